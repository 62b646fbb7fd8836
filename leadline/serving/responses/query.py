"""Body of a response -> ``ChatQuery`` (serving-api 7)."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any

from leadline.core.errors import BadRequest
from leadline.serving.chat_call import ChatQuery
from leadline.serving.formats import answer_format
from leadline.serving.origin import Origin
from leadline.serving.responses.input_items import input_messages
from leadline.serving.responses.schema import ReasoningOptions, ResponsesRequest, TextOptions
from leadline.serving.responses.tools import ToolTable, tool_choice
from leadline.text.chat import ChatInput

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


def input_items(body: ResponsesRequest) -> list[Any]:
    """The input as a list of items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the answer's text carries log-probabilities."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def responses_query(body: ResponsesRequest, items: Sequence[Any], tools: ToolTable) -> ChatQuery:
    """What a request asks.

    Args:
        body: the request.
        items: its input, behind that of the responses that it continues.
        tools: the table of its tools.

    Raises:
        BadRequest: a field that cannot be served as it stands.
    """
    if body.truncation not in (None, "auto", "disabled"):
        raise BadRequest(
            f"truncation is {brief(body.truncation)}; choose auto or disabled", param="truncation"
        )
    messages = input_messages(items, tools)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise BadRequest("input is empty; it needs at least one message", param="input")
    parallel = body.parallel_tool_calls is not False
    choice = tool_choice(body.tool_choice, tools, parallel=parallel)
    given = (body.text or TextOptions()).format
    form = answer_format(given, (given or {}).get("schema"), where="text.format")
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p")
        if (value := getattr(body, name)) is not None
    }
    if wants_logprobs(body):
        sampling["logprobs"] = body.top_logprobs or 0
    return ChatQuery(
        model=body.model,
        chat=ChatInput(
            messages=messages,
            tools=tuple(tools.tools),
            tool_choice=choice,
            reasoning_effort=(body.reasoning or ReasoningOptions()).effort,
            response_format=form.shown,
        ),
        sampling=sampling,
        max_tokens=body.max_output_tokens,
        limit_field="max_output_tokens",
        input_field="input",
        structured=form.enforced,
        origin=Origin(
            session_id=body.session_id,
            prompt_cache_key=body.prompt_cache_key,
            user=body.safety_identifier or body.user,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        ),
    )
