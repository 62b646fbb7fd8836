"""Products of few tokens with FP8 weights as stored, on FP8 tensor cores (kernels.md 9 and 11).

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
from torch import Tensor
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
from leadline.kernels.triton.launch import INTERPRETED

_NATIVE = tl.constexpr(not INTERPRETED)


def stream(x, weight, rounds_input, *, splits=1, rows_block=64, block=128, stages=4,
           warps=4, pdl=True, prefetch=0, fused=False, folds=False, maxnreg=None, finishes=True, most_lines=32):
    tokens, groups, width = x.shape
    rows = weight.codes.shape[1]
    terms = 1 if rounds_input else 2
    lines = min(triton.next_power_of_2(tokens) * terms, most_lines)
    lines = max(lines, 16 * 32 // block)
    token_blocks = triton.cdiv(tokens * terms, lines)
    num_lines = token_blocks * lines
    if fused:
        x = x if x.stride(2) == 1 else x.contiguous()
        codes, powers = x, x
        xs, gs = x.stride(0), x.stride(1)
    else:
        codes, powers = quantize(x, terms, num_lines, pdl)
        codes = codes.view(torch.float8_e4m3fn)
        xs = gs = 0
    dtype = torch.float32 if splits > 1 else torch.bfloat16
    parts = x.new_empty(splits, tokens, groups, rows, dtype=dtype)
    extra = {"maxnreg": maxnreg} if maxnreg else {}
    _stream[(token_blocks, groups * triton.cdiv(rows, rows_block), splits)](
        codes, powers, weight.codes.view(torch.float8_e4m3fn),
        weight.scales, parts, tokens, num_lines, rows, xs, gs,
        WIDTH=width, GROUPS=groups, SPLITS=splits, TERMS=terms, LINES=lines,
        BLOCK_N=rows_block, BLOCK_K=block, EVEN_K=width % (splits * block) == 0,
        PREFETCH=prefetch, PDL=pdl, FUSED=fused, FOLDS=folds, num_warps=warps, num_stages=stages,
        launch_pdl=pdl, **extra,
    )
    parts = parts.flatten(2)
    if splits == 1:
        return parts[0]
    if not finishes:
        return parts.sum(0).bfloat16() if not x.is_cuda else parts[0]
    out = x.new_empty(tokens, groups * rows)
    _finish[(tokens, triton.cdiv(groups * rows, 256))](
        parts, out, splits, tokens, groups * rows, SPLITS=triton.next_power_of_2(splits),
        BLOCK=256, PDL=pdl, num_warps=2, launch_pdl=pdl)
    return out


@triton.jit(do_not_specialize=["splits", "num_tokens"])
def _finish(parts, out, splits, num_tokens, width,
            SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = parts + (split * num_tokens + token) * width + channel
    value = tl.sum(tl.load(at, mask=inside & (split < splits), other=0.0), 0)
    tl.store(out + token * width + channel, to_bf16(value), mask=inside)


def quantize(x, terms, lines, pdl):
    tokens, groups, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    codes = x.new_empty(groups, tokens * terms, width, dtype=torch.uint8)
    powers = x.new_empty(groups, triton.cdiv(width, 32), lines, dtype=torch.float32)
    block = 512
    _quantize[(tokens, groups, triton.cdiv(width, block))](
        x, codes, powers, x.stride(0), x.stride(1), width, lines,
        TERMS=terms, BLOCK=block, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )
    return codes, powers


@triton.jit
def _quantize(x, codes, powers, x_stride, x_group_stride, width, num_lines,
              TERMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token, group = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = x + token.to(tl.int64) * x_stride + group * x_group_stride + channel
    value = tl.load(at, mask=channel < width, other=0.0).to(tl.float32)
    value = value.reshape(BLOCK // 32, 32)
    exponent = fp8_32_scale(absmax(value, 1))
    value = value * reciprocal_of_scale(exponent)[:, None]
    column = tl.program_id(2) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    columns = tl.cdiv(width, 32)
    line = token * TERMS
    at_code = codes + (group * tl.num_programs(0) * TERMS + line).to(tl.int64) * width + channel
    at_power = powers + (group * columns + column) * num_lines + line
    power = decode_ue8m0(exponent)
    for term in tl.static_range(TERMS):
        code = encode_e4m3(value)
        tl.store(at_code + term * width, code.reshape(BLOCK), mask=channel < width)
        tl.store(at_power + term, power, mask=column < columns)
        value = (value - decode_e4m3(code)) * 16.0
        power *= 0.0625


@triton.jit
def _mxfp8(x):
    """Float32 ``[rows, n]`` -> its values in units of its scales, and those ``[rows, n / 32]``."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    blocks = x.reshape(rows, width // 32, 32)
    exponent = fp8_32_scale(absmax(blocks, 2))
    return blocks * reciprocal_of_scale(exponent)[:, :, None], decode_ue8m0(exponent)


@triton.jit(do_not_specialize=["num_tokens"])
def _stream(
    x_codes, x_powers, codes, scales, out, num_tokens, num_lines, num_rows, x_stride, x_group_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, TERMS: tl.constexpr,
    LINES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr, FUSED: tl.constexpr, FOLDS: tl.constexpr,
):
    blocks = tl.cdiv(num_rows, BLOCK_N)
    group = tl.program_id(1) // blocks
    split = tl.program_id(2)
    BLOCKS: tl.constexpr = BLOCK_K // 32
    TOKENS: tl.constexpr = LINES // TERMS
    COLUMNS: tl.constexpr = BLOCKS * LINES
    columns: tl.constexpr = (WIDTH + 31) // 32
    part: tl.constexpr = tl.cdiv(tl.cdiv(WIDTH, BLOCK_K), SPLITS) * BLOCK_K
    first_row = tl.program_id(1) % blocks * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    lines = num_tokens * TERMS
    column = tl.arange(0, COLUMNS)
    block, line = column // LINES, tl.program_id(0) * LINES + column % LINES
    own = (channel[None, :] // 32 == block[:, None]) & (line < lines)[:, None]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = (token < num_tokens)[:, None]

    stored_row = tl.minimum(row, num_rows - 1)
    at_code = codes + (group * num_rows + stored_row)[:, None].to(tl.int64) * WIDTH + channel
    if FUSED:
        at_x = x_codes + token[:, None].to(tl.int64) * x_stride + group * x_group_stride + channel
        at_power = x_powers
    else:
        at_x = x_codes + (group * lines + line)[:, None].to(tl.int64) * WIDTH + channel
        at_power = x_powers + (group * columns + block) * num_lines + line
    tile = first_row // 32 + tl.arange(0, BLOCK_N // 32)
    scale_rows = tl.cdiv(num_rows, 32)
    at_scale = (group * scale_rows + tl.minimum(tile, scale_rows - 1))[:, None] * columns
    at_scale = scales + at_scale
    step_block = tl.arange(0, BLOCKS)[None, :]
    if PDL:
        gdc_launch_dependents()
        if PREFETCH:
            size: tl.constexpr = min(PREFETCH, part)
            at = codes + (group * num_rows + stored_row).to(tl.int64) * WIDTH + split * part
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
                "=r,l,n", [at, size], dtype=tl.int32, is_pure=False, pack=1,
            )
        gdc_wait()
    if FOLDS:
        sums = tl.zeros((BLOCK_N // 32, 32, LINES), tl.float32)
    else:
        sums = tl.zeros((BLOCK_N // 32, 32, COLUMNS), tl.float32)
    last: tl.constexpr = columns - 1
    exponents = tl.load(at_scale + tl.minimum(split * part // 32 + step_block, last))
    for step in tl.range(0, part, BLOCK_K):
        start = split * part + step
        if EVEN_K:
            code = tl.load(at_code + start)
        else:
            inside = start + channel < WIDTH
            code = tl.load(at_code + start, mask=inside, other=0.0)
        if FUSED:
            if EVEN_K:
                x = tl.load(at_x + start, mask=live, other=0.0)
            else:
                x = tl.load(at_x + start, mask=live & (start + channel < WIDTH), other=0.0)
            x, power = _mxfp8(x.to(tl.float32))
            value = encode_e4m3(x).reshape(1, TOKENS, BLOCK_K)
            if TERMS == 2:
                rest = (x.reshape(1, TOKENS, BLOCK_K) - decode_e4m3(value)) * 16.0
                value = tl.join(value, encode_e4m3(rest)).permute(0, 1, 3, 2)
                power = tl.join(power, power * 0.0625).permute(1, 0, 2)
            else:
                power = power.T
            mine = channel // 32 == tl.arange(0, BLOCKS)[:, None]
            value = tl.where(mine[:, None, :], value.reshape(1, LINES, BLOCK_K), 0)
            value = value.reshape(COLUMNS, BLOCK_K).to(tl.float8e4nv, bitcast=True)
            power = power.reshape(1, BLOCKS, LINES)
        else:
            if EVEN_K:
                value = tl.load(at_x + start, mask=own, other=0.0)
                power = tl.load(at_power + start // 32 * num_lines)
            else:
                inside = start + channel < WIDTH
                value = tl.load(at_x + start, mask=own & inside, other=0.0)
                power = tl.load(
                    at_power + start // 32 * num_lines, mask=start // 32 + block < columns, other=0.0
                )
            power = power.reshape(1, BLOCKS, LINES)
        scale = decode_ue8m0(tl.minimum(exponents, 154))
        exponents = tl.load(at_scale + tl.minimum((start + BLOCK_K) // 32 + step_block, last))
        product = _dot_e4m3(code, value.T)
        factor = scale[:, :, None] * power
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
    sums = tl.sum(sums.reshape(BLOCK_N, TOKENS, TERMS), 2)
    at = ((split * num_tokens + token).to(tl.int64) * GROUPS + group)[:, None] * num_rows + row
    inside = live & (row < num_rows)
    tl.store(out + at, cast(sums.T, out.dtype.element_ty), mask=inside)


@triton.jit
def _dot_e4m3(a, b):
    """Codes ``[m, k]`` and ``[k, n]`` -> float32, without their scales."""
    if _NATIVE:
        return tl.dot(a, b)
    else:
        a, b = a.to(tl.uint8, bitcast=True), b.to(tl.uint8, bitcast=True)
        return tl.dot(decode_e4m3(a), decode_e4m3(b), input_precision="ieee")
