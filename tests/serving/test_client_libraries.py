"""Libraries that agents are built with, unmodified, against a real socket (C64)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.serving.conftest import HELLO, MakeRig, serving
from tests.serving.test_chat import CALL, TOOLS

# Their warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

ANSWER = "Hm</think>Hello"
FORECAST = 'Hm</think>{"city": "Oslo", "days": 3}'
ENDLESS: list[Any] = [(66,)] * 100_000
RESULT = "<tool_result>3 degrees</tool_result>"


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect the sockets that the libraries dropped here, not in a test that minds."""
    yield
    gc.collect()


class get_weather(BaseModel):
    """Get the weather."""

    city: str
    days: int


def langchain_model(kind: str, url: str) -> Any:
    """A chat model of LangChain that asks the server at ``url``."""
    if kind == "anthropic":
        langchain = pytest.importorskip("langchain_anthropic")
        return langchain.ChatAnthropic(model="tiny", base_url=url, api_key="x", max_tokens=2000)
    if kind == "deepseek":
        langchain = pytest.importorskip("langchain_deepseek")
        return langchain.ChatDeepSeek(model="tiny", api_base=f"{url}/v1", api_key="x")
    langchain = pytest.importorskip("langchain_openai")
    responses = {"use_responses_api": True} if kind == "responses" else {}
    return langchain.ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="x", **responses)


every_model = pytest.mark.parametrize("kind", ["openai", "responses", "deepseek", "anthropic"])


@every_model
def test_c64_langchain_reads_answers_whole_and_streamed(rig: MakeRig, kind: str) -> None:
    with serving(rig(ANSWER)) as url:
        model = langchain_model(kind, url)
        assert model.invoke("Hi").text == "Hello"
        assert "".join(chunk.text for chunk in model.stream("Hi")) == "Hello"


@every_model
def test_c64_langchain_calls_a_tool_and_returns_its_result(rig: MakeRig, kind: str) -> None:
    server = rig(CALL)
    with serving(server) as url:
        model = langchain_model(kind, url).bind_tools([get_weather])
        turn = model.invoke("Weather?")
        [call] = turn.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo 2>&1", "days": 3})
        server.say(ANSWER)
        result = {"role": "tool", "content": "3 degrees", "tool_call_id": call["id"]}
        final = model.invoke([("human", "Weather?"), turn, result])
    assert final.text == "Hello"
    assert RESULT in server.prompt
    assert "On it.\n\n<｜DSML｜ calls>" in server.prompt


@every_model
def test_c64_langchain_leaves_a_stream(rig: MakeRig, kind: str) -> None:
    server = rig(ENDLESS, end=False)
    with serving(server) as url:
        stream = langchain_model(kind, url).stream("Hi")
        next(stream)
        stream.close()
    assert server.engine.aborted == [server.engine.requests[0].request_id]


@pytest.mark.parametrize("kind", ["openai", "deepseek", "anthropic"])
def test_r5_langchain_gets_structured_output_by_a_named_tool(rig: MakeRig, kind: str) -> None:
    with serving(rig(CALL)) as url:
        method = {} if kind == "anthropic" else {"method": "function_calling"}
        model = langchain_model(kind, url).with_structured_output(get_weather, **method)
        assert model.invoke("Hi") == get_weather(city="Oslo 2>&1", days=3)


@pytest.mark.parametrize("kind", ["openai", "responses"])
def test_c64_langchain_gets_structured_output_by_a_schema(rig: MakeRig, kind: str) -> None:
    with serving(rig(FORECAST)) as url:
        model = langchain_model(kind, url).with_structured_output(get_weather)
        assert model.invoke("Hi") == get_weather(city="Oslo", days=3)


Ask = Callable[..., Any]


@pytest.fixture(params=["openai", "hosted_vllm", "deepseek", "anthropic"])
def ask_litellm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Ask a server through one of LiteLLM's providers."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing from the network
    litellm = pytest.importorskip("litellm")
    path = "/v1" if request.param in ("openai", "hosted_vllm") else ""

    def ask(url: str, **options: Any) -> Any:
        defaults = {"messages": HELLO, "max_tokens": 2000, "api_key": "x"}
        return litellm.completion(
            model=f"{request.param}/tiny", api_base=url + path, **defaults | options
        )

    yield ask
    litellm.in_memory_llm_clients_cache.flush_cache()  # it keeps sockets open for a later call


def test_c64_litellm_reads_answers_whole_and_streamed(rig: MakeRig, ask_litellm: Ask) -> None:
    server = rig(ANSWER)
    server.engine.num_cached_tokens = 2
    with serving(server) as url:
        reply = ask_litellm(url)
        message = reply.choices[0].message
        assert (message.content, message.reasoning_content) == ("Hello", "Hm")
        assert reply.usage.prompt_tokens_details.cached_tokens == 2
        chunks = [chunk.choices[0].delta.content or "" for chunk in ask_litellm(url, stream=True)]
        assert "".join(chunks) == "Hello"


def test_c64_litellm_calls_a_tool_and_returns_its_result(rig: MakeRig, ask_litellm: Ask) -> None:
    server = rig(CALL)
    with serving(server) as url:
        message = ask_litellm(url, tools=TOOLS, tool_choice="required").choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "get_weather"
        assert call.function.arguments == '{"city": "Oslo 2>&1", "days": 3}'
        server.say(ANSWER)
        result = {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}
        final = ask_litellm(url, tools=TOOLS, messages=[*HELLO, message.model_dump(), result])
    assert final.choices[0].message.content == "Hello"
    assert RESULT in server.prompt


def test_c64_litellm_gets_structured_output(rig: MakeRig, ask_litellm: Ask) -> None:
    server = rig(FORECAST)
    with serving(server) as url:
        reply = ask_litellm(url, response_format=get_weather)
    content = reply.choices[0].message.content
    assert get_weather.model_validate_json(content) == get_weather(city="Oslo", days=3)
    assert server.engine.requests[0].constraint is not None


def test_c64_litellm_leaves_a_stream(rig: MakeRig, ask_litellm: Ask) -> None:
    server = rig(ENDLESS, end=False)
    with serving(server) as url:
        stream = ask_litellm(url, stream=True)
        next(iter(stream))
        stream.completion_stream.close()
    assert server.engine.aborted == [server.engine.requests[0].request_id]
