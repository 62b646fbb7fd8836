"""The shared expert: two products with SwiGLU between them (kernels.md 11)."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference import experts as reference
from leadline.kernels.triton.linear import as_group, is_fp8, linear
from leadline.kernels.triton.packed_matmul import packed_matmul


def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """SwiGLU and the rounding for the second product end the first one."""
    if not (is_fp8(w13) and is_fp8(w2)):
        return linear(reference.swiglu(linear(x, w13), limit=limit).to(x.dtype), w2)
    hidden = packed_matmul(
        x.unsqueeze(1),
        as_group(w13),
        rounds_output=w2.quantizes_input,
        swiglu_limit=limit,
    )
    return packed_matmul(hidden.unsqueeze(1), as_group(w2), input_rounded=True)
