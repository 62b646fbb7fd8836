"""Every kernel at official sizes: right, how long, beside the machine's ceiling and its peers.

For each case of ``kernel_cases``: fresh inputs are computed by the kernel and by its definition and
compared; then calls are captured into a CUDA graph over copies of the inputs that no cache can hold
together, and replayed. Microseconds are medians over replays, a call's share of a graph.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, gpu_environment, print_table, write_json
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_cases.case import Case, Rate
from leadline.kernels import batch_invariance

_MAX_COPIES = 64
_ROTATION_BYTES = 3 * 60 * 10**6  # three times what an H200's L2 holds
_MAX_COPY_BYTES = 24 * 2**30
_CALLS = 200  # of a measurement, at least
_REPLAYS = 15


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches (kernels.md 18.1): bytes/s of a read, FLOP/s by unit."""

    read: float
    bf16: float
    fp8: float
    fp32: float

    def seconds(self, case: Case) -> float:
        """No kernel can be faster."""
        rates = {Rate.BF16: self.bf16, Rate.FP8: self.fp8, Rate.FP32: self.fp32}
        return max(case.bytes / self.read, case.flops / rates[case.rate])


@dataclass(frozen=True)
class Result:
    """A line of the table; times in microseconds."""

    kernel: str
    op: str
    shape: str
    error: float
    us: float
    roof_us: float
    target_us: float | None
    target_share: float | None
    unfused_us: float | None
    peers: dict[str, float]

    @property
    def share(self) -> float:
        """Of the ceiling."""
        return self.roof_us / self.us


def measure_ceilings(device: torch.device) -> Ceilings:
    """Some seconds: a sum over 4 GiB, large matrix products."""
    data = torch.empty(2**30, device=device, dtype=torch.float32).normal_()
    read = data.nbytes / _seconds(data.sum, calls=10)
    side = 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * side**3 / _seconds(lambda: a @ b.T, calls=10)
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device=device)
    fp8 = (
        2
        * side**3
        / _seconds(lambda: torch._scaled_mm(a8, b8.T, one, one, out_dtype=torch.bfloat16), calls=10)
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = a.float()[:4096, :4096].contiguous(), b.float()[:4096, :4096].contiguous()
    fp32 = 2 * 4096**3 / _seconds(lambda: a @ b.T, calls=10)
    return Ceilings(read, bf16, fp8, fp32)


def _seconds(call: Callable[[], Any], *, calls: int) -> float:
    return min(_graph_seconds([call] * calls)) / calls


def _graph_seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """All calls in one graph, replayed: seconds of each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, tunes, and grows the pools of libraries
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def fresh(case: Case, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Arguments of a seed: the same again for the same seed."""
    torch.manual_seed(seed)
    return case.make(device)


def error_of(case: Case, device: torch.device, seed: int) -> float:
    """The kernel against its definition, each on inputs of its own.

    Raises:
        AssertionError: the kernel is wrong.
    """
    return case.check(case.fused(*fresh(case, device, seed)), case.twin(*fresh(case, device, seed)))


def microseconds(
    function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int
) -> float:
    """Median time of a call, in graphs of ``calls`` over the inputs in turn."""
    chain = [functools.partial(function, *inputs[i % len(inputs)]) for i in range(calls)]
    return statistics.median(_graph_seconds(chain)) / calls * 1e6


def measure(case: Case, device: torch.device, ceilings: Ceilings, seed: int) -> Result:
    """Check a case, then time it.

    Raises:
        AssertionError: the kernel is wrong.
    """
    error = error_of(case, device, seed)
    first = fresh(case, device, seed)
    size = max(sum(tensor.nbytes for tensor in _tensors(first)), 1)
    read = min(size, max(int(case.bytes), 1))  # a call may need some experts of many
    copies = min(_MAX_COPIES, 1 + _ROTATION_BYTES // read, max(1, _MAX_COPY_BYTES // size))
    inputs = [first, *(fresh(case, device, seed + 1 + i) for i in range(copies - 1))]
    us = microseconds(case.fused, inputs, _CALLS)
    unfused_us = None
    if case.unfused is not None:
        unfused_us = microseconds(case.unfused, inputs, max(copies, 10))
    return Result(
        kernel=case.kernel,
        op=case.op,
        shape=case.shape,
        error=error,
        us=us,
        roof_us=ceilings.seconds(case) * 1e6,
        target_us=case.target_us,
        target_share=case.target_share,
        unfused_us=unfused_us,
        peers=dict(case.peers),
    )


def print_results(results: Sequence[Result]) -> None:
    """One row a case; a ratio above 1 says that ours is faster."""
    header = ["op", "shape", "us", "% of ceiling", "target", "unfused/ours", "peer/ours", "error"]
    rows = []
    for r in results:
        peers = [f"{us / r.us:.2f} {name}" for name, us in r.peers.items()]
        target = f"{r.target_us:.1f} us" if r.target_us else ""
        target = f"{r.target_share:.0%}" if r.target_share else target
        unfused = f"{r.unfused_us / r.us:.2f}" if r.unfused_us else ""
        share = f"{r.share:.0%}"
        cells = [r.shape, f"{r.us:.2f}", share, target, unfused, ", ".join(peers)]
        rows.append([r.op, *cells, f"{r.error:.1e}"])
    print_table(header, rows)


def main() -> int:
    """Returns how many cases failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="cases by name: 'route*'"
    )
    parser.add_argument("--check", action="store_true", help="compare only, time nothing")
    parser.add_argument("--show", type=Path, metavar="PATH", help="print such a file, run nothing")
    parser.add_argument("--batch-invariant", action="store_true", help="measure in that mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if args.show is not None:
        print_results([Result(**found) for found in json.loads(args.show.read_text())["results"]])
        return 0
    batch_invariance.switch.enabled = args.batch_invariant
    device = torch.device("cuda")
    cases = [c for c in CASES if any(fnmatch.fnmatch(c.name, only) for only in args.only)]
    ceilings = None if args.check else measure_ceilings(device)
    results: list[Result] = []
    failures: dict[str, str] = {}
    found = {"environment": environment("v41-flash") | gpu_environment()}
    for case in cases:
        try:
            if ceilings is None:
                print(f"{case.name}: {error_of(case, device, args.seed):.1e}", flush=True)
            else:
                results.append(measure(case, device, ceilings, args.seed))
                line = results[-1]
                print(f"{case.name}: {line.us:.2f} us, {line.share:.0%}", flush=True)
        except Exception as error:  # the others go on; the exit status tells
            failures[case.name] = f"{type(error).__name__}: {error}"
            print(f"{case.name}: FAILED, {failures[case.name]}", flush=True)
        # After each, so that a run which is cut loses one.
        write_json(
            args.json,
            found
            | {
                "ceilings": ceilings and asdict(ceilings),
                "results": [asdict(result) for result in results],
                "failures": failures,
            },
        )
        gc.collect()
        torch.cuda.empty_cache()
    print_results(results)
    return len(failures)


if __name__ == "__main__":
    raise SystemExit(main())
