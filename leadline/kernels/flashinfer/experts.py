"""``routed_experts`` in one call: MXFP4 weights, expanded to bf16 where they are multiplied.

Layouts and arguments are those that FlashInfer 0.7.4 documents for ``cutlass_fused_moe`` on
compute capability 9.0 (W4A16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from flashinfer import fused_moe  # type: ignore[import-not-found]  # the extra 'flashinfer'
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.kernels.packed import PackedWeight, Weight, WeightFormat

_BLOCK = 128  # channels whose scales lie together
_AT_ONCE = 8  # experts that are laid out at a time, beside their old layout


@dataclass(frozen=True, slots=True)
class ArrangedWeight(PackedWeight):
    """A stack of ``arrange_experts``: in an order that only FlashInfer reads.

    Attributes:
        scales: ``[E, out / 64, in / 128, 16, 16]``.
    """


def arrange_experts(w13: Weight, w2: Weight) -> tuple[Weight, Weight]:
    """Both stacks as the kernels read them; codes are overwritten, as there is no room for two.

    Args:
        w13: MXFP4 ``[E, 2 F, D]`` on the GPU, gate rows first; they come last afterwards.
        w2: MXFP4 ``[E, D, F]`` on the GPU.

    Raises:
        ConfigError: they are of another format, or of sizes that the kernels do not take.
    """
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, PackedWeight) or weight.format is not WeightFormat.MXFP4:
            raise ConfigError(
                f"experts' {name} is stored as {weight.format}, and routed_experts by flashinfer "
                "takes MXFP4; choose another kernel_backend for this op"
            )
    assert isinstance(w13, PackedWeight)
    assert isinstance(w2, PackedWeight)
    _, width, hidden_width = w2.shape
    if width % _BLOCK or hidden_width % _BLOCK:
        raise ConfigError(
            f"experts map {width} channels to {hidden_width}, and routed_experts by flashinfer "
            f"takes multiples of {_BLOCK}; choose another kernel_backend for this op"
        )
    return _arrange(w13, first_row=hidden_width), _arrange(w2, first_row=0)


def _arrange(weight: PackedWeight, *, first_row: int) -> ArrangedWeight:
    """Rows from ``first_row`` on come first."""
    for codes in weight.codes.split(_AT_ONCE):
        turned = codes.roll(-first_row, 1)
        codes.copy_(fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(turned, "fp4"))
    scales = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(weight.scales.roll(-first_row, 1))
    return ArrangedWeight(weight.codes, scales, weight.format, quantizes_input=False)


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    limit: float,
    row_scales: bool = False,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Of stacks by ``arrange_experts``, whose inputs are taken as they are, in bf16.

    Closer to the weights than the definition is, which rounds inputs to MXFP8; farther in two
    places: outputs are multiplied by the routing weights where the definition multiplies hidden
    rows, and their sum is rounded to bf16 before ``shared`` is added. Sums have one order.
    """
    assert isinstance(w13, ArrangedWeight)
    assert isinstance(w2, ArrangedWeight)
    num_experts, width, _ = w2.codes.shape
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if len(x):
        fused_moe.cutlass_fused_moe(
            x.contiguous(),
            ids.int(),  # -1 is of no expert here, and adds nothing
            weights.contiguous(),
            w13.codes,
            w2.codes,
            output_dtype=x.dtype,
            quant_scales=[w13.scales, w2.scales],
            swiglu_limit=torch.full((num_experts,), limit, device=x.device),
            output=out,
            use_w4_group_scaling=True,
            use_fused_finalize=False,  # whose sums have any order
        )
    total = out.float()
    return total if shared is None else (total + shared()).to(x.dtype)
