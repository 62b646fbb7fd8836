"""bf16 ops as Triton kernels: what runs on a GPU. Files are named as in ``reference``.

Kernels use nothing that only Hopper has unless their file says so. Under Triton's interpreter
(``TRITON_INTERPRET=1``) all of them run on a CPU, slowly: that is how CI checks them.
"""

from __future__ import annotations

from leadline.kernels.triton import experts, norm

IMPLEMENTATIONS = {op.__name__: op for op in (norm.rms_norm, experts.routed_experts)}
