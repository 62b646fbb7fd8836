"""The writer of random checkpoints; what it writes is loaded in ``tests/weights/test_load.py``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from leadline.config.model import load_model_config
from leadline.config.presets import preset
from leadline.tools.random_checkpoint import main
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.names import expected_tensors

CONFIG = preset("tiny-window128")


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_files_are_the_official_layout(tmp_path: Path, shards: int) -> None:
    main([str(tmp_path), "--preset", "tiny-window128", "--shards", str(shards)])
    assert load_model_config(tmp_path) == CONFIG
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    found = Checkpoint(tmp_path).entries
    expected = expected_tensors(CONFIG)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name


def test_the_index_holds_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    main([str(tmp_path), "--preset", "tiny-window128", "--shards", "2"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    nbytes = sum(tensor.nbytes for tensor in expected_tensors(CONFIG).values())
    assert index["metadata"]["total_size"] == nbytes
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


def test_weights_are_the_same_on_every_machine(random_tiny: Path) -> None:
    checkpoint = Checkpoint(random_tiny)
    digest = hashlib.sha256()
    for name in sorted(checkpoint.entries):
        digest.update(checkpoint.array(name).tobytes())
    assert digest.hexdigest() == "751e229abcd40026fd4ef1f5ed04746cdca6d6b4d092a5146d2732470ce2bdb5"


def test_plain_leaves_scales_and_quantization_out(tmp_path: Path) -> None:
    main([str(tmp_path), "--preset", "tiny-window128", "--plain"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    tensors = load_file(tmp_path / "model.safetensors")
    assert not [name for name in tensors if name.endswith(".scale")]
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16", "torch.float32"}


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
