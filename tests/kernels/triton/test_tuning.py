"""A kernel runs with the config that is known of the GPU, and is measured only without one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

import leadline.kernels.triton  # noqa: F401 (makes all tuners)
from leadline.kernels import tunings
from leadline.kernels.triton.launch import TUNERS
from leadline.kernels.triton.tuning import Tuner, bench

ROOT = Path(__file__).parents[3]
KEY = (16, "torch.int32")


@triton.jit(do_not_specialize=["size"])
def _tell(out, size, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)


class Launches:
    """A tuner of ``_tell``, on a GPU that is called Toy."""

    def __init__(self, device: torch.device) -> None:
        configs = [triton.Config({"BLOCK": block}) for block in (1, 2, 3)]
        self.tuner = Tuner(_tell, configs, ["size"])
        self.tuner.cache_results = True  # which the interpreter does not need
        self.out = torch.zeros(1, dtype=torch.int32, device=device)
        self.searched: list[Any] = []

    def block(self, size: int = 16) -> int:
        """The config of a launch."""
        self.tuner[(1,)](self.out, size)
        return int(self.out)

    def know(self, path: Path, block: int, *, key: tuple[Any, ...] = KEY, **other: Any) -> None:
        """Write a file with one choice."""
        config = triton.Config({"BLOCK": block}, **other).all_kwargs()
        tunings.write(path, {(self.tuner.name, key): config})


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tunings, "DIRECTORY", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Toy GPU")
    tunings.shipped.cache_clear()
    yield tmp_path
    tunings.shipped.cache_clear()


@pytest.fixture
def launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Triton's search finds the first config, and is noted."""
    made = Launches(device)

    def search(self: Any, key: Any, configs: Any, measure: Any) -> bool:
        made.searched.append(key)
        self.cache[key] = configs[0]
        return True

    monkeypatch.setattr(Autotuner, "check_disk_cache", search)
    return made


def test_a_known_config_runs_and_nothing_is_searched(directory: Path, launches: Launches) -> None:
    launches.know(directory / "Toy_GPU.json", block=3)
    assert launches.block() == 3
    assert not launches.searched


@pytest.mark.parametrize(
    ("file", "choice"),
    [
        (None, {"block": 3}),
        ("Toy_GPU_2.json", {"block": 3}),
        ("Toy_GPU.json", {"block": 4}),
        ("Toy_GPU.json", {"block": 3, "num_warps": 8}),
        ("Toy_GPU.json", {"block": 3, "key": (32, "torch.int32")}),
        ("Toy_GPU.json", {"block": 3, "key": (16, "torch.int64")}),
    ],
    ids=["no file", "other GPU", "no such block", "other warps", "other size", "other dtype"],
)
def test_a_config_that_is_not_known_is_searched_once(
    directory: Path, launches: Launches, file: str | None, choice: dict[str, Any]
) -> None:
    if file is not None:
        launches.know(directory / file, **choice)
    assert [launches.block(), launches.block()] == [1, 1]
    assert launches.searched == [(launches.tuner.name, *KEY)]


def test_each_key_has_its_own_choice(directory: Path, launches: Launches) -> None:
    launches.know(directory / "Toy_GPU.json", block=3)
    assert [launches.block(16), launches.block(32)] == [3, 1]
    assert [key[1] for key in launches.searched] == [32]


def test_a_name_tells_module_function_and_variant() -> None:
    assert "leadline.kernels.triton.router._project" in TUNERS
    assert "leadline.kernels.triton.mhc._project" in TUNERS
    assert "leadline.kernels.triton.indexer._logits[decode]" in TUNERS


def test_files_of_the_package_name_kernels_that_there_are() -> None:
    for path in tunings.DIRECTORY.glob("*.json"):
        assert {name for name, _ in tunings.read(path)} <= TUNERS.keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_short_launches_are_timed_in_graphs_and_long_ones_one_by_one(device: torch.device) -> None:
    short, long = torch.zeros(1, device=device), torch.zeros(2**28, device=device)
    calls = []

    def add(target: torch.Tensor) -> None:
        calls.append(target)
        target.add_(1)

    for target, in_graphs in ((short, True), (long, False)):
        calls.clear()
        times = bench(functools.partial(add, target), quantiles=(0.5, 0.2, 0.8))
        assert times[1] <= times[0] <= times[2] < float("inf")
        assert (int(target[0]) > len(calls)) == in_graphs  # replays call nothing


class Program:
    """Python programs whose kernels are compiled, not interpreted, in a cache of their own."""

    def __init__(self, cache: Path) -> None:
        self.environment = dict(os.environ, TRITON_CACHE_DIR=str(cache))
        self.environment.pop("TRITON_INTERPRET", None)
        self.environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )

    def run(self, *command: object, code: int = 0) -> str:
        """What it prints; ``code`` is how it has to end."""
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout


def test_what_one_machine_measured_the_next_one_knows(tmp_path: Path) -> None:
    """Nothing is compiled but what runs; choices that no kernel has any more are left out."""
    launch = [Path(__file__).with_name("tuning_run.py"), tmp_path]
    file = tmp_path / "NVIDIA_H200.json"
    first = Program(tmp_path / "first")
    fresh, again = json.loads(first.run(*launch))
    assert (fresh["compiled"], fresh["measured"]) == (4, [4, 4, 4, 4])  # all, then the first
    assert (again["compiled"], again["measured"]) == (0, [])

    name = "leadline.kernels.triton.router._project"
    kept = triton.Config({"BLOCK": 64}, num_warps=4, num_stages=5).all_kwargs()
    other = (2, 64, 512, "torch.bfloat16")
    stale = {("gone._kernel", KEY): kept, (name, other[1:]): kept, (name, KEY): {"BLOCK": 7}}
    tunings.write(file, {(name, other): kept, **stale})
    said = first.run("scripts/collect_tunings.py", tmp_path / "first", "-o", file)
    assert "2 choices, 1 of them new or changed" in said
    assert len(tunings.read(file)) == 2

    shipped, _ = json.loads(Program(tmp_path / "second").run(*launch))
    assert (shipped["compiled"], shipped["measured"]) == (1, [])
    assert fresh["config"] == again["config"] == shipped["config"]


def test_a_cache_without_measurements_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    said = Program(tmp_path).run("scripts/collect_tunings.py", tmp_path, "-o", file, code=1)
    assert "no kernel of Leadline was measured there" in said
    assert not file.exists()
