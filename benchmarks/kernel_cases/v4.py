"""What V4 asks of kernels otherwise than V4.1, at V4-Flash's sizes (v4-model 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, relative_l2, same, within
from benchmarks.kernel_cases.linear import random_tokens, random_weight, weight_bytes
from leadline.cache.pool import make_field
from leadline.kernels import ops, unfused
from leadline.kernels.packed import PackedWeight, RecordField, WeightFormat
from leadline.kernels.records import Record
from leadline.kernels.reference import attention as reference_attention
from leadline.kernels.reference import compressor as reference_compressor
from leadline.kernels.reference import experts as reference_experts
from leadline.kernels.reference import indexer as reference_indexer
from leadline.kernels.reference import linear as reference_linear
from leadline.kernels.reference import mhc as reference_mhc
from leadline.kernels.reference import norm as reference_norm
from leadline.kernels.reference import quant
from leadline.kernels.reference.rope import rope_angles, rope_frequencies, rotate
from leadline.kernels.triton import (
    attention,
    compressor,
    experts,
    grouped_linear,
    indexer,
    linear,
    mhc_head,
    norm,
    shared_expert,
    window,
)

HIDDEN, HEADS, WIDTH, ROTARY, RANK, EPS = 4096, 64, 512, 64, 1024, 1e-6
INDEX_HEADS, INDEX_WIDTH, SELECTED, WINDOW, PAGE = 64, 128, 512, 128, 256
GROUPS, OUT_RANK, EXPERT, LIMIT, STREAMS = 8, 1024, 2048, 10.0, 4
EXPERTS, TOP_K = 128, 6  # of a GPU of two
DECODES = 64  # rows of a step up to here decode, one prompt above
BF16 = torch.bfloat16


def _angles(pos: Tensor) -> tuple[Tensor, Tensor]:
    return rope_angles(pos, rope_frequencies(ROTARY, 160000.0).to(pos.device))


# Products.


def _weight(device: torch.device, *shape: int, quantizes_input: bool = True) -> PackedWeight:
    """Tiles of 128 x 128, told as those of 32 x 32 in them."""
    weight = random_weight(device, *shape, quantizes_input=quantizes_input)
    scales = weight.scales[..., ::4, ::4].repeat_interleave(4, -2).repeat_interleave(4, -1)
    return dataclasses.replace(weight, scales=scales.contiguous(), aligned=True, input_block=128)


def _linear(rows: int, width: int, tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight]:
        return random_tokens(device, tokens, width), _weight(device, rows, width)

    return Case(
        kernel="11",
        op="linear",
        shape=f"V4,{rows}x{width},T={tokens}",
        make=make,
        fused=linear.linear,
        twin=reference_linear.linear,
        check=within(2.5e-3),
        bytes=weight_bytes(rows * width) + 2 * tokens * (rows + width),
        flops=2 * tokens * rows * width,
    )


def _output_projection(tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight, PackedWeight]:
        wo_a = _weight(device, GROUPS, OUT_RANK, HEADS // GROUPS * WIDTH, quantizes_input=False)
        wo_b = _weight(device, HIDDEN, GROUPS * OUT_RANK)
        return random_tokens(device, tokens, HEADS, WIDTH), wo_a, wo_b

    def steps(how: Any, x: Tensor, wo_a: PackedWeight, wo_b: PackedWeight) -> Tensor:
        grouped, linear = how
        z = grouped(x.reshape(len(x), GROUPS, -1), wo_a)
        product: Tensor = linear(z.flatten(1), wo_b)
        return product

    values = OUT_RANK * (HEADS * WIDTH + GROUPS * HIDDEN)
    return Case(
        kernel="9",
        op="output_projection",
        shape=f"V4,T={tokens}",
        make=make,
        fused=grouped_linear.output_projection,
        twin=partial(steps, (reference_linear.grouped_linear, reference_linear.linear)),
        unfused=partial(steps, (grouped_linear.grouped_linear, linear.linear)),
        check=within(1e-2),
        bytes=weight_bytes(values) + 2 * tokens * (HEADS * WIDTH + HIDDEN),
        flops=2 * tokens * values,
    )


def _shared_expert(tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight, PackedWeight]:
        w13 = _weight(device, 2 * EXPERT, HIDDEN)
        w13.scales.sub_(4)  # SwiGLU would clamp nearly every product otherwise
        return random_tokens(device, tokens, HIDDEN), w13, _weight(device, HIDDEN, EXPERT)

    values = 3 * EXPERT * HIDDEN
    return Case(
        kernel="11",
        op="shared_expert",
        shape=f"V4,T={tokens}",
        make=make,
        fused=partial(shared_expert.shared_expert, limit=LIMIT),
        twin=partial(reference_experts.shared_expert, limit=LIMIT),
        check=within(1e-2),
        bytes=weight_bytes(values) + 4 * tokens * HIDDEN,
        flops=2 * tokens * values,
    )


def _routed_experts(tokens: int) -> Case:
    def stack(device: torch.device, out: int, columns: int) -> PackedWeight:
        codes = torch.empty(EXPERTS, out, columns // 16, dtype=torch.int64, device=device)
        codes.random_(-(2**63), None)
        shape = (EXPERTS, out, columns // 32)
        scales = torch.randint(116, 123, shape, dtype=torch.uint8, device=device)
        return PackedWeight(codes.view(torch.uint8), scales, WeightFormat.MXFP4, input_block=128)

    def make(device: torch.device) -> tuple[Any, ...]:
        chosen = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.sort().values
        weights = torch.rand(tokens, TOP_K, device=device) + 0.1
        stacks = stack(device, 2 * EXPERT, HIDDEN), stack(device, HIDDEN, EXPERT)
        return random_tokens(device, tokens, HIDDEN), chosen, weights, *stacks

    def twin(x: Tensor, ids: Tensor, weights: Tensor, *stacks: PackedWeight) -> Tensor:
        wide = (dataclasses.replace(weight, dtype=torch.float32) for weight in stacks)
        return reference_experts.routed_experts(x, ids, weights, *wide, limit=LIMIT)

    pairs = tokens * TOP_K
    active = min(pairs, EXPERTS)
    return Case(
        kernel="10",
        op="routed_experts",
        shape=f"V4 EP2,T={tokens}",
        make=make,
        fused=partial(experts.routed_experts, limit=LIMIT),
        twin=twin,
        check=within(3e-3),
        bytes=active * 3 * HIDDEN * EXPERT * 17 / 32 + pairs * (4 * HIDDEN + 8 * EXPERT),
        flops=6 * pairs * HIDDEN * EXPERT,
    )


# Between products: norms, the window, compressors, index queries, the head.


def _heads_norm(tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Tensor, Tensor]:
        return random_tokens(device, tokens * HEADS, WIDTH), torch.ones(WIDTH, device=device)

    return Case(
        kernel="4",
        op="rms_norm",
        shape=f"V4,heads,T={tokens}",
        make=make,
        fused=partial(norm.rms_norm, eps=EPS),
        twin=partial(reference_norm.rms_norm, eps=EPS),
        check=within(2e-3),
        bytes=tokens * HEADS * 4 * WIDTH,
        rate=Rate.FP32,
    )


def _window(tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Any, ...]:
        units = tokens // WINDOW + 1
        field = make_field(Record.FP8_64, units, WINDOW, WIDTH, device, ROTARY)
        place = torch.randperm(units * WINDOW, device=device)[:tokens]
        return (
            random_tokens(device, tokens, RANK + WIDTH),
            *(torch.rand(n, device=device) + 0.5 for n in (RANK, WIDTH)),
            *_angles(torch.randint(0, 2**20, (tokens,), device=device)),
            *(field, place // WINDOW, place % WINDOW),
        )

    def run(how: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, ...]:
        query, field = how(*arguments, eps=EPS), arguments[5]
        return query, field.values, field.scales

    def steps(down: Tensor, query_weight: Tensor, *rest: Any, eps: float) -> Tensor:
        unfused.norm_rotate_store(down[:, RANK:], *rest, eps=eps)
        return reference_norm.rms_norm(down[:, :RANK], query_weight, eps=eps)

    return Case(
        kernel="4",
        op="norm_query_store_window",
        shape=f"V4,T={tokens}",
        make=make,
        fused=partial(run, window.norm_query_store_window),
        twin=partial(run, steps),
        check=_alike,
        bytes=tokens * (2 * (RANK + WIDTH) + 2 * RANK + 584),
        rate=Rate.FP32,
        unfused=partial(run, steps),
    )


def _alike(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Norms differ in last bits, so that 0.1 % of the bytes may."""
    for a, b in zip(actual[1:], wanted[1:], strict=True):
        assert (a == b).double().mean() > 0.999, f"{int((a != b).sum())} bytes differ"
    return within(2e-3)(actual[0], wanted[0])


@dataclasses.dataclass(frozen=True)
class Compressor:
    """One of the three that there are."""

    name: str
    ratio: int
    width: int
    record: Record

    @property
    def columns(self) -> int:
        """Values of a row, with as many gates."""
        return self.width * (2 if self.ratio == 4 else 1)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "eps": EPS,
            "dtype": BF16,
            "overlaps": self.ratio == 4,
            "hadamard": self.record is Record.FP4_32,
        }


COMPRESSORS = (
    Compressor("c4a", 4, WIDTH, Record.FP8_64),
    Compressor("c4a index", 4, INDEX_WIDTH, Record.FP4_32),
    Compressor("c128a", 128, WIDTH, Record.FP8_64),
)


def _compressor(kind: Compressor, tokens: int) -> Case:
    """Decode rows that close a group each, or a prompt."""
    ratio, columns = kind.ratio, kind.columns

    def make(device: torch.device) -> tuple[Any, ...]:
        decodes = tokens <= DECODES
        groups, counts = (tokens, torch.ones(tokens)) if decodes else (1, torch.tensor([tokens]))
        ends = counts.long().cumsum(0)
        pos = torch.arange(tokens)
        if decodes:
            pos = torch.randint(1, 2000, (tokens,)) * ratio + ratio - 1
        pages = int(pos.max()) // PAGE + 1
        table = torch.randperm(groups * pages).reshape(groups, pages) + 1
        rotary = ROTARY if kind.record is Record.FP8_64 else 0
        entries = make_field(
            *(kind.record, groups * pages + 1, PAGE // ratio, kind.width, device, rotary)
        )
        ring = torch.randn(groups + 1, 128 if ratio == 128 else 8, 2 * columns, device=device)
        addresses = (
            pos,
            torch.repeat_interleave(torch.arange(groups), counts.long()),
            torch.cat((torch.zeros(1, dtype=torch.int64), ends)),
            1 + torch.arange(groups),
            pos[ends - 1] + 1,
            torch.zeros(groups, dtype=torch.int64),
            table,
        )
        return (
            torch.randn(tokens, 2 * columns, device=device),
            torch.rand(kind.width, device=device) + 0.5,
            *(angle.to(device) for angle in _angles(pos - ratio + 1)),
            *(address.to(device) for address in addresses),
            *(entries, ring, torch.randn(ratio, columns, device=device)),
        )

    def run(how: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, ...]:
        *rest, ape = arguments
        how(*rest, ape=ape, **kind.options)
        entries, ring = rest[-2:]
        return entries.values, entries.scales, ring

    stored = tokens if tokens <= DECODES else tokens // ratio
    rows_of_entries = 2 * ratio * kind.width * 8 if ratio == 4 else ratio * kind.width * 8
    rotary = ROTARY if kind.record is Record.FP8_64 else 0
    moved = stored * (rows_of_entries if tokens <= DECODES else ratio * columns * 8)
    return Case(
        kernel="3",
        op="store_entries",
        shape=f"V4,{kind.name},T={tokens}",
        make=make,
        fused=partial(run, compressor.store_entries),
        twin=partial(run, reference_compressor.store_entries),
        unfused=partial(run, unfused.store_entries),
        check=_entries_agree,
        bytes=moved + stored * kind.record.num_bytes(kind.width, rotary),
        rate=Rate.FP32,
    )


def _entries_agree(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Another order of sums may change a hundredth of the packed bytes; rings are copied."""
    for ours, theirs in zip(actual[:2], wanted[:2], strict=True):
        share = float((ours != theirs).sum() / theirs.count_nonzero().clamp(min=1))
        assert share <= 0.01, f"{share:.2%} of packed bytes differ"
    return same(actual[2], wanted[2])


def _index_query(tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        q = random_tokens(device, tokens, INDEX_HEADS, INDEX_WIDTH)
        return q, *_angles(torch.randint(0, 2**20, (tokens,), device=device))

    return Case(
        kernel="5.1",
        op="prepare_index_query",
        shape=f"V4,T={tokens}",
        make=make,
        fused=partial(indexer.prepare_index_query, hadamard=True),
        twin=partial(reference_indexer.prepare_index_query, hadamard=True),
        check=same,
        bytes=tokens * (4 * INDEX_HEADS * INDEX_WIDTH + 8 * ROTARY // 2),
        rate=Rate.FP32,
    )


def _index_logits(tokens: int, entries: int, *, groups: int) -> Case:
    def make(device: torch.device) -> tuple[Any, ...]:
        per_page = PAGE // 4
        pages = groups * entries // per_page
        keys = make_field(Record.FP4_32, pages, per_page, INDEX_WIDTH, device)
        assert keys.scales is not None
        keys.values.random_(256)
        keys.scales.random_(122, 128)
        q = random_tokens(device, tokens, INDEX_HEADS, INDEX_WIDTH)
        return (
            ops.quantize_index_query(q),
            random_tokens(device, tokens, INDEX_HEADS) / 64,
            keys,
            torch.randperm(pages, device=device).view(groups, -1),
            torch.arange(tokens, device=device) * groups // tokens,
            torch.full((tokens,), entries, device=device),
            entries,
        )

    def agree(actual: Tensor, wanted: Tensor) -> float:
        error = relative_l2(actual.clamp(min=-1e30), wanted.clamp(min=-1e30))
        assert error <= 1e-3, f"relative L2 error is {error:.2e}"
        return error

    return Case(
        kernel="5",
        op="index_logits",
        shape=f"V4,{entries // 1024}K entries,T={tokens}",
        make=make,
        fused=partial(indexer.index_logits, exact_rounding=False),
        twin=partial(reference_indexer.index_logits, exact_rounding=False),
        check=agree,
        bytes=groups * entries * 68 + 2 * tokens * entries,
        flops=2 * INDEX_HEADS * INDEX_WIDTH * tokens * entries,
        rate=Rate.FP8,
    )


def _head(tokens: int) -> Case:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        fn = torch.randn(STREAMS, STREAMS * HIDDEN, device=device) / (STREAMS * HIDDEN) ** 0.5
        base, scale = torch.randn(STREAMS, device=device), torch.ones(1, device=device)
        return random_tokens(device, tokens, STREAMS, HIDDEN), fn, base, scale

    return Case(
        kernel="1",
        op="mhc_head",
        shape=f"V4,T={tokens}",
        make=make,
        fused=partial(mhc_head.mhc_head, hc_eps=EPS, eps=EPS),
        twin=partial(reference_mhc.mhc_head, hc_eps=EPS, eps=EPS),
        check=within(1e-4),
        bytes=STREAMS * HIDDEN * (2 * tokens + 4 * STREAMS),
        rate=Rate.FP32,
        flops=2 * tokens * STREAMS * HIDDEN * (STREAMS + 1),
    )


# Attention.


def _field(device: torch.device, outer: int, inner: int) -> RecordField:
    """Random bytes of moderate scales, rotary channels that are numbers."""
    field = make_field(Record.FP8_64, outer, inner, WIDTH, device, ROTARY)
    assert field.scales is not None
    field.values.random_(256).bitwise_and_(0xBF)
    field.scales.random_(127, 129)
    rotary = torch.randn(outer, inner, ROTARY, device=device, dtype=BF16)
    field.values[..., WIDTH - ROTARY :] = rotary.view(torch.uint8)
    return field


def _attention(kind: str, tokens: int, context: int = 131072) -> Case:
    """Window-only, c4a with its selection, or c128a, of requests or of one prompt's end."""
    ratio = {"window": 256, "c4a": 4, "c128a": 128}[kind]
    decodes = tokens <= DECODES
    groups = tokens if decodes else 1

    def make(device: torch.device) -> tuple[Any, ...]:
        group = torch.arange(tokens, device=device) % groups
        pos = torch.arange(context - tokens, context, device=device)
        if decodes:
            pos, ring = pos * 0 + context - 1, WINDOW
            newest = group.unsqueeze(1) * ring + torch.arange(WINDOW, device=device)
            rings = _field(device, groups, ring)
        else:
            newest = torch.arange(tokens, device=device).unsqueeze(1)
            newest = newest + torch.arange(WINDOW, device=device)
            rings = _field(device, tokens // WINDOW + 1, WINDOW)
        pages = context // PAGE
        table = torch.randperm(groups * pages, device=device).view(groups, pages)
        kv, selected, visible = None, None, None
        if kind != "window":
            kv = _field(device, groups * pages, PAGE // ratio)
        if kind == "c4a":
            scores = torch.rand(tokens, context // ratio, device=device)
            selected = scores.topk(SELECTED, sorted=False).indices.sort(-1).values
        if kind == "c128a":
            visible = (pos + 1) // ratio
        return (
            random_tokens(device, tokens, HEADS, WIDTH),
            *_angles(pos),
            *(rings, newest, torch.full((tokens,), WINDOW, device=device)),
            *(kv, table, group, selected, torch.randn(HEADS, device=device), visible),
        )

    def run(how: Callable[..., Tensor], *arguments: Any) -> Tensor:
        *rest, visible = arguments
        return how(*rest, exact_rounding=False, visible=visible)

    keys = WINDOW + {"window": 0, "c4a": SELECTED, "c128a": context // ratio}[kind]
    read = keys * (groups if kind == "c128a" else tokens)
    return Case(
        kernel="8",
        op="sparse_attention",
        shape=f"V4,{kind},T={tokens}",
        make=make,
        fused=partial(run, attention.sparse_attention),
        twin=partial(run, reference_attention.sparse_attention),
        check=within(4e-3),
        bytes=read * 584 + tokens * HEADS * WIDTH * 4,
        flops=tokens * keys * HEADS * WIDTH * 4,
    )


def _attention_to_fp8(tokens: int) -> Case:
    """Outputs rotated back and in FP8, for a projection that takes its input so."""
    plain = _attention("c4a", tokens)

    def run(how: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, ...]:
        *rest, visible = arguments
        codes = torch.empty(arguments[0].shape, dtype=torch.uint8, device=arguments[0].device)
        fp8 = codes, codes.new_empty(*codes.shape[:2], WIDTH // 32)
        return how(*rest, exact_rounding=False, visible=visible, fp8=fp8), *fp8

    def agree(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
        same(actual[1:], quant.quantize_fp8_32(actual[0]))
        return within(4e-3)(actual[0], wanted[0])

    def steps(*arguments: Any) -> tuple[Tensor, Tensor]:
        """A rotation and a rounding behind attention, which has done one by then."""
        out = plain.fused(*arguments)
        return quant.quantize_fp8_32(rotate(out, *arguments[1:3], inverse=True))

    return dataclasses.replace(
        plain,
        shape=f"V4,c4a to FP8,T={tokens}",
        fused=partial(run, attention.sparse_attention),
        twin=partial(run, reference_attention.sparse_attention),
        unfused=steps,
        check=agree,
    )


_MATRICES = ((1536, 4096), (32768, 1024), (4096, 8192), (8192, 1024))


def _cases() -> Iterator[Case]:
    yield from (_heads_norm(tokens) for tokens in (1, 8, 64, 8192))
    yield from (_head(tokens) for tokens in (1, 8, 64))
    yield from (_window(tokens) for tokens in (1, 8, 64, 512, 8192))
    for kind in COMPRESSORS:
        yield from (_compressor(kind, tokens) for tokens in (1, 8, 64, 512, 8192))
    for rows, width in _MATRICES:
        yield from (_linear(rows, width, tokens) for tokens in (1, 8, 64, 8192))
    yield from (_output_projection(tokens) for tokens in (1, 8, 64, 8192))
    yield from (_shared_expert(tokens) for tokens in (1, 8, 64, 8192))
    yield from (_routed_experts(tokens) for tokens in (1, 8, 64, 4096))
    for layer in ("window", "c4a", "c128a"):
        yield from (_attention(layer, tokens) for tokens in (1, 8, 64, 4096))
    yield from (_attention_to_fp8(tokens) for tokens in (1, 8, 64))
    yield from (_index_query(tokens) for tokens in (1, 8, 64, 8192))
    yield from (_index_logits(tokens, 32 * 1024, groups=tokens) for tokens in (1, 8, 64))
    yield _index_logits(2048, 8 * 1024, groups=1)


CASES = list(_cases())
