"""The bundled model is small, and its files are what their commands make."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadline.tools import random_checkpoint

BUNDLED = Path(__file__).parents[2] / "leadline/data/tiny"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    tokenizer = str(BUNDLED / "tokenizer.json")
    flags = ("--config", str(BUNDLED), "--tokenizer", tokenizer, "--shards", "2", "--seed", "0")
    random_checkpoint.main([str(out), *flags])
    return out


def test_no_file_is_missing_or_more(rebuilt: Path) -> None:
    bundled = {path.name for path in BUNDLED.iterdir()}
    assert bundled == {path.name for path in rebuilt.iterdir()} | {"README.md"}


def test_every_file_is_what_its_command_makes(rebuilt: Path) -> None:
    for path in rebuilt.iterdir():
        assert path.read_bytes() == (BUNDLED / path.name).read_bytes(), path.name


def test_whole_model_is_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 10_000_000
