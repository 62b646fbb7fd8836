"""The parts without torch start without it, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "leadline",
        "leadline.async_llm",
        "leadline.cache.manager",
        "leadline.cli",
        "leadline.config.presets",
        "leadline.engine.async_engine",
        "leadline.engine.scheduler",
        "leadline.serving.app",
        "leadline.text.output_parser",
    ],
)
def test_module_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
