"""What the scripts share: options, prompts, an engine in steady decode, records and tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from leadline.bench import workload
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine

PRESET = "tiny-22m"
# 1,024 ids: a small file that does not change, for what needs some text.
TOKENIZER_FILE = Path(__file__).parents[1] / "tests/fixtures/random_tiny/tokenizer.json"


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--quick", action="store_true", help="smoke run: its numbers mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    return parser


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Seeded token ids above the markers: ``count`` prompts of ``length``."""
    return workload.random_prompts(count, length, vocab_size, f"{count} {length}")


class Decoding:
    """Greedy requests of an engine, every one past its prefill.

    Attributes:
        tokens: request id -> its tokens so far.
    """

    def __init__(
        self, engine: Engine, prompts: Iterable[Sequence[int]], *, max_tokens: int
    ) -> None:
        """Prefill the prompts; none may end while it is measured (``max_tokens``)."""
        self._engine = engine
        self.tokens: dict[str, list[int]] = {}
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.tokens[str(number)] = []
            engine.add(EngineRequest(str(number), tuple(prompt), sampling))
        while not all(self.tokens.values()):
            self.step()

    def step(self) -> None:
        """One token more for every request."""
        for output in self._engine.step():
            self.tokens[output.request_id] += output.token_ids

    def stop(self) -> None:
        """Leave the engine empty."""
        for name in self.tokens:
            self._engine.abort(name)
        self._engine.step()


def summary(runs: Sequence[float]) -> dict[str, Any]:
    """Median and spread, beside every run."""
    return {
        "median": statistics.median(runs),
        "min": min(runs),
        "max": max(runs),
        "runs": list(runs),
    }


def environment(preset: str = PRESET) -> dict[str, Any]:
    """What a reader needs to repeat a measurement: command, commit, machine, versions."""
    here = shlex.quote(str(Path(__file__).parent))
    status, commit = subprocess.getstatusoutput(
        f"git -C {here} describe --always --dirty --abbrev=12 --exclude='*'"
    )
    return {
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": "unknown" if status else commit,  # an unpacked archive has none
        "device": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "preset": preset,
        "dtype": "float32",
    }


def gpu_environment() -> dict[str, Any]:
    """What a GPU changes of ``environment``; nothing without one."""
    if not torch.cuda.is_available():
        return {}
    return {
        "device": torch.cuda.get_device_name(),
        "dtype": "bfloat16",
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton"),
    }


@contextlib.contextmanager
def watched_gpu() -> Iterator[dict[str, float]]:
    """What nvidia-smi read last of clock and power, in the dict once the block has ended.

    A GPU that draws all it may lowers its clock: the same kernels take longer on one machine than
    on another. Nothing is found without nvidia-smi, or in a block of less than its first reading.
    """
    found: dict[str, float] = {}
    query = ["--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        smi = subprocess.Popen(
            ["nvidia-smi", *query, "--loop-ms=100"], stdout=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        yield found
        return
    try:
        yield found
    finally:
        smi.terminate()
        output, _ = smi.communicate()
    found |= last_reading(output)


def last_reading(output: str) -> dict[str, float]:
    """Of lines ``MHz, W``, the last whole one's numbers."""
    for line in reversed(output.split("\n")[:-1]):
        if (match := re.fullmatch(r"(\d+), (\d+\.?\d*)", line)) is not None:
            return {"mhz": float(match[1]), "watts": float(match[2])}
    return {}


def _command() -> str:
    """How the script was called, from the repository's root."""
    script, *options = sys.argv
    name = Path(script).stem
    is_module = sys.modules["__main__"].__spec__ is not None
    called = ["-m", f"benchmarks.{name}"] if is_module else [f"benchmarks/{name}.py"]
    return shlex.join(["python", *called, *options])


def cpu_name() -> str:
    """The processor as Linux names it, or what Python knows elsewhere."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result file, where one is wanted."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A Markdown table: names to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for line in (header, rule, *rows):
        first, *numbers = line
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        print(f"| {' | '.join(cells)} |")
    print()
