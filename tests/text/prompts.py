"""Messages and prompts that tests of the encoder share."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.text.chat import ChatInput, Tool
from leadline.text.encoding import ChatEncoder

HI: Any = {"role": "user", "content": "Hi"}
REPLY: Any = {"role": "assistant", "content": "x", "reasoning_content": "why"}
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
TOOL = Tool("f")

# For tests of the checklist: a statement that names no profile holds for both.
both_profiles = pytest.mark.parametrize("encoder", ["v41", "v4"], indirect=True)


def render(encoder: ChatEncoder, messages: list[Any], **options: Any) -> str:
    """The prompt's text behind BOS."""
    text = encoder.tokenizer.decode(encoder.encode(ChatInput(messages, **options)).token_ids)
    assert text.startswith(BOS)
    return text.removeprefix(BOS)


def in_v4(text: str) -> str:
    """V4.1's tool blocks in V4's spelling."""
    return text.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")


def system(text: Any) -> Any:
    """A system message."""
    return {"role": "system", "content": text}


def calls(*ids: str, arguments: Any = "{}", **fields: Any) -> Any:
    """An assistant's message with a call of ``f`` for each id."""
    function = {"name": "f", "arguments": arguments}
    made = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return {"role": "assistant", "tool_calls": made, **fields}


def result(call_id: str, content: Any) -> Any:
    """A tool's answer."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}
