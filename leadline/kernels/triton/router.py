"""Which experts a token goes to: parts of the gate's product, then the choice (kernels.md 2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.triton.launch import await_previous, bucket, overlapped, tuned
from leadline.kernels.triton.products import dot_parts

_PROGRAMS = 264  # two for each SM of an H200: the product is cut along its channels to get there
_MOST_CUTS = 16


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    req_of_row: Tensor | None = None,
    image_rows: Tensor | None = None,
    image_bias: Tensor | None = None,
    *,
    num_experts_per_tok: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Two launches; NaN counts as the best.

    The number of rows decides how sums are cut, and so their last bits.
    """
    ids = torch.empty(x.shape[0], num_experts_per_tok, dtype=torch.int64, device=x.device)
    biases = bias, image_rows, image_bias
    return _launch(x, gate, ids, req_of_row, scale, *biases, tid2eid=None, token_ids=None)


def hash_route(
    x: Tensor,
    gate: Tensor,
    tid2eid: Tensor,
    token_ids: Tensor,
    req_of_row: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``route``'s launches, of which the second takes who is given."""
    ids = torch.empty(x.shape[0], tid2eid.shape[1], dtype=torch.int64, device=x.device)
    biases = None, None, None
    return _launch(x, gate, ids, req_of_row, scale, *biases, tid2eid=tid2eid, token_ids=token_ids)


def _launch(
    x: Tensor,
    gate: Tensor,
    ids: Tensor,
    req_of_row: Tensor | None,
    scale: float,
    bias: Tensor | None,
    image_rows: Tensor | None,
    image_bias: Tensor | None,
    *,
    tid2eid: Tensor | None,
    token_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fill ``ids``, and return them with their weights."""
    rows = x.shape[0]
    weights = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
    if not rows:
        return ids, weights
    logits = project(x, gate)
    cuts, _, experts = logits.shape
    _choose[(rows,)](
        logits,
        bias,
        image_rows,
        image_bias,
        tid2eid,
        token_ids,
        req_of_row,
        ids,
        weights,
        rows,
        scale,
        bucket(planned_rows(rows)),
        experts,
        cuts,
        ids.shape[1],
        triton.next_power_of_2(experts),
        **overlapped(),
    )
    return ids, weights


def project(x: Tensor, gate: Tensor, most_cuts: int = _MOST_CUTS) -> Tensor:
    """``x gate^T`` in parts yet to be added, each of some of the channels.

    Args:
        x: ``[m, D]`` bf16, m at least 1.
        gate: ``[E, D]`` bf16 or float32.
        most_cuts: parts at most, a power of two.

    Returns:
        ``[parts, m, E]`` float32.
    """
    rows, width = x.shape
    experts = gate.shape[0]
    planned = planned_rows(rows)
    tokens, together = _tile(planned)
    blocks = triton.cdiv(experts, together)
    cuts = min(_cuts(blocks * triton.cdiv(planned, tokens)), most_cuts)
    logits = torch.empty(cuts, rows, experts, dtype=torch.float32, device=x.device)
    _project[(blocks, triton.cdiv(rows, tokens), cuts)](
        x,
        gate,
        logits,
        rows,
        x.stride(0),
        bucket(planned),
        experts,
        width,
        triton.cdiv(triton.cdiv(width, cuts), 64) * 64,
        tokens,
        together,
        1 if gate.dtype == torch.bfloat16 else 3,
        **overlapped(),
    )
    return logits


def _tile(rows: int) -> tuple[int, int]:
    """Rows and experts of a program."""
    return (16, 32) if rows <= 16 else (64, 64) if rows <= 1024 else (128, 128)


def _cuts(tiles: int) -> int:
    """How many programs share a tile's channels."""
    return min(triton.next_power_of_2(triton.cdiv(_PROGRAMS, tiles)), _MOST_CUTS)


@tuned(
    [
        triton.Config({"BLOCK": 64}, num_warps=4, num_stages=5),
        triton.Config({"BLOCK": 128}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK": 64}, num_warps=8, num_stages=3),
        triton.Config({"BLOCK": 64}, num_warps=8, num_stages=4),
    ],
    key=["rows_bucket", "EXPERTS", "WIDTH"],
)
@triton.jit(do_not_specialize=["rows", "rows_bucket"])
def _project(
    x,
    gate,
    logits,
    rows,
    row_stride,
    rows_bucket,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TOKENS rows by TOGETHER experts, over one cut of the channels.

    Programs of the same rows are neighbours, so that only the first reads them from memory.
    """
    await_previous()
    expert = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    cut = tl.program_id(2)
    acc = tl.zeros((TOKENS, TOGETHER), tl.float32)
    for at in range(0, CHANNELS, BLOCK):
        ours = at + tl.arange(0, BLOCK)
        channel = cut * CHANNELS + ours
        inside = (ours < CHANNELS) & (channel < WIDTH)
        values = tl.load(x + token * row_stride + channel, mask=(token < rows) & inside, other=0.0)
        weight = tl.load(
            gate + expert * WIDTH + channel[:, None],
            mask=(expert < EXPERTS) & inside[:, None],
            other=0.0,
        )
        acc = dot_parts(values, weight, acc, PARTS)
    target = logits + (cut * rows + token) * EXPERTS + expert
    tl.store(target, acc, mask=(token < rows) & (expert < EXPERTS))


@tuned(
    [triton.Config({}, num_warps=warps) for warps in (4, 2, 1)],
    key=["rows_bucket", "EXPERTS"],
)
@triton.jit(do_not_specialize=["rows", "rows_bucket"])
def _choose(
    logits,
    bias,
    image_rows,
    image_bias,
    tid2eid,
    token_ids,
    req_of_row,
    ids,
    weights,
    rows,
    scale,
    rows_bucket,
    EXPERTS: tl.constexpr,
    CUTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: sum the cuts in order, score, and take the best K, or those of ``tid2eid``."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    first_cut = logits + row * EXPERTS + expert
    cut_stride = rows.to(tl.int64) * EXPERTS
    if tid2eid is None:
        added = tl.load(bias + expert, mask=there, other=0.0)
        if image_rows is not None:
            for_images = tl.load(image_bias + expert, mask=there, other=0.0)
            added = tl.where(tl.load(image_rows + row), for_images, added)
    else:
        given = tid2eid + tl.load(token_ids + row).to(tl.int64) * K
    lives = True
    if req_of_row is not None:
        lives = tl.load(req_of_row + row) >= 0
    parts: tl.tuple = ()
    for cut in tl.static_range(1, CUTS):
        parts += (tl.load(first_cut + cut * cut_stride, mask=there, other=0.0),)
    tl.debug_barrier()  # all of them are under way before the sum can begin, as in mhc
    logit = tl.load(first_cut, mask=there, other=0.0)
    for cut in tl.static_range(1, CUTS):
        logit += parts[cut - 1]
    score = tl.sqrt(_softplus(logit))

    if tid2eid is None:
        chosen = _best(score + added, expert, there, K, BLOCK)
    else:
        chosen = expert < 0
        for k in tl.static_range(K):
            chosen |= expert == tl.load(given + k)

    place = row * K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    weight = score * scale
    if K > 1:
        weight = weight / (tl.sum(tl.where(chosen, score, 0.0), 0) + 1e-20)
    tl.store(ids + place, tl.where(lives, expert, -1).to(tl.int64), mask=chosen)
    tl.store(weights + place, weight, mask=chosen)


@triton.jit
def _best(value, expert, there, K: tl.constexpr, BLOCK: tl.constexpr):
    """Which experts have the K largest values."""
    # The order of integers is that of the floats whose bits they are, but for negative ones, whose
    # magnitude is turned round. Integers have one maximum, NaN or not; of equal values the lower
    # expert's is the larger.
    order = value.to(tl.int32, bitcast=True)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    order = (order.to(tl.int64) << 32) + (BLOCK - expert)
    taken = -0x8000000000000000
    order = tl.where(there, order, taken)
    chosen = expert < 0
    for _ in tl.static_range(K):
        best = order == tl.max(order, 0)
        chosen |= best
        order = tl.where(best, taken, order)
    return chosen


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, beyond 20 the identity, as torch has it; small values keep their bits.

    What ``1 + e`` loses of e, the quotient puts back.
    """
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    one = 1.0 + e
    kept = tl.where(one == 1.0, 1.0, one - 1.0)
    return tl.where(x > 20.0, x, tl.where(one == 1.0, e, tl.log(one) * (e / kept)))
