"""Fields of a chat: limits, policies, choices of tools, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import HELLO, MakeRig, Rig, both_profiles, joined
from tests.serving.test_chat import CALL, TOOLS

PATH = "/v1/chat/completions"
OFF = {"thinking": {"type": "disabled"}}


def sampling_of(server: Rig, **body: Any) -> Any:
    server.chat(**body)
    return server.engine.requests[-1].sampling


def constraint_of(server: Rig, **body: Any) -> Any:
    server.chat(**body)
    return server.engine.requests[-1].constraint


@both_profiles
@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (OFF, 8192),
        ({}, 65536),
        ({"reasoning_effort": "max"}, 131072),
    ],
    ids=["chat", "thinking", "max"],
)
def test_c27_default_limits(rig: MakeRig, body: dict[str, Any], limit: int) -> None:
    assert sampling_of(rig("x", max_model_len=2**20), **body).max_tokens == limit
    small = rig("x")
    assert sampling_of(small, **body).max_tokens == min(
        limit, 8192 - len(small.engine.requests[0].prompt_token_ids)
    )


@both_profiles
@pytest.mark.parametrize(
    ("setting", "limit"), [("remaining", None), ("77", 77)], ids=["remaining", "number"]
)
def test_c27_the_default_limit_is_a_setting(rig: MakeRig, setting: str, limit: int | None) -> None:
    server = rig("x", default_max_tokens=setting)
    found = sampling_of(server).max_tokens
    assert found == (limit or 8192 - len(server.engine.requests[0].prompt_token_ids))


@both_profiles
def test_c27_a_limit_beyond_the_context_is_refused_when_strict(rig: MakeRig) -> None:
    error = rig("x", strict_max_tokens=True).refuse(PATH, messages=HELLO, max_tokens=10**6)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert rig("x").refuse(PATH, messages=HELLO, max_completion_tokens=0)["param"] == (
        "max_completion_tokens"
    )


@both_profiles
def test_c27_a_limit_beyond_the_context_is_lowered_and_ends_by_length(rig: MakeRig) -> None:
    server = rig([(66,)] * 9000, end=False)
    reply = server.chat(max_tokens=10**6)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 8192


@both_profiles
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_c29_a_forced_call_comes_after_free_reasoning(rig: MakeRig, choice: Any) -> None:
    server = rig(CALL.replace("On it.", ""))
    reply = server.chat(tools=TOOLS, tool_choice=choice)["choices"][0]
    assert reply["message"]["reasoning_content"] == "let me see"
    assert reply["finish_reason"] == "tool_calls"
    constraint = server.engine.requests[0].constraint
    assert constraint is not None
    assert constraint.at_once is None
    triggers = {server.tokenizer.decode((token_id,)) for token_id, _ in constraint.after}
    assert "</think>" in triggers


@both_profiles
def test_c29_without_thinking_the_prompt_opens_the_block(rig: MakeRig) -> None:
    server = rig(CALL.partition("calls>\n")[2])
    reply = server.chat(tools=TOOLS, tool_choice="required", **OFF)["choices"][0]
    _, block = server.prompt.split("<｜Assistant｜></think>\n\n")
    assert block in ("<｜DSML｜ calls>\n", "<｜DSML｜tool_calls>\n")
    assert reply["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert reply["finish_reason"] == "tool_calls"


@both_profiles
def test_c28_auto_is_free_until_a_block_opens(rig: MakeRig) -> None:
    server = rig("x")
    constraint = constraint_of(server, tools=TOOLS)
    assert constraint.at_once is None
    assert [server.tokenizer.decode((token_id,)) for token_id, _ in constraint.after] == [
        "｜DSML｜"
    ]


@both_profiles
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"function_call": "none"},
        {"tools": []},
    ],
    ids=["none", "legacy", "empty"],
)
def test_item_77_no_tools_are_shown(rig: MakeRig, fields: dict[str, Any]) -> None:
    server = rig("Hm</think>Hello")
    body = {"tools": TOOLS} | fields
    reply = server.chat(**body)
    assert "## Tools" not in server.prompt
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert server.engine.requests[0].constraint is None


def test_legacy_functions_become_tools(rig: MakeRig) -> None:
    new, old = rig(CALL), rig(CALL)
    new.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    functions = [tool["function"] for tool in TOOLS]
    reply = old.chat(functions=functions, function_call={"name": "get_weather"})
    assert old.prompt == new.prompt
    assert old.engine.requests[0].constraint == new.engine.requests[0].constraint
    assert reply["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize("effort", ["none", "low"])
def test_c29_a_call_of_none_of_the_tools_cannot_be_demanded(rig: MakeRig, effort: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
    error = rig("x").refuse(
        PATH, messages=HELLO, tools=TOOLS, tool_choice=choice, reasoning_effort=effort
    )
    assert error["param"] == "tool_choice"


def test_allowed_tools_narrow_the_choice_and_keep_the_prompt(rig: MakeRig) -> None:
    server = rig("x")
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"mode": "auto", "tools": [TOOLS[0]]}
    server.chat(
        tools=[*TOOLS, other], tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    server.chat(tools=[*TOOLS, other])
    narrow, wide = server.engine.requests
    assert narrow.prompt_token_ids == wide.prompt_token_ids
    assert narrow.constraint != wide.constraint


@both_profiles
def test_c30_reasoning_field_leaves_one_key(rig: MakeRig) -> None:
    """C30."""
    for setting, keys in (
        ("both", {"reasoning_content", "reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
    ):
        server = rig("Hm</think>Hi", reasoning_field=setting)
        message = server.chat()["choices"][0]["message"]
        assert set(message) & {"reasoning_content", "reasoning"} == keys
        chunks = server.stream()
        assert {key for key in ("reasoning_content", "reasoning") if joined(chunks, key)} == keys
    assert "reasoning" not in rig("</think>Hi").chat()["choices"][0]["message"]


NUMBERS = {
    "temperature": (2.5, "hot", True),
    "top_p": (0, "a"),
    "top_k": (-2, 1.5),
    "min_p": (2,),
    "presence_penalty": (3, False),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0,),
    "seed": (2**63, "x"),
    "n": (0, 129),
    "max_tokens": (0, True),
    "min_tokens": (-1,),
    "top_logprobs": (21,),
    "thinking_token_budget": (-2,),
    "stream_interval": (0,),
    "truncate_prompt_tokens": (0,),
}


@both_profiles
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, bad in NUMBERS.items() for value in bad]
)
def test_c39_a_number_outside_its_domain_is_named(rig: MakeRig, name: str, value: Any) -> None:
    body = {"messages": HELLO, "logprobs": True, name: value}
    assert rig("x").refuse(PATH, **body)["param"] == name


@both_profiles
def test_c40_honour_keeps_what_is_asked_and_fills_the_rest(rig: MakeRig) -> None:
    server = rig("x")
    asked = sampling_of(server, temperature=0, presence_penalty=1.5, top_p=0.5)
    assert (asked.temperature, asked.presence_penalty, asked.top_p) == (0, 1.5, 0.5)
    silent = sampling_of(server)
    assert (silent.temperature, silent.presence_penalty, silent.top_p) == (1.0, 0.0, 1.0)


def test_c40_r9_the_clouds_policy_ignores_without_an_error(rig: MakeRig) -> None:
    server = rig("x", sampling_policy="deepseek")
    asked = sampling_of(server, temperature=0, presence_penalty=1.5, top_p=0.5)
    assert (asked.temperature, asked.presence_penalty, asked.top_p) == (1.0, 0.0, 0.95)
    chat = sampling_of(server, temperature=0.2, presence_penalty=1.5, top_p=0.5, **OFF)
    assert (chat.temperature, chat.presence_penalty, chat.top_p) == (0.2, 1.5, 1.0)


def test_overrides_are_defaults_only(rig: MakeRig) -> None:
    server = rig("x", override_generation_config={"temperature": 0.3, "max_new_tokens": 50})
    assert (sampling_of(server).temperature, sampling_of(server).max_tokens) == (0.3, 50)
    assert sampling_of(server, temperature=0.9).temperature == 0.9


@both_profiles
@pytest.mark.parametrize(
    ("form", "is_shown"),
    [
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}, True),
        ({"type": "regex", "pattern": "a+"}, False),
        ({"type": "text"}, False),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else None,
)
def test_c14_response_formats(rig: MakeRig, form: dict[str, Any], is_shown: bool) -> None:
    server = rig("x")
    constraint = constraint_of(server, response_format=form)
    assert (constraint is None) == (form["type"] == "text")
    assert ("## Response Format:" in server.prompt) == is_shown
    if constraint is not None:  # reasoning is free (R4)
        assert constraint.at_once is None


@both_profiles
@pytest.mark.parametrize(
    "fields",
    [{"guided_json": {}}, {"guided_regex": "a"}, {"guided_choice": ["a"]}, {"guided_grammar": "a"}],
    ids=lambda fields: next(iter(fields)),
)
def test_c26_renamed_fields_name_their_replacement(rig: MakeRig, fields: dict[str, Any]) -> None:
    error = rig("x").refuse(PATH, messages=HELLO, **fields)
    assert error["param"] == next(iter(fields))
    assert "structured_outputs" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"task": "sing"}, "task"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"reasoning_effort": "bogus"}, "reasoning_effort"),
        ({"reasoning": {"effort": 101}}, "reasoning_effort"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
        ({"user_id": "x" * 513}, "user_id"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:50],
)
def test_what_cannot_be_served_is_named(rig: MakeRig, fields: dict[str, Any], param: str) -> None:
    assert rig("x").refuse(PATH, messages=HELLO, **fields)["param"] == param


@both_profiles
def test_item_76_logit_bias_reaches_the_engine(rig: MakeRig) -> None:
    biased = sampling_of(rig("x"), logit_bias={"5": -100, "6": 100})
    assert dict(biased.logit_bias) == {5: -100, 6: 100}


@both_profiles
def test_item_74_ignored_end_tokens_are_counted(rig: MakeRig) -> None:
    reply = rig([(1,), (66,)] * 60, end=False).chat(ignore_eos=True, max_tokens=100, **OFF)
    assert reply["usage"]["completion_tokens"] == 100
    assert "end" not in reply["choices"][0]["message"]["content"]


def test_what_the_engine_needs_beside_sampling(rig: MakeRig) -> None:
    server = rig("x", scheduling_policy="priority")
    server.chat(bad_words=["no"], thinking_token_budget=50, priority=-3)
    request = server.engine.requests[0]
    assert request.bad_token_ids
    assert request.thinking_budget is not None
    assert (request.thinking_budget.num_tokens, request.priority) == (50, -3)


def test_a_priority_where_requests_keep_their_order_is_refused(rig: MakeRig) -> None:
    server = rig("x")
    body = {"messages": HELLO, "priority": -3}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")
    assert server.chat(priority=0)


@both_profiles
def test_c15_task_is_a_quick_instruction(rig: MakeRig) -> None:
    server = rig("A greeting")
    assert server.chat(task="title")["choices"][0]["message"]["content"] == "A greeting"
    assert server.prompt.endswith("<｜User｜>Hi<｜title｜>")
    server.chat(chat_template_kwargs={"task": "title"})
    assert server.prompt.endswith("<｜User｜>Hi<｜title｜>")


def test_ids_are_returned_and_the_client_names_the_answer(rig: MakeRig) -> None:
    server = rig("a</think>b")
    reply = server.chat(return_token_ids=True, request_id="mine")
    assert reply["id"] == "chatcmpl-mine"
    assert tuple(reply["prompt_token_ids"]) == server.engine.requests[0].prompt_token_ids
    assert reply["choices"][0]["token_ids"] == [*server.tokenizer.encode("a</think>b"), 1]
    chunks = server.stream(return_token_ids=True)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
    assert ids == reply["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == reply["prompt_token_ids"]


def test_prompt_logprobs_of_a_chat(rig: MakeRig) -> None:
    server = rig("x")
    first, *others = server.chat(prompt_logprobs=0)["prompt_logprobs"]
    assert first is None
    assert len(others) == len(server.engine.requests[0].prompt_token_ids) - 1


@both_profiles
def test_c46_usage_can_be_forced_and_repeated_at_the_finish(rig: MakeRig) -> None:
    forced = rig("a</think>b", enable_force_include_usage=True).stream()
    assert forced[-1]["choices"] == []
    assert forced[-1]["usage"]["completion_tokens"] > 0
    chunks = rig("a</think>b", usage_in_final_chunk=True).stream()
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all("usage" not in chunk for chunk in chunks[:-1])


@both_profiles
@pytest.mark.parametrize("script", ["Hm</think>Hi there", CALL], ids=["text", "call"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["stop", "length"])
def test_c45_every_choice_has_one_finish_chunk(rig: MakeRig, script: str, is_cut: bool) -> None:
    chunks = rig(script).stream(n=4, tools=TOOLS, max_tokens=5 if is_cut else 999)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    finished = [part["index"] for part in parts if part["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    for index in range(4):
        own = [part for part in parts if part["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"]


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c41_entries_cover_calls_too(rig: MakeRig, stream: bool) -> None:
    server = rig(CALL)
    body: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in server.stream(**body)]
        entries = [entry for part in parts if part for entry in part["content"]]
    else:
        entries = server.chat(**body)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == server.script


@pytest.mark.parametrize("by_field", [False, True], ids=["setting", "field"])
def test_stream_interval_joins_deltas(rig: MakeRig, by_field: bool) -> None:
    steps = [(token_id,) for token_id in range(66, 78)]
    server = rig(steps, **({} if by_field else {"stream_interval": 4}))
    body: dict[str, Any] = OFF | ({"stream_interval": 4} if by_field else {})
    chunks = server.stream(**body)
    sizes = [len(chunk["choices"][0]["delta"].get("content") or "") for chunk in chunks]
    assert sizes == [0, 1, 4, 4, 3, 0]


@both_profiles
@pytest.mark.parametrize(
    ("name", "thinks"),
    [("deepseek-chat", False), ("deepseek-reasoner", True), ("deepseek-chat[1m]", False)],
)
def test_item_84_aliases_carry_a_thinking_mode(rig: MakeRig, name: str, thinks: bool) -> None:
    server = rig(
        "x",
        model_alias=("deepseek-chat=tiny", "deepseek-reasoner=tiny"),
        default_chat_template_kwargs={"thinking": not thinks},
    )
    assert server.chat(model=name)["model"] == name.removesuffix("[1m]")
    assert server.prompt.endswith("<think>" if thinks else "</think>")
    server.chat(model=name, thinking=not thinks)
    assert server.prompt.endswith("</think>" if thinks else "<think>")


@both_profiles
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", PATH])
def test_r13_cached_tokens_are_the_same_in_every_dialect(rig: MakeRig, path: str) -> None:
    server = rig("Hm</think>Hi")
    server.engine.num_cached_tokens = 5
    body = {"messages": HELLO, "input": "Hi", "max_tokens": 50}
    usage = server.post(path, **body)["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert details.get("cached_tokens", usage.get("cache_read_input_tokens")) == 5


@both_profiles
def test_item_82_reasoning_comes_back_the_same_from_every_dialect(rig: MakeRig) -> None:
    server = rig("x")
    user = {"role": "user", "content": "Q"}
    for key in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "A", key: "R"}
        server.chat(messages=[user, turn, user], tools=TOOLS)
    function = TOOLS[0]["function"]
    blocks = [
        {"type": "thinking", "thinking": "R", "signature": "s"},
        {"type": "text", "text": "A"},
    ]
    server.post(
        "/v1/messages",
        max_tokens=50,
        messages=[user, {"role": "assistant", "content": blocks}, user],
        tools=[{"name": function["name"], "input_schema": function["parameters"]}],
    )
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "t", "text": "R"}]}
    answer = {"type": "message", "role": "assistant", "content": "A"}
    server.post(
        "/v1/responses",
        input=[user, thought, answer, user],
        tools=[{"type": "function", **function}],
    )
    prompts = {request.prompt_token_ids for request in server.engine.requests}
    assert len(prompts) == 1
    assert "<think>R</think>A" in server.prompt


@both_profiles
def test_c12_a_sampled_call_comes_back_as_it_was(rig: MakeRig) -> None:
    server = rig(CALL.replace('string="false">3<', 'string="false"> 3 <'))
    message = server.chat(tools=TOOLS)["choices"][0]["message"]
    sampled = server.script.partition("</think>")[2]
    call = message["tool_calls"][0]
    turn = {key: message[key] for key in ("role", "content", "reasoning_content")}
    turn["tool_calls"] = [call]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    server.chat(tools=TOOLS, messages=[*HELLO, turn, result])
    assert sampled in server.prompt
    server.chat(tools=TOOLS, messages=[*HELLO, turn, result], cache_salt="other")
    assert sampled not in server.prompt


@both_profiles
@pytest.mark.parametrize(
    ("policy", "body", "wanted"),
    [
        ("honour", {}, (1.0, 1.0)),
        ("honour", {"tools": TOOLS}, (1.0, 0.95)),
        ("honour", {"tools": TOOLS, "temperature": 0.2, "top_p": 0.5}, (0.2, 0.5)),
        ("deepseek", {"temperature": 0.2, "top_p": 0.5}, (1.0, 1.0)),
        ("deepseek", {"tools": TOOLS, "top_p": 0.5}, (1.0, 0.95)),
        ("deepseek", {"temperature": 0.2, "top_p": 0.5} | OFF, (0.2, 0.5)),
    ],
    ids=["honour", "honour-tools", "honour-asked", "cloud", "cloud-tools", "cloud-chat"],
)
def test_c40_policies_of_v4(
    rig: MakeRig, policy: str, body: dict[str, Any], wanted: tuple[float, float]
) -> None:
    sampling = sampling_of(rig("x", effort_profile="v4", sampling_policy=policy), **body)
    assert (sampling.temperature, sampling.top_p) == wanted


def test_v4_has_its_own_block_and_no_namespaces(rig: MakeRig) -> None:
    call = CALL.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")
    server = rig(call, effort_profile="v4")
    message = server.chat(tools=TOOLS)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "<｜DSML｜tool_calls>" in server.prompt
    tool = {"type": "function", "function": {"name": "fs::read"}}
    assert server.refuse(PATH, messages=HELLO, tools=[tool])["param"] == "tools[0]"
