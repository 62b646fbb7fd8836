"""``--batch-invariant``: a row's result does not depend on the other rows (kernels.md 0.4).

Kernels are written so that rows never meet: what other rows change is how many there are, and with
it tiles, cuts of sums, tuned configs and whole variants, which decide the order of additions. In
this mode all of these are chosen as for ``ROWS`` rows, whatever there is. Few rows then cost what
that many do, and prompts are multiplied by the tiles of long decode steps.
"""

from __future__ import annotations

ROWS = 128
"""Tiles of long decode steps, whose sums are still cut often enough to keep a GPU busy."""


class _Switch:
    """On while an engine's forward runs that wants it; see ``registry.Kernels.active``."""

    enabled = False


switch = _Switch()


def planned_rows(rows: int) -> int:
    """The number of rows to choose a launch by, which may be another than it has."""
    return ROWS if switch.enabled else rows
