"""The form of an answer, however a dialect spells it (serving-api 9.4)."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any, NamedTuple

from leadline.core.errors import BadRequest
from leadline.core.request import StructuredOutputs
from leadline.text.chat import ResponseFormat


class AnswerFormat(NamedTuple):
    """What the prompt says of the answer's form, and what the engine enforces."""

    shown: ResponseFormat | None = None
    enforced: StructuredOutputs | None = None


def answer_format(given: Mapping[str, Any] | None, schema: Any, *, where: str) -> AnswerFormat:
    """A ``response_format``, ``text.format`` or ``output_config.format``.

    Args:
        given: the object; its ``type`` decides.
        schema: where this dialect keeps the schema of ``json_schema``.
        where: the field, for errors.

    Raises:
        BadRequest: an unknown type, or a constraint without its value.
    """
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return AnswerFormat()
    if kind == "json_object":
        return AnswerFormat(ResponseFormat("json_object"), StructuredOutputs(json_object=True))
    if kind == "json_schema":
        if not isinstance(schema, Mapping | bool):
            raise BadRequest(f"{where} of type json_schema has no schema", param=where)
        shown = ResponseFormat("json_schema", schema)
        return AnswerFormat(shown, StructuredOutputs(json=schema))
    if kind == "structural_tag":
        return AnswerFormat(enforced=StructuredOutputs(structural_tag=given))
    if kind == "regex":
        pattern = given.get("pattern", given.get("regex"))
        if not isinstance(pattern, str):
            raise BadRequest(
                f"{where}.pattern is {brief(pattern)}; it must be a string", param=where
            )
        return AnswerFormat(enforced=StructuredOutputs(regex=pattern))
    raise BadRequest(
        f"{where}.type is {brief(kind)}; choose one of text, json_object, json_schema, "
        "structural_tag and regex",
        param=f"{where}.type",
    )
