"""Generated chat requests in OpenAI's form: any role, tools, loops, markers typed as text."""

from __future__ import annotations

import json
import random
from typing import Any

_TEXTS = (
    "Hi",
    "Weather in Oslo?",
    "  two  spaces \n\n and lines\n",
    "Größe: 10 µm, 東京タワー, 🦊🇳🇴",
    "<｜User｜>typed<｜Assistant｜></think>",
    "<think>not reasoning</think> ｜DSML｜",
    "</｜DSML｜ calls><｜end▁of▁sentence｜>",
    "<｜deepseek_image｜> is a marker",
    "<tool_result>quoted</tool_result>",
    '{"json": [1, 2, {"a": null}]}',
    "def f(x):\n\treturn x >> 2  # 12345678\n",
    "x" * 300,
)
_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "properties": {
            "stadt": {"type": "string", "description": "Ort, z. B. „Köln“ <think>"},
            "anzahl": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["stadt"],
    },
    {
        "properties": {
            "filter": {
                "type": "object",
                "properties": {"or": {"type": "array", "items": {"enum": ["a", 1, None, True]}}},
                "additionalProperties": False,
            },
            "ratio": {"type": "number", "default": 0.5},
        },
        "type": "object",
        "$defs": {"unused": {"type": ["string", "null"]}},
    },
)
# The library takes a small part of JSON schema here, and reorders keys beyond these.
_STRICT_SCHEMA: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "object", "properties": {"é": {"type": "null"}}}},
        "b": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
}
_ARGUMENTS: tuple[str, ...] = (
    "{}",
    '{"stadt":"Köln","anzahl":3}',
    '{"b": [1, {"c": null}], "a": {"deep": [[true]]}, "text": "</｜DSML｜ parameter>"}',
    '{"s": "line\\nbreak \\u00e9 \\"quoted\\"", "ratio": 0.25, "n": -7}',
    '"{\\"double\\": 1}"',
    "[1, 2]",
    "{bad",
    "",
)


class Conversations:
    """Requests from one seed.

    Attributes:
        random: where every choice comes from.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._calls = 0

    def body(self) -> dict[str, Any]:
        """One request, without the model's name."""
        pick = self.random
        tools = self._tools() if pick.random() < 0.6 else []
        messages: list[Any] = []
        if pick.random() < 0.6:
            messages.append({"role": "system", "content": self._text()})
        messages += self._exchange(bool(tools))
        for _ in range(pick.randrange(4)):
            if pick.random() < 0.2:
                messages.append({"role": "system", "content": self._text()})
            if pick.random() < 0.2:
                messages.append({"role": "latest_reminder", "content": self._text()})
            messages += self._exchange(bool(tools))
        messages.append({"role": "user", "content": self._content()})
        body: dict[str, Any] = {"messages": messages}
        if tools:
            body["tools"] = tools
        if pick.random() < 0.3:
            body["thinking"] = {"type": "disabled"}
        elif pick.random() < 0.7:
            body["reasoning_effort"] = pick.choice(["low", "medium", "high", "xhigh", "max"])
        if tools:  # beside which the library takes no response format and continues nothing
            if pick.random() < 0.1:
                body["tool_choice"] = "none"
        elif pick.random() < 0.2:
            schema = pick.choice(_SCHEMAS[:2])
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            }
        elif pick.random() < 0.1:
            body["response_format"] = {"type": "json_object"}
            messages.insert(0, {"role": "system", "content": "Answer in json."})
        elif pick.random() < 0.4:
            prefix = {"role": "assistant", "content": self._text(), "prefix": True}
            messages.append(prefix | self._reasoning(0.5))
        return body

    def _exchange(self, has_tools: bool) -> list[Any]:
        count = self.random.choice([1, 1, 2])
        messages = [{"role": "user", "content": self._content()} for _ in range(count)]
        for _ in range(self.random.randrange(3) if has_tools else 0):
            messages += self._tool_turn()
        answer = {"role": "assistant", "content": self._text()}
        return [*messages, answer | self._reasoning(0.6)]

    def _tool_turn(self) -> list[Any]:
        ids = [self._next_id() for _ in range(self.random.choice([1, 1, 2, 3]))]
        calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": self.random.choice(["wetter", "search-2", "f"]),
                    "arguments": self.random.choice(_ARGUMENTS),
                },
            }
            for call_id in ids
        ]
        turn = {"role": "assistant", "content": self.random.choice(["", None, self._text()])}
        results = [
            {"role": "tool", "tool_call_id": call_id, "content": self._content()} for call_id in ids
        ]
        self.random.shuffle(results)
        return [turn | {"tool_calls": calls} | self._reasoning(0.7), *results]

    def _tools(self) -> list[Any]:
        tools = []
        is_strict = self.random.random() < 0.3  # all or none, for the library
        for name in self.random.sample(["wetter", "search-2", "f", "get_time"], 3):
            function = {"name": name, "parameters": self.random.choice(_SCHEMAS)}
            if self.random.random() < 0.7:
                function["description"] = self._text()
            if is_strict:
                function |= {"strict": True, "parameters": _STRICT_SCHEMA}
            tools.append({"type": "function", "function": function})
        return tools

    def _reasoning(self, share: float) -> dict[str, str]:
        return {"reasoning_content": self._text()} if self.random.random() < share else {}

    def _content(self) -> Any:
        if self.random.random() < 0.7:
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self.random.randrange(1, 4))]

    def _text(self) -> str:
        return " ".join(self.random.choices(_TEXTS, k=self.random.choice([1, 1, 2])))

    def _next_id(self) -> str:
        self._calls += 1
        return f"call_{self._calls:04}"  # for V4 the library sorts calls by id; we don't (C13)


def encoded(body: dict[str, Any], model: str) -> bytes:
    """The request as a client would send it to ``model``."""
    return json.dumps(body | {"model": model}, ensure_ascii=False).encode()
