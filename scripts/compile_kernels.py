"""Compile every kernel of ``benchmarks/kernel_cases`` for a GPU that need not be here.

``python scripts/compile_kernels.py --arch 90 --only 'route*'`` runs the kernels' own launch code on
a CPU, each launch ending in a compilation with all of its tuning configs, and prints their needs.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
import tempfile
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

# A block of an H100 or H200 may take 227 KB of shared memory.
MAX_SHARED = {90: 232448, 80: 166912, 89: 101376}


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
def compiling(arch: int, seen: dict[str, Any]) -> Iterator[None]:
    """Inside, launches compile for ``arch`` and run nothing; ``seen`` gets every kernel."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seen[f"{self.__name__}-{kernel.hash[:8]}"] = kernel
        return kernel

    def compile_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    triton.runtime.driver.set_active(_Driver(arch))
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(Autotuner, "run", compile_all),
        patch.object(torch, "bmm"),  # a prompt's worth of arithmetic
    ):
        yield


def resources(kernel: Any) -> str:
    """Registers and spills of a compiled kernel, as ``cuobjdump`` tells them."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return f"{found[1]} registers, {found[2]} B stack" if found else "?"


def main() -> int:
    """Returns how many cases failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, such as 90")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name: 'route*'")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.kernel_cases import CASES

    failures = 0
    told: set[str] = set()
    for case in CASES:
        if not fnmatch.fnmatch(case.name, args.only):
            continue
        seen: dict[str, Any] = {}
        try:
            with compiling(args.arch, seen):
                case.fused(*case.make(torch.device("cpu")))
        except Exception as error:
            failures += 1
            print(f"{case.name}: FAILED, {type(error).__name__}: {error}", flush=True)
        for name, kernel in seen.items():
            if name in told:
                continue
            told.add(name)
            shared = kernel.metadata.shared
            line = f"{case.name}: {name}: {kernel.metadata.num_warps} warps, {resources(kernel)}"
            print(f"{line}, {shared} B shared", flush=True)
            if shared > MAX_SHARED.get(args.arch, shared):
                failures += 1
                print(f"{case.name}: FAILED, {name} takes too much shared memory", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
