"""Thinking and effort under all their names: the strongest word wins."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import V4, V41
from leadline.text.thinking import drop_thinking_of, effort_of, thinking_of
from leadline.text.tokenizer import Tokenizer
from tests.text.prompts import HI, render


@pytest.mark.parametrize(
    ("kwargs", "field", "want"),
    [
        (None, None, None),
        ({}, {"type": "enabled"}, True),
        ({}, {"type": "adaptive"}, True),
        ({}, {"type": "disabled"}, False),
        ({}, False, False),
        ({"thinking": True}, False, True),
        ({"enable_thinking": False}, {"type": "enabled"}, False),
        ({"thinking": None, "enable_thinking": True}, None, True),
    ],
    ids=str,
)
def test_switches_in_their_order(kwargs: Any, field: Any, want: bool | None) -> None:
    assert thinking_of(kwargs, field) is want


@pytest.mark.parametrize(
    ("kwargs", "field", "param"),
    [
        ({}, {"type": "maybe"}, "thinking.type"),
        ({}, "on", "thinking.type"),
        ({"enable_thinking": "yes"}, None, "chat_template_kwargs.enable_thinking"),
    ],
    ids=str,
)
def test_other_switches_are_refused(kwargs: Any, field: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        thinking_of(kwargs, field)
    assert caught.value.param == param


def test_effort_of_the_request_comes_before_the_templates() -> None:
    assert effort_of({"reasoning_effort": 3}, None, "low") == "low"
    assert effort_of({"reasoning_effort": 3}, None) == 3
    assert effort_of(None) is None


def test_drop_thinking_is_a_bool() -> None:
    assert drop_thinking_of({"drop_thinking": True}) is True
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.drop_thinking is 1"):
        drop_thinking_of({"drop_thinking": 1})


@pytest.mark.parametrize(
    ("defaults", "options", "want"),
    [
        ({"thinking": False}, {}, "</think>"),
        ({"enable_thinking": False}, {"thinking": True}, "<think>"),
        ({"reasoning_effort": "none"}, {}, "</think>"),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, "<think>"),
        ({}, {"reasoning_effort": "none"}, "</think>"),
        ({}, {"reasoning_effort": "none", "thinking": True}, "<think>"),
        ({"thinking": True}, {"reasoning_effort": "none"}, "</think>"),
        ({}, {"reasoning_effort": "bogus", "thinking": False}, "</think>"),
    ],
    ids=str,
)
def test_servers_defaults_are_the_weakest_word(
    tokenizer: Tokenizer, defaults: Any, options: Any, want: str
) -> None:
    config = ChatConfig(default_chat_template_kwargs=defaults)
    assert render(ChatEncoder(tokenizer, V41, config), [HI], **options).endswith(f"｜>{want}")


def test_a_wrong_default_fails_at_start(tokenizer: Tokenizer) -> None:
    config = ChatConfig(default_chat_template_kwargs={"reasoning_effort": 30})
    with pytest.raises(ConfigError, match=r"default_chat_template_kwargs: .* no numeric effort"):
        ChatEncoder(tokenizer, V4, config)
