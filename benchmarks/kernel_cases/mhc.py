"""Hyper-connections: seams and their coefficients (kernels.md 1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, relative_l2
from leadline.kernels.reference import mhc as reference
from leadline.kernels.reference import norm, quant
from leadline.kernels.triton import mhc

D, S, EPS = 5120, 4, 1e-20
SETTINGS: dict[str, Any] = {"sinkhorn_iters": 20, "hc_eps": 1e-6, "eps": EPS}
FN_BYTES = 24 * S * D * 4

# Microseconds on an H200 (18.7): expand + collapse + norm; coefficients; both on one stream.
SEAM = {1: 3.90, 8: 4.19, 64: 6.31, 512: 18.7, 8192: 286.0}
COEFFICIENTS = {1: 10.7, 8: 13.8, 64: 15.9, 512: 17.4, 8192: 126.0}
DEEPGEMM = {1: 17.6, 8: 18.5, 64: 20.1, 512: 23.8}
WHOLE = {1: 15.0, 8: 17.9, 64: 21.2, 512: 36.6, 8192: 412.0}


def _rows(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """``y``, streams, ``post``, ``comb``, ``mix`` and the norm's weight; 1 % heavy channels."""
    heavy = torch.where(torch.rand(D, device=device) < 0.01, 30.0, 1.0)
    y, *streams = ((torch.randn(rows, D, device=device) * heavy).bfloat16() for _ in range(1 + S))
    post, mix = (torch.rand(rows, S, device=device) for _ in range(2))
    comb = torch.rand(rows, S, S, device=device).softmax(-1)
    weight = torch.rand(D, device=device) + 0.5
    return y, torch.stack(streams, dim=1), post, comb, mix, weight


def _expand_rows(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    return _rows(rows, device)[:4]


def _enter_rows(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    _, streams, _, _, mix, weight = _rows(rows, device)
    return streams, mix, weight


def _site(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Streams, ``fn``, ``base`` and ``scale``."""
    streams = _rows(rows, device)[1]
    fn = torch.randn(24, S * D, device=device) / (S * D) ** 0.5
    return streams, fn, torch.randn(24, device=device), torch.rand(3, device=device) + 0.5


def _both(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    return (*_rows(rows, device), *_site(rows, device)[1:])


def _seam(y: Tensor, streams: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    post, comb, mix, weight = rest
    expanded = reference.mhc_expand(y, streams, post, comb)
    return expanded, _enter(expanded, mix, weight)


def _enter(streams: Tensor, mix: Tensor, weight: Tensor) -> Tensor:
    return norm.rms_norm(reference.mhc_collapse(streams, mix), weight, eps=EPS)


def _exact_coefficients(*site: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return reference.mhc_coefficients(*(part.double() for part in site), **SETTINGS)


def _eager_coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As one writes it first: some 180 launches."""
    flat = streams.float().flatten(1)
    mixed = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre = (mixed[:, :S] * scale[0] + base[:S]).sigmoid() + 1e-6
    post = 2 * (mixed[:, S : 2 * S] * scale[1] + base[S : 2 * S]).sigmoid()
    comb = (mixed[:, 2 * S :] * scale[2] + base[2 * S :]).unflatten(1, (S, S)).softmax(-1) + 1e-6
    comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    return pre, post, comb


def _seam_and_coefficients(
    seam: Callable[..., Any], coefficients: Callable[..., Any], *both: Tensor
) -> tuple[Tensor, ...]:
    expanded, u = seam(*both[:6])
    return expanded, u, *coefficients(expanded, *both[6:])


def _rounded_alike(actual: Any, wanted: Any) -> float:
    """Of every output 99.9 % of the values are the very same (1.4)."""
    pairs = zip(actual, wanted, strict=True) if isinstance(actual, tuple) else [(actual, wanted)]
    errors = []
    for a, b in pairs:
        errors.append(relative_l2(a, b))
        same = float((a == b).double().mean())
        assert errors[-1] <= 2e-3, f"relative L2 error is {errors[-1]:.2e}"
        assert same >= 0.999, f"only {same:.3%} of the values are the same"
    return max(errors)


def _near(rows: int, actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Absolute errors of coefficients, by the number of terms that ``fn`` is split into (1.4)."""
    limit = 5e-6 if rows <= 64 else 3e-5
    errors = [float((a - b).abs().max()) for a, b in zip(actual, wanted, strict=True)]
    assert max(errors) <= limit, f"errors are {errors}, allowed are {limit}"
    return max(relative_l2(a, b) for a, b in zip(actual, wanted, strict=True))


def _seam_near(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """One value of the streams that rounds to the other side moves all coefficients of its row:
    these are held to their definition where both read the same streams.
    """
    errors = [relative_l2(a, b) for a, b in zip(actual[2:], wanted[2:], strict=True)]
    assert max(errors) <= 1e-3, f"relative L2 errors are {errors}"
    return max(_rounded_alike(actual[:2], wanted[:2]), *errors)


def _cases(rows: int) -> list[Case]:
    few = rows <= 64
    seam_bytes = rows * (20 * D + 96) + 4 * D
    seam_flops = rows * D * 52
    coefficient_flops = rows * D * 200
    fused_seam = partial(mhc.mhc_seam, eps=EPS)
    fused_coefficients = partial(mhc.mhc_coefficients, **SETTINGS)
    return [
        Case(
            kernel="1",
            op="mhc_seam",
            shape=f"T={rows}",
            make=partial(_rows, rows),
            fused=fused_seam,
            twin=_seam,
            unfused=_seam,
            check=_rounded_alike,
            bytes=seam_bytes,
            flops=seam_flops,
            rate=Rate.FP32,
            target_us=SEAM[rows] / 1.3 if few else None,
            target_share=0.8 if rows >= 1024 else None,
            peers={"SGLang expand, collapse + norm": SEAM[rows]},
        ),
        Case(
            kernel="1",
            op="mhc_coefficients",
            shape=f"T={rows}",
            make=partial(_site, rows),
            fused=fused_coefficients,
            twin=_exact_coefficients,
            unfused=_eager_coefficients,
            check=partial(_near, rows),
            bytes=rows * (8 * D + 96) + FN_BYTES,
            flops=coefficient_flops,
            target_us=COEFFICIENTS[rows] / (1.3 if few else 1.2),
            peers={"SGLang Triton": COEFFICIENTS[rows]}
            | ({"DeepGEMM TF32": DEEPGEMM[rows]} if rows in DEEPGEMM else {}),
        ),
        Case(
            kernel="1",
            op="mhc_seam+coefficients",
            shape=f"T={rows}",
            make=partial(_both, rows),
            fused=partial(_seam_and_coefficients, fused_seam, fused_coefficients),
            twin=partial(_seam_and_coefficients, _seam, _exact_coefficients),
            unfused=partial(_seam_and_coefficients, _seam, _eager_coefficients),
            check=_seam_near,
            bytes=rows * (20 * D + 192) + FN_BYTES + 4 * D,  # X' read again is not in it
            flops=seam_flops + coefficient_flops,
            target_us=9.0 if rows <= 16 else WHOLE[rows] / (1.3 if few else 1.2),
            peers={"SGLang, one stream": WHOLE[rows]},
        ),
    ]


def _seam_with_all(*operands: Tensor) -> tuple[Tensor, ...]:
    """The seam, its input of the next sublayer in MXFP8 too, and the mean of its streams."""
    y = operands[0]
    codes = torch.empty(y.shape, device=y.device, dtype=torch.uint8)
    exponents = codes.new_empty(len(y), D // 32)
    mean = torch.empty_like(y)
    expanded, u = mhc.mhc_seam(*operands, eps=EPS, fp8=(codes, exponents), mean=mean)
    return expanded, u, mean, quant.dequantize_fp8_32(codes, exponents)


def _reference_with_all(*operands: Tensor) -> tuple[Tensor, ...]:
    expanded, u = _seam(*operands)
    return expanded, u, reference.mhc_mean(expanded)


def _all_alike(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Codes and scales are held to the kernel's own rounded result."""
    *results, from_fp8 = actual
    assert torch.equal(from_fp8, quant.round_trip_fp8_32(results[1]).float())
    return _rounded_alike(tuple(results), wanted)


CASES = [case for rows in SEAM for case in _cases(rows)]
CASES += [
    Case(
        kernel="1",
        op="mhc_seam",
        shape=f"T={rows},fp8,mean",
        make=partial(_rows, rows),
        fused=_seam_with_all,
        twin=_reference_with_all,
        check=_all_alike,
        bytes=rows * (20 * D + 96 + D + D // 32 + 2 * D) + 4 * D,
        flops=rows * D * 60,
        rate=Rate.FP32,
    )
    for rows in (1, 64, 8192)
]
CASES += [
    Case(
        kernel="1",
        op="mhc_expand",
        shape=f"T={rows}",
        make=partial(_expand_rows, rows),
        fused=mhc.mhc_expand,
        twin=reference.mhc_expand,
        unfused=reference.mhc_expand,
        check=_rounded_alike,
        bytes=rows * (18 * D + 80),
        flops=rows * D * 40,
        rate=Rate.FP32,
        target_share=0.8 if rows >= 1024 else None,
        peers={"SGLang expand": us},
    )
    for rows, us in {1: 1.36, 8: 1.50, 64: 3.05, 512: 12.5, 8192: 187.0}.items()
]
CASES += [
    Case(
        kernel="1",
        op="mhc_enter",
        shape=f"T={rows}",
        make=partial(_enter_rows, rows),
        fused=partial(mhc.mhc_enter, eps=EPS),
        twin=_enter,
        unfused=_enter,
        check=_rounded_alike,
        bytes=rows * (10 * D + 16) + 4 * D,
        flops=rows * D * 12,
        rate=Rate.FP32,
        target_share=0.8 if rows >= 1024 else None,
        peers={"SGLang collapse + norm": us},
    )
    for rows, us in {1: 2.42, 8: 2.60, 64: 4.04, 512: 8.05, 8192: 97.9}.items()
]
