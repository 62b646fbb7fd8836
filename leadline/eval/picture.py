"""Accuracies and divergences as bars, and how these grow by turn: needs the extra ``eval``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leadline.core.errors import ConfigError
from leadline.eval.conclusions import BY_TURN
from leadline.eval.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 0.8  # of the room that a family has
_PANEL_INCHES = 5.0


def is_available() -> bool:
    """Whether the library that draws is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check() -> None:
    """Say what is missing, before the work begins.

    Raises:
        ConfigError: the library that draws is not installed.
    """
    if not is_available():
        raise ConfigError(
            "a picture needs matplotlib; install leadline[eval], or leave --picture out"
        )


def draw(summary: Summary, file: Path) -> None:
    """Right answers; where there are arms to compare, their KL too, by family and by turn."""
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever the machine has
    from matplotlib import pyplot

    reference, *others = arms = list(next(iter(summary.families.values())))
    num_panels = 1 + bool(others) + bool(others and BY_TURN in summary.cells)
    height = 1.2 + len(summary.families) * max(0.4, 0.12 * len(arms))
    figure, [panels] = pyplot.subplots(
        1, num_panels, squeeze=False, figsize=(_PANEL_INCHES * num_panels, height)
    )
    _draw_bars(panels[0], summary, arms, arms, "correct", scale=100)
    panels[0].set_xlim(0, 100)
    panels[0].set_xlabel("right answers, % (± one standard error)")
    if others:
        _draw_bars(panels[1], summary, arms, others, "kl_window", scale=1)
        panels[1].set_yticklabels([])
        panels[1].set_xlabel(f"KL({reference} || arm), first window, nats a token")
    if num_panels > 2:
        _draw_turns(panels[2], summary, arms, others)
        panels[2].set_xlabel(f"the same, {BY_TURN} by turn")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper center", ncols=len(arms))
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / height))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_bars(
    axes: Axes,
    summary: Summary,
    arms: Sequence[str],
    shown: Sequence[str],
    measure: str,
    *,
    scale: float,
) -> None:
    """A row a family and a bar an arm, from the top down."""
    width = _BAR / len(shown)
    for i, arm in enumerate(shown):
        rows = [
            (place + (i + 0.5) * width - _BAR / 2, of_arms[arm][measure])
            for place, of_arms in enumerate(summary.families.values())
            if measure in of_arms[arm]
        ]
        axes.barh(
            [place for place, _ in rows],
            [number.mean * scale for _, number in rows],
            width,
            xerr=[number.se * scale for _, number in rows],
            label=arm,
            color=_colour(arms, arm),
            error_kw={"elinewidth": 0.8},
        )
    axes.set_yticks(range(len(summary.families)), list(summary.families))
    axes.set_ylim(len(summary.families) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)


def _draw_turns(axes: Axes, summary: Summary, arms: Sequence[str], shown: Sequence[str]) -> None:
    """A line an arm."""
    cells = list(summary.cells[BY_TURN].values())
    for arm in shown:
        numbers = [cell[arm]["kl_window"] for cell in cells]
        axes.errorbar(
            range(1, len(cells) + 1),
            [number.mean for number in numbers],
            yerr=[number.se for number in numbers],
            color=_colour(arms, arm),
        )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _colour(arms: Sequence[str], arm: str) -> str:
    """The same in every panel."""
    return f"C{arms.index(arm) % 10}"
