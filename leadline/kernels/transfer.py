"""Between host and device without waiting for either."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.core.errors import ConfigError

MB = 10**6


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


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of the host that a GPU copies from, or to, without anybody waiting.

    Raises:
        ConfigError: the system does not lock that much.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = math.prod(shape) * dtype.itemsize / MB
        raise ConfigError(
            f"{size:.1f} MB of page-locked host memory for a step cannot be had ({error}); give "
            "the machine or its container more memory, or lower max_num_batched_tokens or "
            "max_num_seqs"
        ) from error


class Download:
    """A tensor on its way to page-locked memory of the host, in the order of the stream.

    Args:
        tensor: may be overwritten by what is launched later.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._on_host = tensor
        if tensor.is_cuda:
            self._on_host = page_locked(tensor.shape, tensor.dtype)
            self._on_host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The tensor on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._on_host
