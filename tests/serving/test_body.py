"""Bodies of every size, coding and shape."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from starlette.requests import Request
from starlette.types import Message

from leadline.core.errors import EngineOverloaded
from leadline.serving import body
from leadline.serving.body import BodyReader
from tests.serving.conftest import HELLO, MakeRig, Rig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = json.dumps({"messages": HELLO}).encode()
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
}


async def exchange(
    server: Rig,
    path: str,
    chunks: list[bytes],
    *,
    headers: dict[str, str] | None = None,
    is_whole: bool = True,
) -> tuple[int, bytes]:
    """One request at the level of ASGI messages, the body in these chunks; stands still after."""
    left = list(chunks)
    sent: list[Message] = []

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left) or not is_whole}

    async def send(message: Message) -> None:
        sent.append(message)

    given = {"content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    await server.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("coding", CODINGS)
def test_compressed_bodies_are_read(rig: MakeRig, coding: str) -> None:
    reply = rig("</think>a").http.post(
        CHAT, content=CODINGS[coding](BODY), headers={"Content-Encoding": coding.upper()}
    )
    assert reply.status_code == 200


@pytest.mark.parametrize("damage", [b"", b"not compressed"], ids=["empty", "plain"])
@pytest.mark.parametrize("coding", CODINGS)
def test_damaged_compression_is_a_clients_mistake(rig: MakeRig, coding: str, damage: bytes) -> None:
    reply = rig("a").http.post(CHAT, content=damage, headers={"Content-Encoding": coding})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("cut", [5, 20, -1])
@pytest.mark.parametrize("coding", CODINGS)
def test_truncated_compression_is_a_clients_mistake(rig: MakeRig, coding: str, cut: int) -> None:
    content = CODINGS[coding](BODY)[:cut]
    reply = rig("a").http.post(CHAT, content=content, headers={"Content-Encoding": coding})
    assert reply.status_code == 400


def bomb(coding: str, size: int) -> bytes:
    """``size`` zero bytes, compressed without ever holding them."""
    block = bytes(2**20)
    packer: Any = (
        zlib.compressobj(wbits=31) if coding == "gzip" else zstandard.ZstdCompressor().compressobj()
    )
    packed: list[bytes] = [packer.compress(block) for _ in range(size // len(block))]
    return b"".join([*packed, packer.flush()])


@pytest.mark.parametrize("coding", CODINGS)
def test_c52_a_bomb_is_413_and_takes_less_than_twice_the_limit(rig: MakeRig, coding: str) -> None:
    limit = 4 * 2**20
    server = rig("a", max_request_bytes=limit)
    content = bomb(coding, 256 * 2**20)
    assert len(content) < 2**20
    tracemalloc.start()
    try:
        status, _ = asyncio.run(
            exchange(server, CHAT, [content], headers={"content-encoding": coding})
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert status == 413
    assert peak < 2 * limit


def test_zstd_takes_no_larger_window_than_browsers_do(rig: MakeRig) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    content = packer.compress(BODY) + packer.flush()
    reply = rig("a").http.post(CHAT, content=content, headers={"Content-Encoding": "zstd"})
    assert reply.status_code == 400


def test_c52_a_chunked_body_is_413_before_it_has_all_come(rig: MakeRig) -> None:
    server = rig("a", max_request_bytes=2**20)
    chunks = [bytes(2**16)] * 100
    tracemalloc.start()
    try:
        status, _ = asyncio.run(exchange(server, CHAT, chunks))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert status == 413
    assert peak < 2 * 2**20


def test_c52_a_length_over_the_limit_is_413_unread(rig: MakeRig) -> None:
    server = rig("a", max_request_bytes=100)
    status, _ = asyncio.run(exchange(server, CHAT, [], headers={"content-length": "101"}))
    assert status == 413


def test_a_client_that_stops_sending_gets_408(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "_IDLE_SECONDS", 0.01)
    status, data = asyncio.run(exchange(rig("a"), CHAT, [b'{"messages":'], is_whole=False))
    assert status == 408
    assert json.loads(data)["error"]["type"] == "timeout_error"


async def _read_beside_half_a_body(reader: BodyReader, half: bytes, whole: bytes) -> None:
    rest = asyncio.Event()

    def request(*pieces: bytes) -> Request:
        left = list(pieces)

        async def receive() -> Message:
            if len(left) < len(pieces):
                await rest.wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        return Request({"type": "http", "method": "POST", "headers": []}, receive)

    waiting = asyncio.create_task(reader.read(request(half, half)))
    while not reader.num_held_bytes:
        await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded):
        await reader.read(request(whole))
    rest.set()
    assert await waiting == half * 2
    assert await reader.read(request(whole)) == whole
    assert reader.num_held_bytes == 0


def test_half_sent_bodies_share_a_bound() -> None:
    asyncio.run(_read_beside_half_a_body(BodyReader(100, 130), bytes(50), bytes(90)))


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\xef\xbb\xbf" + BODY, 200),
        (b'{"messages":[{"role":"user","content":"a\\ud83d"}]}', 200),
        (b'{"messages":[{"role":"user","content":"\\u0000\\u0007"}]}', 200),
        (b'{"messages":[],"messages":[{"role":"user","content":"last wins"}]}', 200),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', 400),
        (b'{"messages":[{"role":"user","content":"a"}]} x', 400),
    ],
    ids=["byte order mark", "half an emoji", "control", "duplicate", "bad UTF-8", "trailing"],
)
def test_c51_odd_but_legal_json_is_served(rig: MakeRig, raw: bytes, status: int) -> None:
    reply = rig("</think>a").http.post(CHAT, content=raw)
    assert reply.status_code == status


def mutations(seed: int, count: int) -> list[bytes]:
    """Valid bodies with bytes changed, dropped, doubled, or values of other types put in."""
    draw = random.Random(seed)
    values: list[Any] = [None, True, -1, 1e308, 10**30, "", "\ud800", [], {}, [[]], {"a": {}}]
    base = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi \U0001f600"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        ],
        "prompt": "x",
        "temperature": 0.5,
        "max_tokens": 1,
        "stop": ["a"],
        "n": 1,
        "logit_bias": {"5": 1},
        "stream": False,
    }
    bodies = []
    for _ in range(count):
        changed = dict(base)
        for key in draw.sample(sorted(base), draw.randrange(3)):
            changed[key] = draw.choice(values)
        raw = bytearray(json.dumps(changed).encode())
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(raw))
            match draw.randrange(4):
                case 0:
                    raw[at] = draw.randrange(256)
                case 1:
                    del raw[at : at + draw.randrange(1, 20)]
                case 2:
                    raw[at:at] = raw[at : at + draw.randrange(1, 20)]
                case _:
                    raw = raw[: at + 1]
            if not raw:
                break
        bodies.append(bytes(raw))
    return bodies


def test_item_96_random_bodies_are_answered_and_leave_nothing_behind(rig: MakeRig) -> None:
    server = rig("a")
    bodies = mutations(96, 10_000)

    async def send_all(some: list[bytes]) -> set[int]:
        statuses = set()
        for i, raw in enumerate(some):
            status, _ = await exchange(server, (CHAT, COMPLETIONS)[i % 2], [raw])
            statuses.add(status)
        return statuses

    def memory() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    asyncio.run(send_all(bodies[:500]))  # fills what is filled once
    num_files = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(send_all(bodies[500:9000])) <= {200, 400, 404}
    tracemalloc.start()
    try:
        asyncio.run(send_all(bodies[9000:9100]))
        before = memory()
        server.engine.requests.clear()
        asyncio.run(send_all(bodies[9100:]))
        server.engine.requests.clear()
        assert memory() - before < 100_000
    finally:
        tracemalloc.stop()
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert server.app.state.server.admission.num_open == 0
