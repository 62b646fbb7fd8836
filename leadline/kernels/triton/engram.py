"""Engram: hashes of n-grams, rows of the tables, the gated injection (kernels.md 12)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.triton.formats import cast, decode_e4m3, decode_ue8m0
from leadline.kernels.triton.launch import await_previous, overlapped

_FEW_TOKENS = 128  # below, a program takes all of a stream at once; above, some tokens' chunks
_SORTED_FROM = 12288  # rows of a host table from which shared translations pay for a sort
_HOST_PROGRAMS = 32  # enough to keep the bus busy; most of the GPU computes meanwhile


def engram_history(
    ids: Tensor,
    hist: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    token_map: Tensor,
    *,
    pad: int,
    image_token_id: int,
) -> tuple[Tensor, Tensor]:
    """Programs over blocks of rows."""
    rows, look_back = len(ids), hist.shape[1] + 1
    history = torch.empty(rows, look_back, dtype=torch.int64, device=ids.device)
    live = torch.empty(rows, dtype=torch.bool, device=ids.device)
    if rows:
        block_rows = 32 if rows < _FEW_TOKENS else 128
        _history[(triton.cdiv(rows, block_rows),)](
            ids,
            hist.contiguous(),
            req_of_row,
            q_off,
            token_map,
            history,
            live,
            rows,
            pad,
            image_token_id,
            LOOK_BACK=look_back,
            BLOCK_ROWS=block_rows,
            num_warps=block_rows // 32,
            **overlapped(),
        )
    return history, live


@triton.jit
def _history(
    ids,
    hist,
    req_of_row,
    q_off,
    token_map,
    history,
    live,
    rows,
    pad,
    image,
    LOOK_BACK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    request = tl.load(req_of_row + row, mask=inside, other=0)
    group = tl.maximum(request, 0)
    first = tl.load(q_off + group, mask=inside, other=0)
    alive = inside
    for back in tl.static_range(LOOK_BACK):
        source = row - back
        is_here = source >= first
        before = hist + (group + 1) * (LOOK_BACK - 1) + source - first
        token = tl.load(ids + source, mask=inside & is_here, other=-1)
        token = tl.where(is_here, token, tl.load(before, mask=inside & ~is_here, other=-1))
        named = inside & (token >= 0) & (token != image)
        of_token = tl.load(token_map + token, mask=named, other=-1)
        alive &= of_token >= 0
        tl.store(
            history + row.to(tl.int64) * LOOK_BACK + back, tl.where(alive, of_token, pad), inside
        )
        if back == 0:
            tl.store(live + row, alive & (request >= 0), mask=inside)


def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """All layers and columns in one launch, in int64 throughout."""
    rows, look_back = history.shape
    layers, columns = primes.shape
    out = torch.empty(rows, layers, columns, dtype=torch.int64, device=history.device)
    if rows:
        block_rows = 1 if rows < _FEW_TOKENS else 8
        _hash[(triton.cdiv(rows, block_rows), layers)](
            history,
            multipliers,
            primes,
            offsets,
            out,
            rows,
            layers,
            history.stride(0),
            COLUMNS=columns,
            ORDERS=look_back - 1,
            BLOCK_ROWS=block_rows,
            BLOCK=triton.next_power_of_2(columns),
            num_warps=1 if block_rows == 1 else 4,
            **overlapped(),
        )
    return out


@triton.jit
def _hash(
    history,
    multipliers,
    primes,
    offsets,
    out,
    rows,
    layers,
    stride,
    COLUMNS: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous()
    layer = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    at = layer * COLUMNS + column
    prime = tl.load(primes + at, mask=column < COLUMNS, other=1)
    offset = tl.load(offsets + at, mask=column < COLUMNS, other=0)
    order = column // (COLUMNS // ORDERS) + 1
    mixed = tl.zeros([BLOCK_ROWS, BLOCK], tl.int64)
    for n in tl.static_range(ORDERS + 1):
        multiplier = tl.load(multipliers + layer * (ORDERS + 1) + n)
        product = tl.load(history + row * stride + n, mask=row < rows, other=0) * multiplier
        mixed ^= tl.where(n <= order[None, :], product[:, None], 0)
    # No product and no XOR of them is negative: the remainder is the modulus.
    result = mixed % prime[None, :] + offset[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    tl.store(out + (row * layers + layer)[:, None] * COLUMNS + column[None, :], result, mask=inside)


def gather_rows(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """``gather``: of a host's table by a bounded number of programs, and many rows in order."""
    if codes.device.type == rows.device.type:
        return gather(codes, scales, rows)
    is_sorted = rows.numel() >= _SORTED_FROM
    return gather(codes, scales, rows, is_sorted=is_sorted, max_programs=_HOST_PROGRAMS)


def gather(
    codes: Tensor,
    scales: Tensor,
    rows: Tensor,
    *,
    is_sorted: bool = False,
    max_programs: int | None = None,
) -> Tensor:
    """16 bytes a thread, straight from where the table lies.

    That is the device, or page-locked host memory: Triton asks the driver for the address at which
    the device reaches a tensor's memory, and pinned tensors have one, as has any memory of a
    process (a NumPy array, shared memory) after ``cudaHostRegister``. The kernel then reads over
    the bus.

    Args:
        codes: as for the op; rows may lie apart.
        scales: likewise.
        rows: likewise.
        is_sorted: read them in ascending order, so that rows of one page of memory share the
            translation of its address.
        max_programs: programs of the launch at most; None is one for each block of rows.

    Returns:
        As the op.
    """
    width = codes.shape[1]
    out = torch.empty(*rows.shape, width, dtype=torch.bfloat16, device=rows.device)
    wanted = rows.flatten()
    count = len(wanted)
    if not count:
        return out
    order = wanted
    if is_sorted:  # by 32 bits, which is half of the work; no table has 2^31 rows
        wanted, order = wanted.int().sort()
    block_rows = 8 if count < _SORTED_FROM else 32
    blocks = triton.cdiv(count, block_rows)
    _gather[(min(blocks, max_programs or blocks),)](
        codes,
        scales,
        wanted,
        order,
        out,
        count,
        CODE_STRIDE=codes.stride(0),
        SCALE_STRIDE=scales.stride(0),
        WIDTH=width,
        BLOCK_ROWS=block_rows,
        SORTED=is_sorted,
        num_warps=4,
        **overlapped(),
    )
    return out


@triton.jit
def _gather(
    codes,
    scales,
    rows,
    order,
    out,
    count,
    CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SORTED: tl.constexpr,
):
    await_previous()
    channel = tl.arange(0, WIDTH)
    group = tl.arange(0, WIDTH // 32)
    for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_ROWS), tl.num_programs(0)):
        place = tl.cast(block, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = place < count
        row = tl.load(rows + place, mask=inside, other=-1).to(tl.int64)
        stored = (row >= 0)[:, None]
        if SORTED:
            place = tl.load(order + place, mask=inside, other=0)
        code_at = codes + row[:, None] * CODE_STRIDE + channel[None, :]
        scale_at = scales + row[:, None] * SCALE_STRIDE + group[None, :]
        code = tl.load(code_at, mask=stored, other=0)
        scale = tl.load(scale_at, mask=stored, other=0)
        groups = tl.reshape(decode_e4m3(code), [BLOCK_ROWS, WIDTH // 32, 32])
        values = tl.reshape(groups * decode_ue8m0(scale)[:, :, None], [BLOCK_ROWS, WIDTH])
        at = out + place[:, None] * WIDTH + channel[None, :]
        tl.store(at, cast(values, out.dtype.element_ty), mask=inside[:, None])


def engram_inject(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, live: Tensor, *, eps: float
) -> Tensor:
    """A program for each stream of one token, or of four where there are many.

    Four share the weights, which are as long as the rows. The second reading of a stream finds it
    in a cache, as does that of the values by the other streams' programs.
    """
    rows, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if not rows:
        return out
    block_rows, block = 1, triton.next_power_of_2(width)
    if planned_rows(rows) >= _FEW_TOKENS:
        block_rows, block = 4, min(block, 1024)
    _inject[(num_streams, triton.cdiv(rows, block_rows))](
        streams,
        kv,
        q_weight,
        k_weight,
        live,
        out,
        rows,
        width,
        streams.stride(0),
        streams.stride(1),
        kv.stride(0),
        eps,
        width**-0.5,
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        CHUNKS=triton.cdiv(width, block),
        num_warps=8,
        **overlapped(),
    )
    return out


@triton.jit
def _inject(
    streams,
    kv,
    q_weight,
    k_weight,
    live,
    out,
    rows,
    width,
    row_stride,
    stream_stride,
    kv_stride,
    eps,
    scale,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    await_previous()
    # Programs of one token follow one another, so that its values are read from memory once.
    stream, num_streams = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = row < rows
    hidden_at = streams + row * row_stride + stream * stream_stride
    key_at = kv + row * kv_stride + stream * width
    value_at = kv + row * kv_stride + num_streams * width

    dot = tl.zeros([BLOCK_ROWS, BLOCK // 8], tl.float32)
    hidden_square = tl.zeros([BLOCK_ROWS, BLOCK // 8], tl.float32)
    key_square = tl.zeros([BLOCK_ROWS, BLOCK // 8], tl.float32)
    for chunk in range(CHUNKS):
        channel = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        weight = tl.load(q_weight + stream * width + channel, mask=inside, other=0.0).to(tl.float32)
        weight *= tl.load(k_weight + stream * width + channel, mask=inside, other=0.0)
        mask = exists[:, None] & inside[None, :]
        hidden = tl.load(hidden_at[:, None] + channel[None, :], mask=mask, other=0.0)
        key = tl.load(key_at[:, None] + channel[None, :], mask=mask, other=0.0)
        hidden, key = hidden.to(tl.float32), key.to(tl.float32)
        dot += _sum_of_eight(hidden * weight[None, :] * key)
        hidden_square += _sum_of_eight(hidden * hidden)
        key_square += _sum_of_eight(key * key)

    cosine = tl.sum(dot, axis=1) * tl.rsqrt(tl.sum(hidden_square, axis=1) / width + eps)
    cosine *= tl.rsqrt(tl.sum(key_square, axis=1) / width + eps) * scale
    # The sigmoid of the signed root, from the power that cannot overflow.
    power = tl.exp(-tl.sqrt(tl.maximum(tl.abs(cosine), 1e-6)))
    gate = tl.where(cosine < 0, power, 1.0) / (1.0 + power)
    is_live = tl.load(live + row, mask=exists, other=0) != 0
    for chunk in range(CHUNKS):
        channel = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = exists[:, None] & (channel < width)[None, :]
        hidden = tl.load(hidden_at[:, None] + channel[None, :], mask=mask, other=0.0)
        hidden = hidden.to(tl.float32)
        # Not read where nothing is added: whatever lies there, the row stays as it is.
        value = tl.load(
            value_at[:, None] + channel[None, :], mask=mask & is_live[:, None], other=0.0
        ).to(tl.float32)
        added = tl.where(is_live[:, None], hidden + gate[:, None] * value, hidden)
        at = out + (row[:, None] * num_streams + stream) * width + channel[None, :]
        tl.store(at, cast(added, out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_eight(x):
    """Sums of neighbours that one thread has loaded: fewer registers hold what is accumulated."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), axis=2)
