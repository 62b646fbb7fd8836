"""Whether and how hard the model thinks: every name that clients use, in one order (2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from leadline.core.errors import BadRequest
from leadline.text.chat import ChatInput, Effort
from leadline.text.profiles import DEFAULT_LEVEL, EffortText, Profile


@dataclass(frozen=True, slots=True)
class Mode:
    """How a prompt makes the model think.

    Attributes:
        effort: what ``Profile.effort`` made of the request; None in chat mode.
        drop_thinking: whether prior reasoning is left out; None decides by the tools.
    """

    thinking: bool
    effort: int | EffortText | None
    drop_thinking: bool | None


def resolve_mode(chat: ChatInput, defaults: Mapping[str, Any], profile: Profile) -> Mode:
    """Settle a request with the server's ``--default-chat-template-kwargs``.

    Raises:
        BadRequest: an effort that the model does not have; in chat mode it is not looked at.
    """
    effort = chat.reasoning_effort
    if effort is None:
        effort = effort_of(defaults)
    thinking = chat.thinking
    if thinking is None and effort == "none":
        thinking = False
    if thinking is None:
        thinking = thinking_of(defaults, None)
    drop = chat.drop_thinking if chat.drop_thinking is not None else drop_thinking_of(defaults)
    if thinking is False:
        return Mode(False, None, drop)
    # "none" beside a switch that is on: the stronger one wins, so the default effort holds.
    requested = DEFAULT_LEVEL if effort in (None, "none") else effort
    assert requested is not None
    return Mode(True, profile.effort(requested), drop)


def thinking_of(chat_template_kwargs: Mapping[str, Any] | None, thinking: Any) -> bool | None:
    """The switch of a request, for ``ChatInput.thinking``; None where it says nothing.

    Args:
        chat_template_kwargs: its ``thinking`` or ``enable_thinking`` is the strongest word.
        thinking: the field: a bool, or ``{"type": "enabled" | "disabled" | "adaptive"}``.

    Raises:
        BadRequest: another type or value.
    """
    for name in ("thinking", "enable_thinking"):
        switch = _bool(chat_template_kwargs, name)
        if switch is not None:
            return switch
    if thinking is None or isinstance(thinking, bool):
        return thinking
    kind = thinking.get("type") if isinstance(thinking, Mapping) else thinking
    if kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(
            f"thinking.type is {brief(kind)}; choose enabled, disabled or adaptive",
            param="thinking.type",
        )
    return bool(kind != "disabled")


def effort_of(chat_template_kwargs: Mapping[str, Any] | None, *fields: Any) -> Effort | None:
    """The effort of a request, for ``ChatInput.reasoning_effort``; None where it says nothing.

    Args:
        chat_template_kwargs: its ``reasoning_effort`` is the last to be asked.
        fields: ``reasoning_effort``, ``reasoning.effort`` or ``output_config.effort``.
    """
    given = (*fields, (chat_template_kwargs or {}).get("reasoning_effort"))
    return next((effort for effort in given if effort is not None), None)


def drop_thinking_of(chat_template_kwargs: Mapping[str, Any] | None) -> bool | None:
    """``drop_thinking`` of a request, for ``ChatInput.drop_thinking``.

    Raises:
        BadRequest: it is no bool.
    """
    return _bool(chat_template_kwargs, "drop_thinking")


def _bool(values: Mapping[str, Any] | None, name: str) -> bool | None:
    value = (values or {}).get(name)
    if value is None or isinstance(value, bool):
        return value
    param = f"chat_template_kwargs.{name}"
    raise BadRequest(f"{param} is {brief(value)}; it must be true or false", param=param)
