"""Chat requests -> prompt ids, by the model maker's own encoder (``deepseek-recipe``).

Only what the API asks beyond that library is done here: thinking and effort under all the names
that clients use for them, numeric effort, and ``continue_final_message``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
import msgspec

from leadline.core.errors import BadRequest
from leadline.text.messages import normalize_messages
from leadline.text.tokenizer import Tokenizer

# The name by which the library knows the model version; the served name never reaches it.
_MODEL = "DeepSeek-V4.1-Flash"
SPECIAL_TOKENS = recipe.SpecialTokens(image="<｜deepseek_image｜>")
THINK_END = SPECIAL_TOKENS.token(recipe.SpecialToken.ThinkingEnd)
_MARKERS = (
    recipe.SpecialToken.Bos,
    recipe.SpecialToken.Eos,
    recipe.SpecialToken.System,
    recipe.SpecialToken.User,
    recipe.SpecialToken.Assistant,
    recipe.SpecialToken.ThinkingStart,
    recipe.SpecialToken.ThinkingEnd,
    recipe.SpecialToken.Dsml,
    recipe.SpecialToken.LatestReminder,
    recipe.SpecialToken.Image,
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_DEFAULT_EFFORT = 75


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """An encoded chat, and what is needed to read the answer.

    Attributes:
        request: the library's view of the conversation; output parsing starts from it.
        has_tools: whether the answer may hold tool calls.
    """

    token_ids: tuple[int, ...]
    request: recipe.ConversationRequest
    has_tools: bool

    def default_max_tokens(self, max_model_len: int) -> int:
        """Output limit of a request that sets none, lowered to what is left (serving-api 5.1)."""
        return self.request.resolve_max_tokens(len(self.token_ids), max_model_len)


class ChatEncoder:
    """Renders chats with one tokenizer, in the V4.1 profile.

    Raises:
        ConfigError: the tokenizer lacks a marker that prompts need (C3).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        for marker in _MARKERS:
            tokenizer.marker_id(SPECIAL_TOKENS.token(marker))
        self.tokenizer = tokenizer
        self.recipe_tokenizer = recipe.Tokenizer.from_file(str(tokenizer.path))
        self._options = recipe.ConversionOptions(default_thinking_mode=True)
        self._options = self._options.with_special_tokens(SPECIAL_TOKENS)
        self._encoding = (
            recipe.DeepseekV41Encoding()
            .with_tokenizer(self.recipe_tokenizer)
            .with_special_tokens(SPECIAL_TOKENS)
        )

    def encode(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | Mapping[str, Any] | None = None,
        reasoning_effort: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> ChatPrompt:
        """Encode a chat so that the answer follows (serving-api 2).

        Args:
            messages: OpenAI chat messages.
            tools: OpenAI function tools; none and empty are the same.
            thinking: a switch, or ``{"type": "enabled" | "disabled" | "adaptive"}``.
            reasoning_effort: a level, or 1..100 as a number or a decimal string.
            chat_template_kwargs: ``thinking`` or ``enable_thinking``, and ``reasoning_effort``.
            continue_final_message: the last message is an assistant's and goes on.

        Raises:
            BadRequest: anything that cannot be rendered, with the field's path.
        """
        plain = normalize_messages(messages, continue_final_message=continue_final_message)
        extra = chat_template_kwargs or {}
        effort = _effort(_first(reasoning_effort, extra.get("reasoning_effort")))
        switch = _first(extra.get("thinking"), extra.get("enable_thinking"), _switch(thinking))
        if switch is None:
            switch = effort != "none"
        body = {
            "model": _MODEL,
            "messages": plain,
            "tools": list(tools or ()),
            "thinking": {"type": "enabled" if switch else "disabled"},
        }
        if isinstance(effort, str) and effort != "none":
            body["reasoning_effort"] = effort
        request = self._convert(body)
        token_ids = self._encoding.encode(request.conversation)
        if switch and isinstance(effort, int):
            token_ids = self._set_effort(token_ids, effort)
        return ChatPrompt(tuple(token_ids), request, has_tools=bool(tools))

    def _convert(self, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return recipe.ChatCompletionRequest(msgspec.json.encode(body)).convert(self._options)
        except recipe.ConversionError as error:
            message = msgspec.json.decode(error.body)["error"]["message"]
            raise BadRequest(message) from error
        except ValueError as error:
            raise BadRequest(str(error).removeprefix("invalid request body: ")) from error

    def _set_effort(self, token_ids: list[int], effort: int) -> list[int]:
        """Put a number that the library has no name for into the prompt's effort line (C7).

        The line follows BOS and the system marker. No token spans the end of the part replaced:
        a space begins a new word.
        """
        line = "Reasoning Effort: {} (range"
        old = self.tokenizer.encode(line.format(_DEFAULT_EFFORT))
        new = self.tokenizer.encode(line.format(effort))
        assert token_ids[2 : 2 + len(old)] == old
        return token_ids[:2] + new + token_ids[2 + len(old) :]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _switch(thinking: bool | Mapping[str, Any] | None) -> bool | None:
    if not isinstance(thinking, Mapping):
        return thinking
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(
            f"thinking.type is {kind!r}; choose enabled, disabled or adaptive",
            param="thinking.type",
        )
    return bool(kind != "disabled")


def _effort(value: Any) -> str | int | None:
    """A level's name, a number from 1 to 100, or None."""
    if value is None or (isinstance(value, str) and value in _EFFORTS):
        return value
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= 100:
        return number
    raise BadRequest(
        f"reasoning_effort is {value!r}; choose one of {', '.join(_EFFORTS)}, or an integer from "
        "1 to 100",
        param="reasoning_effort",
    )
