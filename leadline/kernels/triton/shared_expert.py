"""The shared expert: two products with SwiGLU between them (kernels.md 11)."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference import experts as reference
from leadline.kernels.triton.linear import as_group, is_fp8, linear
from leadline.kernels.triton.packed_matmul import chained_matmul


def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """SwiGLU and what the second product wants of its input end the first one."""
    if not (is_fp8(w13) and is_fp8(w2)):
        return linear(reference.swiglu(linear(x, w13), limit=limit).to(x.dtype), w2)
    return chained_matmul(x.unsqueeze(1), as_group(w13), as_group(w2), swiglu_limit=limit)
