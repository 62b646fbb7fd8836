"""How kernels are tuned and launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRETED = triton.knobs.runtime.interpret
"""Kernels run by Triton's interpreter, on a CPU."""

NATIVE_CASTS = tl.constexpr(not INTERPRETED)
"""Casts to E4M3 and bf16 round to nearest even, as a GPU's do and the interpreter's do not."""


@triton.constexpr_function
def has_ptx() -> bool:
    """Whether kernels may have instructions of NVIDIA's own, those of sm_80."""
    return not INTERPRETED and bool(cuda_capability_geq(8, 0))


def tuned(configs: Sequence[triton.Config], key: Sequence[str]) -> Callable[[Any], Any]:
    """Measure the configs at the first launch of each key, and remember the best on disk.

    The file lies in Triton's cache, so a later process does not measure again. Under the
    interpreter the first config serves every shape: put the smallest first.

    Args:
        configs: what to choose from.
        key: arguments of the kernel whose values decide; round sizes up to powers of two
            (``bucket``) before they are passed, or every batch size is measured anew.
    """
    chosen = configs[:1] if INTERPRETED else configs
    return triton.autotune(list(chosen), list(key), cache_results=True)


def bucket(size: int) -> int:
    """The power of two at or above ``size``, at least 1: a key of ``tuned``."""
    return triton.next_power_of_2(max(size, 1))
