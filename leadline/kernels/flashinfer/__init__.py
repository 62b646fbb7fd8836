"""Routed experts by FlashInfer's CUTLASS kernels, on Hopper (kernels.md 10.2).

For those who ask, as in ``--kernel-backend triton,routed_experts=flashinfer``. FlashInfer compiles
its kernels by nvcc at their first call, which takes many minutes, once a machine.
"""

from __future__ import annotations

from leadline.kernels.flashinfer import experts

IMPLEMENTATIONS = {"routed_experts": experts.routed_experts}
arrange_experts = experts.arrange_experts
