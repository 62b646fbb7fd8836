"""White space at the end of a text that is still being written: part of it, or not?"""

from __future__ import annotations


class Blanks:
    """Holds back the blanks at the end of a text until more of it follows.

    Attributes:
        at_start: newlines are dropped until anything else comes.
    """

    def __init__(self, blanks: str | None, *, at_start: bool = False) -> None:
        """``blanks``: the characters that are held back; None is all white space."""
        self.at_start = at_start
        self._blanks = blanks
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that is surely part of it."""
        if self.at_start:
            text = text.lstrip("\n")
            self.at_start = not text
        shown = text.rstrip(self._blanks)
        if shown == text and not self._held:
            return text
        held = text[len(shown) :]
        if shown:
            shown = "".join([*self._held, shown])
            self._held.clear()
        if held:
            self._held.append(held)
        return shown

    def drop(self) -> str:
        """The blanks that were held back, which are forgotten."""
        held = "".join(self._held)
        self._held.clear()
        return held
