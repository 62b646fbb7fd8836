"""Products with FP8 weights as stored, on FP8 tensor cores (kernels.md 9 and 11).

A decode step waits for the weights' bytes. Turned into bf16 they would keep the integer units busy
for longer than they take to arrive; here they go from memory to the tensor cores untouched. Tokens
meet them as E4M3 codes: those of the MXFP8 blocks to which a product rounds its input, or two codes
for each bf16 value, the second for what the first one leaves. Blocks of 32 channels have scales of
their own on both sides, so each is multiplied on its own: a token has a column for each block of a
step, which holds zeros in place of the others.

NVIDIA only, from sm_90 on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.formats import (
    absmax,
    cast,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    fp8_32_scale,
    reciprocal_of_scale,
    to_bf16,
)
from leadline.kernels.triton.launch import INTERPRETED, await_previous, overlapped
from leadline.kernels.triton.quant import on_fp8_32_grid

_NATIVE = tl.constexpr(not INTERPRETED)


def stream(x, weight, rounds_input, *, splits=1, rows=64, block=128, stages=4,
           warps=4, prefetch=0, folds=False, group=32, lines=32, last=True, late=True):
    tokens, groups, width = x.shape
    num_rows = weight.codes.shape[1]
    terms = 1 if rounds_input else 2
    lines = min(triton.next_power_of_2(tokens) * terms, lines)
    lines = max(lines, 16 * group // block)
    token_blocks = triton.cdiv(tokens * terms, lines)
    num_lines = token_blocks * lines
    row_blocks = groups * triton.cdiv(num_rows, rows)
    last = last and splits > 1
    counters = x.new_empty(row_blocks * token_blocks, dtype=torch.int32)
    codes, powers = quantize(x, terms, num_lines, group, counters, last, late)
    out = x.new_empty(tokens, groups * num_rows)
    parts = out
    if splits > 1:
        parts = x.new_empty(splits, tokens, groups * num_rows, dtype=torch.float32)
    _stream[(token_blocks, row_blocks, splits)](
        codes.view(torch.float8_e4m3fn), powers, weight.codes.view(torch.float8_e4m3fn),
        weight.scales, parts, out, counters, tokens, num_lines, num_rows,
        WIDTH=width, GROUPS=groups, SPLITS=splits, TERMS=terms, LINES=lines, SCALED=group,
        BLOCK_N=rows, BLOCK_K=block, EVEN_K=width % (splits * block) == 0,
        PREFETCH=prefetch, LAST=last, FOLDS=folds, num_warps=warps, num_stages=stages,
        **overlapped(),
    )
    if splits == 1 or last:
        return out
    _finish[(tokens, triton.cdiv(groups * num_rows, 256))](
        parts, out, splits, tokens, groups * num_rows, SPLITS=triton.next_power_of_2(splits),
        BLOCK=256, num_warps=2, **overlapped())
    return out


@triton.jit(do_not_specialize=["splits", "num_tokens"])
def _finish(parts, out, splits, num_tokens, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    await_previous()
    at = parts + (split * num_tokens + token) * width + channel
    value = tl.sum(tl.load(at, mask=inside & (split < splits), other=0.0), 0)
    tl.store(out + token * width + channel, to_bf16(value), mask=inside)


def quantize(x, terms, lines, group, counters, last, late=True):
    tokens, groups, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    codes = x.new_empty(groups, tokens * terms, width, dtype=torch.uint8)
    powers = x.new_empty(groups, triton.cdiv(width, group), lines, dtype=torch.float32)
    block = 512
    _quantize[(tokens, groups, triton.cdiv(width, block))](
        x, codes, powers, counters, len(counters), x.stride(0), x.stride(1), width, lines,
        TERMS=terms, SCALED=group, BLOCK=block,
        COUNTERS=triton.next_power_of_2(len(counters)) if last else 0, LATE=late,
        num_warps=2, **overlapped(),
    )
    return codes, powers


@triton.jit(do_not_specialize=["num_counters", "num_lines"])
def _quantize(x, codes, powers, counters, num_counters, x_stride, x_group_stride, width, num_lines,
              TERMS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
              COUNTERS: tl.constexpr, LATE: tl.constexpr):
    token, group = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    _begin(LATE)
    if COUNTERS:
        if token + group + tl.program_id(2) == 0:
            counter = tl.arange(0, COUNTERS)
            tl.store(counters + counter, 0, mask=counter < num_counters)
    at = x + token.to(tl.int64) * x_stride + group * x_group_stride + channel
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if TERMS == 1:
        value = on_fp8_32_grid(value.reshape(1, BLOCK)).to(tl.float32)
    value = value.reshape(BLOCK // SCALED, SCALED)
    exponent = fp8_32_scale(absmax(value, 1))
    value = value * reciprocal_of_scale(exponent)[:, None]
    column = tl.program_id(2) * (BLOCK // SCALED) + tl.arange(0, BLOCK // SCALED)
    columns = tl.cdiv(width, SCALED)
    line = token * TERMS
    at_code = codes + (group * tl.num_programs(0) * TERMS + line).to(tl.int64) * width + channel
    at_power = powers + (group * columns + column) * num_lines + line
    power = decode_ue8m0(exponent)
    for term in tl.static_range(TERMS):
        code = encode_e4m3(value)
        tl.store(at_code + term * width, code.reshape(BLOCK), mask=inside)
        tl.store(at_power + term, power, mask=column < columns)
        value = (value - decode_e4m3(code)) * 16.0
        power *= 0.0625


@triton.jit(do_not_specialize=["num_tokens", "num_lines"])
def _stream(
    x_codes, x_powers, codes, scales, parts, out, counters, num_tokens, num_lines, num_rows,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, TERMS: tl.constexpr,
    LINES: tl.constexpr, SCALED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PREFETCH: tl.constexpr, LAST: tl.constexpr, FOLDS: tl.constexpr,
):
    blocks = tl.cdiv(num_rows, BLOCK_N)
    group = tl.program_id(1) // blocks
    split = tl.program_id(2)
    BLOCKS: tl.constexpr = BLOCK_K // SCALED
    TOKENS: tl.constexpr = LINES // TERMS
    COLUMNS: tl.constexpr = BLOCKS * LINES
    columns: tl.constexpr = (WIDTH + SCALED - 1) // SCALED
    tiles: tl.constexpr = (WIDTH + 31) // 32
    part: tl.constexpr = tl.cdiv(tl.cdiv(WIDTH, BLOCK_K), SPLITS) * BLOCK_K
    first_row = tl.program_id(1) % blocks * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    lines = num_tokens * TERMS
    column = tl.arange(0, COLUMNS)
    block, line = column // LINES, tl.program_id(0) * LINES + column % LINES
    own = (line < lines)[:, None]
    if BLOCKS > 1:
        own = own & (channel[None, :] // SCALED == block[:, None])

    stored_row = tl.minimum(row, num_rows - 1)
    at_code = codes + (group * num_rows + stored_row)[:, None].to(tl.int64) * WIDTH + channel
    at_x = x_codes + (group * lines + line)[:, None].to(tl.int64) * WIDTH + channel
    at_power = x_powers + group * columns * num_lines + line
    tile = first_row // 32 + tl.arange(0, BLOCK_N // 32)
    scale_rows = tl.cdiv(num_rows, 32)
    at_scale = scales + (group * scale_rows + tl.minimum(tile, scale_rows - 1))[:, None] * tiles
    step_tile = tl.arange(0, BLOCKS)[None, :] * (SCALED // 32)
    if PREFETCH:
        at = codes + (group * num_rows + stored_row)[:, None].to(tl.int64) * WIDTH + split * part
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l", [at + tl.arange(0, PREFETCH) * 128], dtype=tl.int32, is_pure=False, pack=1,
        )
    await_previous()
    if FOLDS:
        sums = tl.zeros((BLOCK_N // 32, 32, LINES), tl.float32)
    else:
        sums = tl.zeros((BLOCK_N // 32, 32, COLUMNS), tl.float32)
    exponents = tl.load(at_scale + tl.minimum(split * part // 32 + step_tile, tiles - 1))
    power = tl.load(at_power + tl.minimum(split * part // SCALED + block, columns - 1) * num_lines)
    for step in tl.range(0, part, BLOCK_K):
        start = split * part + step
        if EVEN_K:
            code = tl.load(at_code + start)
            value = tl.load(at_x + start, mask=own, other=0.0)
        else:
            inside = start + channel < WIDTH
            code = tl.load(at_code + start, mask=inside, other=0.0)
            value = tl.load(at_x + start, mask=own & inside, other=0.0)
        scale = decode_ue8m0(tl.minimum(exponents, 154))
        factor = scale[:, :, None] * power.reshape(1, BLOCKS, LINES)
        following = start + BLOCK_K
        exponents = tl.load(at_scale + tl.minimum(following // 32 + step_tile, tiles - 1))
        power = tl.load(at_power + tl.minimum(following // SCALED + block, columns - 1) * num_lines)
        product = _dot_e4m3(code, value.T)
        if FOLDS:
            product = product.reshape(BLOCK_N // 32, 32, 2, 2, LINES).permute(0, 1, 4, 2, 3)
            factor = factor.reshape(BLOCK_N // 32, 1, 2, 2, LINES).permute(0, 1, 4, 2, 3)
            product_a, product_b = tl.split(product)
            factor_a, factor_b = tl.split(factor)
            product_0, product_2 = tl.split(product_a)
            product_1, product_3 = tl.split(product_b)
            factor_0, factor_2 = tl.split(factor_a)
            factor_1, factor_3 = tl.split(factor_b)
            sums += product_0 * factor_0
            sums += product_1 * factor_1
            sums += product_2 * factor_2
            sums += product_3 * factor_3
        else:
            factor = factor.reshape(BLOCK_N // 32, 1, COLUMNS)
            sums += product.reshape(BLOCK_N // 32, 32, COLUMNS) * factor
    if FOLDS:
        sums = sums.reshape(BLOCK_N, LINES)
    else:
        sums = tl.sum(sums.reshape(BLOCK_N, BLOCKS, LINES), 1)
    sums = tl.sum(sums.reshape(BLOCK_N, TOKENS, TERMS), 2).T
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = (token.to(tl.int64) * GROUPS + group)[:, None] * num_rows + row
    inside = (token < num_tokens)[:, None] & (row < num_rows)
    size = num_tokens.to(tl.int64) * GROUPS * num_rows
    tl.store(parts + split * size + at, cast(sums, parts.dtype.element_ty), mask=inside)
    if LAST:
        tl.debug_barrier()
        mine = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(mine, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(
                    parts + other * size + at, mask=inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + at, to_bf16(total), mask=inside)


@triton.jit
def _dot_e4m3(a, b):
    """Codes ``[m, k]`` and ``[k, n]`` -> float32, without their scales."""
    if _NATIVE:
        return tl.dot(a, b)
    else:
        a, b = a.to(tl.uint8, bitcast=True), b.to(tl.uint8, bitcast=True)
        return tl.dot(decode_e4m3(a), decode_e4m3(b), input_precision="ieee")


@triton.jit
def _begin(LATE: tl.constexpr):
    if not LATE:
        await_previous()
    elif _NATIVE:
        gdc_wait()
        gdc_launch_dependents()
