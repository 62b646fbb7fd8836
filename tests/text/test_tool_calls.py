"""Calls of a block: each is told apart from the next, under an id that nobody guesses."""

from __future__ import annotations

import re
from typing import Any

from leadline.text.chat import CallStart
from leadline.text.dsml import Tag, TagKind
from leadline.text.tool_calls import ToolCallReader


def tag(kind: TagKind, **attributes: str) -> Tag:
    return Tag(kind, False, attributes)


def closing(kind: TagKind) -> Tag:
    return Tag(kind, True, {})


def run(*items: Tag | str, max_calls: int | None = None) -> tuple[ToolCallReader, list[Any]]:
    """Names and arguments, in order."""
    deltas: list[Any] = []
    reader = ToolCallReader((), max_calls=max_calls, coerces=True, emit=deltas.append)
    for item in items:
        if isinstance(item, Tag):
            reader.tag(item)
        else:
            reader.text(item)
    reader.finish()
    return reader, [d.name if isinstance(d, CallStart) else d.text for d in deltas]


INVOKE, PARAMETER, BLOCK = TagKind.INVOKE, TagKind.PARAMETER, TagKind.BLOCK
A = tag(PARAMETER, name="a", string="true")


def test_item_79_ids_are_unique_and_well_formed() -> None:
    ids: set[str] = set()

    def note(delta: Any) -> None:
        if isinstance(delta, CallStart):
            assert re.fullmatch("call_[A-Za-z0-9_]{24,}", delta.id)
            ids.add(delta.id)

    reader = ToolCallReader((), max_calls=None, coerces=True, emit=note)
    for _ in range(100_000):
        reader.tag(tag(INVOKE, name="f"))
    assert len(ids) == 100_000


def test_c20_invoke_closes_the_one_before() -> None:
    _, said = run(tag(INVOKE, name="f"), A, "1", tag(INVOKE, name="g"))
    assert said == ["f", '{"a": "1"}', "g", "{}"]


def test_c20_parameter_closes_the_one_before() -> None:
    b = tag(PARAMETER, name="b", string="true")
    assert run(tag(INVOKE, name="f"), A, "1", b, "2")[1] == ["f", '{"a": "1", "b": "2"}']


def test_c20_end_of_the_block_or_of_the_invoke_closes_everything() -> None:
    for end in (closing(BLOCK), closing(INVOKE), tag(BLOCK)):
        assert run(tag(INVOKE, name="f"), A, "1", end, "2")[1] == ["f", '{"a": "1"}']


def test_text_and_parameters_of_no_call_are_dropped() -> None:
    reader, said = run("x", A, "1", tag(INVOKE), A, "1", closing(BLOCK), "y")
    assert (said, reader.calls) == ([], [])


def test_parameter_without_a_name_and_unknown_tags_are_dropped() -> None:
    unknown = Tag(None, False, {})
    said = run(tag(INVOKE, name="f"), A, "1", unknown, "2", tag(PARAMETER), "3")[1]
    assert said == ["f", '{"a": "12"}']


def test_empty_tags_need_no_end() -> None:
    empty = Tag(PARAMETER, False, {"name": "a", "string": "true"}, is_empty=True)
    assert run(tag(INVOKE, name="f"), empty, "x")[1] == ["f", '{"a": ""}']
    assert run(Tag(INVOKE, False, {"name": "f"}, is_empty=True), A, "x")[1] == ["f", "{}"]


def test_item_78_calls_beyond_the_limit_are_only_counted() -> None:
    reader, said = run(tag(INVOKE, name="f"), tag(INVOKE, name="g"), A, "1", max_calls=1)
    assert said == ["f", "{}"]
    assert (len(reader.calls), reader.num_ignored) == (1, 1)
