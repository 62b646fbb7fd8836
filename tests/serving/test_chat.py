"""Chats over HTTP: the two forms of an answer agree, and carry what the API promises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.conftest import HELLO, MakeRig, both_profiles, joined

CALL = (
    'let me see</think>On it.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Oslo 2>&1</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


def test_answer_splits_reasoning_from_content(rig: MakeRig) -> None:
    reply = rig("Hm, well.</think>Hello!").chat()
    message = reply["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Hello!",
        "reasoning_content": "Hm, well.",
        "reasoning": "Hm, well.",
    }
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"


@both_profiles
def test_item_69_reasoning_that_never_closes_is_all_reasoning(rig: MakeRig) -> None:
    reply = rig("Hm, well and", end=False).chat()
    assert reply["choices"][0]["message"]["reasoning_content"] == "Hm, well and"
    assert reply["choices"][0]["message"]["content"] is None
    assert reply["choices"][0]["finish_reason"] == "length"


def test_include_reasoning_false_hides_but_counts_it(rig: MakeRig) -> None:
    reply = rig("Hm</think>Hello").chat(include_reasoning=False)
    assert "reasoning_content" not in reply["choices"][0]["message"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_prompt_is_what_the_encoder_renders(rig: MakeRig) -> None:
    server = rig("x")
    server.chat(thinking={"type": "disabled"})
    prompt = server.engine.requests[0].prompt_token_ids
    assert server.tokenizer.decode(prompt) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    )


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c46_usage_counts_prompt_cache_and_answer(rig: MakeRig, stream: bool) -> None:
    server = rig("Hm</think>Hello")
    server.engine.num_cached_tokens, server.engine.num_replayed_tokens = 2, 1
    if stream:
        chunks = server.stream(stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
    else:
        usage = server.chat()["usage"]
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    num_answer = len(server.tokenizer.encode("Hm</think>Hello")) + 1  # and the end token
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == num_answer
    assert usage["total_tokens"] == num_prompt + num_answer
    details = usage["prompt_tokens_details"]
    assert (details["cached_tokens"], details["replayed_tokens"]) == (2, 1)
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == num_prompt


@both_profiles
def test_c46_stream_without_include_usage_has_no_usage(rig: MakeRig) -> None:
    assert all("usage" not in chunk for chunk in rig("a</think>b").stream())


@both_profiles
def test_item_86_continuous_usage_never_falls_and_ends_at_the_final_count(rig: MakeRig) -> None:
    chunks = rig("Hm</think>Hello there").stream(
        stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2] == counts[-1]


@both_profiles
def test_c45_stream_opens_with_the_role_and_ends_with_one_finish(rig: MakeRig) -> None:
    chunks = rig("Hm</think>Hello").stream()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    kinds = [{"reasoning_content": "reasoning"}.get(k, k) for d in deltas[1:-1] for k in d]
    assert all(len({*delta} - {"reasoning"}) == 1 for delta in deltas[1:-1])
    assert set(kinds) == {"reasoning", "content"}
    assert len({chunk["id"] for chunk in chunks}) == 1


@both_profiles
@pytest.mark.parametrize("step", [1, 2, 3, 1000], ids=lambda n: f"step={n}")
@pytest.mark.parametrize(
    "text",
    [
        "Hm\n\n</think>\n\nfour 😀 bytes 世界",
        CALL,
        "</think><think>x</think>y",
        "a <b",
        "<｜DSML｜",
    ],
    ids=["plain", "call", "empty", "angle", "half-call"],
)
def test_c2_c18_stream_equals_whole_for_any_cut(rig: MakeRig, text: str, step: int) -> None:
    ids = [*rig("").tokenizer.encode(text), 1]
    steps = [ids[i : i + step] for i in range(0, len(ids), step)]
    chunks = rig(steps).stream(tools=TOOLS)
    message = rig([ids]).chat(tools=TOOLS)["choices"][0]["message"]
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
    assert joined(chunks, "content") == (message["content"] or "")
    assert joined(chunks, "reasoning_content") == message.get("reasoning_content", "")
    arguments = "".join(
        call["function"]["arguments"]
        for chunk in chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    )
    assert arguments == "".join(
        call["function"]["arguments"] for call in message.get("tool_calls", ())
    )


@both_profiles
def test_c22_tool_call_streams_name_first_then_fragments(rig: MakeRig) -> None:
    chunks = rig(CALL).stream(tools=TOOLS)
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert calls[0]["id"].startswith("call_")
    assert len(calls[0]["id"]) >= len("call_") + 24
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"city": "Oslo 2>&1", "days": 3}
    assert joined(chunks, "content") == "On it."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@both_profiles
def test_c19_turn_of_only_a_call_has_null_content(rig: MakeRig) -> None:
    server = rig(CALL.replace("On it.", "\n") + "\n\n")
    message = server.chat(tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    _, *chunks = server.stream(tools=TOOLS)
    assert not any("content" in chunk["choices"][0]["delta"] for chunk in chunks)


@both_profiles
@pytest.mark.parametrize(
    "extra", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["none", "off"]
)
def test_item_77_call_without_tools_is_withheld(rig: MakeRig, extra: dict[str, Any]) -> None:
    server = rig(CALL)
    choice = server.chat(**extra)["choices"][0]
    assert choice["message"]["content"].strip() == "On it."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert "get_weather" not in server.tokenizer.decode(server.engine.requests[0].prompt_token_ids)


@both_profiles
def test_item_78_parallel_tool_calls_false_returns_one_call(rig: MakeRig) -> None:
    block = CALL.partition("<｜DSML｜ invoke")[1] + CALL.partition("<｜DSML｜ invoke")[2]
    twice = CALL.replace("\n</｜DSML｜ calls>", "") + "\n" + block
    assert len(rig(twice).chat(tools=TOOLS)["choices"][0]["message"]["tool_calls"]) == 2
    reply = rig(twice).chat(tools=TOOLS, parallel_tool_calls=False)
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 1


@both_profiles
def test_c25_length_inside_a_call_leaves_its_arguments_open(rig: MakeRig) -> None:
    reply = rig(CALL.partition(" 2>&1")[0], end=False).chat(tools=TOOLS)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo'


@both_profiles
def test_item_72_stop_string_cuts_content_only_and_is_counted_to_its_end(rig: MakeRig) -> None:
    text = "no STOP here</think>before STOP after"
    server = rig(text)
    reply = server.chat(stop=["STOP", "never"])
    choice = reply["choices"][0]
    assert choice["message"]["reasoning_content"] == "no STOP here"
    assert choice["message"]["content"] == "before "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    counted = server.tokenizer.encode(text.removesuffix(" after"))
    assert reply["usage"]["completion_tokens"] == len(counted)
    assert server.engine.aborted == [server.engine.requests[0].request_id]


@both_profiles
def test_item_72_stop_string_is_never_leaked_by_a_stream(rig: MakeRig) -> None:
    chunks = rig("</think>one\n\ntwo").stream(stop="\n\n")
    assert joined(chunks, "content") == "one"
    assert chunks[-1]["choices"][0]["stop_reason"] == "\n\n"


@both_profiles
def test_item_73_stop_string_waits_for_min_tokens(rig: MakeRig) -> None:
    text = "</think>a. b. c. d."
    num_tokens = len(rig("").tokenizer.encode("</think>a. b."))
    reply = rig(text).chat(stop=".", min_tokens=num_tokens)
    assert reply["choices"][0]["message"]["content"] == "a. b. c"


def test_stop_token_of_the_client_is_hidden_and_named(rig: MakeRig) -> None:
    (token_id,) = rig("").tokenizer.encode("!")
    reply = rig("</think>Hello! more").chat(stop_token_ids=[token_id])
    choice = reply["choices"][0]
    assert choice["message"]["content"] == "Hello"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)


@both_profiles
def test_item_74_ignored_end_token_is_not_shown(rig: MakeRig) -> None:
    server = rig([(66,), (1,), (67,), (1,)], end=False)
    reply = server.chat(ignore_eos=True, max_tokens=4, thinking={"type": "disabled"})
    choice = reply["choices"][0]
    assert choice["message"]["content"] == server.tokenizer.decode((66, 67))
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 4


@both_profiles
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_c2_character_cut_by_length_becomes_one_replacement(rig: MakeRig, kept: int) -> None:
    ids = rig("").tokenizer.encode("</think>ok 😀")
    assert len(ids) == len(rig("").tokenizer.encode("</think>ok ")) + 4
    steps = [[token_id] for token_id in ids[: len(ids) - 4 + kept]]
    chunks = rig(steps, end=False).stream()
    assert joined(chunks, "content") == "ok \ufffd"


@both_profiles
def test_item_75_choices_have_their_own_seeds_and_share_the_prompt(rig: MakeRig) -> None:
    server = rig("a</think>b")
    reply = server.chat(n=3, seed=7)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in server.engine.requests] == [7, 8, 9]
    assert server.chat(n=2, seed=2**63 - 1)["choices"][1]["finish_reason"] == "stop"  # wraps
    assert reply["usage"]["prompt_tokens"] == len(server.engine.requests[0].prompt_token_ids)
    assert reply["usage"]["completion_tokens"] == 3 * 4


@both_profiles
def test_c45_choices_interleave_in_a_stream_with_one_finish_each(rig: MakeRig) -> None:
    chunks = rig("a</think>hello there").stream(n=2)
    assert joined(chunks, "content", 0) == joined(chunks, "content", 1) == "hello there"
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c41_logprobs_cover_every_token_but_the_end(rig: MakeRig, stream: bool) -> None:
    text = "Hm</think>é STOP"
    server = rig(text)
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in server.stream(**body)]
        entries = [entry for part in parts if part for entry in part["content"]]
    else:
        entries = server.chat(**body)["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(server.tokenizer.encode(text))
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert entries[0]["logprob"] == -0.5
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [0.0, -1.0, -9999.0]


@both_profiles
def test_c41_logprobs_end_with_the_stop_string(rig: MakeRig) -> None:
    server = rig("</think>one STOP two")
    reply = server.chat(logprobs=True, stop="STOP")
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({}, "rest"),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 10**6}, "rest"),
        ({"max_tokens": None}, "rest"),
    ],
    ids=["default", "max_tokens", "both", "too-many", "null"],
)
def test_max_tokens_is_lowered_to_the_context(
    rig: MakeRig, body: dict[str, Any], limit: int | str
) -> None:
    server = rig("x")
    server.chat(**body)
    request = server.engine.requests[0]
    left = 8192 - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == (left if limit == "rest" else limit)


@both_profiles
def test_c26_unknown_fields_and_nulls_are_ignored(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    unknown: dict[str, Any] = {f"unknown_{i}": {"x": [i]} for i in range(20)}
    caplog.set_level("DEBUG", "leadline.serving.body")
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "tools", "seed", "guided_json"))
    assert rig("a</think>b").chat(**unknown, **nulls, store=True, user="me", metadata={"a": 1})
    assert "'unknown_0', 'unknown_1', 'unknown_10'" in caplog.text


def test_sampling_fields_reach_the_engine(rig: MakeRig) -> None:
    server = rig("x")
    server.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, seed=-3, logit_bias={"5": -100}, allowed_token_ids=[5, 6],
        min_tokens=2, max_tokens=9,
    )  # fmt: skip
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert (sampling.repetition_penalty, sampling.seed, sampling.min_tokens) == (1.1, -3, 2)
    assert dict(sampling.logit_bias or {}) == {5: -100}
    assert sampling.allowed_token_ids == (5, 6)


def test_session_of_the_body_comes_before_the_header(rig: MakeRig) -> None:
    server = rig("x")
    body = {"messages": HELLO, "session_id": "body"}
    server.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "header"})
    server.http.post("/v1/chat/completions", json=body)
    assert [request.session_key for request in server.engine.requests] == ["body", "body"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "Hi", "n": 2})],
    ids=["chat", "completions"],
)
def test_session_and_salt_reach_the_engine(
    rig: MakeRig, path: str, prompt: dict[str, object]
) -> None:
    server = rig("x")
    body = prompt | {"prompt_cache_key": "key", "cache_salt": "tenant"}
    assert server.http.post(f"/v1/{path}", json=body).status_code == 200
    assert {(r.session_key, r.cache_salt) for r in server.engine.requests} == {("key", "tenant")}


@both_profiles
@pytest.mark.parametrize("salt", ["", "a/b", "a\\b", "a@b", "a\0b", "x" * 129], ids=repr)
def test_c59_a_salt_outside_its_domain_is_refused(rig: MakeRig, salt: str) -> None:
    """serving-api 13.2."""
    server = rig("x")
    reply = server.http.post("/v1/chat/completions", json={"messages": HELLO, "cache_salt": salt})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "cache_salt"
    assert not server.engine.requests


@both_profiles
@pytest.mark.parametrize("name", ["", None, "tiny", "tiny[1m]"], ids=str)
def test_item_84_known_model_names_are_served(rig: MakeRig, name: str | None) -> None:
    assert rig("x").chat(model=name)["model"] == "tiny"


@both_profiles
def test_c51_half_a_surrogate_pair_is_served_as_replacement(rig: MakeRig) -> None:
    server = rig("x")
    raw = rb'{"messages":[{"role":"user","content":"a\ud83d \ud83d\ude00 \\ud83d"}]}'
    reply = server.http.post("/v1/chat/completions", content=raw)
    assert reply.status_code == 200
    prompt = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    assert "<｜User｜>a\ufffd 😀 \\ud83d<｜Assistant｜>" in prompt


def test_large_prompt_is_served_from_a_thread(rig: MakeRig) -> None:
    server = rig("x")
    server.chat(messages=[{"role": "user", "content": " the" * 6000}])
    assert len(server.engine.requests[0].prompt_token_ids) > 6000
