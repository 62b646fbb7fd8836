"""Servers of the bundled model, each a process with a port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.process import Served, running


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server as it is by default; it must also stop cleanly."""
    with running() as served:
        yield served


@pytest.fixture(scope="session")
def base_url(server: Served) -> str:
    """Its address."""
    return server.url


@pytest.fixture(scope="session")
def exact_url() -> Iterator[str]:
    """The address of one whose hits change no answer, with small blocks and a short context."""
    flags = ("--no-swa-bounded-replay", "--block-size", "16", "--max-model-len", "1024")
    with running(*flags) as served:
        yield served.url
