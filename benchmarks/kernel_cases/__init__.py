"""What ``benchmarks/kernels.py`` measures and ``tests/kernels/triton`` holds to the reference."""

from __future__ import annotations

from benchmarks.kernel_cases import (
    attention,
    compressor,
    engram,
    experts,
    indexer,
    linear,
    mhc,
    norm,
    router,
    sampling,
    selection,
    v4,
    window,
)
from benchmarks.kernel_cases.case import Case

CASES: tuple[Case, ...] = (
    *norm.CASES,
    *mhc.CASES,
    *router.CASES,
    *window.CASES,
    *compressor.CASES,
    *linear.CASES,
    *experts.CASES,
    *attention.CASES,
    *indexer.CASES,
    *selection.CASES,
    *engram.CASES,
    *sampling.CASES,
    *v4.CASES,
)
"""All of them, in the order of kernels.md."""
