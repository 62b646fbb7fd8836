"""Sparse attention: the golden unit, a loop in float64, and rows that have no keys."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference.attention import sparse_attention
from leadline.kernels.reference.quant import quantize_fp8_32
from leadline.kernels.reference.rope import rope_angles, rope_frequencies
from leadline.weights.load import CheckpointSource


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

    def run(
        self,
        *,
        exact_rounding: bool = False,
        visible: Tensor | None = None,
        lse: Tensor | None = None,
        fp8: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        arguments = [getattr(self, item.name) for item in dataclasses.fields(self)]
        return sparse_attention(
            *arguments, exact_rounding=exact_rounding, visible=visible, lse=lse, fp8=fp8
        )

    def run_with_lse(self, *, exact_rounding: bool = False) -> tuple[Tensor, Tensor]:
        lse = torch.full(self.q.shape[:2], math.nan, dtype=self.sink.dtype)
        return self.run(exact_rounding=exact_rounding, lse=lse), lse

    def replace(self, **changes: object) -> Case:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def make_case(
    *, dtype: torch.dtype = torch.float64, rows: int = 7, dim: int = 32, heads: int = 3
) -> Case:
    """Two requests with shuffled pages of four entries; some rows see less than others."""
    window_index = torch.randint(0, 20, (rows, 6))
    selected = torch.stack([torch.randperm(16)[:5].sort().values for _ in range(rows)])
    window_index[1, 3:] = -1
    selected[2, 2:] = -1
    window_index[3], selected[4] = -1, -1
    kv_dtype = torch.float32 if dtype is torch.float64 else torch.bfloat16
    record = Record.FLOAT32 if dtype is torch.float64 else Record.BFLOAT16
    cos, sin = rope_angles(torch.arange(rows) * 3, rope_frequencies(8, 10000.0))
    return Case(
        q=torch.randn(rows, heads, dim).to(dtype),
        cos=cos,
        sin=sin,
        window=RecordField(record, torch.randn(4, 5, dim).to(kv_dtype), None),
        window_index=window_index,
        window_width=torch.full((rows,), 6),
        kv=RecordField(record, torch.randn(9, 4, dim).to(kv_dtype), None),
        page_table=torch.tensor([[8, 1, 3, 6], [2, 7, 5, 4]]),
        req_of_row=torch.tensor([0] * 4 + [1] * (rows - 4)),
        selected=selected,
        sink=torch.randn(heads).to(torch.float64 if dtype is torch.float64 else torch.float32),
    )


def keys_of_row(case: Case, row: int) -> Tensor:
    """The keys that a row attends to, float64 ``[n, d]``, gathered one by one."""
    keys = [case.window.values[divmod(i, 5)] for i in case.window_index[row].tolist() if i >= 0]
    if case.kv is not None and case.selected is not None:
        table = case.page_table[case.req_of_row[row]]
        for entry in case.selected[row].tolist():
            if entry >= 0:
                keys.append(case.kv.values[table[entry // 4], entry % 4])
    return torch.stack(keys).double() if keys else torch.empty(0, case.q.shape[2]).double()


def attend(case: Case) -> Tensor:
    """The formula of 3.7, a row and a head at a time."""
    rows, heads, dim = case.q.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    pairs = case.cos.shape[1]
    for row in range(rows):
        keys = keys_of_row(case, row)
        turns = torch.complex(case.cos[row].double(), case.sin[row].double())
        for head in range(heads):
            q = case.q[row, head].double().clone()
            tail = torch.view_as_complex(q[-2 * pairs :].view(-1, 2).clone())
            q[-2 * pairs :] = torch.view_as_real(tail * turns).flatten()
            weights = (keys @ q / math.sqrt(dim)).exp()
            y = (weights.unsqueeze(1) * keys).sum(0) / (weights.sum() + case.sink[head].exp())
            tail = torch.view_as_complex(y[-2 * pairs :].view(-1, 2).clone())
            y[-2 * pairs :] = torch.view_as_real(tail * turns.conj()).flatten()
            out[row, head] = y
    return out


class TestGoldenUnit:
    """Layer 2 of a 300-token prefill: queries rotated already, outputs not yet rotated back."""

    @staticmethod
    def case(units: dict[str, Tensor], weights: CheckpointSource, which: str) -> Case:
        keys, slots = units["unit.attention.kv"], units[f"unit.attention.{which}slots"].long()
        entries = torch.zeros(2, 128, 64, dtype=torch.bfloat16)
        entries.view(256, 64)[:150] = keys[300:]
        chosen = slots[:, 128:]
        return Case(
            q=units[f"unit.attention.{which}q"],
            cos=torch.ones(8, 8),
            sin=torch.zeros(8, 8),
            window=RecordField(Record.BFLOAT16, keys[:300].unsqueeze(0), None),
            window_index=slots[:, :128],
            window_width=torch.full((8,), 128),
            kv=RecordField(Record.BFLOAT16, entries, None),
            page_table=torch.tensor([[0, 1]]),
            req_of_row=torch.zeros(8, dtype=torch.int64),
            selected=torch.where(chosen < 0, chosen, chosen - 300),
            sink=weights.tensor("layers.2.attn.attn_sink", torch.float32),
        )

    @pytest.mark.parametrize("which", ["", "early_"], ids=["last", "first"])
    def test_bit_equal_in_the_same_blocks(
        self, units: dict[str, Tensor], weights: CheckpointSource, which: str
    ) -> None:
        out = self.case(units, weights, which).run(exact_rounding=True)
        assert torch.equal(out, units[f"unit.attention.{which}out"])

    @pytest.mark.parametrize(("which", "bound"), [("", 4e-3), ("early_", 8e-3)])
    def test_one_softmax_is_as_close_as_the_readme_says(
        self, units: dict[str, Tensor], weights: CheckpointSource, which: str, bound: float
    ) -> None:
        """Its bound still rounds probabilities; without that, one unit of bf16 more."""
        out = self.case(units, weights, which).run(exact_rounding=False)
        golden = units[f"unit.attention.{which}out"]
        torch.testing.assert_close(out.float(), golden.float(), rtol=2**-7, atol=bound)

    def test_roundings_depend_on_where_the_entries_start(
        self, units: dict[str, Tensor], weights: CheckpointSource
    ) -> None:
        """Entries right behind the few keys of an early query move the 64-slot borders."""
        case = self.case(units, weights, "early_")
        squeezed = case.replace(window_width=torch.arange(1, 9)).run(exact_rounding=True)
        golden = units["unit.attention.early_out"]
        assert not torch.equal(squeezed, golden)
        torch.testing.assert_close(squeezed.float(), golden.float(), rtol=2**-7, atol=8e-3)


def test_equals_a_loop_over_keys() -> None:
    case = make_case()
    torch.testing.assert_close(case.run(), attend(case), rtol=0, atol=1e-12)


def test_window_only_layers_have_no_entries() -> None:
    case = make_case().replace(kv=None, selected=None)
    torch.testing.assert_close(case.run(), attend(case), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_so_many_visible_entries_are_those_entries_selected(dtype: torch.dtype) -> None:
    visible = torch.tensor([0, 1, 16, 5, 3, 0, 12])
    span = torch.arange(16).expand(7, -1)
    case = make_case(dtype=dtype)
    listed = case.replace(selected=span.masked_fill(span >= visible.unsqueeze(1), -1))
    for exact_rounding in (False, True):
        counted = case.replace(selected=None).run(visible=visible, exact_rounding=exact_rounding)
        assert torch.equal(counted, listed.run(exact_rounding=exact_rounding))


@pytest.mark.parametrize("exact_rounding", [False, True], ids=["one", "blocks"])
def test_bfloat16_is_close_to_the_loop(exact_rounding: bool) -> None:
    case = make_case(dtype=torch.bfloat16)
    out = case.run(exact_rounding=exact_rounding)
    assert out.dtype is torch.bfloat16
    # Inputs are rounded once more after the rotation, outputs twice.
    torch.testing.assert_close(out.double(), attend(case), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("exact_rounding", [False, True], ids=["one", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_row_without_keys_gives_zero(dtype: torch.dtype, exact_rounding: bool) -> None:
    case = make_case(dtype=dtype)
    assert case.selected is not None
    case.window_index[5], case.selected[5] = -1, -1
    case.sink[0] = -math.inf
    out = case.run(exact_rounding=exact_rounding)
    assert (out[5] == 0).all()
    assert (out[4] != 0).all()


@pytest.mark.parametrize("exact_rounding", [False, True], ids=["one", "blocks"])
@pytest.mark.parametrize("where", ["window", "selected", "both"])
def test_keys_that_a_row_does_not_see_may_be_nan(where: str, exact_rounding: bool) -> None:
    """Unused places hold -1 and are read from somewhere: another request's row, a free page."""
    case = make_case(dtype=torch.bfloat16)
    clean = case.run(exact_rounding=exact_rounding)
    if where != "selected":
        case.window_index[case.window_index == 0] = 1
        clean = case.run(exact_rounding=exact_rounding)
        case.window.values[0, 0] = math.nan
    if where != "window":
        assert case.kv is not None
        assert case.selected is not None
        case.selected[case.selected == 0] = -1  # breaks the order, which changes no value here
        clean = case.run(exact_rounding=exact_rounding)
        case.kv.values[case.page_table[:, 0], 0] = math.nan
    assert torch.equal(case.run(exact_rounding=exact_rounding), clean)


def test_sink_takes_its_share_of_the_denominator_only() -> None:
    """One key of value v with score 0 and a sink of ln 3: v / (1 + 3)."""
    case = make_case(rows=5).replace(kv=None, selected=None)
    case.window_index[:, 1:], case.window_index[:, 0] = -1, 4
    case = case.replace(
        q=torch.zeros_like(case.q),
        cos=torch.ones_like(case.cos),
        sin=torch.zeros_like(case.sin),
        sink=torch.full((3,), math.log(3.0), dtype=torch.float64),
    )
    quarter = (case.window.values[0, 4].double() / 4).expand(5, 3, -1)
    torch.testing.assert_close(case.run(), quarter, rtol=1e-14, atol=0)


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4], ids=str)
def test_extreme_sinks_stay_finite(sink: float) -> None:
    case = make_case()
    out = case.replace(sink=torch.full((3,), sink).double()).run()
    assert out.isfinite().all()
    if sink > 0:
        assert (out == 0).all()


@pytest.mark.parametrize("exact_rounding", [False, True], ids=["one", "blocks"])
def test_huge_scores_do_not_overflow(exact_rounding: bool) -> None:
    case = make_case(dtype=torch.bfloat16)
    case.window.values.mul_(100)
    out = case.replace(q=case.q * 1e4).run(exact_rounding=exact_rounding)
    assert out.isfinite().all()


def test_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    whole = case.run()
    monkeypatch.setattr("leadline.kernels.reference.blocks._ELEMENTS", {"cpu": 1})
    torch.testing.assert_close(case.run(), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("exact_rounding", [False, True], ids=["one", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_lse_is_of_the_keys_and_not_of_the_sink(dtype: torch.dtype, exact_rounding: bool) -> None:
    """Queries of zero: every key has the weight one."""
    case = make_case(dtype=dtype)
    case = case.replace(q=torch.zeros_like(case.q))
    assert case.selected is not None
    case.window_index[5], case.selected[5] = -1, -1
    plain = case.run(exact_rounding=exact_rounding)
    out, lse = case.run_with_lse(exact_rounding=exact_rounding)
    assert torch.equal(out, plain)
    counts = [len(keys_of_row(case, row)) for row in range(len(case.q))]
    wanted = torch.tensor(counts, dtype=lse.dtype).log().unsqueeze(1).expand_as(lse)
    torch.testing.assert_close(lse, wanted)
    assert (lse[5] == -math.inf).all()


def test_parts_of_a_context_merge_by_their_lse() -> None:
    case = make_case()
    assert case.selected is not None
    whole, lse_of_whole = case.run_with_lse()
    alone = case.replace(sink=torch.full_like(case.sink, -math.inf))
    unseen = torch.full_like(case.window_index, -1)
    half = case.selected.shape[1] // 2
    parts = [
        alone.replace(selected=case.selected[:, :0]),
        alone.replace(window_index=unseen, selected=case.selected[:, :half]),
        alone.replace(window_index=unseen, selected=case.selected[:, half:]),
    ]
    outputs, lses = (
        torch.stack(made) for made in zip(*(part.run_with_lse() for part in parts), strict=True)
    )
    weights = lses.exp()
    merged = (weights.unsqueeze(3) * outputs).sum(0)
    merged /= (weights.sum(0) + case.sink.exp()).unsqueeze(2)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(lses.logsumexp(0), lse_of_whole, rtol=0, atol=1e-12)


def test_outputs_in_fp8_are_the_rounded_outputs() -> None:
    case = make_case(dtype=torch.bfloat16)
    codes = torch.empty(case.q.shape, dtype=torch.uint8)
    fp8 = codes, codes[..., : case.q.shape[2] // 32].clone()
    out = case.run(fp8=fp8)
    for actual, wanted in zip(fp8, quantize_fp8_32(out), strict=True):
        assert torch.equal(actual, wanted)
