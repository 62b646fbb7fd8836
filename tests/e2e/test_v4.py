"""``leadline serve`` on a DeepSeek-V4 of random weights, in OpenAI's and Anthropic's dialects."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.process import PATIENCE_SECONDS, Served, running
from tests.e2e.test_checklist import BUDGET, GREEDY, TOOL, cached_and_prompt, events, post, text

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BLOCK = 128
# As the launch lines for other servers name the format.
NAMES = ("--tokenizer-mode", "--tool-call-parser", "--reasoning-parser")


@pytest.fixture(scope="module")
def server(random_tiny_v4: Path) -> Iterator[Served]:
    """With the smallest pages that its groups of 128 tokens allow."""
    names = [word for flag in NAMES for word in (flag, "deepseek_v4")]
    with running(random_tiny_v4, "--block-size", str(BLOCK), *names) as served:
        yield served


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def test_the_log_names_the_chat_format_and_nothing_to_correct(server: Served) -> None:
    assert "chat format v4 (" in server.log
    assert "WARNING" not in server.log


def test_prompts_are_v4s(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokens = post(http, "/tokenize", messages=messages)["tokens"]
    prompt = post(http, "/detokenize", tokens=tokens)["prompt"]
    head = "<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum with no shortcuts permitted."
    assert prompt.startswith(head)
    assert prompt.endswith("<｜User｜>Hi<｜Assistant｜><think>")
    assert "<｜System｜>" not in prompt
    reply = http.post("/tokenize", json={"messages": messages, "reasoning_effort": 30})
    assert reply.status_code == 400
    assert "DeepSeek-V4 has no numeric effort" in reply.text


def test_a_stream_is_the_whole_answer_in_pieces(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": text("v4")}], **GREEDY, **BUDGET}
    whole = post(http, CHAT, **body)
    *chunks, usage = events(http, CHAT, **body, stream_options={"include_usage": True})
    message = whole["choices"][0]["message"]
    for key in ("reasoning_content", "content"):
        joined = "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks)
        assert joined == message[key] != ""
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_r5_openais_client_gets_a_forced_call_behind_free_reasoning(
    server: Served, stream: bool
) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Weather?"}],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "parallel_tool_calls": False,
            "seed": 4,
            "extra_body": BUDGET,
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                [answer] = events.get_final_completion().choices
        else:
            [answer] = client.chat.completions.create(**asked).choices
    assert answer.finish_reason == "tool_calls"
    assert (answer.message.model_extra or {})["reasoning_content"]
    assert not answer.message.content
    [call] = answer.message.tool_calls or []
    assert call.function.name == "get_weather"
    check_arguments(json.loads(call.function.arguments))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropics_client_gets_a_forced_call(server: Served, stream: bool) -> None:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "Weather?"}],
            "tools": [
                {"name": TOOL["name"], "strict": True, "input_schema": TOOL["parameters"]},
            ],
            "tool_choice": {
                "type": "tool",
                "name": "get_weather",
                "disable_parallel_tool_use": True,
            },
            "thinking": {"type": "disabled"},
        }
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert block.type == "tool_use"
    check_arguments(block.input)


def check_arguments(arguments: Any) -> None:
    assert arguments in [{"city": c, "days": d} for c in ("Oslo", "Rome") for d in (1, 2)]


def test_c60_a_second_turn_hits_the_first_alike_in_both_dialects(http: httpx.Client) -> None:
    """And what follows a hit is what follows a cold prompt: a V4 has no approximation."""
    first = [{"role": "user", "content": text("turn", words=150)}]
    body = {**GREEDY, "thinking": {"type": "disabled"}, "return_token_ids": True}
    cold = post(http, CHAT, messages=first, **body)
    assert cached_and_prompt(cold["usage"])[0] == 0
    said = cold["choices"][0]["message"]["content"]
    second = [
        *first,
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And the tide?"},
    ]
    warm = post(http, CHAT, messages=second, **body)
    again = post(http, CHAT, messages=second, **body)
    unshared = post(http, CHAT, messages=second, **body, cache_salt="nobody else's")
    message = post(
        http, MESSAGES, messages=second, temperature=0, max_tokens=12, thinking=body["thinking"]
    )
    [(of_the_first, length), *later] = [
        cached_and_prompt(reply["usage"]) for reply in (warm, again, message)
    ]
    assert BLOCK <= of_the_first < length
    assert all(of_the_first <= cached < length == whole for cached, whole in later)
    assert cached_and_prompt(unshared["usage"]) == (0, length)
    answers = [reply["choices"][0]["token_ids"] for reply in (warm, again, unshared)]
    assert answers[0] == answers[1] == answers[2]


# Around pages, the window and the strides 4 and 128, and a long one.
@pytest.mark.parametrize("length", [127, 128, 129, 131, 255, 256, 257, 1801])
def test_r7_one_prompt_three_times_is_answered_as_when_cold(
    http: httpx.Client, length: int
) -> None:
    prompt = random.Random(length).choices(range(200, 1000), k=length)
    body = {**GREEDY, "prompt": prompt, "return_token_ids": True}
    cold = post(http, "/v1/completions", **body, cache_salt=f"of {length}")
    replies = [post(http, "/v1/completions", **body) for _ in range(3)]
    hits = [cached_and_prompt(reply["usage"])[0] for reply in replies]
    assert hits[0] == 0
    assert hits[1] == hits[2] == (length - 1) // BLOCK * BLOCK
    for reply in replies:
        assert reply["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]


def test_bounded_replay_is_refused_by_name(random_tiny_v4: Path) -> None:
    command = [sys.executable, "-m", "leadline", "serve", str(random_tiny_v4), "--port", "0"]
    done = subprocess.run(
        [*command, "--swa-bounded-replay"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("leadline: error: ")
    assert "swa_bounded_replay" in last
