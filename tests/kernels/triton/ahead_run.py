"""A program: what graphs of a small model launch is compiled ahead, as for an H200 not here.

``python ahead_run.py`` prints in JSON what each of some steps compiled, measured and launched.
Compilers and kernels are stand-ins: what is asked of them is what is looked at.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from leadline.cache.sizing import CacheSize
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.forwards import GraphLimits, GraphMode, Graphs
from leadline.kernels.registry import Kernels, unfuse
from leadline.kernels.triton import IMPLEMENTATIONS, ahead
from leadline.kernels.triton.launch import TUNERS
from leadline.weights.engram_tables import TableMemory
from tests.models.test_triton_backend import MODEL
from tests.steps import make_stepper

PAGE, NUM_PAGES, NUM_SLOTS = 16, 400, 13
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


class Toolchain:
    """Stands for compiler and GPU.

    Attributes:
        compiled: what has been, how often.
        broken: a kernel that does not compile.
    """

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.launched = self.measured = 0
        self.broken = ""

    def compile(self, src: Any, target: Any, options: Any, **_: Any) -> Any:
        if src.name == self.broken:
            raise RuntimeError(f"{src.name} is broken")
        self.compiled[f"{src.name} {src.hash()} {sorted(options.items(), key=str)}"] += 1
        return SimpleNamespace(
            launch_metadata=lambda *_: None, run=self.launch, function=None, packed_metadata=None
        )

    def launch(self, *_: Any) -> None:
        self.launched += 1

    def measure(self, call: Callable[[], object], quantiles: Any) -> list[float]:
        """Finds the last config the fastest."""
        self.measured += 1
        call()
        return [-float(self.measured)] * len(quantiles)

    def told(self, work: Callable[[], object]) -> dict[str, Any]:
        """What work does, and how it ends."""
        self.compiled.clear()
        self.launched = self.measured = 0
        error = ""
        try:
            work()
        except (RuntimeError, ArithmeticError) as raised:
            error = str(raised)
        return {
            "compiled": len(self.compiled),
            "most": max(self.compiled.values(), default=0),
            "kernels": sorted({name.split()[0] for name in self.compiled}),
            "launched": self.launched,
            "measured": self.measured,
            "error": error,
        }


def small_graphs() -> Graphs:
    """Of all kinds."""
    made = make_stepper(
        MODEL,
        dtype=torch.bfloat16,
        block_size=PAGE,
        packed=True,
        num_pages=NUM_PAGES,
        num_slots=NUM_SLOTS,
        table_memory=TableMemory(torch.device("cpu")),
    )
    history = MODEL.engram_max_ngram_size - 1
    return Graphs(
        made.model,
        BatchBuilder(num_history=history, device=torch.device("cpu")),
        lambda run: run,
        GraphMode.ALL,
        GraphLimits(NUM_SLOTS - 1, 384, 512, MODEL.vocab_size),
        CacheSize(NUM_PAGES, NUM_SLOTS, PAGE),
    )


def main() -> None:
    """See the module."""
    logging.basicConfig(level=logging.INFO)
    triton.runtime.driver.set_active(DRIVER)
    tools, graphs = Toolchain(), small_graphs()
    backends = dict.fromkeys(IMPLEMENTATIONS, "triton")
    kernels = Kernels(backends)
    launch = partial(graphs.launch_largest, graphs.num_graphs)

    def ordinary() -> None:
        with kernels.active():
            launch()

    def forget(*, choices: bool) -> None:
        """What a process knows, or only the kernels."""
        for tuner in TUNERS.values():
            tuner.fn.device_caches.clear()
            if choices:
                tuner.cache.clear()

    for tuner in TUNERS.values():
        tuner._do_bench = tools.measure
    with (
        patch.object(torch.cuda, "get_device_name", lambda: "Toy GPU"),
        patch.object(triton.compiler, "compile", tools.compile),
    ):
        told = {
            "others": tools.told(partial(Kernels(unfuse(backends, "none")).compile_ahead, launch)),
            "first": tools.told(partial(kernels.compile_ahead, launch)),
            "ordinary": tools.told(ordinary),
        }
        forget(choices=True)
        told["tuned"] = tools.told(partial(kernels.compile_ahead, launch))
        told["again"] = tools.told(ordinary)
        forget(choices=False)
        tools.broken = "_seam"
        told["broken"] = tools.told(partial(kernels.compile_ahead, launch))
        told["reported"] = tools.told(ordinary)
        told["failing"] = tools.told(partial(kernels.compile_ahead, lambda: 1 / 0))
        assert JITFunction.run.__module__ == JITFunction.__module__
        assert not ahead.is_on()
    print(json.dumps(told))


main()
