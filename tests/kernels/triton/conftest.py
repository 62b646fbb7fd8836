"""Kernels run on a GPU where there is one, under Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _scalars_are_integers() -> Iterator[None]:
    """Bounds of loops are arrays of one element in the interpreter, which numpy no longer takes."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with patch.object(interpreter, "_patch_lang_tensor", patched):
        yield
