"""Which config a kernel runs with: known of this GPU, measured before, or measured now."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.testing
from triton.runtime.autotuner import Autotuner

from leadline.kernels import preparation, tunings
from leadline.kernels.triton import ahead

logger = logging.getLogger(__name__)

_LONG = 0.2  # milliseconds, from which a launch is timed well on its own
_LAUNCHES = 10  # of a graph
_REPLAYS = 20


class Tuner(Autotuner):  # type: ignore[misc]
    """Triton's tuner, which looks into ``kernels/tunings`` first and measures as models run.

    Attributes:
        name: of the kernel and what is tuned of it: with a tuning key, it says what was chosen.
    """

    def __init__(
        self, kernel: Any, configs: Sequence[triton.Config], key: Sequence[str], variant: str = ""
    ) -> None:
        super().__init__(
            *(kernel, kernel.arg_names, list(configs), list(key)),
            reset_to_zero=None,
            restore_value=None,
            do_bench=bench,
            cache_results=True,
        )
        function = self.base_fn
        self.name = f"{function.__module__}.{function.__name__}{variant and f'[{variant}]'}"
        self.configs_timings: dict[triton.Config, list[float]] = {}
        self._uncompiled: list[triton.Config] = []
        self._unmeasured = copy.copy(self.configs[0])  # known by its identity
        self.best_config = self.configs[0]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the config of the key; ahead, with all configs if it is not known yet.

        Launches of one key may need other kernels, so that this holds for every one of them.
        """
        kernel = super().run(*args, **kwargs)
        if self.best_config is self._unmeasured:
            for each in self.configs:
                self.fn.run(*args, **kwargs, **each.all_kwargs())
        return kernel

    def check_disk_cache(
        self,
        tuning_key: tuple[Any, ...],
        configs: list[triton.Config],
        bench_fn: Callable[[], None],
    ) -> bool:
        """Triton calls this at the first launch of a key; returns whether nothing was measured."""
        known = tunings.shipped(torch.cuda.get_device_name()).get((self.name, tuning_key))
        for config in configs:
            if config.all_kwargs() == known:
                self.cache[tuning_key] = config
                return True
        self._uncompiled = configs
        start = time.perf_counter()
        # Triton's files tell a function's name but not its module, so the key has to.
        named_key = (self.name, *tuning_key)
        try:
            found: bool = super().check_disk_cache(named_key, configs, bench_fn)
        except ahead.NotLaunchedError:
            self.cache[tuning_key] = self._unmeasured
            ahead.afterwards(self.cache.pop, tuning_key)
            return True
        if found:
            self.cache[tuning_key] = self.cache.pop(named_key)
            return True
        # Caches are sized without what measuring takes, a quarter of a GB to flush L2 with.
        torch.cuda.empty_cache()
        seconds = time.perf_counter() - start
        preparation.add_tuned(seconds)
        logger.debug(
            "tuned %s for %s in %.1f s; scripts/collect_tunings.py makes it part of the package",
            *(self.name, tuning_key, seconds),
        )
        return False

    def _bench(self, *args: Any, config: triton.Config, **meta: Any) -> Any:
        """Compile all configs side by side before the first of a key is measured."""
        if ahead.is_on():
            raise ahead.NotLaunchedError
        if configs := self._uncompiled:
            self._uncompiled = []
            with ahead.side_by_side():
                for each in configs:
                    self.fn.run(*args, **{**meta, "warmup": True}, **each.all_kwargs())
        return super()._bench(*args, config=config, **meta)


def bench(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    """Milliseconds of a launch that finds nothing in the L2 cache, as weights in a model do.

    Short ones are launched in a graph, where neither the host nor the resolution of events counts.
    It takes about 20 ms, since models have hundreds of configs to measure, and must not be called
    during a capture.
    """
    call()
    if _milliseconds(lambda: [call() for _ in range(3)]) > 3 * _LONG:
        times: list[float] = triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)
        return times
    driver = triton.runtime.driver.active
    flush = functools.partial(driver.clear_cache, driver.get_empty_cache_for_benchmark())
    cold = np.array(_graph_milliseconds([flush, call]))
    found: list[float] = np.quantile(cold - _flush_milliseconds(), quantiles).tolist()
    return found


@functools.cache
def _flush_milliseconds() -> float:
    driver = triton.runtime.driver.active
    flush = functools.partial(driver.clear_cache, driver.get_empty_cache_for_benchmark())
    return float(np.median(_graph_milliseconds([flush])))


def _graph_milliseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Of the calls in turn, on average over a graph of some turns: one value a replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # torch.cuda.graph would give all free memory back first, which takes longer than the rest.
        graph.capture_begin(capture_error_mode="thread_local")
        for call in [*calls] * _LAUNCHES:
            call()
        graph.capture_end()
        graph.replay()
        return [_milliseconds(graph.replay) / _LAUNCHES for _ in range(_REPLAYS)]


def _milliseconds(call: Callable[[], Any]) -> float:
    """From before to after it on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed
