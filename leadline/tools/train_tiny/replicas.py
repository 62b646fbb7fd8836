"""Data parallel training: one process a GPU (``torchrun``), each with rows of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, slots=True)
class Replicas:
    """This process among its equals; every call is an identity where it is alone."""

    rank: int = 0
    size: int = 1

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over the replicas."""
        if self.size > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)
                tensor /= self.size

    def agree(self, value: float) -> float:
        """The first replica's ``value``: clocks differ, decisions must not."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        distributed.broadcast(shared, src=0)
        return shared.item()


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[Replicas, torch.device]]:
    """The replicas that ``torchrun`` started, and this one's device; alone where it did not."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Replicas(), device
        return
    rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    # Clocks are compared on the host, without waiting for the GPU.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Replicas(rank, size), device
    finally:
        distributed.destroy_process_group()
