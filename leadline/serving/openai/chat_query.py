"""Body of a chat -> ``ChatQuery`` (serving-api 2.3, 2.5, 5)."""

from __future__ import annotations

from collections.abc import Mapping

from leadline.core.errors import BadRequest
from leadline.serving.chat_call import ChatQuery
from leadline.serving.formats import AnswerFormat, answer_format
from leadline.serving.openai.schema import ChatRequest
from leadline.text.chat import ChatInput, Tool
from leadline.text.thinking import drop_thinking_of, effort_of, thinking_of
from leadline.text.tools_schema import function_tool_choice, function_tools


def chat_query(body: ChatRequest) -> ChatQuery:
    """What a chat request asks.

    Raises:
        BadRequest: a field that cannot be served as it stands.
    """
    body.check()
    form = chat_format(body)
    if form.enforced is not None and body.structured_outputs is not None:
        raise BadRequest(
            "response_format and structured_outputs exclude each other",
            param="structured_outputs",
        )
    limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return ChatQuery(
        model=body.model,
        chat=chat_input(body, form),
        sampling=body.sampling(),
        max_tokens=getattr(body, limit_field),
        limit_field=limit_field,
        structured=form.enforced or body.structured_outputs,
        origin=body.origin(),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def chat_format(body: ChatRequest) -> AnswerFormat:
    """What ``response_format`` asks."""
    given = body.response_format
    inner = (given or {}).get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    return answer_format(given, schema, where="response_format")


def chat_input(body: ChatRequest, form: AnswerFormat) -> ChatInput:
    """The chat that a body describes.

    Raises:
        BadRequest: a template, or a tool that is no function.
    """
    if body.chat_template is not None:
        raise BadRequest(
            "chat_template: the prompt format is fixed by the model",
            param="chat_template",
            code="not_supported",
        )
    extra = body.chat_template_kwargs or {}
    tools = _tools(body)
    continues = bool(body.continue_final_message)
    return ChatInput(
        messages=body.messages,
        tools=tools,
        tool_choice=function_tool_choice(
            body.tool_choice if body.tool_choice is not None else body.function_call,
            has_tools=bool(tools),
            parallel=body.parallel_tool_calls is not False,
        ),
        thinking=thinking_of(extra, body.thinking),
        reasoning_effort=effort_of(
            extra, body.reasoning_effort, body.reasoning.effort if body.reasoning else None
        ),
        drop_thinking=drop_thinking_of(extra),
        response_format=form.shown,
        task=body.task if body.task is not None else extra.get("task"),
        continue_final_message=continues,
        add_generation_prompt=(
            not continues if body.add_generation_prompt is None else body.add_generation_prompt
        ),
    )


def _tools(body: ChatRequest) -> tuple[Tool, ...]:
    legacy = [{"type": "function", "function": function} for function in body.functions or ()]
    return function_tools([*(body.tools or ()), *legacy])
