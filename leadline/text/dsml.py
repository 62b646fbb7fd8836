"""Tags of tool calls, in every dialect that models have been seen to write (serving-api 3.3).

``<｜DSML｜ invoke name="f">``: the marker is one token, found by its id; only the text behind it is
read here.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass


class TagKind(enum.Enum):
    """What a tag stands for, whatever it is called."""

    BLOCK = enum.auto()
    INVOKE = enum.auto()
    PARAMETER = enum.auto()


_KINDS = {
    "tool_calls": TagKind.BLOCK,
    "calls": TagKind.BLOCK,
    "function_calls": TagKind.BLOCK,
    "toolcalls": TagKind.BLOCK,
    "tool": TagKind.BLOCK,
    "invoke": TagKind.INVOKE,
    "parameter": TagKind.PARAMETER,
}
# The longest head that is waited for: names have at most 128 characters (serving-api 2.4).
_MAX_HEAD = 512
# Up to the first ">" that stands in no quotes; quotes never span lines.
_HEAD = re.compile(r"""(?:[^>"']|"[^"\n]*"|'[^'\n]*')*+>""")
_NAME = re.compile(r"\s*(\w*)")
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'/>]+))""")


@dataclass(frozen=True, slots=True)
class Tag:
    """One tag.

    Attributes:
        kind: None for a name that means nothing.
        is_closing: ``</...>``.
        is_empty: ``<.../>``.
    """

    kind: TagKind | None
    is_closing: bool
    attributes: Mapping[str, str]
    is_empty: bool = False


class TagReader:
    """Reads one tag from the text behind its marker."""

    def __init__(self, *, is_closing: bool) -> None:
        self._is_closing = is_closing
        self._head = ""

    def push(self, text: str) -> tuple[Tag, str] | None:
        """The tag and the text behind it, once ``>`` has come."""
        self._head += text
        if ">" in text and (match := _HEAD.match(self._head)):
            return self._split(match.end())
        bracket = self._head.find(">")
        is_open_quote = bracket >= 0 and "\n" in self._head[bracket:]
        return self.close() if is_open_quote or len(self._head) > _MAX_HEAD else None

    def close(self) -> tuple[Tag, str]:
        """What can be made of a tag that does not end as it should."""
        return self._split(self._head.find(">") + 1 or len(self._head))

    def _split(self, end: int) -> tuple[Tag, str]:
        head = self._head[:end].removesuffix(">").rstrip()
        name = _NAME.match(head)
        assert name is not None  # it matches nothing, too
        attributes = {
            found[1]: found[2] or found[3] or found[4] or ""
            for found in _ATTRIBUTE.finditer(head, name.end())
        }
        kind = _KINDS.get(name[1])
        return Tag(kind, self._is_closing, attributes, head.endswith("/")), self._head[end:]
