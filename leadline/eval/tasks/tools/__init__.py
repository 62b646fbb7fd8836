"""Tools for exercises: some written by hand, any number of others invented."""

from __future__ import annotations

from leadline.eval.tasks.tools.computer import COMPUTER
from leadline.eval.tasks.tools.office import OFFICE
from leadline.eval.tasks.tools.trade import TRADE
from leadline.eval.tasks.tools.world import WORLD

BLUEPRINTS = (*COMPUTER, *OFFICE, *TRADE, *WORLD)
"""All that were written by hand."""
