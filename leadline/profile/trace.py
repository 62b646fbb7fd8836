"""What a trace of ``torch.profiler`` says: which component each piece of a device's work is of.

Ops leave ranges named ``component: op`` on the host's timeline. Work that an op launched carries
the number of that launch, which lies inside the op's range. Work of a replayed graph was launched
by nobody in particular: what it is of is learnt from a trace of the same calls made one by one,
where kernels of one name come in the same order.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leadline.profile.roofline import COMPONENTS

OTHER = "other"
WHOLE = "steps"
"""The range around all that is traced."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
# Calls that give a device something to do, by how their names begin.
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or copy that a device ran; microseconds on the trace's clock.

    Attributes:
        component: None where it is not known.
        beside: it ran on another stream than most.
    """

    name: str
    start: float
    end: float
    component: str | None
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced stretch.

    Attributes:
        work: of the device, by its start.
        ops: microseconds of the host inside ops, by each of ``COMPONENTS``.
        whole: microseconds of the host in ``WHOLE``.
        launches: calls of the host that gave the device work.
    """

    work: tuple[Work, ...]
    ops: Mapping[str, float]
    whole: float
    launches: int


def range_name(component: str, op: str) -> str:
    """What the range of an op is called."""
    return f"{component}: {op}"


def load(file: Path) -> Trace:
    """Read a Chrome trace, ``.json`` or ``.json.gz``."""
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return parse(json.loads(text)["traceEvents"])


def parse(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Make sense of the events of a trace."""
    by_kind: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(event)
    named = by_kind["user_annotation"]
    ranges = _Ranges(named)
    calls = [event for kind in _CALLS for event in by_kind[kind]]
    launched = {event["args"].get("correlation"): event["ts"] for event in calls}
    pieces = [event for kind in _DEVICE for event in by_kind[kind]]
    streams = Counter(event["args"].get("stream") for event in pieces).most_common(1)
    work = []
    for event in pieces:
        launch = launched.get(event["args"].get("correlation"))
        work.append(
            Work(
                event["name"],
                event["ts"],
                event["ts"] + event["dur"],
                component=None if launch is None else ranges.at(launch),
                beside=event["args"].get("stream") != streams[0][0],
            )
        )
    return Trace(
        work=tuple(sorted(work, key=lambda piece: piece.start)),
        ops=ranges.totals,
        whole=sum(event["dur"] for event in named if event["name"] == WHOLE),
        launches=sum(event["name"].startswith(_LAUNCHES) for event in calls),
    )


class _Ranges:
    """Ranges of ops, none of which overlap."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.totals = dict.fromkeys(COMPONENTS, 0.0)
        self._ranges: list[tuple[float, float, str]] = []
        for event in sorted(events, key=lambda event: event["ts"]):
            component = event["name"].partition(": ")[0]
            if component in COMPONENTS:
                self._ranges.append((event["ts"], event["ts"] + event["dur"], component))
                self.totals[component] += event["dur"]

    def at(self, time: float) -> str | None:
        place = bisect_right(self._ranges, time, key=lambda found: found[0]) - 1
        if place < 0 or time > self._ranges[place][1]:
            return None
        return self._ranges[place][2]


def taught(work: Sequence[Work], teacher: Sequence[Work]) -> tuple[Work, ...]:
    """Fill in unknown components from a trace of the same steps, launched op by op.

    The k-th piece of a name is what the k-th of that name is there. Where their numbers differ,
    only names that are of one component throughout teach anything.
    """
    known: defaultdict[str, list[tuple[str | None, bool]]] = defaultdict(list)
    for piece in teacher:
        known[piece.name].append((piece.component, piece.beside))
    counts = Counter(piece.name for piece in work)
    seen: Counter[str] = Counter()
    found = []
    for piece in work:
        labels, number = known[piece.name], seen[piece.name]
        seen[piece.name] += 1
        if piece.component is None and len(labels) == counts[piece.name]:
            component, beside = labels[number]
            piece = replace(piece, component=component, beside=beside)
        elif piece.component is None and len(set(labels)) == 1:
            component, beside = labels[0]
            piece = replace(piece, component=component, beside=beside)
        found.append(piece)
    return tuple(found)


def device_time(work: Sequence[Work]) -> dict[str, float]:
    """Microseconds in which the device worked, by component; what is of none is ``OTHER``.

    No moment counts twice. It is that of the work which began first, so that kernels which come up
    early, and wait, are counted from the end of those before. What runs on a stream beside counts
    where nothing else runs: it is what a step takes longer for its sake.
    """
    spent = dict.fromkeys((*COMPONENTS, OTHER), 0.0)
    busy: list[tuple[float, float]] = []
    for beside in (False, True):
        free_from, taken = -math.inf, []
        for piece in work:
            begin = max(piece.start, free_from)
            if piece.beside is beside and piece.end > begin:
                exposed = piece.end - begin - _covered(busy, begin, piece.end)
                spent[piece.component or OTHER] += exposed
                free_from = piece.end
                taken.append((begin, piece.end))
        busy = taken
    return spent


def _covered(busy: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of a time lies within intervals, which ascend and do not overlap."""
    first = bisect_right(busy, begin, key=lambda interval: interval[1])
    inside = itertools.takewhile(lambda interval: interval[0] < end, busy[first:])
    return sum(min(stop, end) - max(start, begin) for start, stop in inside)
