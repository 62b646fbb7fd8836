"""Hyper-connections: mixing coefficients, and what becomes of the residual streams by them."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.ops.norm import rms_norm
from leadline.kernels.reference import mhc
from leadline.kernels.reference.quant import store_fp8_32
from leadline.kernels.registry import op


@op()
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
    """Mixing coefficients of one site (2.3).

    Args:
        streams: ``[m, S, D]`` activations, the streams before the sublayer.
        fn: ``[S (S + 2), S D]`` wide.
        base: ``[S (S + 2)]`` wide.
        scale: ``[3]`` wide, for the pre, post and comb entries.
        sinkhorn_iters: rounds, the first being softmax and a column step.
        hc_eps: added to ``pre``, after the softmax and in every denominator.
        eps: of the rms statistic, one over all S D values of a row.

    Returns:
        ``pre [m, S]``, ``post [m, S]`` and ``comb [m, S, S]`` (``[incoming, outgoing]``), wide.
    """
    return mhc.mhc_coefficients(
        streams, fn, base, scale, sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, eps=eps
    )


@op()
def mhc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hc_eps: float, eps: float
) -> Tensor:
    """Weights by which V4's last streams become one row, for ``mhc_enter`` (v4-model 2.2).

    Args:
        streams: ``[m, S, D]`` activations, behind the last block.
        fn: ``[S, S D]`` wide.
        base: ``[S]`` wide.
        scale: ``[1]`` wide.
        hc_eps: added to every weight.
        eps: of the rms statistic, one over all S D values of a row.

    Returns:
        ``[m, S]`` wide.
    """
    return mhc.mhc_head(streams, fn, base, scale, hc_eps=hc_eps, eps=eps)


@op()
def mhc_collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """One row from S streams: ``sum_s mix[s] X[s]`` (2.3).

    Args:
        streams: ``[m, S, D]`` activations.
        mix: ``[m, S]`` wide.

    Returns:
        ``[m, D]`` activations.
    """
    return mhc.mhc_collapse(streams, mix)


@op()
def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: ``X[o] <- post[o] y + sum_i comb[i, o] X[i]``, one rounding (2.3).

    Args:
        y: ``[m, D]`` activations, the sublayer's output.
        streams: ``[m, S, D]`` activations.
        post: ``[m, S]`` wide.
        comb: ``[m, S, S]`` wide.

    Returns:
        ``[m, S, D]`` activations.
    """
    return mhc.mhc_expand(y, streams, post, comb)


@op()
def mhc_enter(
    streams: Tensor,
    mix: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What a sublayer reads: ``mhc_collapse``, then ``rms_norm``.

    Args:
        streams: ``[m, S, D]`` activations.
        mix: ``[m, S]`` wide.
        norm_weight: ``[D]`` wide.
        eps: of the norm.
        fp8: codes ``[m, D]`` and exponents ``[m, D / 32]``, uint8, contiguous; receive the result
            as ``quantize_fp8_32`` encodes it, for products that take their input so. None for none.

    Returns:
        ``[m, D]`` activations.
    """
    u = rms_norm(mhc_collapse(streams, mix), norm_weight, eps=eps)
    if fp8 is not None:
        store_fp8_32(u, *fp8)
    return u


@op()
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
    """From one sublayer to the next: ``mhc_expand``, then ``mhc_enter`` (kernels.md 1).

    Args:
        y: ``[m, D]`` activations, the finished sublayer's output.
        streams: ``[m, S, D]`` activations, as they were before it.
        post: ``[m, S]`` wide, of the finished sublayer.
        comb: ``[m, S, S]`` wide, of the finished sublayer.
        mix: ``[m, S]`` wide, ``pre`` of the site before the next one.
        norm_weight: ``[D]`` wide, of the next sublayer.
        eps: of the norm.
        fp8: of the next sublayer's input, as in ``mhc_enter``.
        mean: ``[m, D]`` activations, rows contiguous; receives the mean over the new streams: what
            draft layers read of a block that begins here (8.1). None for none.

    Returns:
        The new streams ``[m, S, D]`` and the next sublayer's input ``[m, D]``, activations.
    """
    expanded = mhc_expand(y, streams, post, comb)
    if mean is not None:
        mean.copy_(mhc.mhc_mean(expanded))
    return expanded, mhc_enter(expanded, mix, norm_weight, eps=eps, fp8=fp8)
