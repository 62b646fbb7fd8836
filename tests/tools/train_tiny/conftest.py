"""A small data folder, built once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from leadline.config.presets import TINY_22M
from leadline.tools.train_tiny.data import build_small
from leadline.tools.train_tiny.dataset import DataSet

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    files = [ROOT / name for name in ("LICENSE", "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    build_small(folder, files, replace(TINY_22M, vocab_size=1024))
    return folder


@pytest.fixture(scope="session")
def data(data_folder: Path) -> DataSet:
    return DataSet(data_folder)
