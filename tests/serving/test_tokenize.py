"""``/tokenize`` gives what would be prefilled; ``/detokenize`` goes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import HELLO, MakeRig, both_profiles
from tests.serving.test_chat import TOOLS

CHATS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required", "thinking": {"type": "disabled"}},
    {"reasoning_effort": "max"},
    {"chat_template_kwargs": {"thinking": False}},
    {"response_format": {"type": "json_object"}},
    {
        "messages": [*HELLO, {"role": "assistant", "content": "One"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
]


@both_profiles
@pytest.mark.parametrize("body", CHATS, ids=lambda body: "-".join(body) or "plain")
@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_c32_a_chat_has_the_ids_that_it_would_prefill(
    rig: MakeRig, path: str, body: dict[str, Any]
) -> None:
    server = rig("x")
    answer = server.post(path, **({"messages": HELLO} | body))
    server.chat(**body)
    assert tuple(answer["tokens"]) == server.engine.requests[0].prompt_token_ids
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert answer["token_strs"] is None


@pytest.mark.parametrize("adds", [True, False])
def test_raw_prompts_go_there_and_back(rig: MakeRig, adds: bool) -> None:
    server = rig("x")
    text = "Once <think> upon"
    answer = server.post("/tokenize", prompt=text, add_special_tokens=adds, return_token_strs=True)
    whole = "<｜begin▁of▁sentence｜>" * adds + text
    assert "".join(answer["token_strs"]) == whole
    assert server.post("/detokenize", tokens=answer["tokens"]) == {"prompt": whole}


def test_the_context_is_no_limit(rig: MakeRig) -> None:
    assert rig("x").post("/tokenize", prompt=" the" * 9000)["count"] > 8192
    messages = [{"role": "user", "content": " the" * 9000}]
    assert rig("x").post("/tokenize", messages=messages)["count"] > 8192


def test_mistakes_are_named(rig: MakeRig) -> None:
    assert rig("x").refuse("/tokenize", model="tiny")["param"] == "prompt"
    assert rig("x").refuse("/tokenize", messages=[])["param"] == "messages"
    assert rig("x").refuse("/detokenize", tokens=[5000])["param"] == "tokens"
    assert rig("x").refuse("/detokenize", tokens=[1], model="other")["code"] == "model_not_found"
