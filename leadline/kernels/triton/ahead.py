"""Kernels compiled side by side, before the work that launches them is done for the first time.

What has to be compiled depends on all that a launch is given, alignments of tensors among it. So
the work itself is done, on its own tensors, and only its launches are left out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from leadline.kernels import preparation

logger = logging.getLogger(__name__)

_ENABLED = not triton.knobs.runtime.interpret
_MAX_THREADS = 16  # more would only wait for the interpreter's lock

# What to do once kernels are launched again; None while they are.
_afterwards: ExitStack | None = None


class NotLaunchedError(Exception):
    """What would be measured has not run."""


def is_on() -> bool:
    """Whether launches are left out now."""
    return _afterwards is not None


def afterwards(undo: Callable[..., object], *args: object) -> None:
    """Undo something once kernels are launched again."""
    assert _afterwards is not None
    _afterwards.callback(undo, *args)


def compile_ahead(work: Callable[[], object]) -> None:
    """Compile what some work would launch, with all configs that it would measure, side by side.

    What kernels would have written has any value. One that does not compile fails again at its
    first launch, which tells why. Work that fails is logged, and left to whoever does it next.

    Args:
        work: waits for nothing that is computed; nothing in it but kernels takes what kernels
            write for an index.
    """
    if not _ENABLED:
        return
    start = known = time.perf_counter()
    with preparation.logged():
        try:
            with side_by_side(), _without_launches():
                work()
                known = time.perf_counter()
        except Exception:
            logger.warning("kernels are not all compiled ahead, but when launched", exc_info=True)
    logger.info(
        "kernels: compiled ahead in %.1f s, after %.1f s to find out which",
        *(time.perf_counter() - known, known - start),
    )


@contextmanager
def side_by_side() -> Iterator[None]:
    """Kernels that are launched inside for ``warmup`` are compiled by threads, at the end.

    Launches would wait for threads that begin earlier: Triton holds the interpreter's lock for a
    fifth of a compilation.
    """
    begin = threading.Event()
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with (
        ThreadPoolExecutor(num_threads, initializer=begin.wait) as pool,
        # What does not compile fails again, by itself, where it is measured or launched.
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        try:
            yield
        finally:
            begin.set()


@contextmanager
def _without_launches() -> Iterator[None]:
    """Launches inside ask for their kernel, once for each way in which layers launch it."""
    global _afterwards
    run, asked = JITFunction.run, set()

    def ask(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # Triton takes long to see that what is not compiled yet has been asked for.
        launch = (id(self), *map(_kind, args), *kwargs, *map(_kind, kwargs.values()))
        if launch not in asked:
            asked.add(launch)
            run(self, *args, grid=grid, warmup=True, **kwargs)

    with ExitStack() as _afterwards:
        afterwards(setattr, JITFunction, "run", run)
        JITFunction.run = ask
        try:
            yield
        finally:
            _afterwards = None


def _kind(argument: Any) -> Any:
    """What kernels may be compiled for, of an argument, and perhaps more."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, argument.layout, *argument.block_shape
    return argument
