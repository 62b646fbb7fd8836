"""Whatever JSON a client sends as a chat, it is encoded or refused by name (item 96)."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leadline.core.errors import BadRequest
from leadline.text.chat import ChatInput
from leadline.text.encoding import ChatEncoder
from leadline.text.thinking import drop_thinking_of, effort_of, thinking_of
from leadline.text.tools_schema import function_tools

SCALARS: Any = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
)
JSON: Any = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def mostly(*values: Any) -> Any:
    """One of the values, or anything."""
    return st.one_of(st.sampled_from(values), st.sampled_from(values), JSON)


PART: Any = st.one_of(
    JSON,
    st.fixed_dictionaries({"type": mostly("text", "image_url"), "text": mostly("a", "｜DSML｜")}),
)
FUNCTION: Any = st.fixed_dictionaries(
    {},
    optional={
        "name": mostly("f", "a::b"),
        "arguments": mostly("{}", "{bad", {"a": 1}),
        "description": mostly("d"),
        "parameters": st.one_of(JSON, st.fixed_dictionaries({"type": JSON, "properties": JSON})),
        "strict": mostly(True),
    },
)
CALL: Any = st.fixed_dictionaries({"id": mostly("1", "2"), "function": st.one_of(FUNCTION, JSON)})
MESSAGE: Any = st.fixed_dictionaries(
    {"role": mostly("system", "user", "assistant", "tool", "function", "latest_reminder")},
    optional={
        "content": st.one_of(mostly("x", ""), st.lists(PART, max_size=2)),
        "reasoning_content": mostly("why"),
        "tool_calls": st.one_of(st.lists(CALL, max_size=2), JSON),
        "function_call": st.one_of(FUNCTION, JSON),
        "tool_call_id": mostly("1", "2"),
        "task": mostly("title", "action"),
        "prefix": mostly(True),
    },
)


@given(
    messages=st.lists(st.one_of(MESSAGE, MESSAGE, JSON), max_size=4),
    tools=st.lists(st.one_of(JSON, st.fixed_dictionaries({"function": FUNCTION})), max_size=2),
    kwargs=st.dictionaries(
        st.sampled_from(["thinking", "reasoning_effort", "drop_thinking"]), JSON, max_size=2
    ),
    task=mostly(None, None, "query", [], {}),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_item_96_any_chat_is_encoded_or_refused(
    encoder: ChatEncoder,
    v4_encoder: ChatEncoder,
    messages: Any,
    tools: Any,
    kwargs: Any,
    task: Any,
    flags: tuple[bool, bool],
) -> None:
    for each in (encoder, v4_encoder):
        with contextlib.suppress(BadRequest):
            chat = ChatInput(
                messages,
                tools=function_tools(tools),
                thinking=thinking_of(kwargs, None),
                reasoning_effort=effort_of(kwargs),
                drop_thinking=drop_thinking_of(kwargs),
                task=task,
                continue_final_message=flags[0],
                add_generation_prompt=flags[1],
            )
            assert each.encode(chat).token_ids
