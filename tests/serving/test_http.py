"""What happens on real connections: reuse, limits of a request's head, slow readers, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from leadline.config.args import from_values
from leadline.config.server import ServerConfig
from leadline.serving import http as http_module
from leadline.serving.http import HttpConfig, HttpServer, refresh_certificates
from tests.serving.conftest import MakeRig, Rig

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@asynccontextmanager
async def listening(app: Any, **config: Any) -> AsyncIterator[int]:
    """The port of a server that runs ``app``."""
    server = HttpServer(
        HttpConfig(app, from_values(ServerConfig, {"shutdown_timeout": 0, **config}))
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield port
        finally:
            server.should_exit = server.force_exit = True
            await task


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def talk(port: int, data: bytes) -> bytes:
    """Everything that the server says to ``data`` until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.transport.abort()  # the rest of ``data`` may never be taken


def test_item_93_a_thousand_requests_on_one_connection(rig: MakeRig) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for i in range(1000):
                writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: r%d\r\n\r\n" % i)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert b"x-request-id: r%d\r\n" % i in head
            writer.close()

    run(test)


def test_item_93_pipelined_probes_are_answered_in_order(rig: MakeRig) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            ask = b"GET /ping HTTP/1.1\r\nHost: a\r\nX-Request-Id: r%d\r\n%b\r\n"
            asks = [ask % (i, b"Connection: close\r\n" if i == 9 else b"") for i in range(10)]
            said = await talk(port, b"".join(asks))
            assert said.count(b"HTTP/1.1 200") == 10
            places = [said.index(b"x-request-id: r%d\r\n" % i) for i in range(10)]
            assert places == sorted(places)

    run(test)


def test_head_is_answered_without_a_body(rig: MakeRig) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            ask = b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            head, _, rest = (await talk(port, ask)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert rest == b""

    run(test)


def test_a_refused_body_does_not_spoil_its_connection(rig: MakeRig) -> None:
    async def test() -> None:
        async with listening(rig("a", api_key=("k",)).app) as port:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
            last = b"GET /ping HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            said = await talk(port, head % 2**20 + bytes(2**20) + last)
            assert said.startswith(b"HTTP/1.1 401")
            assert b"HTTP/1.1 200" in said

    run(test)


async def show_url(http: Request) -> Response:
    assert http.client is not None
    return JSONResponse({"url": str(http.url), "client": http.client.host})


@pytest.mark.parametrize(
    ("proxies", "url", "client"),
    [
        ("127.0.0.1", "https://shop.example/ai/show", "203.0.113.9"),
        ("10.0.0.1", "http://shop.example/ai/show", "127.0.0.1"),
    ],
    ids=["believed", "not believed"],
)
def test_item_93_a_proxy_tells_of_scheme_and_client_and_has_a_path_of_its_own(
    proxies: str, url: str, client: str
) -> None:
    async def test() -> None:
        app = Starlette(routes=[Route("/show", show_url)])
        config = {"root_path": "/ai", "forwarded_allow_ips": proxies}
        headers = {
            "Host": "shop.example",
            "X-Forwarded-Proto": "https",
            "X-Forwarded-For": "203.0.113.9",
        }
        async with listening(app, **config) as port, httpx.AsyncClient() as http:
            reply = await http.get(f"http://127.0.0.1:{port}/show", headers=headers)
            assert reply.json() == {"url": url, "client": client}

    run(test)


def test_item_93_keys_and_probes_work_below_a_root_path(rig: MakeRig) -> None:
    async def test() -> None:
        app = rig("a", api_key=("k",)).app
        async with listening(app, root_path="/ai") as port, httpx.AsyncClient() as http:
            base = f"http://127.0.0.1:{port}"
            assert (await http.get(f"{base}/health")).status_code == 200
            assert (await http.get(f"{base}/v1/models")).status_code == 401
            good = {"x-api-key": "k"}
            assert (await http.get(f"{base}/v1/models", headers=good)).status_code == 200

    run(test)


@pytest.mark.parametrize(
    "fields",
    [b"x-a: b\r\n" * 256, b"x-a: " + b"b" * 65_600 + b"\r\n"],
    ids=["too many", "too large"],
)
def test_a_large_head_is_431(rig: MakeRig, fields: bytes) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            ask = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n%b\r\n" % fields
            assert (await talk(port, ask)).startswith(b"HTTP/1.1 431")

    run(test)


@pytest.mark.parametrize("piece", [b"x-a: b\r\n", b"b"], ids=["fields", "one value"])
def test_a_head_without_end_is_cut_off(rig: MakeRig, piece: bytes) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nx-a: ")
            while not reader.at_eof():
                writer.write(piece * 1000)
                try:
                    await asyncio.wait_for(reader.read(1), 0.01)
                    break
                except TimeoutError:
                    continue
            rest = await reader.read()
            assert rest.startswith(b"TTP/1.1 431")
            writer.close()

    run(test)


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "piece"),
    [
        (CHUNKED + b"0\r\n", b"x-a: b\r\n"),
        (CHUNKED + b"0\r\nx-a: ", b"b"),
        (CHUNKED + b"1;", b"b"),
        (b"", b"\r\n"),
    ],
    ids=["trailers", "one trailer", "a chunk's extension", "blank lines"],
)
def test_what_carries_nothing_and_has_no_end_is_cut_off(
    rig: MakeRig, sent: bytes, piece: bytes
) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent + piece * (2**20 // len(piece)))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.transport.abort()

    run(test)


def test_requests_that_pile_up_on_a_connection_end_it(rig: MakeRig) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            with contextlib.suppress(ConnectionError):
                said = await talk(port, HEALTH * 5000)
                assert said.count(b"HTTP/1.1 200") < 5000

    run(test)


def test_a_body_that_is_no_http_is_400(rig: MakeRig) -> None:
    async def test() -> None:
        async with listening(rig("a").app) as port:
            assert (await talk(port, CHUNKED + b"zz\r\n")).startswith(b"HTTP/1.1 400")

    run(test)


def test_trailers_are_no_headers() -> None:
    async def show(http: Request) -> Response:
        await http.body()
        return JSONResponse({"names": http.headers.keys()})

    async def test() -> None:
        app = Starlette(routes=[Route("/tokenize", show, methods=["POST"])])
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED + b"0\r\nx-api-key: k\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert b"x-api-key" not in await reader.readuntil(b"}")
            writer.close()

    run(test)


def stream(server: Rig) -> bytes:
    """A request whose answer begins, and ends when the gate of its engine opens."""
    server.engine.gate = asyncio.Event()
    body = b'{"prompt": "a", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.mark.parametrize(
    "behind", [b"no HTTP\r\n\r\n", b"", HEALTH], ids=["nonsense", "end", "more"]
)
def test_c49_an_answer_ends_with_its_connection_whatever_was_sent_behind_its_request(
    rig: MakeRig, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = rig("ab", sse_keep_alive_interval=0.01)  # a lost client shows when it is written to

    async def test() -> None:
        async with listening(server.app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(stream(server))
            await reader.readuntil(b"data: ")
            writer.write(behind)
            if behind.startswith(b"no"):
                with contextlib.suppress(ConnectionError):
                    assert b"HTTP/1.1" not in await reader.read()
            writer.close()
            while not server.engine.aborted:
                await asyncio.sleep(0.001)

    run(test)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", HEALTH + b"GET /"], ids=["none", "first", "later"]
)
def test_a_head_that_takes_too_long_is_given_up(
    rig: MakeRig, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "_HEAD_SECONDS", 0.05)

    async def test() -> None:
        async with listening(rig("a").app) as port:
            said = await talk(port, sent)
            assert said.count(b"HTTP/1.1 200") == sent.count(HEALTH)

    run(test)


class Flood:
    """An application that sends until nobody takes any more."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        flood = asyncio.ensure_future(self._send(send))
        await receive()  # the request
        assert (await receive())["type"] == "http.disconnect"
        flood.cancel()
        self.is_over.set()

    async def _send(self, send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
            await asyncio.sleep(0)  # to a client that has left, ``send`` returns at once


def test_c48_a_reader_that_stands_still_is_aborted_and_a_slow_one_is_not() -> None:
    async def test() -> None:
        flood = Flood()
        async with listening(flood, stream_write_timeout=0.3) as port:
            stalled: Streams = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            slow: Streams = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            for _, writer in (stalled, slow):
                writer.write(HEALTH)
            while not flood.is_over.is_set():  # only one of the two ends
                assert await slow[0].read(2**20)
            assert await slow[0].read(2**20)
            for _, writer in (stalled, slow):
                writer.transport.abort()

    run(test)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN={name} -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@needs_openssl
def test_tls_of_version_1_2_or_later_is_spoken(rig: MakeRig, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    config = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}

    async def test() -> None:
        async with listening(rig("a").app, **config) as port:
            trust = ssl.create_default_context(cafile=certificate)
            async with httpx.AsyncClient(verify=trust) as http:
                reply = await http.get(f"https://localhost:{port}/health")
                assert reply.status_code == 200

    run(test)
    loaded = HttpConfig(rig("a").app, from_values(ServerConfig, config))
    loaded.load()
    assert loaded.ssl is not None
    assert loaded.ssl.minimum_version is ssl.TLSVersion.TLSv1_2


@needs_openssl
def test_the_old_certificate_serves_until_the_key_of_the_new_one_is_there(
    rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    config = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    tls = from_values(ServerConfig, config).tls
    loaded = HttpConfig(rig("a").app, from_values(ServerConfig, config))
    loaded.load()
    trust = ssl.create_default_context(cafile=certificate)
    (tmp_path / "new").mkdir()
    renewed, _ = make_certificate(tmp_path / "new", "second")

    async def test() -> None:
        assert loaded.ssl is not None
        task = asyncio.create_task(refresh_certificates(loaded.ssl, tls, seconds=0.001))
        await asyncio.sleep(0)
        certificate.write_bytes(renewed.read_bytes())
        while "could not be read again" not in caplog.text:
            await asyncio.sleep(0.001)
        task.cancel()

    run(test)
    shake_hands(loaded.ssl, trust)


def shake_hands(server: ssl.SSLContext | None, client: ssl.SSLContext) -> None:
    """A handshake in memory; raises what either side finds wrong."""
    assert server is not None
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    left = client.wrap_bio(down, up, server_hostname="localhost")
    right = server.wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for side in (left, right):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert left.version()
    assert right.version()


@needs_openssl
def test_certificates_are_read_again_when_they_change(
    rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    config = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    server_config = from_values(ServerConfig, config)
    loaded = HttpConfig(rig("a").app, server_config)
    loaded.load()
    caplog.set_level("INFO")

    async def test() -> None:
        assert loaded.ssl is not None
        refresh = refresh_certificates(loaded.ssl, server_config.tls, seconds=0.001)
        task = asyncio.create_task(refresh)
        await asyncio.sleep(0)
        key.write_text("half a key")
        while "could not be read again" not in caplog.text:
            await asyncio.sleep(0.001)
        make_certificate(tmp_path, "second")
        while "were read again" not in caplog.text:
            await asyncio.sleep(0.001)
        task.cancel()

    run(test)
