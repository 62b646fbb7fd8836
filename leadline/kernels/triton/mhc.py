"""Hyper-connections: seams between sublayers, and the coefficients that they mix with.

A seam is one pass over a row: expand, collapse and norm (kernels.md 1, kernel A). Coefficients are
needed one sublayer later, so they are launches of their own (kernel B), which may run beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.triton.formats import cast
from leadline.kernels.triton.launch import await_previous, bucket, overlapped, tuned
from leadline.kernels.triton.products import dot_parts
from leadline.kernels.triton.quant import store_fp8_32

# A projection is cut along its channels until there are two programs for each SM of an H200, into
# multiples of so many channels.
_PROGRAMS = 264
_LEAST_COLUMNS = 16  # of matrix instructions


def mhc_seam(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    mix: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One program a row, which stays in registers from its reading to its writing."""
    expanded, u = _like(streams), _like(y)
    _launch_seam(
        *(streams, y, post, comb),
        expanded=expanded,
        mix=mix,
        norm_weight=norm_weight,
        u=u,
        eps=eps,
        fp8=fp8,
        mean=mean,
    )
    return expanded, u


def mhc_enter(
    streams: Tensor,
    mix: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The second half of a seam."""
    u = streams.new_empty(streams.shape[0], streams.shape[2])
    _launch_seam(streams, mix=mix, norm_weight=norm_weight, u=u, eps=eps, fp8=fp8)
    return u


def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The first half of a seam."""
    expanded = _like(streams)
    _launch_seam(streams, y, post, comb, expanded=expanded)
    return expanded


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch_seam(
    streams: Tensor,
    y: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    *,
    expanded: Tensor | None = None,
    mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    u: Tensor | None = None,
    eps: float = 0.0,
    fp8: tuple[Tensor, Tensor] | None = None,
    mean: Tensor | None = None,
) -> None:
    """What writes ``expanded``, what writes ``u``, or both."""
    rows, num_streams, width = streams.shape
    codes, exponents = fp8 or (None, None)
    if rows:
        _seam[(rows,)](
            streams,
            y,
            post,
            comb,
            expanded,
            mix,
            norm_weight,
            u,
            codes,
            exponents,
            mean,
            streams.stride(0),
            streams.stride(1),
            0 if y is None else y.stride(0),
            0 if mean is None else mean.stride(0),
            eps,
            bucket(planned_rows(rows)),
            num_streams,
            width,
            **overlapped(),
        )


@tuned(
    [
        triton.Config({"CHUNK": 1024}, num_warps=4),
        triton.Config({"CHUNK": 1024}, num_warps=8),
        triton.Config({"CHUNK": 1024}, num_warps=16),
        triton.Config({"CHUNK": 2048}, num_warps=8),
    ],
    key=["rows_bucket", "WIDTH"],
)
@triton.jit(do_not_specialize=["rows_bucket"])
def _seam(
    streams,
    y,
    post,
    comb,
    expanded,
    mix,
    norm_weight,
    u,
    codes,
    exponents,
    mean,
    row_stride,
    stream_stride,
    y_stride,
    mean_stride,
    eps,
    rows_bucket,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row: without ``y`` nothing is added to the streams, without ``mix`` nothing entered.

    Of ``codes``, ``exponents`` and ``mean`` it writes those that are there.
    """
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    # All of the row is asked for before any of it is used: one latency instead of one a chunk. The
    # new streams may then lie where the old ones did.
    old: tl.tuple = ()
    added: tl.tuple = ()
    weights: tl.tuple = ()
    for at in tl.static_range(0, WIDTH, CHUNK):
        channel = at + lane
        for s in tl.static_range(S):
            source = streams + row * row_stride + s * stream_stride + channel
            old += (tl.load(source, mask=channel < WIDTH, other=0.0),)
        if y is not None:
            added += (tl.load(y + row * y_stride + channel, mask=channel < WIDTH, other=0.0),)
        if mix is not None:
            weights += (tl.load(norm_weight + channel, mask=channel < WIDTH, other=0.0),)
    moves: tl.tuple = ()
    gains: tl.tuple = ()
    shares: tl.tuple = ()
    if y is not None:
        moves = _scalars(comb + row * S * S, S * S)
        if mix is not None:
            shares = _scalars(mix + row * S, S)
    # This waits for no load. It keeps the assembler from putting some of them off until others have
    # come: what every sum begins with is loaded behind it.
    tl.debug_barrier()
    if y is not None:
        gains = _scalars(post + row * S, S)
    else:
        shares = _scalars(mix + row * S, S)

    squares = tl.zeros((CHUNK,), tl.float32)
    collapsed: tl.tuple = ()
    for at in tl.static_range(0, WIDTH, CHUNK):
        channel = at + lane
        total = tl.zeros((CHUNK,), tl.float32)
        average = tl.zeros((CHUNK,), tl.float32)
        for o in tl.static_range(S):
            new = old[at // CHUNK * S + o]
            if y is not None:
                wide = gains[o] * added[at // CHUNK].to(tl.float32)
                for s in tl.static_range(S):
                    wide += moves[s * S + o] * old[at // CHUNK * S + s].to(tl.float32)
                new = cast(wide, new.dtype)
                target = expanded + (row * S + o) * WIDTH + channel
                tl.store(target, new, mask=channel < WIDTH)
            if mix is not None:
                total += shares[o] * new.to(tl.float32)
            if mean is not None:
                average += new.to(tl.float32)
        if mean is not None:
            average = cast(average / S, mean.dtype.element_ty)
            tl.store(mean + row * mean_stride + channel, average, mask=channel < WIDTH)
        if mix is not None:
            collapsed += (cast(total, u.dtype.element_ty),)
            rounded = collapsed[at // CHUNK].to(tl.float32)
            squares += rounded * rounded

    if mix is not None:
        factor = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        for at in tl.static_range(0, WIDTH, CHUNK):
            scaled = collapsed[at // CHUNK].to(tl.float32) * factor
            scaled *= weights[at // CHUNK].to(tl.float32)
            rounded = cast(scaled, u.dtype.element_ty)
            tl.store(u + row * WIDTH + at + lane, rounded, mask=at + lane < WIDTH)
            if codes is not None:
                first = row * WIDTH + at + tl.arange(0, 1)
                inside = at + 32 * tl.arange(0, CHUNK // 32)[None, :] < WIDTH
                store_fp8_32(rounded.reshape(1, CHUNK), codes, exponents, first, inside)


@triton.jit
def _scalars(source, COUNT: tl.constexpr):
    """COUNT values at a pointer, as a tuple."""
    values: tl.tuple = ()
    for i in tl.static_range(COUNT):
        values += (tl.load(source + i),)
    return values


def mhc_coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two launches: parts of the projection, then their sum and Sinkhorn.

    The number of streams is a power of two. Coefficients are exact to 24 bits of ``fn`` for up to
    64 rows, to 16 for more (kernels.md 1.3). The number of rows also decides how sums are cut, and
    so their last bits.
    """
    rows, num_streams, width = streams.shape
    pre = fn.new_empty(rows, num_streams)
    post = torch.empty_like(pre)
    comb = fn.new_empty(rows, num_streams, num_streams)
    if not rows:
        return pre, post, comb
    partial = project(streams, fn)
    parts, _, columns = partial.shape
    block = triton.next_power_of_2(parts)
    together = max(1, 128 // block)
    _sinkhorn[(triton.cdiv(rows, together),)](
        partial,
        base,
        scale,
        pre,
        post,
        comb,
        rows,
        parts,
        num_streams * width,
        hc_eps,
        eps,
        sinkhorn_iters,
        num_streams,
        columns,
        block,
        together,
        **overlapped(),
    )
    return pre, post, comb


def project(streams: Tensor, fn: Tensor) -> Tensor:
    """Parts of ``fn`` times all channels of a row, and of the sum of their squares.

    Args:
        streams: ``[m, S, D]`` bf16, m at least 1.
        fn: ``[n, S D]`` float32.

    Returns:
        ``[parts, m, columns]`` float32 to be added: n products, then the squares.
    """
    rows, num_streams, width = streams.shape
    planned = planned_rows(rows)
    # More tokens in a tile read fn less often.
    tokens = 16 if planned <= 16 else 64 if planned <= 2048 else 128
    tiles = triton.cdiv(planned, tokens)
    cuts = triton.next_power_of_2(triton.cdiv(_PROGRAMS, tiles * num_streams))
    least = _least_channels(planned)
    channels = triton.cdiv(triton.cdiv(width, cuts), least) * least
    parts = num_streams * triton.cdiv(width, channels)
    columns = max(triton.next_power_of_2(fn.shape[0] + 1), _LEAST_COLUMNS)
    partial = fn.new_empty(parts, rows, columns)
    _project[(triton.cdiv(rows, tokens), parts)](
        streams,
        fn,
        partial,
        rows,
        streams.stride(0),
        streams.stride(1),
        bucket(planned),
        num_streams,
        width,
        channels,
        fn.shape[0],
        columns,
        tokens,
        3 if planned <= 64 else 2,
        **overlapped(),
    )
    return partial


def _least_channels(rows: int) -> int:
    return 128 if rows <= 16 else 256


@tuned(
    [
        triton.Config({"BLOCK": 64}, num_warps=4, num_stages=4),
        triton.Config({"BLOCK": 64}, num_warps=8, num_stages=4),
        triton.Config({"BLOCK": 128}, num_warps=8, num_stages=3),
    ],
    key=["rows_bucket", "WIDTH"],
)
@triton.jit(do_not_specialize=["rows", "rows_bucket"])
def _project(
    streams,
    fn,
    partial,
    rows,
    row_stride,
    stream_stride,
    rows_bucket,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows by some channels of one stream: products, and behind them the sum of squares."""
    await_previous()
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    CUTS: tl.constexpr = tl.cdiv(WIDTH, CHANNELS)
    part = tl.program_id(1)
    stream, first = part // CUTS, part % CUTS * CHANNELS
    column = tl.arange(0, COLUMNS)[None, :]
    source = streams + token * row_stride + stream * stream_stride
    matrix = fn + (column * S + stream) * WIDTH
    acc = tl.zeros((TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((TOKENS, BLOCK), tl.float32)
    for at in range(0, CHANNELS, BLOCK):
        channel = first + at + tl.arange(0, BLOCK)
        inside = channel < WIDTH
        x = tl.load(source + channel, mask=(token < rows) & inside, other=0.0)
        weight = tl.load(
            matrix + channel[:, None], mask=(column < OUT) & inside[:, None], other=0.0
        )
        acc = dot_parts(x, weight, acc, PARTS)
        wide = x.to(tl.float32)
        squares += wide * wide
    acc = tl.where(column == OUT, tl.sum(squares, 1)[:, None], acc)
    tl.store(partial + (part * rows + token) * COLUMNS + column, acc, mask=token < rows)


@tuned([triton.Config({}, num_warps=warps) for warps in (4, 1)], key=["BLOCK"])
@triton.jit(do_not_specialize=["rows"])
def _sinkhorn(
    partial,
    base,
    scale,
    pre,
    post,
    comb,
    rows,
    parts,
    width,
    hc_eps,
    eps,
    ROUNDS: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows: the sum of their parts, in order, and what becomes of it.

    A row that is not finite costs what others cost and reaches nobody: all sums are within a row.
    """
    await_previous()
    s = tl.arange(0, S)
    pair = s[:, None] * S + s
    pre_scale, post_scale, comb_scale = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    pre_base, post_base = tl.load(base + s), tl.load(base + S + s)
    comb_base = tl.load(base + 2 * S + pair)

    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    part = tl.arange(0, BLOCK)
    source = partial + (part * rows + row[:, None]) * COLUMNS
    there = (row < rows)[:, None] & (part < parts)
    squares = tl.load(source + S * (S + 2), mask=there, other=0.0)
    source, there = source[:, :, None], there[:, :, None]
    to_pre = tl.load(source + s, mask=there, other=0.0)
    to_post = tl.load(source + S + s, mask=there, other=0.0)
    source, there = source[:, :, :, None], there[:, :, :, None]
    mixing = tl.load(source + 2 * S + pair, mask=there, other=0.0)

    factor = tl.rsqrt(tl.sum(squares, 1) / width + eps)[:, None]
    to_pre = tl.sum(to_pre, 1) * factor * pre_scale + pre_base
    to_post = tl.sum(to_post, 1) * factor * post_scale + post_base
    mixing = tl.sum(mixing, 1) * factor[:, :, None] * comb_scale + comb_base

    mixing = tl.exp(mixing - tl.max(mixing, 2)[:, :, None])
    mixing = mixing * (1.0 / tl.sum(mixing, 2))[:, :, None] + hc_eps
    mixing *= (1.0 / (tl.sum(mixing, 1) + hc_eps))[:, None, :]
    for _ in range(ROUNDS - 1):
        mixing *= (1.0 / (tl.sum(mixing, 2) + hc_eps))[:, :, None]
        mixing *= (1.0 / (tl.sum(mixing, 1) + hc_eps))[:, None, :]

    row = row[:, None]
    tl.store(pre + row * S + s, tl.sigmoid(to_pre) + hc_eps, mask=row < rows)
    tl.store(post + row * S + s, 2 * tl.sigmoid(to_post), mask=row < rows)
    row = row[:, :, None]
    tl.store(comb + row * S * S + pair, mixing, mask=row < rows)
