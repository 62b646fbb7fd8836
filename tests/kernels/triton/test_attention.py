"""Fused attention against its definition: records, splits, and the edges of kernels.md 8.7."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.cache.pool import make_field as pool_field
from leadline.core.errors import ConfigError
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import attention as reference
from leadline.kernels.reference import quant
from leadline.kernels.reference.kv_store import pack_rows
from leadline.kernels.reference.rope import rope_angles, rope_frequencies
from leadline.kernels.triton import attention

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WIDTH, ROPE = (512, 64) if HOPPER else (64, 16)  # its kernel is made for rows of one width

# For tests to which splits make no difference: the interpreter is slow.
whole = pytest.mark.parametrize("programs", ["whole"], indirect=True)


@pytest.fixture(autouse=True, params=["portable", pytest.param("hopper", marks=pytest.mark.gpu)])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for every GPU, and Hopper's own."""
    if request.param == "portable":
        monkeypatch.setattr(attention, "_suits_hopper", lambda *operands: False)
    elif not HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture(params=["split", "whole"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a row in parts for several programs, or a program for several rows."""
    if request.param == "whole":
        monkeypatch.setattr(attention, "_PROGRAMS", {16: 2, 64: 2})


@dataclass(frozen=True)
class Case:
    """Arguments of ``sparse_attention``, in its order."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    window: RecordField
    window_index: Tensor
    window_width: Tensor
    kv: RecordField | None
    page_table: Tensor
    req_of_row: Tensor
    selected: Tensor | None
    sink: Tensor
    visible: Tensor | None = None

    def run(
        self,
        function: Callable[..., Tensor] = attention.sparse_attention,
        **outputs: object,
    ) -> Tensor:
        *arguments, visible = (getattr(self, item.name) for item in dataclasses.fields(self))
        return function(*arguments, exact_rounding=False, visible=visible, **outputs)

    def replace(self, **changes: object) -> Case:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def check_lse(self) -> Tensor:
        """As kernels.md 8.7 bounds it, and by what float32 tells apart; changes no output."""
        shape = self.q.shape[:2]
        actual, wanted = (torch.full(shape, math.nan, device=self.q.device) for _ in range(2))
        assert torch.equal(self.run(lse=actual), self.run())
        self.run(reference.sparse_attention, lse=wanted)
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-4)
        return actual

    def check(self, function: Callable[..., Tensor] = attention.sparse_attention) -> Tensor:
        """Rows equal the definition's up to the roundings of probabilities and outputs."""
        actual, wanted = self.run(function), self.run(reference.sparse_attention)
        assert actual.isfinite().all()
        assert error(actual, wanted) <= 4e-3
        return actual


def error(actual: Tensor, wanted: Tensor) -> float:
    """Relative L2."""
    difference = (actual.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp(min=1e-300))


def make_field(record: Record, outer: int, inner: int, device: torch.device) -> RecordField:
    """Rows as the pool stores them."""
    if record is Record.FP8_64:
        field = pool_field(record, outer, inner, WIDTH, device, rotary=64)
        rows = torch.randn(outer, inner, WIDTH, device=device)
        fields = field.values, field.scales
        for stored, packed in zip(fields, pack_rows(rows, record, 64), strict=True):
            stored.copy_(packed)  # type: ignore[union-attr, arg-type]
        return field
    values, scales = pack_rows(torch.randn(outer, inner, WIDTH, device=device), record)
    if scales is None:
        return RecordField(record, values, None)
    widths = (values.shape[2], scales.shape[2])
    return RecordField(record, *torch.cat((values, scales), dim=2).split(widths, dim=2))


def make_case(
    device: torch.device,
    *,
    rows: int = 3,
    heads: int = 16,
    window: Record = Record.FP8_32,
    kv: Record | None = Record.FP4_16,
    per_page: int = 32,
    keys: int = 20,
    chosen: int = 40,
) -> Case:
    """A prefill of all rows but the last, which decodes: rings of 64, pages in any order."""
    index = torch.stack([torch.randperm(3 * 64)[:keys] for _ in range(rows)])
    entries = 3 * per_page
    selected = torch.stack([torch.randperm(entries)[:chosen].sort().values for _ in range(rows)])
    index[0, keys // 2 :], selected[-1, chosen // 3 :] = -1, -1
    cos, sin = rope_angles(2**20 - torch.arange(rows), rope_frequencies(ROPE, 160000.0))
    return Case(
        q=torch.randn(rows, heads, WIDTH, device=device).bfloat16(),
        cos=cos.to(device),
        sin=sin.to(device),
        window=make_field(window, 3, 64, device),
        window_index=index.to(device),
        window_width=torch.full((rows,), keys, device=device),
        kv=None if kv is None else make_field(kv, 7, per_page, device),
        page_table=torch.randperm(7)[:6].view(2, 3).to(device),
        req_of_row=(torch.arange(rows) == rows - 1).long().to(device),
        selected=None if kv is None else selected.to(device),
        sink=torch.randn(heads, device=device),
    )


@pytest.mark.parametrize("record", [Record.FP4_16, Record.FP8_32, Record.BFLOAT16], ids=str)
def test_equals_its_definition(device: torch.device, programs: None, record: Record) -> None:
    window = Record.BFLOAT16 if record is Record.BFLOAT16 else Record.FP8_32
    make_case(device, window=window, kv=record).check()


@pytest.fixture
def v4_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have channels in front of 64 that rotate."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 128 if WIDTH < 128 else WIDTH)
    monkeypatch.setattr(sys.modules[__name__], "ROPE", 64)


@pytest.mark.usefixtures("v4_width")
@pytest.mark.parametrize("kv", [Record.FP8_64, None], ids=str)
def test_rows_with_rotary_channels(device: torch.device, programs: None, kv: Record | None) -> None:
    make_case(device, window=Record.FP8_64, kv=kv).check()


def all_visible(case: Case, counts: list[int]) -> Case:
    """The rows see so many of their first entries."""
    return case.replace(selected=None, visible=torch.tensor(counts, device=case.q.device))


@pytest.mark.usefixtures("v4_width")
@pytest.mark.parametrize("per_page", [2, 32])
def test_all_visible_entries(device: torch.device, programs: None, per_page: int) -> None:
    """None, some, and all that the table has room for."""
    case = make_case(device, window=Record.FP8_64, kv=Record.FP8_64, per_page=per_page)
    all_visible(case, [0, per_page + 1, 3 * per_page]).check()


@whole
def test_visible_entries_are_those_of_a_full_list(device: torch.device, programs: None) -> None:
    case = make_case(device)
    listed = torch.arange(96, device=device).expand(3, -1)
    seen = torch.tensor([[5], [96], [33]], device=device)
    listed = torch.where(listed < seen, listed, -1)
    actual = all_visible(case, seen.flatten().tolist()).check()
    assert torch.equal(actual, case.replace(selected=listed).run())


@whole
def test_a_padded_row_sees_nothing(device: torch.device, programs: None) -> None:
    case = all_visible(make_case(device), [3, 90, 40])
    wanted = case.run()
    case.req_of_row[1], case.window_index[1] = -1, -1
    actual = case.run()
    assert not actual[1].any()
    assert torch.equal(actual[[0, 2]], wanted[[0, 2]])


@whole
def test_rows_of_other_widths_take_the_reference(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2, window=Record.BFLOAT16, kv=Record.BFLOAT16)
    assert case.kv is not None
    width = WIDTH - 16
    narrow = case.replace(
        q=case.q[..., :width],
        window=dataclasses.replace(case.window, values=case.window.values[..., :width]),
        kv=dataclasses.replace(case.kv, values=case.kv.values[..., :width]),
    )
    assert torch.equal(narrow.run(), narrow.run(reference.sparse_attention))


@pytest.mark.parametrize("heads", [5, 20, 65])
def test_any_number_of_heads(device: torch.device, heads: int) -> None:
    make_case(device, rows=1, heads=heads).check()


@pytest.mark.parametrize("per_page", [64, 128, 256])
def test_pages_of_any_size(device: torch.device, per_page: int) -> None:
    make_case(device, rows=1, per_page=per_page).check()


@whole
def test_window_only_layers_have_no_entries(device: torch.device, programs: None) -> None:
    make_case(device, kv=None).check()


@whole
@pytest.mark.parametrize("chosen", [0, 1])
def test_nearly_nothing_is_selected(device: torch.device, programs: None, chosen: int) -> None:
    case = make_case(device, rows=2, chosen=1)
    assert case.selected is not None
    case.replace(selected=case.selected[:, :chosen]).check()


def test_lists_may_have_holes_anywhere(device: torch.device, programs: None) -> None:
    case = make_case(device)
    assert case.selected is not None
    for places in (case.window_index, case.selected):
        places[:, ::3] = -1
        places[1, :35] = -1  # a whole block and more
    case.check()


@whole
def test_a_key_that_is_listed_twice_counts_twice(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2, window=Record.FP8_32, kv=Record.FP8_32)
    assert case.kv is not None
    assert case.selected is not None
    page = case.page_table[0, 0]
    case.kv.values[page, 0], case.kv.scales[page, 0] = (  # type: ignore[index]
        case.window.values[0, 0],
        case.window.scales[0, 0],  # type: ignore[index]
    )
    case.window_index[:, :2], case.selected[:, :2] = 0, 0
    case.check()


def test_rows_without_keys_give_zero(device: torch.device, programs: None) -> None:
    case = make_case(device)
    assert case.selected is not None
    case.window_index[1], case.selected[1] = -1, -1
    case.sink[3] = -math.inf
    assert not case.check()[1].any()


@pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter's logarithm is numpy's
@pytest.mark.parametrize("heads", [5, 20])
def test_lse(device: torch.device, programs: None, heads: int) -> None:
    case = make_case(device, heads=heads)
    assert case.selected is not None
    case.window_index[1], case.selected[1] = -1, -1
    case.sink[:3] = torch.tensor([-math.inf, math.inf, 1e4])
    lse = case.check_lse()
    assert (lse[1] == -math.inf).all()
    assert lse[[0, 2]].isfinite().all()


@whole
def test_lse_of_window_only_layers(device: torch.device, programs: None) -> None:
    make_case(device, rows=2, kv=None).check_lse()


@whole
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum is numpy's
def test_lse_of_a_broken_row_is_nan(device: torch.device, programs: None) -> None:
    case = make_case(device)
    case.q[1] = math.nan
    lse = torch.zeros(case.q.shape[:2], device=device)
    case.run(lse=lse)
    assert lse[1].isnan().all()
    assert lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize("heads", [5, 20])
def test_outputs_in_fp8_are_the_rounded_outputs(
    device: torch.device, programs: None, heads: int
) -> None:
    """A row without keys is zeros with the least scale."""
    case = make_case(device, heads=heads)
    assert case.selected is not None
    case.window_index[1], case.selected[1] = -1, -1
    codes = torch.full((3, heads, WIDTH), 1, device=device, dtype=torch.uint8)
    exponents = codes[..., : WIDTH // 32].clone()
    out = case.run(fp8=(codes, exponents))
    assert torch.equal(out, case.run())
    for actual, wanted in zip((codes, exponents), quant.quantize_fp8_32(out), strict=True):
        assert torch.equal(actual, wanted)


@whole
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum is numpy's
def test_broken_outputs_in_fp8_are_broken(device: torch.device, programs: None) -> None:
    case = make_case(device)
    case.q[1] = math.nan
    codes = torch.zeros(3, 16, WIDTH, device=device, dtype=torch.uint8)
    exponents = codes[..., : WIDTH // 32].clone()
    case.run(fp8=(codes, exponents))
    assert (exponents[1] == 255).all()
    assert (exponents[[0, 2]] < 255).all()


def test_no_rows(device: torch.device) -> None:
    case = make_case(device, rows=2)
    assert case.selected is not None
    per_row = ("q", "cos", "sin", "window_index", "window_width", "req_of_row", "selected")
    empty = case.replace(**{name: getattr(case, name)[:0] for name in per_row})
    assert empty.run().shape == (0, 16, WIDTH)


def test_extreme_sinks(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2)
    case.sink[:4] = torch.tensor([-math.inf, math.inf, -1e4, 1e4])
    actual = case.check()
    assert not actual[:, [1, 3]].any()


@whole
@pytest.mark.parametrize("size", [1e3, 1e-3])
def test_scores_far_apart_and_close_together(
    device: torch.device, programs: None, size: float
) -> None:
    case = make_case(device, rows=2)
    case.replace(q=case.q * size).check()


@whole
def test_one_huge_key(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2)
    huge = 3e5 * torch.randn(1, 64, WIDTH, device=device)
    for part, rows in zip(
        (case.window.values, case.window.scales), pack_rows(huge, Record.FP8_32), strict=True
    ):
        part[0, :1], part[1, 5] = rows[0, :1], rows[0, 1]  # type: ignore[index]
    case.window_index[:, 3] = 64 + 5
    case.check()


@whole
def test_what_nobody_refers_to_may_be_nan(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2)
    assert case.kv is not None
    assert case.selected is not None
    case.window_index[case.window_index == 0] = 1
    case.selected[case.selected == 0] = 1
    clean = case.run()
    case.window.scales[0, 0] = 255  # type: ignore[index]
    case.kv.scales[case.page_table[:, 0], 0] = 127  # type: ignore[index]
    assert torch.equal(case.run(), clean)


@whole
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum is numpy's
@pytest.mark.parametrize("where", ["q", "window", "kv"])
def test_a_broken_row_stays_alone(device: torch.device, programs: None, where: str) -> None:
    case = make_case(device)
    assert case.kv is not None
    assert case.selected is not None
    case.window_index[case.window_index == 0] = 1
    case.selected[case.selected == 0] = 1
    clean = case.run()
    if where == "q":
        case.q[1] = math.nan
    elif where == "window":
        case.window.scales[0, 0], case.window_index[1, 7] = 255, 0  # type: ignore[index]
    else:
        case.kv.scales[case.page_table[0, 0], 0] = 127  # type: ignore[index]
        case.selected[1, 0] = 0
    broken = case.run()
    assert broken[1].isnan().all()
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])


@whole
def test_caches_may_be_larger_than_2_gib(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2)
    assert case.kv is not None
    sizes = (Record.FP4_16.value_bytes(WIDTH), Record.FP4_16.scale_bytes(WIDTH))
    pages = 2**31 // (32 * sum(sizes)) + 7
    data = torch.empty(pages, 32, sum(sizes), dtype=torch.uint8, device=device)
    data[-7:] = torch.cat((case.kv.values, case.kv.scales), dim=2)  # type: ignore[arg-type]
    far = RecordField(Record.FP4_16, *data.split(sizes, dim=2))
    actual = case.replace(kv=far, page_table=case.page_table + pages - 7).run()
    assert torch.equal(actual, case.run())


@whole
def test_queries_may_have_gaps(device: torch.device, programs: None) -> None:
    case = make_case(device, rows=2)
    wide = torch.randn(2, 18, 2 * WIDTH, device=device).bfloat16()
    case.replace(q=wide[:, 2:, WIDTH:]).check()


def test_records_of_index_keys_are_refused(device: torch.device) -> None:
    case = make_case(device, rows=1).replace(kv=make_field(Record.FP4_32, 7, 32, device))
    with pytest.raises(ConfigError, match="fp4_32"):
        case.run()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [16, 64])
def test_many_rows(device: torch.device, heads: int) -> None:
    make_case(device, rows=4097, heads=heads).check()
