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
@pytest.mark.parametrize(
    ("arch", "cases"),
    [
        ("80", ["--one-per-op"]),
        ("90", ["--one-per-op"]),
        ("90", ["--only", "routed_experts?EP4,W4A8,T=*"]),
    ],
    ids=str,
)
def test_cases_compile(arch: str, cases: list[str]) -> None:
    """All configs of a case of every op, within shared memory: where kernels.md wants to run, and
    where first; and what needs FP8 tensor cores.
    """
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    command = [sys.executable, "scripts/compile_kernels.py", "--arch", arch, *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert done.returncode == 0, "\n".join([*failed, done.stderr])
