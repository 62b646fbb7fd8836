"""Libraries that agents are built with, against a real socket (C64)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.serving.conftest import HELLO, MakeRig, serving
from tests.serving.test_chat import CALL, TOOLS

pytestmark = [
    pytest.mark.slow,  # the libraries take seconds to import
    pytest.mark.filterwarnings("ignore"),  # theirs are not ours to mend
]

ANSWER = "Hm</think>Hello"
FORECAST = 'Hm</think>{"city": "Oslo", "days": 3}'


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


@pytest.mark.parametrize("kind", ["openai", "responses", "deepseek", "anthropic"])
def test_langchain_reads_answers_whole_and_streamed(rig: MakeRig, kind: str) -> None:
    with serving(rig(ANSWER)) as url:
        model = langchain_model(kind, url)
        assert model.invoke("Hi").text == "Hello"
        assert "".join(chunk.text for chunk in model.stream("Hi")) == "Hello"


@pytest.mark.parametrize("kind", ["openai", "deepseek", "anthropic"])
def test_r5_langchain_gets_structured_output_by_a_named_tool(rig: MakeRig, kind: str) -> None:
    with serving(rig(CALL)) as url:
        method = {} if kind == "anthropic" else {"method": "function_calling"}
        model = langchain_model(kind, url).with_structured_output(get_weather, **method)
        assert model.invoke("Hi") == get_weather(city="Oslo 2>&1", days=3)


def test_langchain_gets_structured_output_by_a_schema(rig: MakeRig) -> None:
    with serving(rig(FORECAST)) as url:
        model = langchain_model("openai", url).with_structured_output(get_weather)
        assert model.invoke("Hi") == get_weather(city="Oslo", days=3)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "deepseek", "anthropic"])
def test_litellm_reads_answers_and_calls(
    rig: MakeRig, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing from the network
    litellm = pytest.importorskip("litellm")
    path = "/v1" if provider in ("openai", "hosted_vllm") else ""

    def ask(url: str, **options: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/tiny",
            messages=HELLO,
            api_base=url + path,
            api_key="x",
            max_tokens=2000,
            **options,
        )

    with serving(rig(ANSWER)) as url:
        message = ask(url).choices[0].message
        assert (message.content, message.reasoning_content) == ("Hello", "Hm")
        chunks = [chunk.choices[0].delta.content or "" for chunk in ask(url, stream=True)]
        assert "".join(chunks) == "Hello"
    with serving(rig(CALL)) as url:
        (call,) = ask(url, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert call.function.arguments == '{"city": "Oslo 2>&1", "days": 3}'
