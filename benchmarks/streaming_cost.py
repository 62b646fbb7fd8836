"""What the API process costs a token: the latency it adds, and the tokens/s that it can send.

A scripted engine stands where the real one does, so that nothing but the front end is measured:
reading the output, making events, HTTP. A client in a process of its own reads the sockets.

* latency: every stream gets a token at a steady pace; from the moment at which the engine has it to
  the moment at which the client has its event is what was added.
* throughput: the engine always has a next token, and every token is an event of its own.

``--peer-python`` names an interpreter that has vLLM installed: the same tokens then go through its
front end too (``peer_vllm.py``), behind the same client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvloop
from common import TOKENIZER_FILE, argument_parser, environment, print_table, summary, write_json

from leadline.config.server import ServerConfig
from leadline.core.client import EngineStats
from leadline.core.request import EngineRequest, FinishReason, TokenOutput

STREAMS = (1, 64)
PACE = 50.0  # tokens/s of one stream where latency is measured: a good interactive speed
TEXT = " The quick brown fox jumps over the lazy dog, and the dog does not mind at all."


class Emitter:
    """Gives every stream one token at a time, and notes when.

    Args:
        pace: tokens/s of each stream; 0 has the next token ready at once.
    """

    def __init__(self, pace: float) -> None:
        self.times: dict[str, list[float]] = {}
        self._pace = pace
        self._tick: asyncio.Future[float] | None = None

    async def ticks(self, name: str, count: int) -> AsyncGenerator[None, None]:
        """One item for each token of a stream."""
        times = self.times[name] = []
        for _ in range(count):
            times.append(await self.step())
            yield

    async def step(self) -> float:
        """The moment of the next step, which all streams share as those of a real engine do."""
        if not self._pace:
            await asyncio.sleep(0)
            return time.perf_counter()
        if self._tick is None:
            loop = asyncio.get_running_loop()
            self._tick = loop.create_future()
            loop.call_later(1 / self._pace, self._step)
        return await asyncio.shield(self._tick)

    def _step(self) -> None:
        tick, self._tick = self._tick, None
        if tick is not None:
            tick.set_result(time.perf_counter())


class ScriptedEngine:
    """An ``EngineClient`` whose answers are the same text over and over."""

    def __init__(self, emitter: Emitter, token_ids: list[int]) -> None:
        self._emitter = emitter
        self._token_ids = token_ids

    async def submit(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """``max_tokens`` outputs of one token."""
        last = request.sampling.max_tokens - 1
        i = 0
        async for _ in self._emitter.ticks(request.request_id, last + 1):
            yield TokenOutput(
                request.request_id,
                (self._token_ids[i % len(self._token_ids)],),
                finish_reason=FinishReason.LENGTH if i == last else None,
            )
            i += 1

    async def stats(self) -> EngineStats:
        """Nothing runs."""
        return EngineStats()

    async def health(self) -> None:
        """Always well."""


def serve(pace: float, report: Path) -> None:
    """Serve the scripted engine; the port goes to standard output, the times to ``report``."""
    import uvicorn

    from leadline.serving.app import build_app
    from leadline.serving.context import ModelInfo
    from leadline.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(TOKENIZER_FILE)
    emitter = Emitter(pace)
    engine = ScriptedEngine(emitter, tokenizer.encode(TEXT))
    info = ModelInfo(root="tiny", max_model_len=1 << 20, vocab_size=tokenizer.vocab_size)
    app = build_app(engine, tokenizer, info, ServerConfig())  # type: ignore[arg-type]
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, http="httptools")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run_server(uvicorn.Server(config), emitter, report))


async def run_server(server: Any, emitter: Emitter, report: Path) -> None:
    """Run a uvicorn server until SIGTERM, then write what the emitter noted."""
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    try:
        await task
    finally:  # uvicorn raises the signal that stopped it once more
        report.write_text(json.dumps(emitter.times))


class _Stream(asyncio.Protocol):
    """One chat over a socket: notes when each content event came, and its id in the engine."""

    MARK = b'"content":"'

    def __init__(self, num_tokens: int) -> None:
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": num_tokens,
            "reasoning_effort": "none",
            "ignore_eos": True,
            "stream": True,
        }
        payload = json.dumps(body).encode()
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(payload), payload)
        )
        self.times: list[float] = []
        self.head = b""
        self.done = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if len(self.head) < 1024:
            self.head += data
        data = self._tail + data
        self.times += [now] * data.count(self.MARK)
        self._tail = data[-len(self.MARK) + 1 :]
        if b"[DONE]" in data:
            self.done.set_result(None)
            self._transport.close()

    @property
    def answer_id(self) -> str:
        """The part of the answer's id that its engine knows too."""
        return self.head.partition(b'"id":"chatcmpl-')[2].partition(b'"')[0].decode()


async def read_streams(port: int, streams: int, num_tokens: int) -> tuple[float, list[_Stream]]:
    """Read ``streams`` answers at once; the seconds from the first event to the last."""
    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(streams):
        _, reader = await loop.create_connection(lambda: _Stream(num_tokens), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    first = min(reader.times[0] for reader in readers)
    return max(reader.times[-1] for reader in readers) - first, readers


def measure(command: list[str], streams: int, num_tokens: int, pace: float) -> dict[str, Any]:
    """Start a server, read from it, stop it.

    Returns:
        ``tokens_per_second`` over all streams, and of paced runs ``added_ms``: percentiles.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "times.json"
        arguments = ["--pace", str(pace), "--report", str(report)]
        # The peer's environment has no Leadline, and its script needs a little of ours.
        paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with subprocess.Popen(
            [*command, *arguments], env=paths, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None
                port = int(server.stdout.readline())
                uvloop.run(read_streams(port, streams, 20))  # warm
                seconds, readers = uvloop.run(read_streams(port, streams, num_tokens))
            finally:
                server.send_signal(signal.SIGINT)
        emitted = json.loads(report.read_text())
    num_events = sum(min(len(reader.times), num_tokens) for reader in readers)
    result: dict[str, Any] = {
        "tokens_per_second": streams * num_tokens / seconds,
        "events_per_token": num_events / (streams * num_tokens),
    }
    if pace:
        added = sorted(
            1000 * (had - had_it)
            for reader in readers
            # The first content event of a chat is empty: it carries the role.
            for had, had_it in zip(reader.times[-num_tokens:], _of(emitted, reader), strict=True)
        )
        result["added_ms"] = {
            name: added[int(share * (len(added) - 1))]
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        }
    return result


def _of(emitted: dict[str, list[float]], reader: _Stream) -> list[float]:
    return next(times for name, times in emitted.items() if reader.answer_id in name)


def main(options: Namespace) -> None:
    """Measure, print, write."""
    if options.report is not None:
        serve(options.pace, options.report)
        return
    commands = {"leadline": [sys.executable, __file__]}
    if options.peer_python is not None:
        commands[f"vllm {_peer_version(options.peer_python)}"] = [
            options.peer_python,
            str(Path(__file__).with_name("peer_vllm.py")),
        ]
    runs = 1 if options.quick else 5
    num_paced, num_flat = (10, 50) if options.quick else (200, 2000)
    results: dict[str, dict[str, Any]] = {}
    for name, command in commands.items():
        result = results[name] = {}
        for streams in STREAMS:
            result[f"latency_{streams}"] = measure(command, streams, num_paced, PACE)["added_ms"]
        flat = [measure(command, STREAMS[-1], num_flat, 0) for _ in range(runs)]
        result["tokens_per_second"] = summary([run["tokens_per_second"] for run in flat])
        result["events_per_token"] = summary([run["events_per_token"] for run in flat])
    rows = []
    for streams in STREAMS:
        for share in ("p50", "p99"):
            values = [result[f"latency_{streams}"][share] for result in results.values()]
            rows.append(
                [f"added ms a token, {streams} streams, {share}", *_cells(values, "{:.2f}")]
            )
    values = [result["tokens_per_second"]["median"] for result in results.values()]
    rows.append([f"tokens/s over {STREAMS[-1]} streams", *_cells(values, "{:,.0f}")])
    values = [result["events_per_token"]["median"] for result in results.values()]
    rows.append(["events a token meanwhile", *_cells(values, "{:.2f}")])
    print_table(["", *results, *(["ratio"] if len(results) > 1 else [])], rows)
    write_json(options.json, {**environment(), "results": results})


def _peer_version(python: str) -> str:
    ask = "import importlib.metadata as m; print(m.version('vllm'))"
    return subprocess.check_output([python, "-c", ask], text=True).strip()


def _cells(values: list[float], form: str) -> list[str]:
    ratio = [f"{values[0] / values[1]:.2f}"] if len(values) > 1 else []
    return [*map(form.format, values), *ratio]


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--peer-python", metavar="PATH", help="python that has vLLM")
    parser.add_argument("--pace", type=float, default=0.0, help="of the server process")
    parser.add_argument("--report", type=Path, help="makes this the server process")
    main(parser.parse_args())
