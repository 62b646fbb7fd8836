"""Tools written by hand: what they take, how people ask for them, what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from leadline.eval.tasks.values import Value, one_of

Field: TypeAlias = Value | Callable[[Mapping[str, Any]], Any]
"""Of a result: drawn, or worked out from the arguments."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A tool before its names are settled.

    Attributes:
        names: names that it may have.
        description: for its schema.
        required: arguments; a key holds the names that one may have, ``city|location``, and the
            templates use the first.
        optional: arguments that a request may name, each with the words that do so.
        asks: requests; ``{+}`` is where optional arguments are named.
        result: fields of the JSON result; a single field ``text`` is a result in plain text.
        answer: what to say then; empty is what results without words of their own get.
    """

    names: tuple[str, ...]
    description: str
    required: Mapping[str, Value]
    optional: Mapping[str, tuple[Value, str]]
    asks: tuple[str, ...]
    result: Mapping[str, Field]
    answer: str

    @property
    def has_one_plain_argument(self) -> bool:
        """Whether its one required argument is no list: several calls can then be asked at once."""
        types = [value.schema["type"] for value in self.required.values()]
        return len(types) == 1 and types != ["array"]


def tool(
    names: str,
    description: str,
    required: Mapping[str, Value],
    asks: tuple[str, ...],
    result: Mapping[str, Field],
    answer: str = "",
    **optional: tuple[Value, str],
) -> Blueprint:
    """A blueprint, written in the order in which a reader wants it; see its attributes.

    Args:
        names: with ``|`` between them.
        description: for its schema.
        required: arguments.
        asks: requests.
        result: fields.
        answer: what to say then.
        **optional: arguments.
    """
    return Blueprint(tuple(names.split("|")), description, required, optional, asks, result, answer)


DONE: Mapping[str, Field] = {"status": one_of("ok")}
"""The result of a tool that has nothing else to tell."""
