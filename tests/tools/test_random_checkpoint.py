"""The writer of random checkpoints; what it writes is loaded in ``tests/weights/test_load.py``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from leadline.config.families import AnyConfig, load_any_config
from leadline.config.model import load_model_config
from leadline.config.presets import preset
from leadline.config.v4_presets import TINY_V4
from leadline.tools.random_checkpoint import main, write_random_checkpoint
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.names import expected_tensors
from leadline.weights.verify import verify, verify_index

CONFIG = preset("tiny-window128")
# The draft of April's checkpoints.
MTP = replace(
    TINY_V4,
    dspark_block_size=0,
    dspark_noise_token_id=0,
    dspark_target_layer_ids=(),
    dspark_markov_rank=0,
)
CONFIGS = {"v41": CONFIG, "v4-dspark": TINY_V4, "v4-mtp": MTP}
every_model = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@every_model
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_files_are_the_official_layout(tmp_path: Path, config: AnyConfig, shards: int) -> None:
    write_random_checkpoint(tmp_path, config, num_shards=shards)
    assert load_any_config(tmp_path) == config
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    found = Checkpoint(tmp_path).entries
    expected = expected_tensors(config)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name


@every_model
def test_what_is_written_passes_the_strict_check(tmp_path: Path, config: AnyConfig) -> None:
    write_random_checkpoint(tmp_path, config, num_shards=2)
    verify_index(tmp_path, config)
    contents = verify(Checkpoint(tmp_path), config)
    drafts = sum(name.startswith("mtp.") for name in expected_tensors(config))
    assert contents.skipped == {"draft": drafts}
    assert all(contents.formats[name] is spec.format for name, spec in contents.weights.items())


@every_model
def test_shards_have_about_equal_bytes(tmp_path: Path, config: AnyConfig) -> None:
    write_random_checkpoint(tmp_path, config, num_shards=2)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert max(sizes) < 1.2 * min(sizes)


def test_shards_change_no_byte_and_seeds_do(tmp_path: Path) -> None:
    def written(name: str, *flags: str) -> dict[str, bytes]:
        main([str(tmp_path / name), "--preset", "tiny-window128", *flags])
        checkpoint = Checkpoint(tmp_path / name)
        return {key: checkpoint.array(key).tobytes() for key in checkpoint.entries}

    one = written("one")
    assert written("three", "--shards", "3") == one
    assert written("other", "--seed", "1") != one


@pytest.mark.parametrize(
    ("fixture", "wanted"),
    [
        ("random_tiny", "751e229abcd40026fd4ef1f5ed04746cdca6d6b4d092a5146d2732470ce2bdb5"),
        ("random_tiny_v4", "b1bd5a082bb7c8182c9c55683aafb18f98d456b6274fa979c1a39c6983ad204a"),
    ],
)
def test_weights_are_the_same_on_every_machine(
    request: pytest.FixtureRequest, fixture: str, wanted: str
) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(fixture))
    digest = hashlib.sha256()
    for name in sorted(checkpoint.entries):
        digest.update(checkpoint.array(name).tobytes())
    assert digest.hexdigest() == wanted


def test_plain_leaves_scales_and_quantization_out(tmp_path: Path) -> None:
    main([str(tmp_path), "--preset", "tiny-window128", "--plain"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    tensors = load_file(tmp_path / "model.safetensors")
    assert not [name for name in tensors if name.endswith(".scale")]
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16", "torch.float32"}


def test_tables_of_tokens_stay_whole_numbers_where_matrices_are_plain(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, MTP, plain=True)
    contents = verify(Checkpoint(tmp_path), load_any_config(tmp_path))
    table = contents.weights["layers.1.ffn.gate.tid2eid"]
    assert (table.dtype, table.shape) == ("I64", (MTP.vocab_size, MTP.num_experts_per_tok))
    assert not any(name.endswith(".scale") for name in Checkpoint(tmp_path).entries)


def test_a_config_file_and_a_tokenizer_are_taken_over(tmp_path: Path, golden: Path) -> None:
    source = golden / "v41-reference"
    tokenizer = source / "tokenizer.json"
    out = tmp_path / "out"
    main([str(out), "--config", str(source / "config.json"), "--tokenizer", str(tokenizer)])
    assert load_model_config(out) == load_model_config(source)
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--preset", "v5"], "invalid choice: 'v5'", id="preset"),
        pytest.param(["--config", "nowhere.json"], "cannot be read", id="config"),
        pytest.param(["--preset", "tiny-window128", "--shards", "0"], "shards is 0", id="shards"),
        pytest.param([], "one of the arguments --preset --config is required", id="neither"),
    ],
)
def test_bad_arguments_end_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), *flags])
    assert message in capsys.readouterr().err


def test_an_existing_checkpoint_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--preset", "tiny-window128"])
    assert "holds a checkpoint already" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"
