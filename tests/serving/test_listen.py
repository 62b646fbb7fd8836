"""Addresses that can be had, and what the log says of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import httpx
import pytest
import uvloop

from leadline.config.server import ServerConfig
from leadline.core.errors import ConfigError
from leadline.serving.http import HttpConfig, HttpServer
from leadline.serving.listen import announce, bind
from tests.serving.conftest import MakeRig


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])
def test_a_unix_socket_serves_like_a_port(rig: MakeRig, tmp_path: Path, loop: object) -> None:
    config = ServerConfig(uds=str(tmp_path / "leadline.sock"))

    async def run() -> None:
        server = HttpServer(HttpConfig(rig("a").app, config))
        with bind(config) as listener:
            task = asyncio.create_task(server.serve(sockets=[listener]))
            transport = httpx.AsyncHTTPTransport(uds=config.uds)
            async with httpx.AsyncClient(transport=transport, base_url="http://local") as http:
                while not server.started:
                    await asyncio.sleep(0.001)
                assert (await http.get("/health")).status_code == 200
            server.should_exit = True
            await task

    loop.run(run())  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_a_socket_that_a_killed_server_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))
    assert path.is_socket()
    with bind(ServerConfig(uds=str(path))) as listener:
        listener.listen()
    assert not path.exists()


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "a.sock"))
    with bind(config) as first:
        first.listen()
        with (
            pytest.raises(ConfigError, match=r"cannot listen on .*a\.sock \(Address already in"),
            bind(config),
        ):
            pass
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"),
            bind(ServerConfig(host="127.0.0.1", port=port)),
        ):
            pass


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen on"), bind(ServerConfig(uds=str(file))):
        pass
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("values", "url", "warns"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:{}/v1", False),
        ({"host": "127.0.0.1", "root_path": "/ai"}, "http://127.0.0.1:{}/ai/v1", False),
        ({"host": "127.0.0.1", "ssl_certfile": "c"}, "https://127.0.0.1:{}/v1", False),
        ({"host": "::1"}, "http://[::1]:{}/v1", False),
        ({"host": "0.0.0.0"}, "http://0.0.0.0:{}/v1", True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, "http://0.0.0.0:{}/v1", False),
    ],
    ids=str,
)
def test_the_log_names_the_url_and_warns_of_an_open_door(
    rig: MakeRig,
    values: dict[str, object],
    url: str,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = rig("", port=0, served_model_name=("a", "b"), **values).app.state.server
    with bind(server.config) as listener:
        announce(server, listener)
        port = listener.getsockname()[1]
    assert f"serves a, b at {url.format(port)}" in caplog.text
    assert ("there are no API keys" in caplog.text) == warns
