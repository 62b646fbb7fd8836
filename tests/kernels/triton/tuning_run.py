"""A program: the router is launched as on an H200 that is not here, until its kernel is compiled.

``python tuning_run.py DIRECTORY`` takes choices from the directory, and prints for a first launch
and for one of a later process how many configs were compiled in all, and by the time that each was
measured, and which one ran.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from leadline.kernels import preparation, tunings
from leadline.kernels.triton import router
from leadline.kernels.triton.launch import TUNERS

DEVICE = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


class Clock:
    """Finds the third config the fastest.

    Attributes:
        work: of the launch that is being tuned.
        compiled: for each config that was timed, how many had been compiled by then.
    """

    work = preparation.Preparation()
    compiled: list[int]

    def __call__(self, call: Any, quantiles: Any) -> list[float]:
        self.compiled.append(self.work.compiled)
        call()
        return [1.0 if len(self.compiled) == 3 else 2.0] * len(quantiles)


def main() -> None:
    """See the module."""
    triton.runtime.driver.set_active(DEVICE)
    tuner, clock = TUNERS["leadline.kernels.triton.router._project"], Clock()
    tuner._do_bench = clock
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    told = []
    with (
        patch.object(tunings, "DIRECTORY", Path(sys.argv[1])),
        patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H200"),
        patch.object(JITFunction, "run", compile_only),
        patch.object(router, "_choose", MagicMock()),
    ):
        for _ in range(2):
            clock.compiled = []
            tuner.cache.clear()
            with preparation.logged() as clock.work:
                x, gate = (torch.zeros(n, 512, dtype=torch.bfloat16) for n in (8, 64))
                router.route(x, gate, torch.zeros(64), num_experts_per_tok=6, scale=1.0)
            config = str(tuner.best_config)
            launch = {"compiled": clock.work.compiled, "measured": clock.compiled}
            told.append(launch | {"config": config})
    print(json.dumps(told))


main()
