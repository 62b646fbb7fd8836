"""What the checklist says of answers, shown by a random model behind ``leadline serve``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.test_serve import WORDS

BUDGET = {"thinking_token_budget": 8}  # random weights never close their reasoning
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    },
}


@pytest.fixture(scope="module")
def http(exact_url: str) -> Iterator[httpx.Client]:
    """Asks the exact server."""
    with httpx.Client(base_url=exact_url, timeout=120) as client:
        yield client


def text(seed: str, words: int = 12) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(http: httpx.Client, content: str, **body: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return post(http, "/v1/chat/completions", messages=messages, **GREEDY | body)


def events(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    """The JSON of a stream's events."""
    reply = http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if "data: {" in line)
    return [json.loads(line) for line in lines]


def test_a_stream_is_the_whole_answer_in_pieces(http: httpx.Client) -> None:
    whole = chat(http, text("pieces"), **BUDGET)
    messages = [{"role": "user", "content": text("pieces")}]
    body = GREEDY | BUDGET | {"stream_options": {"include_usage": True}}
    *chunks, usage = events(http, "/v1/chat/completions", messages=messages, **body)
    message = whole["choices"][0]["message"]
    for key in ("reasoning_content", "content"):
        joined = "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks)
        assert joined == message[key] != ""
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12


def cached_and_prompt(usage: dict[str, Any]) -> tuple[int, int]:
    """Cached and all tokens of a prompt, in the words of any dialect."""
    if "prompt_tokens" in usage:
        cached, total = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        assert usage["prompt_cache_hit_tokens"] == cached
        assert usage["prompt_cache_miss_tokens"] == total - cached
        return cached, total
    if "input_tokens_details" in usage:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    cached = usage["cache_read_input_tokens"]
    return cached, usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]


def test_c60_a_second_request_hits_alike_in_every_dialect_and_answers_as_a_cold_run(
    http: httpx.Client,
) -> None:
    content = text("c60")
    messages = [{"role": "user", "content": content}]
    body = GREEDY | {"messages": messages, "return_token_ids": True}
    cold = post(http, "/v1/chat/completions", **body)
    assert cached_and_prompt(cold["usage"])[0] == 0
    ids = cold["prompt_token_ids"]
    reasoning = cold["choices"][0]["message"]["reasoning_content"]
    usages = []

    again = post(http, "/v1/chat/completions", **body)
    assert again["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    *chunks, last = events(
        http, "/v1/chat/completions", **body, stream_options={"include_usage": True}
    )
    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
    assert streamed == cold["choices"][0]["token_ids"]
    usages += [again["usage"], last["usage"]]

    raw = GREEDY | {"prompt": ids, "return_token_ids": True}
    reply = post(http, "/v1/completions", **raw)
    assert reply["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    *_, last = events(http, "/v1/completions", **raw, stream_options={"include_usage": True})
    usages += [reply["usage"], last["usage"]]

    asked = {"input": content, "temperature": 0, "max_output_tokens": 12}
    reply = post(http, "/v1/responses", **asked)
    assert reply["output"][0]["content"][0]["text"] == reasoning
    *_, last = events(http, "/v1/responses", **asked)
    usages += [reply["usage"], last["response"]["usage"]]

    asked = {"messages": messages, "temperature": 0, "max_tokens": 12}
    reply = post(http, "/v1/messages", **asked)
    assert reply["content"][0]["thinking"] == reasoning
    first, *_ = events(http, "/v1/messages", **asked)
    usages += [reply["usage"], first["message"]["usage"]]

    [(cached, total)] = {cached_and_prompt(usage) for usage in usages}
    assert 0 < cached < total == len(ids)


def test_c60_by_default_a_prompt_of_whole_blocks_is_cached_but_for_its_last_token(
    base_url: str,
) -> None:
    prompt = random.Random(60).choices(range(200, 1000), k=512)
    with httpx.Client(base_url=base_url, timeout=120) as http:
        body = GREEDY | {"prompt": prompt}
        usages = [post(http, "/v1/completions", **body)["usage"] for _ in range(3)]
        *_, last = events(http, "/v1/completions", **body, stream_options={"include_usage": True})
    assert [cached_and_prompt(usage)[0] for usage in (*usages, last["usage"])] == [0, *[511] * 3]
    assert usages[1]["prompt_tokens_details"]["replayed_tokens"] == 128


def test_c34_a_new_billing_line_hits_the_old_prompt(http: httpx.Client) -> None:
    usages = [
        post(
            http,
            "/v1/messages",
            max_tokens=2,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cch={nonce};"},
                {"type": "text", "text": text("c34")},
            ],
            messages=[{"role": "user", "content": "Hi"}],
        )["usage"]
        for nonce in ("a1", "b2")
    ]
    (of_the_head, first), (hit, second) = map(cached_and_prompt, usages)
    assert first == second
    assert of_the_head < hit


@pytest.mark.parametrize(
    "body",
    [{}, {"tools": [{"type": "function", "function": TOOL}], "reasoning_effort": "max"}],
    ids=["plain", "tools"],
)
def test_c32_tokenize_gives_the_ids_that_are_prefilled(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    reply = chat(http, "Weather?", return_token_ids=True, max_tokens=1, **body)
    messages = [{"role": "user", "content": "Weather?"}]
    tokens = post(http, "/tokenize", messages=messages, **body)["tokens"]
    assert reply["prompt_token_ids"] == tokens


def test_c31_a_prompt_is_scored_as_its_tokens_were_drawn(http: httpx.Client) -> None:
    drawn = post(http, "/v1/completions", prompt=text("c31"), logprobs=1, **GREEDY)
    choice = drawn["choices"][0]
    whole = post(
        http,
        "/v1/completions",
        prompt=text("c31") + choice["text"],
        max_tokens=0,
        echo=True,
        logprobs=1,
    )
    scores = whole["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert len(scores) == whole["usage"]["prompt_tokens"]
    assert all(score <= 0 for score in scores[1:])
    assert whole["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c42_reasoning_is_free_and_the_answer_is_json(http: httpx.Client, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22, 333]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "JSON?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "temperature": 1.0,
        "seed": 42,
        **BUDGET,
    }
    if stream:
        deltas = [
            chunk["choices"][0]["delta"] for chunk in events(http, "/v1/chat/completions", **body)
        ]
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
    else:
        message = post(http, "/v1/chat/completions", **body)["choices"][0]["message"]
        reasoning, content = message["reasoning_content"], message["content"]
    assert reasoning
    assert not reasoning.startswith("{")
    assert json.loads(content)["n"] in (1, 22, 333)


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(100):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "structured",
    [
        {"json": {"type": "no such type"}},
        {"json": {"type": "object", "not": {}}},
        {"json": DEEP},
        {"json": {"enum": ["x" * 2**21]}},
        {"regex": "("},
        {"grammar": "start: ("},
    ],
    ids=["schema", "keyword", "nesting", "size", "regex", "grammar"],
)
def test_c43_what_cannot_be_enforced_is_refused_and_harms_nobody(
    http: httpx.Client, structured: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": "x", "structured_outputs": structured, "stream": stream}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert post(http, "/v1/completions", prompt="x", max_tokens=1)["choices"]


def test_item_69_a_thinking_budget_ends_reasoning_and_an_answer_follows(
    http: httpx.Client,
) -> None:
    reply = chat(http, text("69"), thinking_token_budget=50, max_tokens=70)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 50
    assert reply["choices"][0]["message"]["content"]
    endless = chat(http, text("69"), max_tokens=70)
    assert endless["choices"][0]["message"]["content"] is None
    assert endless["choices"][0]["finish_reason"] == "length"


def test_items_73_and_74_tokens_are_counted_as_asked(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 100, "return_token_ids": True}
    ignoring = post(http, "/v1/completions", **body, ignore_eos=True, logit_bias={"1": 5})
    assert len(ignoring["choices"][0]["token_ids"]) == 100
    assert "end▁of▁sentence" not in ignoring["choices"][0]["text"]
    eager = {"logit_bias": {"1": 100}, "min_tokens": 20}
    ended = post(http, "/v1/completions", **body, **eager)["choices"][0]
    assert len(ended["token_ids"]) == 21
    assert ended["finish_reason"] == "stop"


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "chat"])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_c29_a_call_is_forced(http: httpx.Client, choice: Any, thinks: bool) -> None:
    [answer] = post(
        http,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[{"type": "function", "function": TOOL}],
        tool_choice=choice,
        parallel_tool_calls=False,
        thinking=thinks,
        temperature=1.0,
        seed=29,
        **BUDGET,
    )["choices"]
    assert answer["finish_reason"] == "tool_calls"
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments in [{"city": c, "days": d} for c in ("Oslo", "Rome") for d in (1, 2)]
    assert ("reasoning_content" in answer["message"]) == thinks


def test_item_75_choices_of_a_seed_differ_and_come_again(http: httpx.Client) -> None:
    body = {"prompt": "Once", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    first, again = (post(http, "/v1/completions", **body) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in again["choices"]]
    assert first["usage"]["prompt_tokens"] == len(post(http, "/tokenize", prompt="Once")["tokens"])


def test_item_76_a_biased_token_never_or_always_comes(http: httpx.Client) -> None:
    free = post(http, "/v1/completions", prompt="x", return_token_ids=True, **GREEDY)
    [best, *_] = free["choices"][0]["token_ids"]
    for bias, is_always in ((-100, False), (100, True)):
        biased = {"logit_bias": {str(best): bias}, "return_token_ids": True}
        reply = post(http, "/v1/completions", prompt="x", **GREEDY | biased)
        came = [token_id == best for token_id in reply["choices"][0]["token_ids"]]
        assert all(came) if is_always else not any(came)


def test_item_89_a_prompt_one_below_the_context_gets_one_token(http: httpx.Client) -> None:
    prompt = random.Random(89).choices(range(200, 1000), k=1023)
    reply = post(http, "/v1/completions", prompt=prompt, max_tokens=99, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "length"
    refused = http.post("/v1/completions", json={"prompt": [*prompt, 200], "max_tokens": 99})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]


# Multiples of the block size, of the strides 4 and 128 and of the window, and their neighbours.
@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_item_90_around_blocks_windows_and_strides_a_hit_answers_as_a_cold_run(
    http: httpx.Client, length: int
) -> None:
    prompt = random.Random(length).choices(range(200, 1000), k=length)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    cold, hit, other = (
        post(http, "/v1/completions", **body, **salt)
        for salt in ({}, {}, {"cache_salt": "another cold run"})
    )
    cached = [cached_and_prompt(reply["usage"])[0] for reply in (cold, hit, other)]
    assert cached == [0, (length - 1) // 16 * 16, 0]
    assert cold["choices"] == hit["choices"] == other["choices"]


def test_c59_salts_never_share(http: httpx.Client) -> None:
    content = text("c59")
    cached = [
        cached_and_prompt(chat(http, content, cache_salt=salt, max_tokens=1)["usage"])[0]
        for salt in ("a", "b", "a")
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
