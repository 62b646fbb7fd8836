"""Between host and device without waiting for either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: Sequence[float] | Sequence[Sequence[float]] | NDArray[np.generic],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """A tensor of these values, copied from page-locked memory in the order of the stream."""
    on_host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)


class Download:
    """A tensor on its way to page-locked memory of the host, in the order of the stream.

    Args:
        tensor: may be overwritten by what is launched later.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._on_host = tensor
        if tensor.is_cuda:
            self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._on_host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The tensor on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._on_host
