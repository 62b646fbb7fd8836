"""Request bodies of the OpenAI endpoints (serving-api 5, 6, 9.1).

``null`` means "not given" for every optional field. Fields that are not here are ignored (C26).
"""

from __future__ import annotations

from dataclasses import fields
from reprlib import repr as brief
from typing import Any

from msgspec import Struct

from leadline.core.errors import BadRequest
from leadline.core.request import SamplingParams, StructuredOutputs
from leadline.serving.origin import Origin

# What these ask would be lost in silence, and with it the form that clients count on.
_RENAMED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


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
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    user_id: str | None = None
    priority: int | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def check(self) -> None:
        """Check what does not depend on the server.

        Raises:
            BadRequest: a renamed field (C26), or a value that makes no sense beside another.
        """
        for name in _RENAMED:
            if getattr(self, name) is not None:
                raise BadRequest(
                    f"{name} is not a field of this server; use structured_outputs",
                    param=name,
                    code="not_supported",
                )
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs come with whole answers only; leave stream out",
                param="prompt_logprobs",
            )
        if self.stream_interval is not None and self.stream_interval < 1:
            raise BadRequest(
                f"stream_interval is {self.stream_interval}; it must be at least 1",
                param="stream_interval",
            )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def origin(self) -> Origin:
        """Whose request it is."""
        return Origin(
            session_id=self.session_id,
            prompt_cache_key=self.prompt_cache_key,
            user=self.user_id or self.user,
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
        )

    def sampling(self) -> dict[str, Any]:
        """The ``SamplingParams`` fields that the request gives, but for limit and logprobs.

        Raises:
            BadRequest: a key of ``logit_bias`` is no id.
        """
        given: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return given


# Fields that go on as they came: those that are ``SamplingParams``'s by name.
_SAMPLING_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationRequest.__struct_fields__
    and field.name not in ("max_tokens", "logit_bias")
)


def _token_id(key: str) -> int:
    if not key.isdecimal():
        raise BadRequest(f"logit_bias has key {brief(key)}; keys are token ids", param="logit_bias")
    return int(key)


class ReasoningOptions(Struct):
    """``reasoning`` as OpenRouter spells it."""

    effort: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Any = None
    reasoning: ReasoningOptions | None = None
    thinking: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    task: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    echo: bool | None = None

    def check(self) -> None:
        """As the base class, and what only chats can ask for."""
        super().check()
        if self.echo:
            raise BadRequest(
                "echo: chats are not echoed, only completions are",
                param="echo",
                code="not_supported",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.thinking_token_budget is not None:
            given["thinking_token_budget"] = self.thinking_token_budget
        return given


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
