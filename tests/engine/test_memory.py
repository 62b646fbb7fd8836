"""What is left for the cache, on devices that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from leadline.config.engine import CacheConfig, EngineConfig
from leadline.core.errors import ConfigError
from leadline.engine.memory import GIB, MemoryUse, cache_budget_bytes, log_use, profile

CONFIG = EngineConfig(model="m")
USE = MemoryUse(total=100 * GIB, loaded=50 * GIB, step=4 * GIB, graphs=2 * GIB, staging=GIB)


@dataclass
class Device:
    """Counts what a rehearsal on it says that it takes."""

    held: int
    total: int = 100
    peak: int = 0

    def in_use(self) -> int:
        return self.held

    def added_by(self, run: Callable[[], None]) -> int:
        self.peak = before = self.held
        run()
        return self.peak - before

    def take(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)
        if self.held > self.total:
            raise torch.OutOfMemoryError(f"no {size} bytes")


@dataclass
class Rehearsal:
    """On a cache of 10 bytes; code that stays takes 3."""

    device: Device
    step_bytes: int = 20
    graphs: int = 5
    done: list[str] = field(default_factory=list)

    def step(self) -> None:
        if not self.done:
            self.device.take(10 + 3)
        self.device.take(self.step_bytes)
        self.device.held -= self.step_bytes
        self.done.append("step")

    def graph_bytes(self, memory: object) -> int:
        self.device.take(self.graphs)
        self.device.held -= self.graphs
        self.done.append("graphs")
        return self.graphs

    def end(self) -> None:
        self.device.held -= 10
        self.done.append("end")


def test_the_second_of_two_steps_is_measured_and_the_small_cache_is_gone() -> None:
    device = Device(held=40)
    rehearsal = Rehearsal(device)
    use = profile(device, rehearsal, CONFIG, staging=7)
    assert rehearsal.done == ["step", "step", "graphs", "end"]
    assert use == MemoryUse(total=100, loaded=43, step=20, graphs=5, staging=7)
    assert use.sum == 75


def test_a_step_that_does_not_fit_names_what_makes_it_large() -> None:
    device = Device(held=40)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 8192 rows and max_num_seqs 256"):
        profile(device, Rehearsal(device, step_bytes=60), CONFIG, staging=0)


def test_graphs_that_do_not_fit_can_be_left_out() -> None:
    device = Device(held=40)
    with pytest.raises(
        ConfigError, match=r"graphs do not fit beside the weights.*'decode' or 'off"
    ):
        profile(device, Rehearsal(device, graphs=60), CONFIG, staging=0)


def test_the_cache_gets_what_its_share_leaves_beside_all_else() -> None:
    assert cache_budget_bytes(CONFIG, USE) == (90 - 50 - 4 - 2 - 1) * GIB
    half = replace(CONFIG, cache=CacheConfig(gpu_memory_utilization=0.6))
    assert cache_budget_bytes(half, USE) == (60 - 57) * GIB


def test_a_setting_says_it_all_and_a_cpu_has_a_modest_share() -> None:
    given = replace(CONFIG, cache=CacheConfig(kv_cache_memory_bytes=12345))
    assert cache_budget_bytes(given, None) == 12345
    assert 0 < cache_budget_bytes(CONFIG, None) <= 2 * GIB


def test_a_full_gpu_is_told_what_takes_how_much_and_what_to_do() -> None:
    tight = replace(CONFIG, cache=CacheConfig(gpu_memory_utilization=0.5))
    with pytest.raises(ConfigError) as caught:
        cache_budget_bytes(tight, USE)
    assert str(caught.value) == (
        "gpu_memory_utilization 0.5 of 100.0 GiB leaves no memory for the cache: 50.0 GiB are in "
        "use once the weights are loaded, a step of max_num_batched_tokens 8192 rows takes 5.0 "
        "and graphs take 2.0; raise the share, free the GPU, lower max_num_batched_tokens, or set "
        "cuda_graphs to 'decode' or 'off'"
    )


def test_one_line_says_where_memory_goes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_use(USE, 33 * GIB)
    [message] = caplog.messages
    assert message == (
        "memory: 100.0 GiB, of which 50.0 are in use once the weights are loaded, 5.00 are for a "
        "step, 2.00 for graphs, 33.0 for the cache, and 10.0 are left over"
    )
