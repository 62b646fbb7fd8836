"""Accuracies and divergences as bars: needs the extra ``eval``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from leadline.core.errors import ConfigError
from leadline.eval.summary import Summary

_BAR = 0.8  # of the room that a family has


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
    """Two panels side by side, a row a family and a bar an arm: right answers, and KL."""
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever the machine has
    from matplotlib import pyplot

    families = list(summary.families)[::-1]  # from the bottom up
    arms = list(summary.families[families[0]])
    height = _BAR / len(arms)
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(11, 1 + len(families) * max(0.5, 0.16 * len(arms)))
    )
    colours = pyplot.get_cmap("tab10")
    panels = ((left, "correct", 100, arms), (right, "kl_window", 1, arms[1:]))
    for axes, measure, scale, shown in panels:
        for arm in shown:
            i = arms.index(arm)
            rows = [
                (y + _BAR / 2 - (i + 0.5) * height, number)
                for y, family in enumerate(families)
                if (number := summary.families[family][arm].get(measure)) is not None
            ]
            axes.barh(
                [y for y, _ in rows],
                [number.mean * scale for _, number in rows],
                height,
                xerr=[number.se * scale for _, number in rows],
                label=arm,
                color=colours(i % 10),
                error_kw={"elinewidth": 0.8},
            )
    left.set_yticks(range(len(families)), families)
    left.set_xlim(0, 100)
    left.set_xlabel("right answers, % (± one standard error)")
    right.set_xlabel("KL(exact || arm) over the first window, nats a token")
    left.legend(loc="upper center", bbox_to_anchor=(1, 1.0), fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
