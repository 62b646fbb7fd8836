"""The official Anthropic client against a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

from tests.serving.conftest import HELLO, MakeRig, Rig, serving
from tests.serving.test_chat import CALL
from tests.serving.test_messages import NO_ARGUMENTS, WEATHER
from tests.serving.test_openai_client import Forecast

TOOL: Any = WEATHER


@contextmanager
def listening(server: Rig) -> Iterator[anthropic.Anthropic]:
    """Serve on a free port; yields a client of it."""
    with (
        serving(server) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


def test_c64_message_and_its_stream(rig: MakeRig) -> None:
    with listening(rig("Hm</think>Hello 😀")) as client:
        reply = client.messages.create(model="tiny", max_tokens=2000, messages=HELLO)
        with client.messages.stream(model="tiny", max_tokens=2000, messages=HELLO) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == "Hello 😀"
    assert [block.type for block in final.content] == ["thinking", "text"]
    plain = [[block.to_dict() for block in message.content] for message in (reply, final)]
    for blocks in plain:
        blocks[0].pop("signature")  # the message's id
    assert plain[0] == plain[1]
    assert final.usage.output_tokens == reply.usage.output_tokens
    assert reply._request_id


def test_c38_stream_of_tools_is_accumulated(rig: MakeRig) -> None:
    for script, wanted in ((CALL, {"city": "Oslo 2>&1", "days": 3}), (NO_ARGUMENTS, {})):
        with (
            listening(rig(script)) as client,
            client.messages.stream(
                model="tiny", max_tokens=2000, messages=HELLO, tools=[TOOL]
            ) as stream,
        ):
            final = stream.get_final_message()
        call: Any = final.content[-1]
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", wanted)
        assert final.stop_reason == "tool_use"


def test_c64_tool_loop(rig: MakeRig) -> None:
    server = rig(CALL)
    with listening(server) as client:
        reply = client.messages.create(
            model="tiny",
            max_tokens=2000,
            messages=HELLO,
            tools=[TOOL],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        call: Any = reply.content[-1]
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "3 degrees"}
        history: Any = [
            *HELLO,
            {"role": "assistant", "content": [block.to_dict() for block in reply.content]},
            {"role": "user", "content": [result]},
        ]
        client.messages.create(model="tiny", max_tokens=2000, messages=history, tools=[TOOL])
    assert "<think>let me see</think>On it.\n\n<｜DSML｜ calls>" in server.prompt
    assert "<tool_result>3 degrees</tool_result>" in server.prompt


def test_c64_structured_output_is_parsed(rig: MakeRig) -> None:
    server = rig('Hm</think>{"city": "Oslo", "degrees": 3}')
    with listening(server) as client:
        parsed = client.messages.parse(
            model="tiny", max_tokens=2000, messages=HELLO, output_format=Forecast
        )
        assert parsed.parsed_output == Forecast(city="Oslo", degrees=3)
    assert server.engine.requests[0].constraint is not None


def test_count_tokens_and_errors(rig: MakeRig) -> None:
    server = rig("x")
    with listening(server) as client:
        count = client.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL])
        client.messages.create(model="tiny", max_tokens=9, messages=HELLO, tools=[TOOL])
        assert count.input_tokens == len(server.engine.requests[0].prompt_token_ids)
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="other", max_tokens=9, messages=HELLO)
        long: Any = [{"role": "user", "content": " the" * 9000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9"):
            client.messages.create(model="tiny", max_tokens=9, messages=long)


def test_c64_a_client_that_leaves_aborts(rig: MakeRig) -> None:
    server = rig([(66,)] * 100_000, end=False)
    with (
        listening(server) as client,
        client.messages.stream(model="tiny", max_tokens=8000, messages=HELLO) as stream,
    ):
        next(iter(stream))
    assert server.engine.aborted == [server.engine.requests[0].request_id]
