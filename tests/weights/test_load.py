"""Loading: every class of tensor, the account of what was taken, and bad checkpoints by message."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import leadline.weights.load
from leadline.config.families import AnyConfig, load_any_config
from leadline.config.presets import preset
from leadline.core.errors import CheckpointError
from leadline.kernels.packed import PackedWeight, WeightFormat
from leadline.tools.random_checkpoint import write_random_checkpoint
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.engram_tables import MappedEngramTable, MemoryEngramTable, TableMemory
from leadline.weights.formats import decode, scale_name
from leadline.weights.load import CheckpointSource, DummySource
from leadline.weights.names import model_weights
from leadline.weights.random_init import random_tensors
from leadline.weights.source import WeightSource
from leadline.weights.table import Part, Role
from leadline.weights.verify import verify

CONFIG = preset("tiny-window128")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in two shards; not to be changed."""
    out = tmp_path_factory.mktemp("random") / "checkpoint"
    write_random_checkpoint(out, CONFIG, num_shards=2)
    return out


def open_source(folder: Path, config: AnyConfig | None = None) -> CheckpointSource:
    config = config or load_any_config(folder)
    return CheckpointSource(Checkpoint(folder), config, show_progress=False)


def take_all(
    source: WeightSource,
    config: AnyConfig,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
) -> dict[str, Tensor]:
    """What a model takes, by name, dequantised; a table as its first and last row."""
    taken: dict[str, Tensor] = {}
    for name, spec in model_weights(config).items():
        stem = name.removesuffix(".weight")
        if spec.part is Part.DRAFT or spec.role is Role.IMAGE_ROUTER:
            continue
        if spec.role is Role.ENGRAM_TABLE:
            ends = torch.tensor([0, spec.shape[0] - 1])
            taken[name] = source.engram_table(stem, dtype).gather(ends)
        elif spec.role is Role.ROUTED_EXPERT:
            prefix, expert, which = stem.rsplit(".", 2)
            if expert == "0":
                every = slice(0, config.n_routed_experts)
                dense = source.experts(prefix, which, every, dtype, packed=packed).dense
                taken |= {f"{prefix}.{e}.{which}.weight": d for e, d in enumerate(dense)}
        elif spec.format is WeightFormat.PLAIN:
            taken[name] = source.tensor(name, dtype)
        else:
            taken[name] = source.linear(stem, dtype, packed=packed).dense
    return taken


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_weight_comes_back_as_it_was_encoded(
    folder: Path, dtype: torch.dtype, packed: bool
) -> None:
    source = open_source(folder)
    taken = take_all(source, CONFIG, dtype, packed=packed)
    source.finish()
    weights = model_weights(CONFIG)
    for name in taken:
        spec = weights[name]
        made = random_tensors(spec, seed=0)
        intended = made[name]
        if spec.format is not WeightFormat.PLAIN:
            intended = decode(spec.format, intended, made[scale_name(name)])
        if spec.role is Role.ENGRAM_TABLE:
            intended = intended[[0, -1]]
        assert torch.equal(taken[name], intended.to(dtype)), name


def test_dummy_weights_are_those_of_the_random_checkpoint(folder: Path) -> None:
    dummy = DummySource(CONFIG)
    expected = take_all(open_source(folder), CONFIG)
    for name, values in take_all(dummy, CONFIG).items():
        assert torch.equal(values, expected[name]), name
    dummy.finish()


@pytest.mark.gpu
def test_on_a_gpu_weights_are_read_and_made_there(folder: Path) -> None:
    device = torch.device("cuda")
    read = CheckpointSource(Checkpoint(folder), CONFIG, device=device, show_progress=False)
    expected = take_all(open_source(folder), CONFIG)
    for name, values in take_all(read, CONFIG).items():
        assert torch.equal(values.cpu(), expected[name]), name
    made = DummySource(CONFIG, device=device)
    for values in take_all(made, CONFIG, packed=True).values():
        assert values.isfinite().all()
    made.finish()


def test_tables_copied_to_memory_give_the_rows_of_the_files(folder: Path, tmp_path: Path) -> None:
    memory, config = TableMemory(torch.device("cpu"), tmp_path), CONFIG
    copied = CheckpointSource(Checkpoint(folder), config, table_memory=memory)
    dummy = DummySource(config, table_memory=memory)
    for layer in config.engram_layer_ids:
        name = f"layers.{layer}.engram.embed"
        rows = torch.randint(0, min(config.engram_num_embeddings), (40, 6))
        wanted = open_source(folder).engram_table(name, torch.float32).gather(rows)
        for source in (copied, dummy):
            table = source.engram_table(name, torch.float32)
            assert isinstance(table, MemoryEngramTable)
            assert torch.equal(table.gather(rows), wanted)
    assert len(list(tmp_path.glob("*.table"))) == 2 * len(config.engram_layer_ids)


def test_plain_tables_stay_on_the_files(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "plain", CONFIG, plain=True)
    checkpoint, memory = Checkpoint(tmp_path / "plain"), TableMemory(torch.device("cpu"))
    source = CheckpointSource(checkpoint, CONFIG, table_memory=memory)
    table = source.engram_table(f"layers.{CONFIG.engram_layer_ids[0]}.engram.embed", torch.float32)
    assert isinstance(table, MappedEngramTable)


def test_a_checkpoint_that_was_written_again_has_other_stamps(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        write_random_checkpoint(tmp_path / folder, CONFIG)
    first, second = (Checkpoint(tmp_path / folder) for folder in ("first", "second"))
    stamps = {checkpoint.stamp(name) for checkpoint in (first, second) for name in first.entries}
    assert len(stamps) == 2 * len(first.entries)
    assert Checkpoint(tmp_path / "first").stamp("norm.weight") == first.stamp("norm.weight")


def test_a_plain_checkpoint_gives_plain_weights(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "plain", CONFIG, plain=True)
    source = open_source(tmp_path / "plain")
    linear = source.linear("layers.0.attn.wq_a", torch.float32)
    experts = source.experts("layers.0.ffn.experts", "w2", slice(2, 5), torch.float32)
    assert linear.format is experts.format is WeightFormat.PLAIN
    assert experts.dense.shape == (3, CONFIG.hidden_size, CONFIG.moe_intermediate_size)
    assert not linear.quantizes_input


@pytest.mark.parametrize("name", ["v41-tiny", "v41-reference", "v4-tiny"])
def test_golden_checkpoints_load_whole(golden: Path, name: str) -> None:
    source = open_source(golden / name)
    take_all(source, load_any_config(golden / name))
    source.finish()


def test_golden_linears_decode_exactly(golden: Path) -> None:
    cases = load_file(golden / "v41-reference" / "cases.safetensors")
    source = open_source(golden / "v41-reference")
    fp8 = source.linear("layers.0.attn.wq_a", torch.float32)
    fp4 = source.experts("layers.0.ffn.experts", "w1", slice(0, 1), torch.float32)
    assert torch.equal(fp8.dense, cases["unit.fp8_linear.w"])
    assert torch.equal(fp4.dense[0], cases["unit.fp4_linear.w"])
    assert (fp8.format, fp4.format) == (WeightFormat.FP8_BLOCK32, WeightFormat.MXFP4)
    assert fp8.quantizes_input
    assert fp4.quantizes_input


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_slices_are_parts_of_the_whole(folder: Path, packed: bool) -> None:
    source = open_source(folder)
    name, experts, dtype = "layers.0.attn.wo_b", "layers.3.ffn.experts", torch.float32
    part = source.linear(name, dtype, out=slice(32, 96), inp=slice(64, 128), packed=packed)
    assert torch.equal(part.dense, source.linear(name, dtype).dense[32:96, 64:128])
    rows = source.tensor("embed.weight", dtype, rows=slice(100, 200))
    assert torch.equal(rows, source.tensor("embed.weight", dtype)[100:200])
    some = source.experts(experts, "w1", slice(2, 4), dtype, packed=packed)
    assert torch.equal(some.dense, source.experts(experts, "w1", slice(0, 8), dtype).dense[2:4])


def test_packed_weights_are_the_bytes_of_the_file(folder: Path) -> None:
    source = open_source(folder)
    weight = source.linear(WQ_A, torch.float32, packed=True)
    assert isinstance(weight, PackedWeight)
    made = random_tensors(model_weights(CONFIG)[f"{WQ_A}.weight"], seed=0)
    assert torch.equal(weight.codes, made[f"{WQ_A}.weight"])
    assert torch.equal(weight.scales, made[f"{WQ_A}.scale"])
    assert weight.shape == weight.dense.shape


def test_opening_logs_what_is_used_and_what_is_skipped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="leadline"):
        open_source(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 657 tensors (0.00323 GB); skipped: 169 draft"
    ]


def test_vision_tensors_are_skipped_by_name(folder: Path, tmp_path: Path) -> None:
    vision = ("vision.blocks.0.norm1.weight", "aligner.w1.weight", "image_start")
    add = edits(2, lambda t: t | {name: torch.zeros(4) for name in vision}, index=True)
    checkpoint = Checkpoint(copied(folder, tmp_path, add))
    assert verify(checkpoint, CONFIG).skipped == {"draft": 169, "vision": 3}


class Bar:
    """A progress bar that counts."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def update(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.total -= self.done


def test_progress_counts_every_byte_but_those_of_tables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[Bar] = []

    def make(total: int, _: str) -> Bar:
        bars.append(Bar(total))
        return bars[0]

    monkeypatch.setattr(leadline.weights.load, "progress_bar", make)
    source = CheckpointSource(Checkpoint(folder), CONFIG)
    take_all(source, CONFIG)
    source.finish()
    assert bars[0].done > 2_000_000
    assert bars[0].total == 0


def test_progress_is_silent_without_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = CheckpointSource(Checkpoint(folder), CONFIG)
    source.tensor("embed.weight", torch.float32)
    assert capsys.readouterr().err == ""


def test_finish_names_what_was_never_taken(folder: Path) -> None:
    source = open_source(folder)
    source.tensor("embed.weight", torch.float32)
    with pytest.raises(AssertionError, match=r"never taken, the first is layers\.0\.hc_attn_fn"):
        source.finish()


def test_finish_names_what_was_taken_twice() -> None:
    source = DummySource(CONFIG)
    take_all(source, CONFIG)
    source.tensor("norm.weight", torch.float32)
    with pytest.raises(AssertionError, match="1 weights were taken twice, the first is norm"):
        source.finish()


# Bad checkpoints. Each case damages a copy of a good one; the message names file and tensor.

SHARD_1, SHARD_2 = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
WQ_A = "layers.0.attn.wq_a"
W1 = "layers.0.ffn.experts.3.w1"
Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def edit(folder: Path, number: int, change: Edit, *, index: bool = False) -> None:
    """Rewrite a shard; with ``index``, the index follows."""
    file = folder / f"model-0000{number}-of-00002.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file)
    if index:
        raw = json.loads((folder / INDEX).read_text())
        kept = {name: shard for name, shard in raw["weight_map"].items() if shard != file.name}
        raw["weight_map"] = kept | dict.fromkeys(tensors, file.name)
        (folder / INDEX).write_text(json.dumps(raw))


def without(name: str) -> Edit:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def byte_at(row: int, col: int, value: int) -> Callable[[Tensor], Tensor]:
    """Set one byte of a packed tensor."""

    def change(tensor: Tensor) -> Tensor:
        raw = tensor.view(torch.uint8).clone()
        raw[row, col] = value
        return raw.view(tensor.dtype)

    return change


def scale_bytes(value: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.full_like(t.view(torch.uint8), value).view(t.dtype)


def truncate(folder: Path) -> None:
    file = folder / SHARD_2
    file.write_bytes(file.read_bytes()[:-1])


def misplace_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(
        text.replace(f'"embed.weight": "{SHARD_1}"', f'"embed.weight": "{SHARD_2}"')
    )


def edits(number: int, change: Edit, *, index: bool = False) -> Callable[[Path], None]:
    return lambda folder: edit(folder, number, change, index=index)


BAD = {
    "missing-shard": (
        lambda folder: (folder / SHARD_2).unlink(),
        rf"{SHARD_2}: shard is missing, but {INDEX} names it",
    ),
    "truncated-shard": (
        truncate,
        rf"{SHARD_2}: truncated: tensor \S+ ends at byte \d+, the file at \d+",
    ),
    "duplicate-name": (
        edits(2, lambda t: t | {"embed.weight": torch.zeros(2)}),
        rf"{SHARD_2}: tensor embed.weight is also in {SHARD_1}",
    ),
    "shard-lacks-what-the-index-names": (
        edits(1, without("embed.weight")),
        rf"{SHARD_1}: tensor embed.weight is not in it, but {INDEX} says so",
    ),
    "index-lacks-what-a-shard-holds": (
        edits(2, lambda t: t | {"extra.weight": torch.zeros(2)}),
        rf"{SHARD_2}: tensor extra.weight is missing in {INDEX}",
    ),
    "index-names-another-shard": (
        misplace_in_index,
        rf"{SHARD_2}: tensor embed.weight is not in it, but {INDEX} says so",
    ),
    "unknown-tensor": (
        edits(2, lambda t: t | {"layers.0.attn.wq_c.weight": torch.zeros(2)}, index=True),
        rf"{SHARD_2}: 1 tensor\(s\) that the configuration does not explain: "
        r"layers.0.attn.wq_c.weight",
    ),
    "scale-of-a-plain-weight": (
        edits(2, lambda t: t | {"norm.scale": torch.zeros(2)}, index=True),
        r"1 tensor\(s\) that the configuration does not explain: norm.scale",
    ),
    "missing-tensor": (
        edits(1, without("layers.0.attn_norm.weight"), index=True),
        r"checkpoint: 1 tensor\(s\) missing: layers.0.attn_norm.weight",
    ),
    "missing-scale": (
        edits(1, without(f"{WQ_A}.scale"), index=True),
        rf"{SHARD_1}: tensor {WQ_A}.weight is F8_E4M3 and needs {WQ_A}.scale, which is missing",
    ),
    "wrong-shape": (
        edits(1, replaced("embed.weight", lambda t: t[:-1])),
        rf"{SHARD_1}: tensor embed.weight has shape \[511, 128\]; config.json needs \[512, 128\]",
    ),
    "wrong-shape-of-a-scale": (
        edits(1, replaced(f"{WQ_A}.scale", lambda t: t.repeat(2, 1))),
        rf"{SHARD_1}: tensor {WQ_A}.scale has shape \[4, 4\]; config.json needs \[2, 4\]",
    ),
    "wrong-type-of-a-norm": (
        edits(1, replaced("layers.0.attn_norm.weight", lambda t: t.half())),
        rf"{SHARD_1}: tensor layers.0.attn_norm.weight is F16; it must be BF16 or F32",
    ),
    "wrong-type-of-a-bias": (
        edits(1, replaced("layers.0.ffn.gate.bias", lambda t: t.bfloat16())),
        rf"{SHARD_1}: tensor layers.0.ffn.gate.bias is BF16; it must be F32",
    ),
    "wrong-type-of-an-expert": (
        edits(1, replaced(f"{W1}.weight", lambda t: t.view(torch.float8_e4m3fn))),
        rf"{SHARD_1}: tensor {W1}.weight is F8_E4M3; it must be I8",
    ),
    "E1-scale-copied-to-a-float": (
        edits(1, replaced(f"{WQ_A}.scale", lambda t: t.view(torch.uint8).float())),
        rf"{SHARD_1}: tensor {WQ_A}.scale is F32; it must be F8_E8M0",
    ),
    "E1-scale-copied-to-bytes": (
        edits(1, replaced(f"{W1}.scale", lambda t: t.view(torch.uint8))),
        rf"{SHARD_1}: tensor {W1}.scale is U8; it must be F8_E8M0",
    ),
    "E1-scale-bytes-taken-for-numbers": (
        # A byte of 120 read as 120.0 and stored again: 2^7 in place of 2^-7.
        edits(1, replaced(f"{WQ_A}.scale", scale_bytes(134))),
        rf"{SHARD_1}: tensor {WQ_A}.weight has values up to \S+; .* its scales are damaged",
    ),
    "absurd-scale-of-an-expert": (
        edits(1, replaced(f"{W1}.scale", byte_at(5, 1, 200))),
        rf"{SHARD_1}: tensor {W1}.weight has values up to \S+; .* its scales are damaged",
    ),
    "zeroed-scales": (
        edits(1, replaced(f"{WQ_A}.scale", scale_bytes(0))),
        rf"{SHARD_1}: tensor {WQ_A}.weight has values up to \S+e-3\d; .* its scales are damaged",
    ),
    "NaN-code": (
        edits(1, replaced(f"{WQ_A}.weight", byte_at(40, 70, 0x7F))),
        rf"{SHARD_1}: tensor {WQ_A}.weight holds NaN at \[40, 70\]: a NaN code, or",
    ),
    "NaN-scale": (
        edits(1, replaced(f"{W1}.scale", byte_at(5, 1, 255))),
        rf"{SHARD_1}: tensor {W1}.weight holds NaN at \[5, 32\]: .* byte 255 in {W1}.scale",
    ),
    "NaN-in-a-norm": (
        edits(1, replaced("layers.0.attn_norm.weight", lambda t: t * float("nan"))),
        rf"{SHARD_1}: tensor layers.0.attn_norm.weight holds NaN or infinity",
    ),
}


def copied(folder: Path, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    copy = tmp_path / "checkpoint"
    shutil.copytree(folder, copy)
    change(copy)
    return copy


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_refused_by_file_and_tensor(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str, packed: bool
) -> None:
    copy = copied(folder, tmp_path, damage)
    with pytest.raises(CheckpointError, match=message) as raised:
        take_all(open_source(copy), CONFIG, packed=packed)
    assert str(copy) in str(raised.value)


def test_experts_of_mixed_formats_are_refused(folder: Path, tmp_path: Path) -> None:
    def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = torch.zeros(CONFIG.moe_intermediate_size, CONFIG.hidden_size, dtype=torch.bfloat16)
        return without(f"{W1}.scale")(tensors) | {f"{W1}.weight": plain}

    copy = copied(folder, tmp_path, edits(1, unpack, index=True))
    with pytest.raises(CheckpointError, match="come in different formats: mxfp4, plain"):
        open_source(copy).experts("layers.0.ffn.experts", "w1", slice(0, 8), torch.float32)


def test_zero_blocks_may_have_any_scale(folder: Path, tmp_path: Path) -> None:
    def zeroed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = replaced(f"{WQ_A}.weight", lambda t: torch.zeros_like(t))(tensors)
        return replaced(f"{WQ_A}.scale", scale_bytes(0))(tensors)

    copy = copied(folder, tmp_path, edits(1, zeroed))
    for packed in (False, True):
        assert not open_source(copy).linear(WQ_A, torch.float32, packed=packed).dense.any()
