"""``leadline inspect``: the official figures, and folders that are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadline.config.model import load_model_config
from leadline.config.presets import preset
from leadline.core.errors import CheckpointError, ConfigError
from leadline.kernels.packed import WeightFormat
from leadline.tools.inspect import ModelReport, inspect_main, inspect_model
from leadline.tools.random_checkpoint import write_random_checkpoint
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.table import Role
from leadline.weights.verify import verify


@pytest.fixture(scope="module")
def official() -> ModelReport:
    return inspect_model(preset("v4.1-flash"), memory_bytes=8 * 141 * 2**30)


def test_official_figures(official: ModelReport) -> None:
    assert official.cache.bytes_per_token == 890
    assert official.active_prefill == pytest.approx(7.9e9, rel=0.01)
    assert official.active_decode == pytest.approx(16.1e9, rel=0.01)
    assert official.num_tensors == 93_418
    assert official.skipped == {"draft": 2_401, "vision": 266}


def test_official_bytes_by_part(official: ModelReport) -> None:
    gigabytes = {role: round(stored.nbytes / 1e9, 1) for role, stored in official.by_role.items()}
    assert gigabytes[Role.ROUTED_EXPERT] == 288.8
    assert gigabytes[Role.ENGRAM] + gigabytes[Role.ENGRAM_TABLE] == pytest.approx(203.1)
    assert gigabytes[Role.ATTENTION] == 5.1
    assert gigabytes[Role.SHARED_EXPERT] == 1.4
    by_format = sum(stored.nbytes for stored in official.by_format.values())
    assert by_format == sum(stored.nbytes for stored in official.by_role.values())


def test_layer_table_follows_the_specification(official: ModelReport) -> None:
    table = {row.layer: (row.mode, row.ratio, row.kv_source, row.index_source, row.notes)
             for row in official.layers}  # fmt: skip
    assert table[1] == ("window", 0, None, None, "engram")
    assert table[13] == ("reuse", 2, 8, 8, "")
    assert table[20] == ("full", 1, 20, 20, "cut, picks candidate blocks")
    assert table[28] == ("reindex", 1, 20, 28, "within candidate blocks")
    assert table[39] == ("reuse", 1, 20, 36, "feeds the draft")


def test_what_fits_adds_up(official: ModelReport) -> None:
    fit, cache = official.fit, official.cache
    assert fit is not None
    left = fit.memory_bytes - fit.weight_bytes
    assert 0 <= left - fit.pages * cache.page_bytes < cache.page_bytes
    assert fit.tokens == fit.pages * 256
    session = cache.slot_bytes + 391 * cache.page_bytes  # 100,000 tokens are 390.6 pages
    assert fit.sessions == left // session


def test_cache_records_can_be_chosen() -> None:
    assert inspect_model(preset("v4.1-flash"), kv_cache_dtype="fp8").cache.bytes_per_token == 1490


def test_a_plain_folder_is_reported_as_it_is(golden: Path) -> None:
    folder = golden / "v41-tiny"
    config = load_model_config(folder)
    report = inspect_model(config, contents=verify(Checkpoint(folder), config))
    assert list(report.by_format) == [WeightFormat.PLAIN]
    assert report.num_tensors == 394
    assert report.skipped == {}


def test_a_preset_prints_without_any_file(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_main("v4.1-flash", memory="141GiB")
    out = capsys.readouterr().out
    for figure in ("96,085", "93,418 used", "2,401 draft", "266 vision", "890", "7.9B", "16.1B"):
        assert figure in out
    assert "does not fit" in out


def test_a_folder_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_checkpoint(tmp_path, preset("tiny-window128"), num_shards=2)
    inspect_main(str(tmp_path), memory="1GiB")
    out = capsys.readouterr().out
    assert "657 used, skipped 169 draft" in out
    assert "The files hold every tensor of the backbone" in out
    assert "MB" in out
    assert "What the model is for" not in out
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="shard is missing"):
        inspect_main(str(tmp_path))


@pytest.mark.parametrize(
    ("target", "memory", "message"),
    [
        ("v5", None, r"'v5' is neither a folder nor a preset \(v4.1-flash"),
        ("tiny-22m", "lots", r"memory: 'lots' is not a whole number"),
    ],
)
def test_bad_arguments_say_what_is_wrong(target: str, memory: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect_main(target, memory=memory)
