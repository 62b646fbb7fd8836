"""Clients that misbehave, and an engine that is killed, around a server that goes on.

Every scenario has a short form and a ``slow`` one; ``-s`` shows the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import resource
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.process import PATIENCE_SECONDS, Served, running, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Body = dict[str, Any]

NUM_TOKENS = 32
MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS: Body = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
CHAT: Body = {"messages": MESSAGES} | ENDLESS
WORDY: Body = CHAT | {"logprobs": True, "top_logprobs": 100}
RAW: Body = {"prompt": "a"} | ENDLESS
SMALL = ("--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "64")
MAX_OPEN = 100
# Of what one scenario may leave in memory: caches that fill once, arenas of the allocator.
MAX_GROWTH_BYTES = 96 * 2**20

Scenario = Callable[[], Awaitable[None]]


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """How many clients: few in CI, all of them when asked for."""
    return pytest.mark.parametrize(
        "number", [pytest.param(short), pytest.param(long, marks=pytest.mark.slow)]
    )


@pytest.fixture(scope="module")
def served(random_tiny: Path) -> Iterator[Served]:
    # More connections than its soft limit of descriptors: it must raise that by itself.
    flags = {"max-num-queued-reqs": MAX_OPEN, "stream-write-timeout": 1, "max-logprobs": 100}
    settings = [f"--{name}={value}" for name, value in flags.items()]
    with running(random_tiny, *SMALL, *settings, max_files=256) as server:
        asyncio.run(settle(server))
        yield server


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """The clients are this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run(scenario: Scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 5 * PATIENCE_SECONDS))


async def settle(server: Served) -> None:
    """Let a server fill what it fills once."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as http:
        await asyncio.gather(*(read_stream(http) for _ in range(4)))


async def read_stream(http: httpx.AsyncClient) -> float:
    """A whole stream, which must be complete; returns its longest silence in seconds."""
    longest, last = 0.0, time.monotonic()
    events: list[bytes] = []
    body = CHAT | {"max_tokens": NUM_TOKENS, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for part in reply.aiter_raw():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            events.append(part)
    *_, usage, done, end = b"".join(events).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == NUM_TOKENS
    return longest


@asynccontextmanager
async def unharmed(server: Served, what: str) -> AsyncIterator[None]:
    """What happens inside must not touch a neighbour's streams, and leave nothing behind."""
    num_files, num_bytes, start = server.num_files, server.num_bytes, time.monotonic()
    gaps: list[float] = []
    is_over = False

    async def neighbour() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as http:
            while not (gaps and is_over):
                gaps.append(await read_stream(http))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(neighbour())
        yield
        is_over = True
    seconds = time.monotonic() - start
    await until(lambda: not any(server.work_left().values()), "a request was left open")
    await until(lambda: server.num_files <= num_files, "a file was left open")
    grown = server.num_bytes - num_bytes
    print(
        f"\n{what}: {seconds:.1f} s; neighbour: {len(gaps)} streams, longest silence "
        f"{max(gaps):.3f} s; memory {num_bytes / 2**20:.0f} -> {(num_bytes + grown) / 2**20:.0f} "
        f"MiB; files {num_files} -> {server.num_files}"
    )
    assert grown < MAX_GROWTH_BYTES


async def connect(server: Served, sent: bytes = b"") -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    return reader, writer


@asynccontextmanager
async def crowd(server: Served, number: int, sent: bytes = b"") -> AsyncIterator[list[Streams]]:
    """Many connections that send the same."""
    clients = [await connect(server, sent) for _ in range(number)]
    try:
        yield clients
    finally:
        for _, writer in clients:
            writer.close()


def post(path: str, body: bytes, *, length: int | None = None) -> bytes:
    """A request; ``length`` may promise more than is sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset, as a client does that crashes."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


PATHS: dict[str, Body] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def malformed(number: int) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Requests that no server could answer: path, body and headers."""
    draw = random.Random(1000)
    for i in range(number):
        path, body = list(PATHS.items())[i % len(PATHS)]
        raw, headers = json.dumps(body).encode(), {}
        cut = draw.randrange(1, len(raw))
        match draw.randrange(8):
            case 0:
                raw = raw[:cut]
            case 1:
                raw = raw[:cut] + b"\xff" + raw[cut:]
            case 2:
                raw = draw.choice([b"", b"null", b"[]", b'"a"', b"NaN", b"\x00", b"{}", raw * 2])
            case 3:
                raw = b'{"model":' + draw.choice([b"[", b'{"a":']) * draw.randrange(2000, 60_000)
            case 4:
                raw = json.dumps(
                    {key: draw.choice([1.5, True, {"a": []}]) for key in body}
                ).encode()
            case 5:
                headers = {"Content-Encoding": draw.choice(["gzip", "zstd", "br"])}
            case 6:
                raw, headers = (
                    gzip.compress(raw)[: -draw.randrange(1, 20)],
                    {"Content-Encoding": "gzip"},
                )
            case _:
                headers = {"Content-Type": draw.choice(["text/plain", "a", "multipart/form-data"])}
        yield path, raw, headers


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port that speaks none
    b"GET\r\n\r\n",
    b"\x00" * 100 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    POST + b"Content-Length: -5\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
]


@sizes(200, 1000)
def test_malformed_requests_are_the_clients_mistake(served: Served, number: int) -> None:
    async def scenario() -> None:
        requests = malformed(number)
        async with (
            unharmed(served, f"{number} malformed bodies"),
            httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_SECONDS) as http,
            asyncio.TaskGroup() as tasks,
        ):

            async def send() -> None:
                for path, raw, headers in requests:
                    headers = {"Content-Type": "application/json"} | headers
                    reply = await http.post(path, content=raw, headers=headers)
                    assert 400 <= reply.status_code < 500, (path, raw[:200], reply.text)
                    assert reply.json()["error"]["message"]

            for _ in range(8):
                tasks.create_task(send())
            for garbage in GARBAGE:
                reader, writer = await connect(served, garbage)
                said = await reader.read()
                writer.close()
                assert said.startswith(b"HTTP/1.1 4"), (garbage, said)

    run(scenario)


HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHo"
HALF_A_BODY = post("/v1/chat/completions", b'{"messages"', length=100)


@sizes(150, 1000)
def test_slow_lorises_hold_nothing_that_others_need(served: Served, number: int) -> None:
    async def scenario() -> None:
        async with (
            unharmed(served, f"{number} half-sent heads and as many bodies"),
            crowd(served, number, HALF_A_HEAD) as heads,
            crowd(served, number, HALF_A_BODY) as bodies,
            httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_SECONDS) as http,
        ):
            for piece in (b"s", b"t"):
                assert (await http.get("/health")).status_code == 200
                await read_stream(http)
                for _, writer in heads + bodies:
                    writer.write(piece)

    run(scenario)


@pytest.mark.slow
def test_slow_lorises_are_given_up(served: Served) -> None:
    async def scenario() -> None:
        async with (
            unharmed(served, "2 x 500 half-sent requests until they are given up"),
            crowd(served, 500, HALF_A_HEAD) as heads,
            crowd(served, 500, HALF_A_BODY) as bodies,
        ):
            said = await asyncio.gather(*(reader.read() for reader, _ in heads + bodies))
            assert set(said[:500]) == {b""}
            assert all(answer.startswith(b"HTTP/1.1 408") for answer in said[500:])

    run(scenario)


@sizes(400, 2000)
def test_many_connections_are_kept_while_some_stream(served: Served, number: int) -> None:
    async def probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    async def scenario() -> None:
        async with (
            unharmed(served, f"{number} connections"),
            crowd(served, number) as idle,
            httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_SECONDS) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(number // 50):
                tasks.create_task(read_stream(http))
            assert (await http.get("/health")).status_code == 200
            await asyncio.gather(*(probe(*streams) for streams in idle))

    run(scenario)


@sizes(2, 30)
def test_clients_that_never_read_are_given_up(served: Served, number: int) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        raw = post("/v1/chat/completions", json.dumps(WORDY).encode())
        async with unharmed(served, f"{number} clients that never read"):
            deaf = [socket.socket() for _ in range(number)]
            for client in deaf:
                client.setblocking(False)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await loop.sock_connect(client, ("127.0.0.1", served.port))
                await loop.sock_sendall(client, raw)
            await until(lambda: served.work_left()["running"] > 1, "they did not start")
            # ``unharmed`` waits until all of it is given up.
        for client in deaf:
            client.close()

    run(scenario)


@sizes(100, 1000)
def test_aborts_at_random_moments_leave_nothing_behind(served: Served, number: int) -> None:
    draw = random.Random(7)
    left = iter(range(number))

    async def leave() -> None:
        for _ in left:
            body = json.dumps(CHAT | {"stream": draw.random() < 0.7}).encode()
            raw = post("/v1/chat/completions", body)
            reader, writer = await connect(served, raw[: draw.choice([50, len(raw), len(raw)])])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(draw.randrange(1, 9000)), draw.expovariate(20))
            if draw.random() < 0.5:
                reset(writer)
            writer.close()

    async def scenario() -> None:
        async with unharmed(served, f"{number} random aborts"), asyncio.TaskGroup() as tasks:
            for _ in range(16):
                tasks.create_task(leave())

    run(scenario)


async def kill_engine(server: Served, num_streams: int) -> None:
    """Kill the engine while streams run; every one must end with one error event."""
    num_started = 0

    async def hear(http: httpx.AsyncClient, path: str, body: Body) -> None:
        nonlocal num_started
        async with http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            num_started += 1
            text = (await reply.aread()).decode()
        assert text.count('data: {"error"') == 1, text[-500:]
        assert text.endswith("data: [DONE]\n\n")

    async with (
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for i in range(num_streams):
            path, body = [("/v1/chat/completions", CHAT), ("/v1/completions", RAW)][i % 2]
            tasks.create_task(hear(http, path, body))
        await until(lambda: num_started == num_streams, "they did not start")
        os.kill(server.engine_pid, signal.SIGKILL)


def test_item_92_streams_hear_of_a_killed_engine_and_the_server_ends(random_tiny: Path) -> None:
    with running(random_tiny, *SMALL, code=2) as server:

        async def scenario() -> None:
            await kill_engine(server, 8)
            await until(lambda: server.process.poll() is not None, "the server goes on")

        run(scenario)


@pytest.mark.parametrize(
    ("times", "num_streams"), [(1, 8), pytest.param(3, 64, marks=pytest.mark.slow)]
)
def test_item_92_a_killed_engine_is_replaced(
    random_tiny: Path, times: int, num_streams: int
) -> None:
    with running(random_tiny, *SMALL, "--auto-restart") as server:

        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as http:
                for i in range(times + 1):
                    await settle(server)
                    await until(lambda: not any(server.work_left().values()), "work is left")
                    print(f"\n{i} kills: {server.num_files} files, {server.num_bytes >> 20} MiB")
                    if i == times:
                        return
                    await kill_engine(server, num_streams)
                    reply = await http.post("/v1/completions", json={"prompt": "a"})
                    assert reply.status_code in (500, 503), reply.text
                    assert reply.json()["error"]["message"]
                    start = time.monotonic()
                    while (reply := await http.get("/health")).status_code != 200:
                        assert reply.status_code == 503
                        assert time.monotonic() - start < PATIENCE_SECONDS
                        await asyncio.sleep(0.05)
                    print(f"serves again after {time.monotonic() - start:.1f} s")

        run(scenario)
