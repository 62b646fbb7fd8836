"""What the sections of ``slice.py`` share: engines around one loaded model, a clock, tables."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from leadline.config.engine import EngineConfig
from leadline.config.families import AnyConfig
from leadline.config.optimization import make_engine_config
from leadline.config.presets import any_preset
from leadline.engine.engine import Engine
from leadline.engine.launch import LoadedModel, engine_around, load_model

T = TypeVar("T")

GIB = 2**30

Case = dict[str, Any]
"""One measurement, as the result file holds it."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""


class Engines:
    """Engines of one model, one at a time.

    Weights are loaded again only where the settings of loading differ, and an engine is built again
    only where any setting does.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._loaded: tuple[EngineConfig, LoadedModel] | None = None
        self._engine: tuple[EngineConfig, Engine] | None = None

    def get(self, config: EngineConfig) -> Engine:
        """An idle engine with these settings; the one before it must not be used any more."""
        if self._engine is not None and self._engine[0] == config:
            return self._engine[1]
        self.drop()
        weights = _of_loading(config)
        if self._loaded is None or self._loaded[0] != weights:
            self._loaded = None
            _free()
            self._loaded = weights, self._timed("weights", lambda: load_model(config))
        loaded = self._loaded[1]
        _free()
        engine = self._timed("engine", lambda: engine_around(loaded, config))
        self._engine = config, engine
        return engine

    def drop(self) -> None:
        """Let nobody have the last engine again: it is in the way, or in the middle of a step."""
        self._engine = None

    def _timed(self, what: str, make: Callable[[], T]) -> T:
        start = time.perf_counter()
        made = make()
        self._log(f"{what} ready after {time.perf_counter() - start:.1f} s")
        return made


def _of_loading(config: EngineConfig) -> EngineConfig:
    """The settings with those put to their defaults that ``load_model`` does not read."""
    plain = EngineConfig(model=config.model)
    return replace(
        config,
        max_model_len=None,
        debug_nonfinite=False,
        cuda_graphs=plain.cuda_graphs,
        async_scheduling=None,
        check_integrity=False,
        cache=plain.cache,
        scheduler=plain.scheduler,
    )


def _free() -> None:
    """Give back what nobody refers to: a cache, graphs, weights."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Bench:
    """What a section runs with.

    Attributes:
        preset: the model's name.
        quick: a smoke run.
        seconds: tells what is left of the run's time.
        log: tells of progress.
        engines: the run's.
    """

    preset: str
    quick: bool
    seconds: Callable[[], float]
    log: Callable[[str], None]
    engines: Engines = field(init=False)

    def __post_init__(self) -> None:
        self.engines = Engines(self.log)

    @property
    def model(self) -> AnyConfig:
        return any_preset(self.preset)

    def config(self, **values: Any) -> EngineConfig:
        """Settings of an engine by their names; without a GPU it has no graphs."""
        on_gpu = torch.cuda.is_available()
        defaults = {
            "model": self.preset,
            "load_format": "dummy",
            "kernel_backend": "triton" if on_gpu else "auto",
            "kv_cache_memory_bytes": 16 * GIB if on_gpu else GIB // 4,
        }
        if not on_gpu:
            values["cuda_graphs"] = "off"
        return make_engine_config(defaults | values)


@dataclass(frozen=True)
class Section:
    """One claim about speed or memory, and how it is measured.

    Attributes:
        title: of its table.
        cases: measures one after the other; a run that is cut keeps those that it has.
        table: of the cases that there are.
    """

    title: str
    cases: Callable[[Bench], Iterator[Case]]
    table: Callable[[Sequence[Case]], Table]


def ratio(a: float | None, b: float | None, digits: int = 2) -> str:
    """``a / b`` for a table; empty where one of them was not measured, or nothing."""
    return "" if a is None or not b else f"{a / b:.{digits}f}"
