"""Shapes inside bodies that vary too much for a ``msgspec`` type."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

from leadline.core.errors import BadRequest


def objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; null is an empty one.

    Raises:
        BadRequest: anything else, with its path.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where} is {brief(value)}; it must be a list of objects", param=where)
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise BadRequest(
                f"{where}[{i}] is {brief(item)}; it must be an object", param=f"{where}[{i}]"
            )
    return value


def string(value: Any, where: str) -> str:
    """A string.

    Raises:
        BadRequest: anything else, with its path.
    """
    if not isinstance(value, str):
        raise BadRequest(f"{where} is {brief(value)}; it must be a string", param=where)
    return value


def no_image(kind: Any, where: str) -> BadRequest:
    """The error of an image part, whatever the dialect calls it (serving-api 2.8)."""
    return BadRequest(
        f"{where}.type is {brief(kind)}: images are not supported, this server reads text only",
        param=f"{where}.type",
        code="not_supported",
    )


def no_text(kind: Any, where: str) -> BadRequest:
    """The error of any other part that is not text."""
    return BadRequest(
        f"{where}.type is {brief(kind)}; only text parts are supported", param=f"{where}.type"
    )
