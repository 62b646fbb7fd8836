"""What kernels cost before they first run: they are compiled, and some are tuned."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Preparation:
    """What was done; seconds of compilations that ran side by side are added up."""

    compiled: int = 0
    compile_seconds: float = 0.0
    tuned: int = 0
    tune_seconds: float = 0.0


_current = Preparation()


def add_tuned(seconds: float) -> None:
    """A kernel was measured with all of its configs, which includes compiling them."""
    _current.tuned += 1
    _current.tune_seconds += seconds


def _add_compiled(*, times: Any, cache_hit: bool, **_: Any) -> None:
    """Triton's listener of compilations, which knows microseconds."""
    if not cache_hit:
        _current.compiled += 1
        _current.compile_seconds += times.total / 1e6


@contextmanager
def logged() -> Iterator[Preparation]:
    """Count what has to be compiled and tuned inside, and tell at the end if anything had."""
    global _current
    _current = done = Preparation()
    triton = sys.modules.get("triton")  # imported if any of its kernels is to run
    if triton is None:
        yield done
        return
    listener = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = _add_compiled
    try:
        yield done
    finally:
        triton.knobs.compilation.listener = listener
    if done.compiled or done.tuned:
        logger.info(
            "kernels: %d compiled (%.1f s over all threads), %d tuned (in %.1f s); "
            "later starts find them",
            *(done.compiled, done.compile_seconds),
            *(done.tuned, done.tune_seconds),
        )
