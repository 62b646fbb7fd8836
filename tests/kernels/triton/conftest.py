"""Kernels run on a GPU where there is one, under Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import interpreter


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreter():
        yield
