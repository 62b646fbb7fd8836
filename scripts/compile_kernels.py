"""Compile every kernel of ``benchmarks/kernel_cases`` for a GPU that need not be here.

``python scripts/compile_kernels.py --arch 90 --only 'route*'`` runs the kernels' own launch code on
a CPU, each launch ending in a compilation with all of its tuning configs, and prints their needs.
A launch none of whose configs fits in shared memory fails; the tuner passes over single ones.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
import tempfile
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kernel_cases import CASES
from benchmarks.kernel_cases.case import Case

# A block of an H100 or H200 may take 227 KB of shared memory.
MAX_SHARED = {90: 232448, 80: 166912, 89: 101376}

# The stack pointer as a number of 16 bits, or as codes that others are merged with. ptxas 12.8 puts
# it where it loses the codes that ``formats.ENCODE_E4M3`` tells of.
_LOST_VALUE = re.compile(
    r"LOP3\S* R\d+, R1(\.reuse)?, 0xffff,|PACK_AB_MERGE_C R\d+, \S+, \S+, R1(\.reuse)? "
)


class _Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int, launches: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, launches compile for ``arch`` and run nothing; ``launches`` gets their kernels."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append({f"{self.__name__}-{kernel.hash[:8]}": kernel})
        return kernel

    def compile_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(launches)
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        launches[before:] = [dict(ChainMap(*launches[before:]))]

    triton.runtime.driver.set_active(_Driver(arch))
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(Autotuner, "run", compile_all),
        patch.object(torch, "bmm"),  # a prompt's worth of arithmetic
    ):
        yield


def _tool(path: str, kernel: Any, *options: str) -> str:
    """What a tool of NVIDIA's says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(kernel: Any) -> str:
    """Registers, spills and shared memory of a compiled kernel."""
    text = _tool(triton.knobs.nvidia.cuobjdump.path, kernel, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    usage = f"{found[1]} registers, {found[2]} B stack" if found else "?"
    return f"{kernel.metadata.num_warps} warps, {usage}, {kernel.metadata.shared} B shared"


def is_miscompiled(kernel: Any) -> bool:
    """Whether the assembler lost a value."""
    return bool(_LOST_VALUE.search(_tool(triton.knobs.nvidia.nvdisasm.path, kernel, "-c")))


def check(case: Case, arch: int, told: set[str]) -> int:
    """Compile a case, print its kernels that are not in ``told``, and return its failures."""
    launches: list[dict[str, Any]] = []
    failures = []
    try:
        with compiling(arch, launches):
            case.fused(*case.make(torch.device("cpu")))
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}")
    for launch in launches:
        for name in launch.keys() - told:
            print(f"{case.name}: {name}: {resources(launch[name])}", flush=True)
            if is_miscompiled(launch[name]):
                failures.append(f"{name} reads a value that the assembler lost")
        least = min(kernel.metadata.shared for kernel in launch.values())
        if least > MAX_SHARED.get(arch, least):
            failures.append(f"{', '.join(launch)}: too much shared memory")
        told.update(launch)
    for failure in failures:
        print(f"{case.name}: FAILED, {failure}", flush=True)
    return len(failures)


def main() -> int:
    """Returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, such as 90")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name: 'route*'")
    parser.add_argument("--one-per-op", action="store_true", help="only the first case of each op")
    args = parser.parse_args()
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, args.only)]
    if args.one_per_op:
        cases = list({case.op: case for case in reversed(cases)}.values())
    told: set[str] = set()
    return min(1, sum([check(case, args.arch, told) for case in cases]))


if __name__ == "__main__":
    raise SystemExit(main())
