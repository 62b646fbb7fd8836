"""What a profile sees of ops: each call, and who makes it. Nothing while nobody profiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

R = TypeVar("R")

Around = Callable[[str, str], AbstractContextManager[object]]
"""An op's name and the qualified name of its caller -> what the call runs in."""


class _Observer:
    """Who looks on now."""

    around: Around | None = None


observer = _Observer()


@contextmanager
def observed(around: Around) -> Iterator[None]:
    """Calls of ops inside run in contexts of this observer."""
    observer.around = around
    try:
        yield
    finally:
        observer.around = None


def call(name: str, run: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    """Run an op for whoever called ``registry.op``'s function, in a context of the observer.

    Ops that the op itself calls are part of it, and nobody sees them.
    """
    around, observer.around = observer.around, None
    assert around is not None
    try:
        with around(name, sys._getframe(2).f_code.co_qualname):
            return run(*args, **kwargs)
    finally:
        observer.around = around
