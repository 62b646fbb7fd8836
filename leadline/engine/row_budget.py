"""How many rows a step may have when memory turns out to be short. No torch."""

from __future__ import annotations

# A budget that was cut doubles again over so many steps that are as large as it allows.
_STEPS_TO_DOUBLE = 64


class RowBudget:
    """Rows of a step at most: half of those that did not fit, and from then on slowly more.

    What a step needs beside weights and cache grows with its rows, so that is what is cut. Where
    the budget grew until memory was short once more, it grows half as fast from then on: a prompt
    that begins anew after each shortage gets through, however narrow memory stays.

    Args:
        most: rows while memory suffices.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows = float(most)
        self._patience = _STEPS_TO_DOUBLE
        self._fitted = True  # the last step did

    @property
    def rows(self) -> int:
        return int(self._rows)

    def grow(self, num_rows: int) -> None:
        """Say that a step of so many rows fitted."""
        self._fitted = True
        self._rows = min(self._most, self._rows + num_rows / self._patience)
        if self._rows == self._most:
            self._patience = _STEPS_TO_DOUBLE

    def shrink(self, num_rows: int) -> None:
        """Say that a step of so many rows did not fit."""
        if self._fitted and self._rows < self._most:
            self._patience *= 2
        self._fitted = False
        self._rows = max(1.0, min(self._rows, num_rows // 2))
