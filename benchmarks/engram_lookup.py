"""Rows of an Engram table read by a GPU out of host memory: microseconds and GB/s.

A table of a given size lies in registered host memory, in huge pages and then in small ones. Each
measurement is a CUDA graph of gathers of rows that change before every replay, so that no cache
knows them: medians over replays, a call's share of a graph. Beside them stand what such memory is
copied with, and the figures of kernels.md 18.9.

    python -m benchmarks.engram_lookup --json engram_lookup.json

needs a GPU and host memory for the table once, and ends within 100 s.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import environment, gpu_environment, print_table, write_json
from leadline.kernels.reference import engram as reference
from leadline.kernels.triton import engram
from leadline.weights.host_memory import GB, HostMemory

COLUMNS, CODES, SCALES = 24, 256, 8  # rows of a token; bytes of a row
ROW = CODES + SCALES
TOKENS = (1, 8, 64, 512, 4096, 16384)
PEER_US = {  # kernels.md 18.9: tokens -> as they come, sorted
    1: (3.07, None),
    8: (4.62, None),
    64: (15.8, None),
    512: (367.0, 314.0),
    4096: (3598.0, 1820.0),
    16384: (14356.0, 3139.0),
}
LAYOUT_CASES = ((8, False), (64, False), (512, False), (4096, False), (4096, True))
PROGRAM_CASES = ((64, False), (512, False), (4096, True), (16384, True))
PROGRAMS = (16, 32, 64, 128, 192, 256, None)
RECORDS = {"record of 264": 264, "record of 272": 272}  # codes and scales of a row side by side
_CALL_ROWS = 2 * 10**5  # of a graph, about
_MAX_CALLS = 64
_REPLAYS = 9
_PIECE = 64 * 2**20
_COPY = 2 * 2**30
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_SETTINGS = ("enabled", "shmem_enabled", "defrag")


@dataclass(frozen=True)
class Variant:
    """How a gather is launched.

    Attributes:
        tokens: T.
        is_sorted: rows are read in ascending order, sorting included.
        programs: of the launch at most.
        layout: of the table.
    """

    tokens: int
    is_sorted: bool
    programs: int | None
    layout: str = "as stored"


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    pages: str
    variant: Variant
    us: float
    gb_per_s: float
    of_copy_rate: float
    peer_us: float | None


def variants() -> Iterator[Variant]:
    """The important ones first."""
    default = engram._HOST_PROGRAMS
    for tokens in TOKENS:
        yield Variant(tokens, False, default)
        if tokens >= 64:
            yield Variant(tokens, True, default)
    for layout in RECORDS:
        for tokens, is_sorted in LAYOUT_CASES:
            yield Variant(tokens, is_sorted, default, layout)
    for programs in PROGRAMS:
        if programs != default:
            for tokens, is_sorted in PROGRAM_CASES:
                yield Variant(tokens, is_sorted, programs)


def fill(memory: HostMemory, rows: int, seed: int) -> None:
    """Random finite values as rows of codes and then of scales; a row's first codes number it."""
    block = np.random.default_rng(seed).integers(64, 127, _PIECE, dtype=np.uint8)
    codes = memory.bytes[: rows * CODES].reshape(rows, CODES)

    def fill_piece(start: int) -> None:
        piece = memory.bytes[start : start + _PIECE]
        np.copyto(piece, block[: len(piece)])
        first, end = start // CODES, min(rows, (start + _PIECE) // CODES)
        number = np.arange(first, end)
        for digit in range(6):
            codes[first:end, digit] = 64 + ((number >> 5 * digit) & 31)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill_piece, range(0, memory.nbytes, _PIECE)))


def tables(memory: HostMemory, rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales by layout; records take the same bytes for theirs."""
    everything = torch.from_numpy(memory.bytes)
    codes, scales = everything.split([rows * CODES, rows * SCALES])
    found = {"as stored": (codes.view(rows, CODES), scales.view(rows, SCALES))}
    for layout, width in RECORDS.items():
        count = len(everything) // width
        records = everything[: count * width].view(count, width)
        found[layout] = (records[:, :CODES], records[:, CODES:ROW])
    return found


def check(table: tuple[Tensor, Tensor]) -> None:
    """The kernel against its definition, at both ends and anywhere.

    Raises:
        AssertionError: the kernel is wrong.
    """
    last = len(table[0]) - 1
    rows = torch.cat((torch.tensor([-1, 0, last]), torch.randint(0, last, (3000,))))
    wanted = reference.gather_rows(*table, rows)
    for is_sorted in (False, True):
        actual = engram.gather(*table, rows.cuda(), is_sorted=is_sorted, max_programs=64)
        assert torch.equal(actual.cpu(), wanted), "a gathered row differs"


def microseconds(table: tuple[Tensor, Tensor], variant: Variant) -> float:
    """Median time of a call."""
    count = variant.tokens * COLUMNS
    calls = max(1, min(_MAX_CALLS, _CALL_ROWS // count))
    rows = torch.empty(calls, variant.tokens, COLUMNS, dtype=torch.int64, device="cuda")

    def gather(wanted: Tensor) -> Tensor:
        return engram.gather(
            *table, wanted, is_sorted=variant.is_sorted, max_programs=variant.programs
        )

    rows.random_(0, len(table[0]))
    gather(rows[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for wanted in rows:
            gather(wanted)
    times: list[float] = []
    for _ in range(_REPLAYS):
        rows.random_(0, len(table[0]))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times) / calls


def copy_rate(memory: HostMemory) -> float:
    """GB/s of copies of registered memory to the GPU."""
    source = torch.from_numpy(memory.bytes[:_COPY])
    target = torch.empty(len(source), dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return len(source) / GB / min(times)


def measure(
    nbytes: int, huge_pages: bool, folder: Path | None, seed: int, deadline: float
) -> tuple[dict[str, Any], list[Result]]:
    """One kind of pages: what the memory is like, and all variants that time allows."""
    pages, rows = "huge" if huge_pages else "small", nbytes // ROW
    file = None if folder is None else folder / f"engram_lookup-{os.getpid()}"
    started = time.perf_counter()
    memory = HostMemory(rows * ROW, file=file, huge_pages=huge_pages)
    if file is not None:
        file.unlink()  # its memory lives as long as it is mapped
    fill(memory, rows, seed)
    filled = time.perf_counter()
    if huge_pages:
        memory.collapse()
    collapsed = time.perf_counter()
    share = memory.huge_share()
    before = time.perf_counter()
    memory.register()
    registered = time.perf_counter()
    rate = copy_rate(memory)
    about: dict[str, Any] = {
        "pages": pages,
        "bytes": memory.nbytes,
        "fill_seconds": filled - started,
        "collapse_seconds": collapsed - filled,
        "register_seconds": registered - before,
        "huge_share": share,
        "is_pinned": torch.from_numpy(memory.bytes).is_pinned(),
        "copy_gb_per_s": rate,
        "skipped": 0,
    }
    print(about, flush=True)
    by_layout, results = tables(memory, rows), []
    for table in by_layout.values():
        check(table)
    for variant in variants():
        if time.perf_counter() > deadline:
            about["skipped"] += 1
            continue
        us = microseconds(by_layout[variant.layout], variant)
        speed = variant.tokens * COLUMNS * ROW / us / 1e3
        peer = PEER_US[variant.tokens][variant.is_sorted]
        results.append(Result(pages, variant, us, speed, speed / rate, peer))
    return about, results


def print_results(results: list[Result]) -> None:
    """A ratio above 1 says that ours is faster."""
    header = ["pages, layout", "T", "order", "programs", "us", "GB/s", "of copies", "peer/ours"]
    print_table(
        header,
        [
            [
                f"{r.pages}, {r.variant.layout}",
                str(r.variant.tokens),
                "sorted" if r.variant.is_sorted else "as they come",
                str(r.variant.programs or "all"),
                f"{r.us:.2f}",
                f"{r.gb_per_s:.1f}",
                f"{r.of_copy_rate:.0%}",
                f"{r.peer_us / r.us:.2f}" if r.peer_us else "",
            ]
            for r in results
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table-gb", type=float, default=32, metavar="N", help="size of the table")
    parser.add_argument("--folder", type=Path, help="of a shared memory file system; else private")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=80, help="measurements stop after these")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    memories, results = [], []
    for number, huge_pages in enumerate((True, False), 1):
        deadline = start + args.seconds * number / 2
        about, found = measure(
            int(args.table_gb * GB), huge_pages, args.folder, args.seed, deadline
        )
        memories.append(about)
        results += found
    print_results(results)
    settings = [file for file in _SYSTEM.glob("*") if file.name in _SETTINGS]
    write_json(
        args.json,
        {
            "environment": environment("v41-flash")
            | gpu_environment()
            | {
                "kernel": platform.release(),
                "huge_pages": {file.name: file.read_text().strip() for file in settings},
            },
            "memories": memories,
            "results": [asdict(result) for result in results],
        },
    )


if __name__ == "__main__":
    main()
