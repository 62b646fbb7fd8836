"""The official client against a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from tests.serving.conftest import HELLO, MakeRig, Rig, serving
from tests.serving.test_chat import CALL, TOOLS


@contextmanager
def listening(server: Rig) -> Iterator[openai.OpenAI]:
    """Serve on a free port; yields a client of it."""
    with (
        serving(server) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_c64_chat_whole_and_streamed(rig: MakeRig) -> None:
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


def test_c64_logprobs(rig: MakeRig) -> None:
    server = rig("Hm</think>Hello")
    with listening(server) as client:
        reply = client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
        )
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in entries) == "Hm</think>Hello"
    assert {len(entry.top_logprobs) for entry in entries} == {2}


def test_c64_tool_loop_over_chats(rig: MakeRig) -> None:
    server = rig(CALL)
    with listening(server) as client:
        reply = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        [call] = reply.choices[0].message.tool_calls or []
        server.say("Hm</think>Cold.")
        turn: Any = reply.choices[0].message.to_dict()
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}
        final = client.chat.completions.create(
            model="tiny", messages=[*HELLO, turn, result], tools=TOOLS
        )
    assert final.choices[0].message.content == "Cold."
    assert "<think>let me see</think>On it.\n\n<｜DSML｜ calls>" in server.prompt
    assert "<tool_result>3 degrees</tool_result>" in server.prompt


def test_c64_tool_call_streamed(rig: MakeRig) -> None:
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


def test_c64_client_that_closes_its_stream_aborts(rig: MakeRig) -> None:
    server = rig([(66,)] * 100_000, end=False)
    with listening(server) as client:
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=8000, stream=True
        )
        next(iter(stream))
        stream.close()
    assert server.engine.aborted == [server.engine.requests[0].request_id]


class Forecast(pydantic.BaseModel):
    city: str
    degrees: int


FORECAST = 'Hm</think>{"city": "Oslo", "degrees": 3}'


def test_c64_parse_with_a_strict_schema(rig: MakeRig) -> None:
    server = rig(FORECAST)
    with listening(server) as client:
        reply = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Forecast
        )
        assert reply.choices[0].message.parsed == Forecast(city="Oslo", degrees=3)
        with client.chat.completions.stream(
            model="tiny", messages=HELLO, response_format=Forecast
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == Forecast(city="Oslo", degrees=3)
        parsed = client.responses.parse(model="tiny", input="Hi", text_format=Forecast)
        assert parsed.output_parsed == Forecast(city="Oslo", degrees=3)
    assert all(request.constraint for request in server.engine.requests)


def test_c64_tool_loop_over_responses(rig: MakeRig) -> None:
    server = rig(CALL)
    tool: Any = {"type": "function", **TOOLS[0]["function"]}
    with listening(server) as client:
        with client.responses.stream(model="tiny", input="Weather?", tools=[tool]) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_response()
        assert types[-1] == "response.completed"
        assert final.output_text == "On it."
        call: Any = final.output[-1]
        assert call.arguments == '{"city": "Oslo 2>&1", "days": 3}'
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items: Any = [{"role": "user", "content": "Weather?"}]
        items += [item.to_dict() for item in final.output]
        client.responses.create(model="tiny", input=[*items, result], tools=[tool])
    assert "<think>let me see</think>On it.\n\n<｜DSML｜ calls>" in server.prompt
    assert "<tool_result>3</tool_result>" in server.prompt


@pytest.mark.parametrize(
    "script", ["Hm.</think>Hello", CALL, "no end"], ids=["text", "call", "open"]
)
def test_c33_every_event_is_what_the_client_declares(rig: MakeRig, script: str) -> None:
    server = rig(script)
    tool = {"type": "function", "strict": False, **TOOLS[0]["function"]}
    event_type: Any = pydantic.TypeAdapter(ResponseStreamEvent)
    for event in server.events("/v1/responses", input="Hi", tools=[tool]):
        event_type.validate_python(event)


def test_stored_responses(rig: MakeRig) -> None:
    with listening(rig("Hm</think>Hello", enable_responses_store=True)) as client:
        reply = client.responses.create(model="tiny", input="Hi")
        assert client.responses.retrieve(reply.id).output_text == "Hello"
        more = client.responses.create(model="tiny", input="Hi", previous_response_id=reply.id)
        assert more.previous_response_id == reply.id
