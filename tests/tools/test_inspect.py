"""``leadline inspect``: the official figures, and folders that are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leadline.config.families import any_config_to_json, load_any_config
from leadline.config.model import load_model_config
from leadline.config.presets import any_preset, preset
from leadline.config.v4_presets import TINY_V4, V4_FLASH
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
    assert official.num_bytes + official.skipped_bytes == 510_286_023_000


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


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("v4-flash", ("69,187", "1,575 draft", "159,609,485,896", "284.3B", "12.7B", "3,514.25")),
        ("v4-flash-0731", ("72,317", "4,705 draft", "166,878,536,440", "156,015,698,140")),
        ("v4-pro", ("145,116", "864,704,792,696", "1573.0B", "47.9B", "5,031.44", "4.92 GiB")),
        ("v4-pro-0813", ("149,782", "7,009 draft", "892,727,580,904", "850,748,205,004")),
    ],
)
def test_published_figures_of_v4(
    name: str, figures: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_main(name)
    out = capsys.readouterr().out
    for figure in figures:
        assert figure in out


def test_a_million_tokens_of_v4_pro_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_main("v4-pro", kv_cache_dtype="bfloat16")
    assert "10,334,371,840 (9.62 GiB)" in capsys.readouterr().out


def test_layer_table_of_v4() -> None:
    rows = inspect_model(V4_FLASH).layers
    table = {row.layer: (row.mode, row.ratio, row.kv_source, row.index_source, row.notes)
             for row in rows}  # fmt: skip
    assert table[0] == ("window", 0, None, None, "experts by token id")
    assert table[2] == ("sparse", 4, 2, 2, "experts by token id")
    assert table[3] == ("dense", 128, 3, None, "")
    assert table[42] == ("sparse", 4, 42, 42, "")
    assert inspect_model(TINY_V4).layers[5].notes == "feeds the draft"


def test_a_v4_folder_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_checkpoint(tmp_path, TINY_V4, num_shards=3)
    inspect_main(str(tmp_path))
    out = capsys.readouterr().out
    assert "750: 509 used, skipped 241 draft" in out
    assert "5,315,682: 3,799,794 used" in out
    assert "The files hold every tensor of the backbone" in out


def test_the_golden_v4_checkpoint_is_plain(golden: Path) -> None:
    config = load_any_config(golden / "v4-tiny")
    report = inspect_model(config, contents=verify(Checkpoint(golden / "v4-tiny"), config))
    assert list(report.by_format) == [WeightFormat.PLAIN]
    assert (report.num_tensors, report.skipped, report.skipped_bytes) == (304, {}, 0)


def test_a_configuration_alone_and_an_index_without_shards_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_checkpoint(tmp_path, TINY_V4, num_shards=2)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    inspect_main(str(tmp_path))
    out = capsys.readouterr().out
    assert "750: 509 used" in out
    assert "The index names every tensor" in out
    file = tmp_path / "other.json"
    file.write_text(json.dumps(any_config_to_json(any_preset("v4-pro"))))
    inspect_main(str(file))
    assert "864,704,792,696" in capsys.readouterr().out
