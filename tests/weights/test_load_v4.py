"""V4 checkpoints: weights as they were encoded, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadline.config.v4_presets import TINY_V4
from leadline.core.errors import CheckpointError
from leadline.kernels.packed import PackedWeight, WeightFormat
from leadline.tools.random_checkpoint import write_random_checkpoint
from leadline.weights.checkpoint import SINGLE_FILE
from leadline.weights.formats import decode, scale_name
from leadline.weights.load import DummySource
from leadline.weights.names import model_weights
from leadline.weights.random_init import random_tensors
from tests.weights.test_load import open_source, take_all

Change = Callable[[dict[str, Tensor]], object]
TABLE, WQ_A = "layers.0.ffn.gate.tid2eid", "layers.1.attn.wq_a"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint; not to be changed."""
    out = tmp_path_factory.mktemp("random") / "v4"
    write_random_checkpoint(out, TINY_V4)
    return out


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_weight_comes_back_as_it_was_encoded(folder: Path, packed: bool) -> None:
    source = open_source(folder)
    taken = take_all(source, TINY_V4, packed=packed)
    source.finish()
    for name, spec in model_weights(TINY_V4).items():
        if name in taken:
            made = random_tensors(spec, seed=0)
            intended = made[name]
            if spec.format is not WeightFormat.PLAIN:
                intended = decode(spec.format, intended, made[scale_name(name)])
            assert torch.equal(taken[name], intended.float()), name


def test_dummy_weights_are_those_of_the_random_checkpoint(folder: Path) -> None:
    expected = take_all(open_source(folder), TINY_V4)
    for name, values in take_all(DummySource(TINY_V4), TINY_V4).items():
        assert torch.equal(values, expected[name]), name


def test_packed_tiles_are_told_as_the_smaller_ones_in_them(folder: Path) -> None:
    """Of 320 and of 80 rows: the last tile is a part of one, in either size."""
    for name in ("attn.wq_b", "attn.wkv"):
        weight = open_source(folder).linear(f"layers.1.{name}", torch.bfloat16, packed=True)
        assert isinstance(weight, PackedWeight)
        assert weight.format is WeightFormat.FP8_BLOCK32
        assert weight.aligned
        assert weight.input_block == 128
        rows, cols = weight.shape
        assert weight.scales.shape == (-(-rows // 32), cols // 32)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_experts_take_their_input_in_blocks_of_128_too(folder: Path, packed: bool) -> None:
    prefix, some = "layers.1.ffn.experts", slice(0, 2)
    weight = open_source(folder).experts(prefix, "w1", some, torch.bfloat16, packed=packed)
    assert weight.format is WeightFormat.MXFP4
    assert weight.quantizes_input
    assert weight.input_block == 128


def test_tokens_have_different_experts(folder: Path) -> None:
    table = open_source(folder).ids(TABLE)
    assert table.dtype == torch.int64
    assert table.min() == 0
    assert table.max() == TINY_V4.n_routed_experts - 1
    assert (table[:, 0] != table[:, 1]).all()


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


BAD: dict[str, tuple[Change, str]] = {
    "missing-table": (lambda t: t.pop(TABLE), rf"1 tensor\(s\) missing: {TABLE}"),
    "missing-mixer": (lambda t: t.pop("hc_head_fn"), r"1 tensor\(s\) missing: hc_head_fn"),
    "a-bias-beside-the-table": (
        lambda t: t.update({"layers.0.ffn.gate.bias": torch.zeros(8)}),
        "that the configuration does not explain: layers.0.ffn.gate.bias",
    ),
    "missing-scale": (
        lambda t: t.pop(f"{WQ_A}.scale"),
        f"{WQ_A}.weight is F8_E4M3 and needs {WQ_A}.scale, which is missing",
    ),
    "narrow-table": (replaced(TABLE, lambda t: t.int()), f"{TABLE} is I32; it must be I64"),
    "short-table": (
        replaced(TABLE, lambda t: t[:-1]),
        rf"{TABLE} has shape \[511, 2\]; config.json needs \[512, 2\]",
    ),
    "scales-of-32": (
        replaced(f"{WQ_A}.scale", lambda t: t.view(torch.uint8).repeat(4, 4).view(t.dtype)),
        rf"{WQ_A}.scale has shape \[4, 4\]; config.json needs \[1, 1\]",
    ),
    "narrow-positions": (
        replaced("layers.1.attn.compressor.ape", lambda t: t.bfloat16()),
        "compressor.ape is BF16; it must be F32",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_refused_by_file_and_tensor(
    folder: Path, tmp_path: Path, damage: Change, message: str
) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / SINGLE_FILE)
    damage(tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_source(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([3, 3], r"names one expert twice in row 5: \[3, 3\]"),
        ([8, 0], r"has numbers from 0 to 8; they must lie in 0\.\.7"),
        ([-1, 0], r"has numbers from -1 to 7; they must lie in 0\.\.7"),
    ],
    ids=["twice", "too large", "negative"],
)
def test_a_table_that_names_no_experts_is_refused(
    folder: Path, tmp_path: Path, row: list[int], message: str
) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / SINGLE_FILE)
    tensors[TABLE][5] = torch.tensor(row)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=f"{TABLE}.* {message}"):
        open_source(tmp_path).ids(TABLE)
