"""An op by both implementations, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from leadline.kernels import ops
from leadline.kernels.registry import Kernels, choose

Both = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="session")
def numba_kernels() -> Kernels:
    """Every op that numba has."""
    pytest.importorskip("numba", reason="the extra 'cpu' is not installed")
    return choose("numba", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def both(numba_kernels: Kernels) -> Both:
    """Calls ``ops.NAME`` twice: what numba makes of the arguments, and what the reference does."""

    def call(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        assert numba_kernels.backend_of[name] == "numba"
        op = getattr(ops, name)
        with numba_kernels.active():
            fast = op(*args, **kwargs)
        return fast, op(*args, **kwargs)

    return call
