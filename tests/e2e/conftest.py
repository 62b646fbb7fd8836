"""Servers of the small random model, each a process with a port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Served, running


@pytest.fixture(scope="session")
def server(random_tiny: Path) -> Iterator[Served]:
    """A server as it is by default; it must also stop cleanly."""
    with running(random_tiny) as served:
        yield served


@pytest.fixture(scope="session")
def base_url(server: Served) -> str:
    """Its address."""
    return server.url


@pytest.fixture(scope="session")
def exact_url(random_tiny: Path) -> Iterator[str]:
    """The address of one whose hits change no answer, with small blocks and a short context."""
    flags = ("--no-swa-bounded-replay", "--block-size", "16", "--max-model-len", "1024")
    with running(random_tiny, *flags) as served:
        yield served.url
