"""A small data folder, built once."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from leadline.tools.train_tiny.data import add_arguments, run
from leadline.tools.train_tiny.dataset import DataSet

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    names = ("LICENSE", "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")
    texts = [str(ROOT / name) for name in names]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args([str(folder), "--texts", *texts, "--vocab-size", "1024"]))
    return folder


@pytest.fixture(scope="session")
def data(data_folder: Path) -> DataSet:
    return DataSet(data_folder)
