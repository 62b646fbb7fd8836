"""Which passes a profile is made of; a device and its traces are made up here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from leadline.engine.engine import Engine
from leadline.engine.forwards import Replay
from leadline.profile import measure as measuring
from leadline.profile.bypass import GraphBypass
from leadline.profile.measure import Profile, measure
from leadline.profile.roofline import ATTENTION, COMPONENTS, HEAD, ROUTER
from leadline.profile.trace import OTHER, Trace, Work

GPU = torch.device("cuda")
OP_BY_OP = (
    Work("mm", 0, 5, ROUTER),
    Work("mm", 10, 16, ATTENTION),
    Work("copy", 20, 21, None),
    Work("mm", 30, 37, HEAD),
)


class Recorder:
    """Captures by remembering; notes what is replayed and what runs."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, run: Callable[[], None]) -> Replay:
        return lambda: self.calls.append("replay")


class Device:
    """Steps that replay a graph, and the traces of them."""

    unit = "step"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, graphs: bool, sees: bool) -> None:
        self.recorder = Recorder()
        self.calls, self._sees = self.recorder.calls, sees
        self.bypass = GraphBypass(lambda: self.recorder)
        run: Replay = lambda: self.calls.append("run")  # noqa: E731
        self.forward = self.bypass(run) if graphs else run
        monkeypatch.setattr(measuring, "_finish", lambda device: None)
        monkeypatch.setattr(measuring, "_traced", self._traced)
        monkeypatch.setattr(measuring, "_between_events", self._between_events)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.forward()

    def _traced(self, steps: Any, count: int, device: Any, file: Any = None) -> Trace:
        start = len(self.calls)
        self.run(count)
        *work, head = OP_BY_OP
        if "replay" in self.calls[start:]:  # the head lies outside of the graph
            work = [replace(piece, component=None) for piece in work]
        seen = (*work, head) if self._sees else ()
        return Trace(seen, dict.fromkeys(COMPONENTS, 0.0), whole=50, launches=6)

    def _between_events(self, steps: Any, count: int, device: Any) -> dict[str, float]:
        self.run(count)
        return dict.fromkeys(COMPONENTS, 2.0)

    def profile(self) -> Profile:
        engine = SimpleNamespace(metrics=SimpleNamespace(step_seconds={"forward": 0.0}))
        return measure(cast(Engine, engine), self, self.bypass, GPU, warmup=1, count=2)


def test_graphs_learn_from_a_pass_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, graphs=True, sees=True)
    found = device.profile()
    assert device.calls == ["replay"] * 5 + ["run"] * 2
    spent = {name: us for name, us in found.components.items() if us}
    assert spent == {ROUTER: 2.5, ATTENTION: 3, OTHER: 0.5, HEAD: 3.5}
    assert found.busy == sum(spent.values())
    assert (found.pieces, found.launches) == (2, 3)
    assert found.source == "the device's trace"


def test_without_graphs_one_trace_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, graphs=False, sees=True)
    found = device.profile()
    assert device.calls == ["run"] * 5
    assert found.components[ATTENTION] == 3


def test_events_stand_in_for_a_trace_that_saw_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(monkeypatch, graphs=True, sees=False)
    found = device.profile()
    assert device.calls == ["replay"] * 5 + ["run"] * 2
    assert "the profiler saw no kernels (CUPTI is missing" in caplog.text
    assert found.source == "events around ops"
    assert found.busy == 2 * len(COMPONENTS)
    assert found.pieces is found.launches is None


def test_graphs_are_back_after_a_bypass() -> None:
    recorder = Recorder()
    bypass = GraphBypass(lambda: recorder)
    assert not bypass.has_graphs
    launch = bypass(lambda: recorder.calls.append("run"))
    assert bypass.has_graphs
    with bypass.without_graphs():
        launch()
    launch()
    assert recorder.calls == ["run", "replay"]
