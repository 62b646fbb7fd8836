"""Prompts in all their forms -> what the engine is asked (serving-api 15.2).

What needs ``deepseek-recipe`` or ``llguidance`` is imported when it is first used: token ids do
without either.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError, prompt_too_long
from leadline.core.request import EngineRequest, SamplingParams
from leadline.text.chat import AnswerStart, ChatInput, ChatPrompt
from leadline.text.sampling_defaults import (
    default_chat_limit,
    sampling_defaults,
    thinking_policy,
    with_end_tokens,
    with_generation_config,
)
from leadline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from leadline.text.encoding import ChatEncoder
    from leadline.text.profiles import Profile

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

_KEYS = ({"prompt"}, {"prompt_token_ids"})
_OPTIONAL_KEYS = {"cache_salt", "multi_modal_data"}


class ChatFields(TypedDict, total=False):
    """Fields of a chat beside its messages: the keyword arguments of ``PromptEncoder.chat``."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt that was checked and encoded.

    Attributes:
        text: of the prompt, or None where it came as ids.
        request: what every choice asks of the engine, but for its id and its seed.
        reasoning_end: the id behind which stop strings are searched; None searches everywhere.
    """

    text: str | None
    request: EngineRequest
    reasoning_end: int | None = None


class PromptEncoder:
    """Prompts and chats -> queries, for one model.

    Args:
        tokenizer: None serves token ids only.
        options: how chats are rendered and constrained.
        max_model_len: tokens of a prompt and its answer.
        folder: the checkpoint, which decides the chat format (C6) and may bring sampling values;
            None has no files.
        preset: the model's name where it has no files; without either it is a V4.1.

    Raises:
        ConfigError: sampling values that cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        options: ChatConfig,
        max_model_len: int,
        folder: Path | None = None,
        preset: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = with_generation_config(options, folder)
        self._max_model_len = max_model_len
        self._folder = folder
        self._preset = preset

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: there is none.
        """
        if self._tokenizer is None:
            raise ConfigError("this LLM has no tokenizer: pass ids, or name one by tokenizer=")
        return self._tokenizer

    def completion(self, prompt: Prompt, sampling: SamplingParams | None, *, param: str) -> Query:
        """A raw prompt. Strings get a BOS token unless they begin with one.

        Where it leaves ``<think>`` open, reasoning has begun: structured outputs hold behind its
        end, and a thinking budget counts.

        Args:
            prompt: in any form that ``LLM.generate`` takes.
            sampling: of its answers; None is what a request over HTTP gets that says nothing of it.
            param: what errors call it.

        Raises:
            BadRequest: it cannot be served as it stands.
        """
        text, ids, salt = _read(prompt, param)
        if text:
            ids = self.tokenizer.encode_prompt(text)
        if not ids:
            raise BadRequest(f"{param} is empty; it needs at least one token", param=param)
        if sampling is None:
            sampling = SamplingParams(**sampling_defaults(self._options))
        request = self._request(ids, sampling, param=param)
        if sampling.structured_outputs or sampling.bad_words or sampling.thinking_token_budget >= 0:
            request = self._constrained(request, ChatPrompt(tuple(ids), self._start(ids), False))
        return Query(text, replace(request, cache_salt=salt))

    def chat(
        self,
        messages: Sequence[Any],
        sampling: SamplingParams | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> Query:
        """A conversation, as ``/v1/chat/completions`` would encode it, id by id (C63).

        Args:
            messages: OpenAI chat messages.
            sampling: None is what a request over HTTP gets that says nothing of it.
            tools: OpenAI function tools.
            tool_choice: in any of OpenAI's forms.
            parallel_tool_calls: False is one call at most.
            chat_template_kwargs: ``thinking``, ``reasoning_effort``, ``drop_thinking``, ``task``.
            add_generation_prompt: whether an assistant turn is opened; None is the opposite of
                ``continue_final_message``.
            continue_final_message: the last message is the assistant's, and goes on.

        Raises:
            BadRequest: it cannot be served as it stands.
        """
        from leadline.text.markers import THINK_END
        from leadline.text.thinking import drop_thinking_of, effort_of, thinking_of
        from leadline.text.tools_schema import function_tool_choice, function_tools

        extra = chat_template_kwargs or {}
        declared = function_tools(tools or ())
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        prompt = self._encoder.encode(
            ChatInput(
                messages=messages,
                tools=declared,
                tool_choice=function_tool_choice(
                    tool_choice, has_tools=bool(declared), parallel=parallel_tool_calls
                ),
                thinking=thinking_of(extra, None),
                reasoning_effort=effort_of(extra),
                drop_thinking=drop_thinking_of(extra),
                task=extra.get("task"),
                continue_final_message=continue_final_message,
                add_generation_prompt=add_generation_prompt,
            )
        )
        sampling = sampling or self._chat_sampling(prompt)
        request = self._request(prompt.token_ids, sampling, param="messages")
        return Query(
            self.tokenizer.decode(prompt.token_ids),
            self._constrained(request, prompt),
            reasoning_end=(
                self.tokenizer.marker_id(THINK_END) if prompt.start.is_reasoning else None
            ),
        )

    def _chat_sampling(self, prompt: ChatPrompt) -> SamplingParams:
        """What a chat gets over HTTP that says nothing of sampling."""
        is_v4 = not self._profile.has_system_marker
        given = thinking_policy({}, prompt, self._options, is_v4=is_v4)
        limit = default_chat_limit(prompt, self._options, self._max_model_len)
        left = max(1, self._max_model_len - len(prompt.token_ids))
        return SamplingParams(
            **{**sampling_defaults(self._options), **given, "max_tokens": min(limit, left)}
        )

    def _request(
        self, token_ids: Iterable[int], sampling: SamplingParams, *, param: str
    ) -> EngineRequest:
        request = EngineRequest("", tuple(token_ids), with_end_tokens(sampling, self._options))
        num_tokens = len(request.prompt_token_ids)
        if num_tokens + min(1, sampling.max_tokens) > self._max_model_len:
            raise prompt_too_long(num_tokens, self._max_model_len, param=param)
        if sampling.stop and not (self._tokenizer and sampling.detokenize):
            raise BadRequest("stop strings need a tokenizer and detokenize", param="stop")
        return request

    def _constrained(self, request: EngineRequest, prompt: ChatPrompt) -> EngineRequest:
        """The request with what its sampling parameters and tools ask of the tokens."""
        from leadline.text import grammar

        sampling = request.sampling
        return replace(
            request,
            constraint=grammar.chat_constraint(
                prompt,
                self.tokenizer,
                sampling.structured_outputs,
                strict_level=self._options.tool_strict_level,
                tags=self._profile.tags,
            ),
            bad_token_ids=grammar.bad_token_ids(sampling.bad_words, self.tokenizer),
            thinking_budget=grammar.thinking_budget(sampling, prompt, self.tokenizer),
        )

    def _start(self, token_ids: Sequence[int]) -> AnswerStart:
        """Whether a raw prompt has opened its answer's reasoning."""
        from leadline.text.markers import THINK_END, THINK_START

        if self.tokenizer.has_markers(THINK_START, THINK_END):
            start, end = map(self.tokenizer.marker_id, (THINK_START, THINK_END))
            last = next((id for id in reversed(token_ids) if id in (start, end)), end)
            if last == start:
                return AnswerStart.REASONING
        return AnswerStart.CONTENT

    @cached_property
    def _profile(self) -> Profile:
        from leadline.text.profiles import choose_profile

        return choose_profile(self._options.effort_profile, self._folder, self._preset)

    @cached_property
    def _encoder(self) -> ChatEncoder:
        from leadline.text.encoding import ChatEncoder

        return ChatEncoder(self.tokenizer, self._profile, self._options)


def _read(prompt: Prompt, param: str) -> tuple[str | None, list[int], str | None]:
    """Text or ids of a prompt, and its salt."""
    if isinstance(prompt, str):
        return prompt, [], None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt, param, "a string or a list of token ids"), None
    if prompt.get("multi_modal_data"):
        raise BadRequest(
            f"{param}.multi_modal_data: images are not supported, this engine reads text only",
            param=f"{param}.multi_modal_data",
            code="not_supported",
        )
    if prompt.keys() - _OPTIONAL_KEYS not in _KEYS:
        raise BadRequest(
            f"{param} has the keys {sorted(prompt)}; it must have one, prompt or "
            "prompt_token_ids, and may have cache_salt",
            param=param,
        )
    salt = prompt.get("cache_salt")
    if salt is not None:
        _check_string(salt, f"{param}.cache_salt")
    if "prompt" in prompt:
        _check_string(prompt["prompt"], f"{param}.prompt")
        return prompt["prompt"], [], salt
    ids = prompt["prompt_token_ids"]
    return None, _token_ids(ids, f"{param}.prompt_token_ids", "a list of token ids"), salt


def _check_string(value: object, param: str) -> None:
    if not isinstance(value, str):
        raise BadRequest(f"{param} is {brief(value)}; it must be a string", param=param)


def _token_ids(value: Any, param: str, wanted: str) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in value]
    except TypeError:
        raise BadRequest(f"{param} is {brief(value)}; it must be {wanted}", param=param) from None
