"""Servers of the bundled model, each a process with a port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def leadline_serve(*flags: str) -> Iterator[str]:
    """``leadline serve`` with these flags; yields its address. It must also stop cleanly."""
    port = _free_port()
    command = [sys.executable, "-m", "leadline", "serve", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--drain-delay", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if "serves tiny at http" in line:
                break
        else:
            pytest.fail("the server ended before it was ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=60)
    assert server.returncode == 0, log
    assert "Traceback" not in log, log


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """A server as it is by default."""
    with leadline_serve() as url:
        yield url


@pytest.fixture(scope="session")
def exact_url() -> Iterator[str]:
    """A server whose hits change no answer, with small blocks and a short context."""
    flags = ("--no-swa-bounded-replay", "--block-size", "16", "--max-model-len", "1024")
    with leadline_serve(*flags) as url:
        yield url
