"""What is done beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from leadline.text.tokenizer import Tokenizer
from tests.serving.conftest import MakeRig


@pytest.mark.parametrize(
    ("num_bytes", "is_beside"), [(100, False), (500_000, True)], ids=["small", "500 kB"]
)
def test_c53_a_large_request_is_prepared_beside_the_loop(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_beside: bool
) -> None:
    server = rig("a")
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode_prompt

    def note(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(Tokenizer, "encode_prompt", note)

    async def ask() -> int:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reply = await http.post("/tokenize", json={"prompt": "a" * num_bytes})
            return reply.status_code

    assert asyncio.run(ask()) == 200
    assert (threads != [threading.current_thread()]) == is_beside
