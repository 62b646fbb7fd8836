"""The official client against a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn

from tests.serving.conftest import HELLO, MakeRig, Rig
from tests.serving.test_chat import CALL, TOOLS


@contextmanager
def listening(server: Rig) -> Iterator[openai.OpenAI]:
    """Serve on a free port; yields a client of it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(server.app, log_level="error", lifespan="off")
        web = uvicorn.Server(config)
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield client
        finally:
            web.should_exit = True
            thread.join()


def test_chat_whole_and_streamed(rig: MakeRig) -> None:
    with listening(rig("Hm</think>Hello 😀")) as client:
        reply: Any = client.chat.completions.create(model="tiny", messages=HELLO)
        assert reply.choices[0].message.content == "Hello 😀"
        assert reply.choices[0].message.reasoning_content == "Hm"
        chunks: list[Any] = list(
            client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        )
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert "".join(delta.content or "" for delta in deltas) == "Hello 😀"
        assert chunks[-1].usage == reply.usage


def test_tool_call_streamed(rig: MakeRig) -> None:
    with listening(rig(CALL)) as client:
        chunks: list[Any] = list(
            client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)
        )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather"
    arguments = "".join(call.function.arguments for call in calls)
    assert arguments == '{"city": "Oslo 2>&1", "days": 3}'


def test_completion_models_and_errors(rig: MakeRig) -> None:
    with listening(rig("there was")) as client:
        reply = client.completions.create(model="tiny", prompt="Once", n=2, max_tokens=99)
        assert [choice.text for choice in reply.choices] == ["there was"] * 2
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="Once")
        with pytest.raises(openai.BadRequestError, match="messages is empty"):
            client.chat.completions.create(model="tiny", messages=[])


def test_client_that_closes_its_stream_aborts(rig: MakeRig) -> None:
    server = rig([(66,)] * 100_000, end=False)
    with listening(server) as client:
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=8000, stream=True
        )
        next(iter(stream))
        stream.close()
    assert server.engine.aborted == [server.engine.requests[0].request_id]
