"""Files of choices: what is written is read, and only by the GPU that it was measured on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from leadline.kernels import tunings

CHOICES: tunings.Choices = {
    ("b._down", (64, True, None, "torch.bfloat16")): {"BLOCK": 64, "num_warps": 4},
    ("b._down", (8, True, 2, "torch.bfloat16")): {"BLOCK": 32, "num_warps": 4},
    ("a._up[decode]", (8, "torch.bfloat16")): {"BLOCK": 16, "maxnreg": 80},
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tunings, "DIRECTORY", tmp_path)
    tunings.shipped.cache_clear()
    yield tmp_path
    tunings.shipped.cache_clear()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "GPU.json"
    tunings.write(path, CHOICES)
    assert tunings.read(path) == CHOICES


def test_a_file_has_a_line_for_a_choice_and_one_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    tunings.write(one, CHOICES)
    tunings.write(other, dict(reversed(CHOICES.items())))
    assert one.read_bytes() == other.read_bytes()
    assert sum('"config"' in line for line in one.read_text().splitlines()) == len(CHOICES)


def test_a_gpu_finds_its_own_file_and_others_find_none(directory: Path) -> None:
    tunings.write(directory / "NVIDIA_H100_80GB_HBM3.json", CHOICES)
    assert tunings.shipped("NVIDIA H100 80GB HBM3") == CHOICES
    assert tunings.shipped("NVIDIA H200") == {}


def test_files_of_the_package_can_be_read() -> None:
    for path in tunings.DIRECTORY.glob("*.json"):
        assert tunings.read(path)
