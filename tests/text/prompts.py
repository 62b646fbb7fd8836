"""Messages and prompts that tests of the encoder share."""

from __future__ import annotations

from typing import Any

from leadline.text.chat import ChatInput, Tool
from leadline.text.encoding import ChatEncoder

HI: Any = {"role": "user", "content": "Hi"}
REPLY: Any = {"role": "assistant", "content": "x", "reasoning_content": "why"}
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
TOOL = Tool("f")


def render(encoder: ChatEncoder, messages: list[Any], **options: Any) -> str:
    """The prompt's text behind BOS."""
    text = encoder.tokenizer.decode(encoder.encode(ChatInput(messages, **options)).token_ids)
    assert text.startswith(BOS)
    return text.removeprefix(BOS)


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
