"""Calls and results of the history, brought together (serving-api 2.6, C13)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from leadline.core.errors import BadRequest
from leadline.text.messages import Message


def match_results(
    messages: Sequence[Message], *, is_strict: bool, is_answered: bool
) -> list[Message]:
    """Put the results of every turn into the order of its calls.

    An agent that was interrupted can go on: a result that is missing is added, empty, and one that
    answers no call stays where it is.

    Args:
        messages: the conversation.
        is_strict: both are errors instead (``--strict-tool-history``).
        is_answered: an answer follows; calls that end the conversation may be open otherwise.

    Raises:
        BadRequest: only when strict, naming the message.
    """
    matched: list[Message] = []
    for turn in _turns(messages):
        is_open = not is_answered and turn[-1] is messages[-1] and turn[-1].role == "assistant"
        matched += turn if is_open else _match(turn, is_strict=is_strict)
    return matched


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation, cut before each message of the assistant."""
    turn: list[Message] = []
    for message in messages:
        if message.role == "assistant" and turn:
            yield turn
            turn = []
        turn.append(message)
    yield turn


def _match(turn: list[Message], *, is_strict: bool) -> list[Message]:
    ranks: dict[str, int] = {}
    for rank, call in enumerate(turn[0].calls):
        ranks.setdefault(call.id, rank)
    missing = Counter(call.id for call in turn[0].calls)
    answers: dict[int, Message] = {}  # by position
    for i, message in enumerate(turn):
        if message.role != "tool":
            continue
        if missing[message.call_id]:
            missing[message.call_id] -= 1
            answers[i] = message
        elif is_strict:
            raise BadRequest(
                f"{message.where}: tool_call_id {message.call_id!r} answers no call of the "
                "preceding message of the assistant",
                param=f"{message.where}.tool_call_id",
            )
    open_ids = list(missing.elements())
    if open_ids and is_strict:
        raise BadRequest(
            f"{turn[0].where}.tool_calls: no result follows for {', '.join(open_ids)}",
            param=f"{turn[0].where}.tool_calls",
        )
    turn = list(turn)
    ordered = sorted(answers.values(), key=lambda answer: ranks[answer.call_id])
    for i, answer in zip(answers, ordered, strict=True):
        turn[i] = answer
    return _insert_missing(turn, ranks, open_ids) if open_ids else turn


def _insert_missing(turn: list[Message], ranks: dict[str, int], ids: list[str]) -> list[Message]:
    """Empty results among those that follow the calls at once, in the order of the calls."""
    end = next((i for i, m in enumerate(turn) if i and m.role != "tool"), len(turn))
    empty = deque(Message(turn[0].where, "tool", "", call_id=call_id) for call_id in ids)
    results: list[Message] = []
    for message in turn[1:end]:
        rank = ranks.get(message.call_id, -1)
        while empty and ranks[empty[0].call_id] < rank:
            results.append(empty.popleft())
        results.append(message)
    return [turn[0], *results, *empty, *turn[end:]]
