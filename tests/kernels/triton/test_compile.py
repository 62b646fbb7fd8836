"""Kernels compile for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_a_case_of_every_op_compiles(arch: int) -> None:
    """All configs of it, within shared memory: where kernels.md wants to run, and where first."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    command = [sys.executable, "scripts/compile_kernels.py", "--arch", str(arch), "--one-per-op"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert done.returncode == 0, "\n".join([*failed, done.stderr])
