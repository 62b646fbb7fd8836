"""What would make the host wait for a GPU, or freeze a step's numbers into a graph: refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Their results, or the shapes of these, depend on what tensors hold; or they make a tensor of
# numbers of the host.
_REFUSED = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_METHODS = ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist")


class SynchronisationError(AssertionError):
    """The host would have waited."""


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _REFUSED or (name == "repeat_interleave" and isinstance(args[-1], Tensor)):
            raise SynchronisationError(f"{func} needs what a tensor holds, or copies from the host")
        if name in _INDEXING:
            kinds = {index.dtype for index in args[1] if index is not None}
            if kinds & {torch.bool, torch.uint8}:
                raise SynchronisationError(f"{func} by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def refused() -> Iterator[None]:
    """Raise ``SynchronisationError`` where torch would wait for a GPU."""

    def refuse(self: Tensor, *_: Any) -> Any:
        raise SynchronisationError("a tensor is read by the host")

    with ExitStack() as stack:
        stack.enter_context(_Refusing())  # type: ignore[no-untyped-call]
        for name in _METHODS:
            stack.enter_context(patch.object(Tensor, name, refuse))
        yield
