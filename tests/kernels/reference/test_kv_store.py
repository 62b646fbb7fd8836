"""Cache rows in the pool's own fields: what comes back, and which bytes lie where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leadline.cache.layout import CacheLayout, Owner
from leadline.cache.pool import CachePool
from leadline.cache.pool import make_field as pool_field
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import kv_store, quant
from tests.kernels.conftest import V41_RECORDS

CHANNELS = {"kv": 512, "index": 128, "window": 512}
FIELDS = [*CHANNELS]


def make_field(kind: str, record: Record, *, rows: int = 8, outer: int = 3) -> RecordField:
    """A field of the pool: pages of ``rows`` entries, or rings of as many rows."""
    layout = CacheLayout(
        page_size=rows,
        owners=(Owner(layer=0, ratio=1),),
        head_dim=CHANNELS["kv"],
        index_head_dim=CHANNELS["index"],
        window=4,
        ring=rows,
        window_layers=1,
        window_record=record,
        kv_record=record,
        index_record=record,
    )
    pool = CachePool(layout, num_pages=outer, num_slots=outer, step_rows=0)
    return {"kv": pool.kv[0], "index": pool.index[0], "window": pool.window[0]}[kind]


def raw_bytes(field: RecordField) -> Tensor:
    """The memory behind a field: ``[outer, bytes]`` uint8."""
    memory = torch.empty(0, dtype=torch.uint8).set_(field.values.untyped_storage())
    return memory.view(field.values.shape[0], -1)


def fake_quantize(x: Tensor, record: Record) -> Tensor:
    """Quantise and dequantise, without a cache in between."""
    match record:
        case Record.FP8_32:
            return quant.round_trip_fp8_32(x)
        case Record.FP8_64:  # but for rotary channels
            return quant.dequantize_fp8_64(*quant.quantize_fp8_64(x)).to(x.dtype)
        case Record.FP4_16:
            return quant.dequantize_fp4_16(*quant.quantize_fp4_16(x)).to(x.dtype)
        case Record.FP4_32:
            return quant.round_trip_fp4_32(x)
        case Record.BFLOAT16:
            return x.bfloat16().to(x.dtype)
        case Record.FLOAT32:
            return x.float().to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("record", V41_RECORDS)
@pytest.mark.parametrize("kind", FIELDS)
def test_stored_rows_come_back_as_the_fake_quantiser_leaves_them(
    kind: str, record: Record, dtype: torch.dtype
) -> None:
    field = make_field(kind, record)
    x = torch.randn(5, CHANNELS[kind]).mul(3).to(dtype)
    outer, inner = torch.tensor([2, 0, 1, 2, 2]), torch.tensor([7, 0, 3, 0, 6])
    kv_store.store_rows(field, outer, inner, *kv_store.pack_rows(x, record))
    loaded = kv_store.load_rows(field, outer, inner, dtype)
    assert loaded.dtype is dtype
    assert torch.equal(loaded, fake_quantize(x, record))


@pytest.mark.parametrize("record", V41_RECORDS)
@pytest.mark.parametrize("kind", FIELDS)
def test_storing_rows_touches_no_other(kind: str, record: Record) -> None:
    field = make_field(kind, record)
    raw_bytes(field).fill_(0xA5)
    x = torch.randn(2, CHANNELS[kind])
    outer, inner = torch.tensor([1, 1]), torch.tensor([0, 5])
    kv_store.store_rows(field, outer, inner, *kv_store.pack_rows(x, record))
    for tensor in (field.values, field.scales):
        if tensor is not None:
            other = tensor.view(torch.uint8).clone()
            other[outer, inner] = 0xA5
            assert (other == 0xA5).all()


@pytest.mark.parametrize("record", V41_RECORDS)
@pytest.mark.parametrize("kind", FIELDS)
def test_rows_take_the_bytes_that_their_record_promises(kind: str, record: Record) -> None:
    field = make_field(kind, record)
    assert raw_bytes(field).shape == (3, 8 * record.num_bytes(CHANNELS[kind]))


@pytest.mark.parametrize(
    ("kind", "record", "size"),
    [("kv", Record.FP4_16, 288), ("window", Record.FP8_32, 528), ("kv", Record.FP8_32, 528)],
    ids=["C288", "W528-window", "W528-compressed"],
)
def test_scales_follow_each_row(kind: str, record: Record, size: int) -> None:
    field = make_field(kind, record)
    values, scales = kv_store.pack_rows(torch.randn(8, 512), record)
    assert scales is not None
    kv_store.store_rows(field, torch.ones(8, dtype=torch.int64), torch.arange(8), values, scales)
    assert torch.equal(raw_bytes(field)[1].view(8, size), torch.cat((values, scales), 1))


def test_index_page_holds_all_values_then_all_scales() -> None:
    field = make_field("index", Record.FP4_32)
    values, scales = kv_store.pack_rows(torch.randn(8, 128), Record.FP4_32)
    assert scales is not None
    kv_store.store_rows(field, torch.ones(8, dtype=torch.int64), torch.arange(8), values, scales)
    assert torch.equal(raw_bytes(field)[1], torch.cat((values.flatten(), scales.flatten())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rotary_channels_are_not_quantised(dtype: torch.dtype) -> None:
    field = pool_field(Record.FP8_64, 3, 8, 80, "cpu", rotary=16)
    x = torch.randn(5, 80).mul(3).to(dtype)
    outer, inner = torch.tensor([2, 0, 1, 2, 2]), torch.tensor([7, 0, 3, 0, 6])
    packed = kv_store.pack_rows(x, field.record, field.rotary)
    kv_store.store_rows(field, outer, inner, *packed)
    loaded = kv_store.load_rows(field, outer, inner, dtype)
    assert loaded.dtype is dtype
    assert torch.equal(loaded[:, :64], fake_quantize(x[:, :64], Record.FP8_64))
    assert torch.equal(loaded[:, 64:], x[:, 64:].bfloat16().to(dtype))


class TestGoldenPages:
    def test_compressed_rows_lie_as_in_the_file(self, vectors: dict[str, Tensor]) -> None:
        field = make_field("kv", Record.FP4_16)
        x = vectors["v41_ckv_fp4.input_bf16"].flatten(0, 1)
        page, entry = torch.arange(24) // 8, torch.arange(24) % 8
        kv_store.store_rows(field, page, entry, *kv_store.pack_rows(x, Record.FP4_16))
        assert torch.equal(raw_bytes(field), vectors["v41_ckv_fp4.interleaved_rows_u8"])

    @pytest.mark.parametrize(
        ("kind", "record", "name", "size"),
        [
            ("kv", Record.FP4_16, "v41_ckv_fp4", 288),
            ("window", Record.FP8_32, "v41_swa_fp8", 528),
        ],
    )
    def test_pages_with_scales_at_their_end_are_repacked(
        self, vectors: dict[str, Tensor], kind: str, record: Record, name: str, size: int
    ) -> None:
        """The writer pads its pages and puts all scales behind all rows."""
        width = record.value_bytes(512)
        pages = vectors[f"{name}.pages_u8"][:, : 8 * size]
        values, scales = pages.split((8 * width, 8 * (size - width)), dim=1)
        rows = torch.cat((values.unflatten(1, (8, -1)), scales.unflatten(1, (8, -1))), dim=2)
        field = make_field(kind, record)
        raw_bytes(field).copy_(rows.flatten(1))
        outer, inner = torch.arange(3).unsqueeze(1), torch.arange(8)
        loaded = kv_store.load_rows(field, outer, inner, torch.bfloat16)
        assert torch.equal(loaded, vectors[f"{name}.dequant_bf16"])

    def test_index_pages_are_read_as_they_are(self, vectors: dict[str, Tensor]) -> None:
        """64 keys a page; rows lie at the file's own addresses."""
        field = make_field("index", Record.FP4_32, rows=64, outer=2)
        raw_bytes(field).copy_(vectors["indexk_fp4.pages_u8"])
        loc = vectors["indexk_fp4.loc"].long()
        loaded = kv_store.load_rows(field, loc // 64, loc % 64, torch.float32)
        assert torch.equal(loaded, vectors["indexk_fp4.dequant_fp32"])

    def test_v4_pages_lie_as_in_the_file_but_for_its_padding(
        self, vectors: dict[str, Tensor]
    ) -> None:
        """8 entries a page: 448 codes and 64 channels in bf16 each, then all scales."""
        field = pool_field(Record.FP8_64, 4, 8, 512, "cpu", rotary=64)
        assert raw_bytes(field).shape == (4, 8 * 584)
        raw_bytes(field).copy_(vectors["v4_kv_fp8.pages_u8"][:, : 8 * 584])
        loc = vectors["v4_kv_fp8.loc"].long()
        _, scales = field.gather(loc // 8, loc % 8)
        assert scales is not None
        assert torch.equal(scales[:, :7], vectors["v4_kv_fp8.row_scale_u8"])
        assert (scales[:, 7] == 0).all()
        loaded = kv_store.load_rows(field, loc // 8, loc % 8, torch.bfloat16)
        assert torch.equal(loaded, vectors["v4_kv_fp8.dequant_bf16"])

    def test_v4_rows_are_written_as_in_the_file_but_for_the_floor(
        self, vectors: dict[str, Tensor]
    ) -> None:
        """Its writer floors amax at 1e-8, ours at 1e-4 (v4-model 4.1)."""
        x = vectors["v4_kv_fp8.input_bf16"]
        values, scales = kv_store.pack_rows(x, Record.FP8_64, rotary=64)
        assert scales is not None
        golden, loc = vectors["v4_kv_fp8.pages_u8"], vectors["v4_kv_fp8.loc"].long()
        golden_values = golden[:, : 8 * 576].unflatten(1, (8, 576))[loc // 8, loc % 8]
        golden_scales = golden[:, 8 * 576 : 8 * 584].unflatten(1, (8, 8))[loc // 8, loc % 8]
        above = x[:, :448].float().unflatten(-1, (-1, 64)).abs().amax(-1) >= 1e-4
        assert torch.equal(scales[:, :7][above], golden_scales[:, :7][above])
        assert torch.equal(scales[:, 7], golden_scales[:, 7])
        written = torch.cat((above.repeat_interleave(64, 1), torch.ones(24, 128).bool()), 1)
        assert torch.equal(values[written], golden_values[written])
