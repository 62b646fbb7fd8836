"""Server-sent events as bytes; those that differ in a text only are encoded once.

A stream of one event a token spends most of its time in what stays the same from event to event.
"""

from __future__ import annotations

from typing import Any

import msgspec

BLANK = "\0blank\0"
_ENCODER = msgspec.json.Encoder()
_BLANK_JSON = _ENCODER.encode(BLANK)


def event(payload: Any, *, name: str | None = None) -> bytes:
    """One event.

    Args:
        payload: anything that ``msgspec`` encodes.
        name: of the ``event:`` line that some clients dispatch on.
    """
    if name is None:
        return b"data: %b\n\n" % json_line(payload)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_line(payload))


def event_template(payload: Any, *, name: str | None = None) -> bytes:
    """The event of ``payload`` as a format for ``%``: every ``BLANK`` in it becomes ``%b``."""
    return event(payload, name=name).replace(b"%", b"%%").replace(_BLANK_JSON, b"%b")


def json_line(value: Any) -> bytes:
    """JSON that fits in a line of an event, also for the blank of a template."""
    line = _ENCODER.encode(value)
    if b"\xe2\x80" in line:  # some readers split lines at U+2028 and U+2029
        line = line.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return line
