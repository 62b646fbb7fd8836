"""Turns of the assistant as spans: header, reasoning, content, tool block (2.5, 2.6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leadline.text.json_text import dumps, loads
from leadline.text.markers import ASSISTANT, DSML, EOS, TASKS, THINK_END, THINK_START
from leadline.text.messages import Call, Message
from leadline.text.profiles import Profile
from leadline.text.spans import Ids, Span


def turn_header(*, thinks: bool, task: str | None = None) -> list[Span]:
    """What introduces an assistant's turn, past or about to be generated.

    Args:
        thinks: its reasoning is shown, or comes first.
        task: a quick instruction's own token stands in its place, but behind it for ``action``
            (C15).
    """
    if task is not None and task != "action":
        return [TASKS[task]]
    header: list[Span] = [ASSISTANT, THINK_START if thinks else THINK_END]
    return header if task is None else [*header, TASKS[task]]


def turn_spans(
    message: Message,
    profile: Profile,
    *,
    shows_reasoning: bool,
    task: str | None = None,
    sampled: Ids | None = None,
) -> list[Span]:
    """A turn with its header, and with its end unless it goes on.

    Args:
        message: the assistant's.
        profile: names the elements of the tool block.
        shows_reasoning: what was thought is kept; a turn without any shows an empty block (C9).
        task: the quick instruction that it answers.
        sampled: ids of content and calls as the model wrote them (C12).
    """
    has_think_block = shows_reasoning and (task is None or task == "action")
    spans = turn_header(thinks=has_think_block, task=task)
    if has_think_block:
        spans.append(message.reasoning)
        if message.content or not message.is_partial:  # else the reasoning itself goes on (C10)
            spans.append(THINK_END)
    if sampled is not None:
        spans.append(sampled)
    else:
        spans.append(message.content)
        if message.calls:
            spans += _tool_block(message.calls, profile)
    if not message.is_partial:
        spans.append(EOS)
    return spans


def open_tool_block(profile: Profile) -> list[Span]:
    """The start of a tool block, up to where its first call begins (C29)."""
    return ["\n\n", *_tag("<", profile.tags.calls), "\n"]


def _tool_block(calls: Sequence[Call], profile: Profile) -> Iterator[Span]:
    yield from open_tool_block(profile)
    tags = profile.tags
    for call in calls:
        yield from _tag("<", tags.invoke, f' name="{call.name}"')
        yield "\n"
        parameters = _parameters(call.arguments)
        for name, is_string, value in parameters:
            kind = "true" if is_string else "false"
            yield from _tag("<", tags.parameter, f' name="{name}" string="{kind}"')
            yield value
            yield from _tag("</", tags.parameter)
            yield "\n"
        if not parameters and profile.empty_call_line:
            yield "\n"
        yield from _tag("</", tags.invoke)
        yield "\n"
    yield from _tag("</", tags.calls)


def _tag(start: str, name: str, attributes: str = "") -> tuple[Span, ...]:
    return (start, DSML, f"{name}{attributes}>")


def _parameters(arguments: str) -> list[tuple[str, bool, str]]:
    """Name, whether it is a string, and text of each argument.

    Arguments that are no JSON object are shown as they are, in one parameter (C11).
    """
    try:
        values = loads(arguments)
        if isinstance(values, dict):
            return [
                (name, True, value) if type(value) is str else (name, False, dumps(value))
                for name, value in values.items()
            ]
    except ValueError:
        pass
    return [("arguments", True, arguments)]
