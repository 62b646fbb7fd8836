"""Where a GPU's memory goes, measured before pages and slots are sized from what is left.

A step's peak and what graphs hold cannot be computed from a configuration: kernels, allocator and
driver decide. So the largest step and some graphs are run at start, on a small cache that lives no
longer than that (cache-and-scheduling 6.6).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from leadline.config.engine import EngineConfig
from leadline.core.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 2**30


class DeviceMemory(Protocol):
    """Measures the memory of one device."""

    @property
    def total(self) -> int:
        """Bytes of the device."""
        ...

    def in_use(self) -> int:
        """Bytes that somebody has, this process or another; what torch only keeps is given back."""
        ...

    def added_by(self, run: Callable[[], None]) -> int:
        """Bytes that torch takes beside what it has, at most while ``run`` goes on."""
        ...


class CudaMemory:
    """``DeviceMemory`` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def in_use(self) -> int:
        """See ``DeviceMemory``."""
        return bytes_in_use(self._device)

    def added_by(self, run: Callable[[], None]) -> int:
        """See ``DeviceMemory``; whole pieces of the allocator, so what fragments count too."""
        self.in_use()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def bytes_in_use(device: torch.device) -> int:
    """What somebody has of a GPU's memory, see ``DeviceMemory.in_use``; 0 of a CPU's."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Rehearsal(Protocol):
    """What an engine will do, on a cache of its own; implemented by ``rehearsal.Rehearsal``."""

    def step(self) -> None:
        """Run the largest step.

        Raises:
            OutOfMemoryError: of torch; it does not fit.
        """
        ...

    def graph_bytes(self, memory: DeviceMemory) -> int:
        """Bytes that all graphs will hold; 0 where there are none.

        Raises:
            OutOfMemoryError: of torch; some do not fit.
        """
        ...

    def end(self) -> None:
        """Let go of all of it."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device beside pages and slots.

    Attributes:
        total: of the device.
        loaded: in use while the engine has nothing to do: weights, code, other processes.
        step: what the largest step takes at its most.
        graphs: what graphs hold.
        staging: rows of a step behind the window rings.
    """

    total: int
    loaded: int
    step: int
    graphs: int
    staging: int

    @property
    def sum(self) -> int:
        return self.loaded + self.step + self.graphs + self.staging


def profile(
    memory: DeviceMemory, rehearsal: Rehearsal, config: EngineConfig, *, staging: int
) -> MemoryUse:
    """Measure an engine whose weights are loaded and whose cache is not allocated yet.

    Args:
        memory: of its device.
        rehearsal: of what it will do.
        config: for what is said when that does not fit.
        staging: bytes that the cache takes beside pages and slots.

    Raises:
        ConfigError: a step or the graphs do not fit beside the weights alone.
    """
    scheduler = config.scheduler
    try:
        rehearsal.step()  # loads and tunes what it launches: that memory is not needed again
        step = memory.added_by(rehearsal.step)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of max_num_batched_tokens {scheduler.max_num_batched_tokens} rows and "
            f"max_num_seqs {scheduler.max_num_seqs} requests does not fit beside the weights "
            f"({error}); lower them, or free the GPU"
        ) from error
    try:
        graphs = rehearsal.graph_bytes(memory)
    except torch.OutOfMemoryError as error:
        raise graphs_do_not_fit("the weights", error) from error
    rehearsal.end()
    return MemoryUse(memory.total, memory.in_use(), step, graphs, staging)


def cache_budget_bytes(config: EngineConfig, use: MemoryUse | None) -> int:
    """Bytes for pages and slots.

    The setting, or else: on a CPU the smaller of 2 GiB and a tenth of memory; on a GPU what
    ``gpu_memory_utilization`` of it leaves beside all other use.

    Args:
        config: all settings.
        use: of a GPU; None on a CPU, and where the setting says it all.

    Raises:
        ConfigError: nothing is left.
    """
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    if use is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(2 * GIB, memory // 10)
    share = config.cache.gpu_memory_utilization
    budget = int(use.total * share) - use.sum
    if budget <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {share} of {use.total / GIB:.1f} GiB leaves no memory for the "
            f"cache: {use.loaded / GIB:.1f} GiB are in use once the weights are loaded, a step of "
            f"max_num_batched_tokens {config.scheduler.max_num_batched_tokens} rows takes "
            f"{(use.step + use.staging) / GIB:.1f} and graphs take {use.graphs / GIB:.1f}; raise "
            "the share, free the GPU, lower max_num_batched_tokens, or set cuda_graphs to 'decode' "
            "or 'off'"
        )
    return budget


def log_use(use: MemoryUse, cache_bytes: int) -> None:
    """Say where the memory of a device goes."""
    logger.info(
        "memory: %.1f GiB, of which %.1f are in use once the weights are loaded, %.2f are for a "
        "step, %.2f for graphs, %.1f for the cache, and %.1f are left over",
        *(
            part / GIB
            for part in (
                use.total,
                use.loaded,
                use.step + use.staging,
                use.graphs,
                cache_bytes,
                use.total - use.sum - cache_bytes,
            )
        ),
    )


def graphs_do_not_fit(beside: str, error: torch.OutOfMemoryError) -> ConfigError:
    """What to do about graphs that memory does not suffice for."""
    return ConfigError(
        f"graphs do not fit beside {beside} ({error}); lower gpu_memory_utilization or "
        "kv_cache_memory_bytes, or set cuda_graphs to 'decode' or 'off'"
    )
