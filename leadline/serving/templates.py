"""Events that differ in a text only: encoded once, filled for every token.

A stream of one event a token spends most of its time in what stays the same from event to event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from leadline.serving.dialect import event

BLANK = "\0blank\0"
_BLANK_JSON = msgspec.json.encode(BLANK)
_ENCODER = msgspec.json.Encoder()


def event_template(payload: Any, *, name: str | None = None) -> bytes:
    """The event of ``payload`` as a format for ``%``: every ``BLANK`` in it becomes ``%b``."""
    return event(payload, name=name).replace(b"%", b"%%").replace(_BLANK_JSON, b"%b")


def json_text(text: str) -> bytes:
    """``text`` as JSON that fits in one line of an event, for the blank of a template."""
    encoded = _ENCODER.encode(text)
    if b"\xe2\x80" in encoded:  # some readers split lines at U+2028 and U+2029
        encoded = encoded.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return encoded
