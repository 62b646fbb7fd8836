"""Request bodies of the OpenAI endpoints (serving-api 5, 6, 9.1).

``null`` means "not given" for every optional field. Fields that are not here are ignored.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from leadline.core.errors import BadRequest
from leadline.core.request import SamplingParams

_RENAMED = "this field no longer exists, use structured_outputs; "
_NO_CONSTRAINTS = "structured output constraints do not exist yet"
_CACHE_SALT = re.compile(r"[^@/\\\0]{1,128}")
# Fields that would change the answer's meaning if they were ignored in silence.
_NOT_YET = {
    "guided_json": _RENAMED + _NO_CONSTRAINTS,
    "guided_regex": _RENAMED + _NO_CONSTRAINTS,
    "guided_choice": _RENAMED + _NO_CONSTRAINTS,
    "guided_grammar": _RENAMED + _NO_CONSTRAINTS,
    "structured_outputs": _NO_CONSTRAINTS,
    "bad_words": "bad words do not exist yet",
    "prompt_logprobs": "log-probabilities of prompt tokens do not exist yet",
    "truncate_prompt_tokens": "prompts are not truncated",
    "priority": "clients cannot choose priorities yet",
    "return_token_ids": "token ids are not returned yet",
}


class StreamOptions(Struct):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """Fields that both endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    priority: Any = None
    return_token_ids: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_cache_salt(self) -> None:
        """Raise ``BadRequest`` for a salt outside its domain (serving-api 13.2)."""
        if self.cache_salt is not None and not _CACHE_SALT.fullmatch(self.cache_salt):
            raise BadRequest(
                f"cache_salt is {self.cache_salt[:128]!r}; it must have 1 to 128 characters, none "
                "of them @, /, a backslash or NUL",
                param="cache_salt",
            )

    def refuse_missing_features(self) -> None:
        """Raise ``BadRequest`` for the first field that this server cannot honour yet."""
        for name, reason in _NOT_YET.items():
            if getattr(self, name):
                raise BadRequest(f"{name}: {reason}", param=name, code="not_supported")

    def sampling(self, *, max_tokens: int, logprobs: int | None, vocab_size: int) -> SamplingParams:
        """The request's sampling parameters; ``max_tokens`` is already resolved.

        Raises:
            BadRequest: a value is out of its domain, or an id outside the vocabulary.
        """
        names = (*_SAMPLING_FIELDS, "stop_token_ids", "allowed_token_ids")
        given: dict[str, Any] = {
            name: value for name in names if (value := getattr(self, name)) is not None
        }
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in given.get(name, ()):
                if not 0 <= token_id < vocab_size:
                    raise BadRequest(
                        f"{name} has id {token_id}, outside the vocabulary of {vocab_size}",
                        param=name,
                    )
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "stop",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def _token_id(key: str) -> int:
    if not key.isdecimal():
        raise BadRequest(f"logit_bias has key {key!r}; keys are token ids", param="logit_bias")
    return int(key)


class ResponseFormat(Struct):
    """``response_format``: only its type matters so far."""

    type: str


class FunctionTool(Struct):
    """A legacy entry of ``functions``, or the inside of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """An entry of ``tools``."""

    type: str
    function: FunctionTool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[FunctionTool] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | int | float | None = None
    reasoning: dict[str, Any] | None = None
    thinking: bool | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    echo: bool | None = None
    task: str | None = None

    def refuse_missing_features(self) -> None:
        """As the base class, and what only chats can ask for."""
        super().refuse_missing_features()
        extra = self.chat_template_kwargs or {}
        problems = {
            "chat_template": self.chat_template and "the prompt format is fixed",
            "echo": self.echo and "chats are not echoed",
            "task": (self.task or extra.get("task")) and "quick instructions do not exist yet",
            "chat_template_kwargs.drop_thinking": extra.get("drop_thinking") is not None
            and "prior reasoning is kept exactly where tools are declared",
            "thinking_token_budget": self.thinking_token_budget not in (None, -1)
            and "thinking budgets do not exist yet",
            "add_generation_prompt": self.add_generation_prompt is False
            and not self.continue_final_message
            and "an answer always begins with a new assistant turn",
            "response_format": self.response_format is not None
            and self.response_format.type != "text"
            and _NO_CONSTRAINTS,
            "tool_choice": self._choice not in (None, "auto", "none")
            and f"only auto and none; {_NO_CONSTRAINTS}",
        }
        for name, reason in problems.items():
            if reason:
                raise BadRequest(f"{name}: {reason}", param=name, code="not_supported")

    @property
    def _choice(self) -> str | dict[str, Any] | None:
        return self.tool_choice if self.tool_choice is not None else self.function_call

    def active_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, in OpenAI's form.

        Raises:
            BadRequest: a tool is not a function.
        """
        if self._choice == "none":
            return []
        functions = list(self.functions or ())
        for i, tool in enumerate(self.tools or ()):
            if tool.type != "function" or tool.function is None:
                raise BadRequest(
                    f"tools[{i}].type is {tool.type!r}; only function tools are supported",
                    param=f"tools[{i}].type",
                )
            functions.append(tool.function)
        return [{"type": "function", "function": _without_none(tool)} for tool in functions]


def _without_none(tool: FunctionTool) -> dict[str, Any]:
    return {
        name: value for name, value in msgspec.structs.asdict(tool).items() if value is not None
    }


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
