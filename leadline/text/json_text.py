"""JSON that keeps the spelling of numbers, written as the model's prompts write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


class Number(str):
    """A JSON number as it was spelled: ``1.10``, ``1e5``, an integer of any length."""

    __slots__ = ()


def loads(text: str) -> Any:
    """Parse JSON; numbers become ``Number``.

    Raises:
        ValueError: no JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """JSON with ``", "`` and ``": "`` between the parts and literal non-ASCII characters.

    Raises:
        ValueError: nested too deeply.
    """
    try:
        return _dump(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def canonical(text: str) -> str:
    """One spelling for everything that means the same: key order, spaces, ``1.0`` and ``1``.

    Text that is no JSON is its own canonical form.
    """
    try:
        value = json.loads(text, parse_float=_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _dump(value: Any) -> str:
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quote(k)}: {_dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join([_dump(item) for item in value]) + "]"
    return _quote(value)


def _quote(scalar: Any) -> str:
    return json.dumps(scalar, ensure_ascii=False)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
