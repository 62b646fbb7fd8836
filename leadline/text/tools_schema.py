"""Tools as the prompt shows them, and what is wrong with others (serving-api 2.4, C8)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any

from leadline.core.errors import BadRequest
from leadline.text.chat import Tool, ToolChoice
from leadline.text.json_schema import close_schema
from leadline.text.json_text import dumps
from leadline.text.profiles import Profile

MAX_TOOLS = 1024
_MAX_NAME = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_NAMESPACED = re.compile(r"(?:[a-zA-Z0-9_-]+::)?[a-zA-Z0-9_-]+")


def function_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """OpenAI's ``{"type": "function", "function": {...}}`` as ``Tool``.

    Raises:
        BadRequest: another type of tool, or fields of a wrong type.
    """
    return tuple(_function_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _function_tool(tool: Any, where: str) -> Tool:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise BadRequest(
            f"{where}.type is {brief(kind)}; only function tools are supported",
            param=f"{where}.type",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where} has no function object", param=f"{where}.function")
    fields: dict[str, Any] = {"name": function.get("name")}
    for name, types in (("name", str), ("description", str), ("parameters", Mapping)):
        value = function.get(name)
        if not isinstance(value, types) and (value is not None or name == "name"):
            param = f"{where}.function.{name}"
            wanted = "an object" if types is Mapping else "a string"
            raise BadRequest(f"{param} is {brief(value)}; it must be {wanted}", param=param)
        fields[name] = value
    return Tool(
        name=fields["name"],
        description=fields["description"] or "",
        parameters=fields["parameters"],
        strict=function.get("strict") is True,
    )


def function_tool_choice(given: Any, *, has_tools: bool, parallel: bool = True) -> ToolChoice:
    """OpenAI's ``tool_choice`` in all its forms, or the legacy ``function_call``.

    Args:
        given: None is ``auto`` where there are tools.
        has_tools: whether any are declared.
        parallel: ``parallel_tool_calls``.

    Raises:
        BadRequest: another form; ``param`` is ``tool_choice``.
    """
    if given is None:
        return ToolChoice("auto" if has_tools else "none", parallel=parallel)
    if given in ("auto", "none", "required"):
        return ToolChoice(given, parallel=parallel)
    if isinstance(given, Mapping):
        if given.get("type") != "allowed_tools":
            return ToolChoice("named", name=_chosen_name(given), parallel=False)
        match given.get("allowed_tools"):
            case {"mode": "auto" | "required" as mode, "tools": [*tools]}:
                allowed = tuple(map(_chosen_name, tools))
                return ToolChoice(mode, allowed=allowed, parallel=parallel)
    raise BadRequest(
        f"tool_choice is {brief(given)}; it must be none, auto, required, a function or "
        "allowed_tools",
        param="tool_choice",
    )


def _chosen_name(given: Any) -> str:
    """The name in ``{"type": "function", "function": {"name": ...}}``, or the legacy form's."""
    if isinstance(given, Mapping):
        inner = given.get("function", given)
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            return str(inner["name"])
    raise BadRequest(f"tool_choice has {brief(given)}; name a function", param="tool_choice")


def check_tools(tools: Sequence[Tool], choice: ToolChoice, profile: Profile) -> None:
    """Check names, their number, and that the choice names tools that exist.

    Raises:
        BadRequest: ``param`` is the tool, or ``tool_choice``.
    """
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS}", param="tools")
    pattern = _NAMESPACED if profile.has_namespaces else _NAME
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if not pattern.fullmatch(tool.name) or len(tool.name) > _MAX_NAME:
            raise BadRequest(
                f"tools[{i}]: the name {brief(tool.name)} must be 1 to {_MAX_NAME} of the "
                "characters a-z A-Z 0-9 _ -",
                param=f"tools[{i}]",
            )
        if tool.name in names:
            raise BadRequest(
                f"tools[{i}]: {brief(tool.name)} is declared twice", param=f"tools[{i}]"
            )
        names.add(tool.name)
    if choice.mode == "required" and (not tools or choice.allowed == ()):
        reason = "it allows none of the tools" if tools else "tools is empty"
        raise BadRequest(f"tool_choice asks for a call, but {reason}", param="tool_choice")
    wanted = (choice.name,) if choice.mode == "named" else choice.allowed or ()
    for name in wanted:
        if name not in names:
            raise BadRequest(
                f"tool_choice names {brief(name)}, which is not in tools", param="tool_choice"
            )


def schema_lines(tools: Sequence[Tool]) -> str:
    """The tools as the prompt lists them: one JSON object a line.

    Raises:
        BadRequest: parameters that cannot be written.
    """
    return "\n".join(_schema_line(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _schema_line(tool: Tool, where: str) -> str:
    parameters: Any = tool.parameters or {}
    try:
        if tool.strict:
            parameters = close_schema(parameters or {"type": "object"})
        return dumps({"name": tool.name, "description": tool.description, "parameters": parameters})
    except (ValueError, RecursionError):
        raise BadRequest(f"{where}: parameters are nested too deeply", param=where) from None
