"""One profile: the same steps timed, then traced, then once more with ops that can be told apart.

A graph's kernels are launched by nobody in particular, so where steps run as graphs they are traced
a second time as the calls which the graphs were captured from.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from leadline.engine.engine import Engine
from leadline.kernels.observe import observed
from leadline.profile.bypass import GraphBypass
from leadline.profile.components import component_of
from leadline.profile.roofline import COMPONENTS, MICROSECONDS
from leadline.profile.steps import Steps
from leadline.profile.trace import OTHER, WHOLE, Trace, device_time, load, range_name, taught

logger = logging.getLogger(__name__)

# Long enough for the host to launch an op meanwhile: some 300 us.
_CYCLES_AHEAD = 500_000


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step takes: microseconds and counts, each of one step.

    Attributes:
        unit: what a step is.
        wall: without any tracing.
        host: of the host in that, by the engine's parts; drawing tokens waits for the device.
        components: by ``COMPONENTS``, and ``OTHER`` for what no op did.
        source: where these come from.
        busy: of the device; None where that is the host.
        pieces: kernels and copies that it ran, where a trace knows.
        launches: calls of the host that launched these, likewise.
    """

    unit: str
    wall: float
    host: Mapping[str, float]
    components: Mapping[str, float]
    source: str
    busy: float | None = None
    pieces: float | None = None
    launches: float | None = None


def measure(
    engine: Engine,
    steps: Steps,
    bypass: GraphBypass,
    device: torch.device,
    *,
    warmup: int,
    count: int,
    file: Path | None = None,
) -> Profile:
    """Profile ``count`` steps.

    Args:
        engine: that ``steps`` run in, built with ``bypass`` as its capture.
        steps: at least ``warmup + 3 * count`` of them.
        bypass: of the engine's graphs.
        device: of the engine.
        warmup: steps before, which compile and tune.
        count: steps of each pass.
        file: for the trace of the steps as they run, ``.json`` or ``.json.gz``.
    """
    steps.run(warmup)
    _finish(device)
    before, start = dict(engine.metrics.step_seconds), time.perf_counter()
    steps.run(count)
    _finish(device)
    per_step = MICROSECONDS / count
    wall = (time.perf_counter() - start) * per_step
    after = engine.metrics.step_seconds
    host = {part: (after[part] - before[part]) * per_step for part in before}
    trace = _traced(steps, count, device, file)
    if device.type == "cpu":
        components = {name: trace.ops[name] / count for name in COMPONENTS}
        components[OTHER] = trace.whole / count - sum(components.values())
        return Profile(steps.unit, wall, host, components, "the host's clock, while traced")
    if not trace.work:
        logger.warning(
            "the profiler saw no kernels (CUPTI is missing, or not allowed to look): ops are timed "
            "between events instead, one by one, and a trace shows the host only"
        )
        with bypass.without_graphs():
            components = _between_events(steps, count, device)
        busy = sum(components.values())
        return Profile(steps.unit, wall, host, components, "events around ops", busy)
    work = trace.work
    if bypass.has_graphs:
        with bypass.without_graphs():
            work = taught(work, _traced(steps, count, device).work)
    components = {name: us / count for name, us in device_time(work).items()}
    return Profile(
        steps.unit,
        wall,
        host,
        components,
        "the device's trace",
        busy=sum(components.values()),
        pieces=len(work) / count,
        launches=trace.launches / count,
    )


def _traced(steps: Steps, count: int, device: torch.device, file: Path | None = None) -> Trace:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profiler,
        observed(_range),
        torch.profiler.record_function(WHOLE),
    ):
        steps.run(count)
        _finish(device)
    with tempfile.TemporaryDirectory() as folder:
        file = file or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return load(file)


def _range(op: str, caller: str) -> AbstractContextManager[object]:
    return torch.profiler.record_function(range_name(component_of(op, caller), op))


def _between_events(steps: Steps, count: int, device: torch.device) -> dict[str, float]:
    """Microseconds of the device inside ops, by component."""
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def between(op: str, caller: str) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_CYCLES_AHEAD)  # or it would be the host's launches that are timed
        start.record()
        yield
        end.record()
        events.append((component_of(op, caller), start, end))

    with observed(between):
        steps.run(count)
    _finish(device)
    spent: Counter[str] = Counter()
    for component, start, end in events:
        spent[component] += 1e3 * start.elapsed_time(end)
    return {name: spent[name] / count for name in COMPONENTS}


def _finish(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()
