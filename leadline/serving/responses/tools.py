"""Tools of the Responses API as functions, and their calls mapped back (serving-api 7)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import Any

import msgspec

from leadline.core.errors import BadRequest
from leadline.text.chat import Tool, ToolChoice
from leadline.text.shapes import objects, string

logger = logging.getLogger(__name__)

_HOSTED = re.compile(
    r"(web_search|file_search|code_interpreter|image_generation|local_shell|computer|mcp|shell"
    r"|apply_patch|tool_search).*"
)
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


@dataclass(slots=True)
class ToolTable:
    """What the model may call.

    Attributes:
        separator: between a namespace and a name, in the names that the model knows.
        tools: in the order given; hosted ones are left out.
        custom: names of the free-form ones, whose only argument is their text.
        namespaces: of tools in a group, by the name that the model knows.
    """

    separator: str
    tools: list[Tool] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]], *, has_namespaces: bool) -> ToolTable:
        """The table of a request's ``tools``.

        Args:
            entries: as the client sent them.
            has_namespaces: the model knows ``namespace::name``; else a name of ordinary
                characters stands for it.

        Raises:
            BadRequest: an unknown kind of tool, or one without a name.
        """
        table = cls("::" if has_namespaces else "__")
        for i, entry in enumerate(entries):
            table._add(entry, f"tools[{i}]")
        return table

    def _add(
        self, entry: Mapping[str, Any], where: str, group: Mapping[str, Any] | None = None
    ) -> None:
        kind = entry.get("type")
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            logger.warning(
                "%s: hosted tools of type %s do not exist here, dropped", where, brief(kind)
            )
            return
        if kind not in ("function", "custom", "namespace"):
            raise BadRequest(
                f"{where}.type is {brief(kind)}; choose function, custom or namespace",
                param=f"{where}.type",
            )
        name = string(entry.get("name"), f"{where}.name")
        description = string(entry.get("description") or "", f"{where}.description")
        if kind == "namespace":
            for i, inner in enumerate(objects(entry.get("tools"), f"{where}.tools")):
                self._add(inner, f"{where}.tools[{i}]", entry)
            return
        texts = [description]
        if group is not None:
            texts.insert(0, group.get("description") or "")
            full_name = self.model_name(group["name"], name)
            self.namespaces[full_name] = group["name"]
        else:
            full_name = name
        parameters = entry.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadRequest(
                f"{where}.parameters is {brief(parameters)}; it must be an object",
                param=f"{where}.parameters",
            )
        if kind == "custom":
            self.custom.add(full_name)
            parameters = _INPUT_SCHEMA
            texts.append(_grammar_text(entry.get("format")))
        self.tools.append(
            Tool(
                name=full_name,
                description="\n".join(text for text in texts if text),
                parameters=parameters,
                strict=bool(entry.get("strict")),
            )
        )

    def model_name(self, namespace: Any, name: str) -> str:
        """The name that the model knows a tool by."""
        return f"{namespace}{self.separator}{name}" if isinstance(namespace, str) else name

    def client_name(self, full_name: str) -> dict[str, str]:
        """``name``, and ``namespace`` where the tool has one, as items carry them."""
        namespace = self.namespaces.get(full_name)
        if namespace is None:
            return {"name": full_name}
        return {"name": full_name.removeprefix(namespace + self.separator), "namespace": namespace}


def _grammar_text(form: Any) -> str:
    """What the model is told of the grammar of a free-form input."""
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        return ""
    return f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"


def tool_choice(
    given: str | Mapping[str, Any] | None, tools: ToolTable, *, parallel: bool
) -> ToolChoice:
    """``tool_choice`` in all its forms.

    Raises:
        BadRequest: another form.
    """
    if given is None:
        return ToolChoice(parallel=parallel)
    if given in ("auto", "none", "required"):
        return ToolChoice(given, parallel=parallel)  # type: ignore[arg-type]  # checked above
    if isinstance(given, Mapping):
        kind = given.get("type")
        if kind == "allowed_tools" and given.get("mode") in ("auto", "required"):
            chosen = objects(given.get("tools"), "tool_choice.tools")
            # A hosted tool that was dropped cannot be chosen either.
            names = tuple(_name(tool, tools) for tool in chosen if tool.get("name"))
            return ToolChoice(given["mode"], allowed=names, parallel=parallel)
        if kind in ("function", "custom") and given.get("name"):
            return ToolChoice("named", name=_name(given, tools), parallel=False)
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            return ToolChoice(parallel=parallel)
    raise BadRequest(
        f"tool_choice is {brief(given)}; it must be none, auto, required, a tool or allowed_tools",
        param="tool_choice",
    )


def _name(given: Mapping[str, Any], tools: ToolTable) -> str:
    return tools.model_name(given.get("namespace"), str(given["name"]))


class FreeFormInput:
    """The text of a custom tool's input, out of fragments of ``{"input": "..."}``."""

    _OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    # An escaped pair of surrogates is one character.
    _WHOLE_CHARACTERS = re.compile(
        r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
        r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
    )

    def __init__(self) -> None:
        self._raw = ""
        self._is_open = False

    def push(self, fragment: str) -> str:
        """The characters that ``fragment`` completes."""
        self._raw += fragment
        if not self._is_open:
            opening = self._OPENING.match(self._raw)
            if opening is None:
                return ""
            self._is_open = True
            self._raw = self._raw[opening.end() :]
        whole = self._WHOLE_CHARACTERS.match(self._raw)
        assert whole is not None  # it matches nothing too
        self._raw = self._raw[whole.end() :]
        text: str = msgspec.json.decode(f'"{whole[0]}"')
        return text

    def finish(self) -> str:
        """The rest: everything, when the model did not call its only parameter ``input``."""
        return "" if self._is_open else self._raw
