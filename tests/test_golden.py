"""The golden files are there, whole, and as they came."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
SUMS = {
    name: digest
    for digest, name in (line.split() for line in (GOLDEN / "SHA256SUMS").read_text().splitlines())
}


def test_every_golden_file_is_listed() -> None:
    found = {str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*")}
    assert found == set(SUMS)


@pytest.mark.parametrize("name", SUMS)
def test_golden_file_is_as_it_came(name: str) -> None:
    assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == SUMS[name]
