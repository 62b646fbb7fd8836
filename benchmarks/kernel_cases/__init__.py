"""What ``benchmarks/kernels.py`` measures and ``tests/kernels/triton`` holds to the reference."""

from __future__ import annotations

from benchmarks.kernel_cases import experts, norm
from benchmarks.kernel_cases.case import Case

CASES: tuple[Case, ...] = (*norm.CASES, *experts.CASES)
"""All of them, in the order of kernels.md."""
