"""Triton's interpreter, which runs kernels where there is no GPU; imported before any kernel is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@contextmanager
def interpreter(*, checks_overflow: bool = True) -> Iterator[None]:
    """The interpreter with loops that today's numpy allows; skips the test where it is missing.

    Args:
        checks_overflow: of every sum and product of integers, which takes a fifth of the time.
    """
    module = pytest.importorskip("triton.runtime.interpreter")
    original, builder = module._patch_lang_tensor, module.interpreter_builder

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        # Bounds of loops are arrays of one element, which numpy no longer takes as integers.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def of_bools(mask: Any) -> Any:
        # Triton 3.9 makes integers of some masks, and its own loads and stores refuse them.
        return module.TensorHandle(mask.data.astype(bool), mask.dtype)

    load, store = builder.create_masked_load, builder.create_masked_store
    options = dataclasses.replace(builder.options, sanitize_overflow=checks_overflow)
    with (
        patch.object(module, "_patch_lang_tensor", patched),
        patch.object(
            builder,
            "create_masked_load",
            lambda pointers, mask, *rest: load(pointers, of_bools(mask), *rest),
        ),
        patch.object(
            builder,
            "create_masked_store",
            lambda pointers, value, mask, *rest: store(pointers, value, of_bools(mask), *rest),
        ),
        patch.object(builder, "options", options),
    ):
        yield
