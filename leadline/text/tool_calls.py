"""A tool block's text and tags -> calls, whatever is missing in it (serving-api 3.3, 3.5)."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from leadline.text.chat import CallArguments, CallStart, Tool
from leadline.text.dsml import Tag, TagKind
from leadline.text.tool_arguments import ArgumentsWriter

# Random bytes of a call's id: it guards what ``text`` remembers about the call (C12).
_ID_BYTES = 16


@dataclass(slots=True)
class SentCall:
    """A call as far as it was reported; ``arguments`` holds what its fragments say."""

    id: str
    name: str
    arguments: io.StringIO = field(default_factory=io.StringIO)


class ToolCallReader:
    """Reads calls from a block, or from invokes that stand without one.

    A tag that is missing is understood from the next: an invoke ends the one before, a parameter
    ends an open parameter, the block's end ends everything (C20). Text that belongs to no call is
    dropped.

    Attributes:
        calls: those that were reported.
        num_ignored: calls beyond the limit.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_calls: int | None,
        coerces: bool,
        emit: Callable[[CallStart | CallArguments], None],
    ) -> None:
        """
        Args:
            tools: what the model was told of; their schemas repair arguments.
            max_calls: calls to report; None is all.
            coerces: whether declared types win over what the model says.
            emit: takes what is to be sent.
        """
        self.calls: list[SentCall] = []
        self.num_ignored = 0
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._max_calls = max_calls
        self._coerces = coerces
        self._emit = emit
        self._arguments: ArgumentsWriter | None = None

    def text(self, text: str) -> None:
        """Take text between two tags."""
        if self._arguments is not None:
            self._send(self._arguments.push(text))

    def tag(self, tag: Tag) -> None:
        """Take a tag."""
        if tag.kind is TagKind.PARAMETER:
            self._parameter(tag)
        elif tag.kind is not None:
            self.finish()
            if tag.kind is TagKind.INVOKE and not tag.is_closing and tag.attributes.get("name"):
                self._start(tag.attributes["name"])
                if tag.is_empty:
                    self.finish()

    def finish(self) -> None:
        """End the open call so that its arguments parse (C22)."""
        if self._arguments is not None:
            self._send(self._arguments.finish())
            self._arguments = None

    def cut(self) -> None:
        """The output was cut: send what is known of the open call, and leave it open (C25)."""
        if self._arguments is not None:
            self._send(self._arguments.cut())
            self._arguments = None

    def _start(self, name: str) -> None:
        if self._max_calls is not None and len(self.calls) >= self._max_calls:
            self.num_ignored += 1
            return
        call = SentCall(f"call_{secrets.token_hex(_ID_BYTES)}", name)
        self._emit(CallStart(len(self.calls), call.id, name))
        self.calls.append(call)
        self._arguments = ArgumentsWriter(self._schemas.get(name), coerces=self._coerces)

    def _parameter(self, tag: Tag) -> None:
        arguments = self._arguments
        if arguments is None:
            return
        name = tag.attributes.get("name")
        if tag.is_closing or not name:
            self._send(arguments.close(is_explicit=tag.is_closing))
            return
        is_string = tag.attributes.get("string", "").lower() == "true"
        self._send(arguments.open(name, is_string=is_string))
        if tag.is_empty:
            self._send(arguments.close())

    def _send(self, fragment: str) -> None:
        if fragment:
            self.calls[-1].arguments.write(fragment)
            self._emit(CallArguments(len(self.calls) - 1, fragment))
