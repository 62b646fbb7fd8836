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
    """A row a family and a bar an arm: right answers and, where there are arms to compare, KL."""
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever the machine has
    from matplotlib import pyplot

    families = list(summary.families)
    arms = list(summary.families[families[0]])
    panels = [("correct", 100, arms, "right answers, % (± one standard error)")]
    if len(arms) > 1:
        title = f"KL({arms[0]} || arm) over the first window, nats a token"
        panels.append(("kl_window", 1, arms[1:], title))
    height = _BAR / len(arms)
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        squeeze=False,
        sharey=True,
        figsize=(6 * len(panels), 1.2 + len(families) * max(0.45, 0.13 * len(arms))),
    )
    colours = pyplot.get_cmap("tab10")
    for panel, (measure, scale, shown, title) in zip(axes[0], panels, strict=True):
        for arm in shown:
            offset = (arms.index(arm) + 0.5) * height - _BAR / 2
            rows = [
                (place + offset, number)
                for place, family in enumerate(families)
                if (number := summary.families[family][arm].get(measure)) is not None
            ]
            panel.barh(
                [place for place, _ in rows],
                [number.mean * scale for _, number in rows],
                height,
                xerr=[number.se * scale for _, number in rows],
                label=arm,
                color=colours(arms.index(arm) % 10),
                error_kw={"elinewidth": 0.8},
            )
        panel.set_xlabel(title)
        panel.set_xlim(left=0)
        panel.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(families)), families)
    axes[0][0].invert_yaxis()  # in the order of the tables
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=len(arms))
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
