"""How kernels are tuned and launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from leadline.kernels.triton.tuning import Tuner

INTERPRETED = triton.knobs.runtime.interpret
"""Kernels run by Triton's interpreter, on a CPU."""

NATIVE_CASTS = tl.constexpr(not INTERPRETED)
"""Casts to E4M3 and bf16 round to nearest even, as a GPU's do and the interpreter's do not."""


@triton.constexpr_function
def has_ptx() -> bool:
    """Whether kernels may have instructions of NVIDIA's own, those of sm_80."""
    return not INTERPRETED and bool(cuda_capability_geq(8, 0))


TUNERS: dict[str, Tuner] = {}
"""All that ``tuned`` made, by name."""


def tuned(
    configs: Sequence[triton.Config], key: Sequence[str], *, variant: str = ""
) -> Callable[[Any], Tuner]:
    """Choose a config at the first launch of each key, as ``tuning.Tuner`` does.

    What had to be measured is remembered in Triton's cache on disk. Under the interpreter the
    first config serves every shape: put the smallest first.

    Args:
        configs: what to choose from.
        key: arguments of the kernel whose values decide; round sizes up to powers of two
            (``bucket``) before they are passed, or every batch size is measured anew.
        variant: tells what is tuned from what else is of the same kernel, with other configs.
    """

    def decorate(kernel: Any) -> Tuner:
        tuner = Tuner(kernel, configs[:1] if INTERPRETED else configs, key, variant)
        assert tuner.name not in TUNERS, f"{tuner.name} is tuned twice; give one a variant"
        TUNERS[tuner.name] = tuner
        return tuner

    return decorate


def bucket(size: int) -> int:
    """The power of two at or above ``size``, at least 1: a key of ``tuned``."""
    return triton.next_power_of_2(max(size, 1))


_PROCESSORS_OF_AN_H200 = 132


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's under the interpreter."""
    if device.type != "cuda":
        return _PROCESSORS_OF_AN_H200
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper() -> bool:
    """Whether kernels that need compute capability 9.0 itself can run."""
    return not INTERPRETED and triton.runtime.driver.active.get_current_target().arch == 90


@functools.cache
def overlapped() -> dict[str, bool]:
    """Options of a launch whose kernel begins with ``await_previous``.

    Its programs may come up while those of the launch before still run (programmatic dependent
    launch, kernels.md 0.4), which hides most of a short kernel's cost. Hopper and later have it.
    """
    if INTERPRETED or not cuda_capability_geq(9):
        return {}
    return {"launch_pdl": True}


@triton.jit
def await_previous():
    """Wait until all that was launched before has been written: the first thing a kernel does.

    Nothing lets the next launch come up before this one's programs end: those of a large one would
    crowd on the few multiprocessors that have room.
    """
    if NATIVE_CASTS and cuda_capability_geq(9):
        gdc_wait()


@triton.jit
def hold_next():
    """``await_previous``, and let the next launch come up from then on.

    For short kernels before one that fills the GPU.
    """
    if NATIVE_CASTS and cuda_capability_geq(9):
        gdc_wait()
        gdc_launch_dependents()
