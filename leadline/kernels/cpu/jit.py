"""Compiling kernels: types from annotations, before the first call, and kept between processes."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

# Arguments of kernels; the second part is what numba calls such a type.
F1 = Annotated[NDArray[np.float32], "float32[::1]"]
F2 = Annotated[NDArray[np.float32], "float32[:,::1]"]
F3 = Annotated[NDArray[np.float32], "float32[:,:,::1]"]
I1 = Annotated[NDArray[np.int64], "int64[::1]"]
I2 = Annotated[NDArray[np.int64], "int64[:,::1]"]
U1 = Annotated[NDArray[np.uint8], "uint8[::1]"]
U2 = Annotated[NDArray[np.uint8], "uint8[:,::1]"]
Packed = Annotated[NDArray[np.uint8], "uint8[:,:,:]"]  # a field of the cache, which has gaps
Rings = Annotated[NDArray[np.float32], "float32[:,:,:]"]  # likewise
Flags1 = Annotated[NDArray[np.bool_], "bool_[::1]"]
_SCALARS = {int: "int64", float: "float32", bool: "boolean"}
# What passes between parts of kernels: float32 and integers of the machine, as numba finds them.
Real: TypeAlias = Any
Whole: TypeAlias = Any

# Sums may be taken in any order and products fused into them; NaN and infinity stay what they are.
_SUMS = {"reassoc", "contract"}
# A division by zero is infinity or NaN, as in torch, not an exception that every loop must check.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True}


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels; every operation rounds as written."""
    compiled: Callable[P, R] = numba.njit(**_PART)(function)
    return compiled


def inline_sums(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels whose sums may be taken in any order."""
    compiled: Callable[P, R] = numba.njit(**_PART, fastmath=_SUMS)(function)
    return compiled


def splice(function: Callable[P, R]) -> Callable[P, R]:
    """A part that becomes lines of its kernel, and rounds as these do.

    For rows of many arrays: arrays that are passed on, and more so views of them, cost more than
    copying a row does.
    """
    compiled: Callable[P, R] = numba.njit(**_PART, inline="always")(function)
    return compiled


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function for the types of its annotations, before its first call.

    Where an array is expected a tensor may be given: its own memory is, or a copy where it has
    gaps. Anything else of another type is a TypeError. Nothing checks an index. Sums may be taken
    in any order; what must round as written is in functions of ``inline``.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    del hints["return"]
    types = [
        _SCALARS[hint] if hint in _SCALARS else typing.get_args(hint)[1] for hint in hints.values()
    ]
    compiled = _compile(function, f"void({', '.join(types)})")

    @functools.wraps(function)
    def call(*args: Any) -> None:
        compiled(*[a.contiguous().numpy() if isinstance(a, Tensor) else a for a in args])

    return call


def _compile(function: Callable[..., None], signature: str) -> Callable[..., None]:
    options = {**_OPTIONS, "fastmath": _SUMS}
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(_cache_folder())
        compiled: Callable[..., None] = numba.njit(signature, cache=True, **options)(function)
    except RuntimeError as error:  # no folder can be written
        logger.warning("%s is compiled at every start: %s", function.__name__, error)
        compiled = numba.njit(signature, **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    return compiled


@functools.cache
def _cache_folder() -> Path:
    """Of these very sources: numba itself compares a kernel's file only, not what it inlines.

    Raises:
        RuntimeError: the user has no home.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "leadline" / f"numba-{digest.hexdigest()[:16]}"
    if not folder.exists():
        logger.info("compiling kernels for this machine: some ten seconds, once")
    return folder


def in_float32(reference: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run an op by its reference where its first argument, a tensor, is not float32."""

    def decorate(fast: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fast)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            run = fast if first.dtype is torch.float32 else reference
            return run(*args, **kwargs)

        return call

    return decorate
