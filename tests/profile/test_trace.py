"""What traces say of the device's work, on traces small enough to be written down."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from leadline.profile.roofline import ATTENTION, COMPONENTS, ENGRAM, ROUTER
from leadline.profile.trace import OTHER, WHOLE, Work, device_time, load, parse, range_name, taught


def event(kind: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, number: int, name: str = "cuLaunchKernelEx") -> dict[str, Any]:
    return event("cuda_driver", name, ts, 1, correlation=number)


EVENTS = [
    {"ph": "M", "name": "process_name", "args": {}},
    event("user_annotation", range_name(ROUTER, "route"), 100, 10),
    event("user_annotation", WHOLE, 90, 100),
    launch(105, 1),
    event("user_annotation", range_name(ATTENTION, "sparse_attention"), 120, 10),
    launch(121, 2, "cudaLaunchKernel"),
    launch(129, 3, "cudaMemcpyAsync"),
    launch(140, 4),  # between ops
    launch(150, 5, "cudaGraphLaunch"),
    event("cuda_runtime", "cudaDeviceSynchronize", 160, 100, correlation=6),
    event("kernel", "_route", 200, 5, correlation=1),
    event("kernel", "_attend", 210, 20, correlation=2),
    event("gpu_memcpy", "Memcpy HtoD", 235, 1, correlation=3),
    event("kernel", "copy", 240, 2, correlation=4),
    event("kernel", "_route", 250, 6, correlation=5),
    event("kernel", "_attend", 256, 21, correlation=5),
    event("kernel", "nobody's", 280, 1),
]


def test_work_belongs_to_the_op_that_launched_it() -> None:
    trace = parse(EVENTS)
    assert [piece.component for piece in trace.work] == [
        ROUTER, ATTENTION, ATTENTION, None, None, None, None,
    ]  # fmt: skip
    assert trace.ops == dict.fromkeys(COMPONENTS, 0) | {ROUTER: 10, ATTENTION: 10}
    assert trace.whole == 100
    assert trace.launches == 5


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_files_are_read_packed_or_not(name: str, tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert load(tmp_path / name) == parse(EVENTS)


def pieces(*named: tuple[str, str | None]) -> list[Work]:
    return [Work(name, i, i + 1, component) for i, (name, component) in enumerate(named)]


def components(work: tuple[Work, ...]) -> list[str | None]:
    return [piece.component for piece in work]


def test_a_graph_learns_from_the_order_of_equal_names() -> None:
    """A product's kernel is of several components: only its place tells of which."""
    teacher = pieces(("mm", ROUTER), ("a", ATTENTION), ("mm", ATTENTION), ("copy", None))
    graph = pieces(("mm", None), ("a", None), ("mm", None), ("copy", None), ("new", None))
    assert components(taught(graph, teacher)) == [ROUTER, ATTENTION, ATTENTION, None, None]


def test_where_numbers_differ_only_unambiguous_names_teach() -> None:
    teacher = pieces(("mm", ROUTER), ("mm", ATTENTION), ("a", ATTENTION))
    graph = pieces(("mm", None), ("a", None), ("a", None))
    assert components(taught(graph, teacher)) == [None, ATTENTION, ATTENTION]


def test_what_is_known_stays() -> None:
    assert components(taught(pieces(("a", ROUTER)), pieces(("a", ATTENTION)))) == [ROUTER]


def test_most_work_tells_which_stream_is_the_main_one() -> None:
    kernels = [event("kernel", "k", i, 1, correlation=i, stream=7 + (i == 2)) for i in range(4)]
    assert [piece.beside for piece in parse(kernels).work] == [False, False, True, False]


def test_work_beside_counts_where_nothing_else_runs() -> None:
    work = [
        Work("gather", 0, 30, ENGRAM, beside=True),
        Work("a", 2, 10, ROUTER),
        Work("b", 12, 20, ATTENTION),
        Work("second", 25, 40, ENGRAM, beside=True),
        Work("c", 35, 50, ROUTER),
    ]
    spent = device_time(work)
    assert (spent[ROUTER], spent[ATTENTION]) == (23, 8)
    assert spent[ENGRAM] == 2 + 2 + 10 + 5
    assert sum(spent.values()) == 50


def test_no_moment_of_the_device_counts_twice() -> None:
    work = [
        Work("long", 0, 10, ROUTER),
        Work("comes up early", 4, 15, ATTENTION),
        Work("beside it", 11, 14, ROUTER),
        Work("after a pause", 20, 22, None),
    ]
    spent = device_time(work)
    assert spent[ROUTER] == 10
    assert spent[ATTENTION] == 5
    assert spent[OTHER] == 2
    assert tuple(spent) == (*COMPONENTS, OTHER)
