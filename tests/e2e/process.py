"""``leadline serve`` as a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

# A liveness bound: what has not happened by then never will.
PATIENCE_SECONDS = 60.0
_READY = re.compile(r"serves tiny at http://127\.0\.0\.1:(\d+)/v1")


@dataclass
class Served:
    """A running server.

    Attributes:
        process: the API process; the engine is a child of it.
        port: where it listens.
    """

    process: subprocess.Popen[bytes]
    port: int
    _log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(encoding="utf-8")

    @property
    def engine_pid(self) -> int:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        [engine] = (child for child in children if "spawn_main" in " ".join(child.cmdline()))
        return int(engine.pid)

    @property
    def num_files(self) -> int:
        """File descriptors that the API process holds."""
        return int(psutil.Process(self.process.pid).num_fds())

    @property
    def num_bytes(self) -> int:
        """Resident memory of the API process and the engine."""
        processes = (psutil.Process(pid) for pid in (self.process.pid, self.engine_pid))
        return sum(int(process.memory_info().rss) for process in processes)

    def work_left(self) -> dict[str, float]:
        """Gauges of what requests hold; each is 0 when none is open."""
        text = httpx.get(f"{self.url}/metrics").text
        gauges = {
            "running": r"^vllm:num_requests_running\{.*\} (\S+)$",
            "waiting": r"^vllm:num_requests_waiting\{.*\} (\S+)$",
            "pages": r'^leadline:kv_pages\{.*state="used".*\} (\S+)$',
            "slots": r'^leadline:slots\{.*state="used".*\} (\S+)$',
        }
        found = {name: re.findall(line, text, re.MULTILINE) for name, line in gauges.items()}
        return {name: float(value) for name, [value] in found.items()}


@contextmanager
def running(
    model: Path, *flags: str, max_files: int | None = None, code: int = 0
) -> Iterator[Served]:
    """A server of a model that is called ``tiny``, on a free port.

    Args:
        model: its folder.
        flags: of ``leadline serve``.
        max_files: soft limit of its file descriptors.
        code: how it must end.
    """
    command = [sys.executable, "-m", "leadline", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", "0", "--drain-delay", "0", *flags]
    if max_files is not None:
        command = ["sh", "-c", f'ulimit -Sn {max_files}; exec "$@"', "sh", *command]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            served = Served(process, 0, Path(log.name))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (found := _READY.search(served.log)):
                assert process.poll() is None, served.log
                assert time.monotonic() < deadline, served.log
                time.sleep(0.05)
            served.port = int(found[1])
            yield served
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == code, served.log
            assert "Traceback" not in served.log, served.log
        finally:
            process.kill()
            process.wait()


async def until(is_so: Callable[[], object], what: str) -> None:
    """Wait for something that must become true, and fail with ``what`` when it does not."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_so():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(what) from None
