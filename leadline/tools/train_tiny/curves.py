"""A run's log as a picture: losses over tokens, by family, as SVG."""

from __future__ import annotations

import colorsys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

Line: TypeAlias = list[tuple[float, float]]

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 640, 360, 44, 170


def draw_curves(entries: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write an SVG: the training loss, and the held-out loss of each family's answers.

    Args:
        entries: of one log or of several in order (``journal.read_journal``); tokens add up over
            the runs.
        out: the file.
    """
    lines: defaultdict[str, Line] = defaultdict(list)
    before = tokens = 0
    switches = []
    for entry in entries:
        if entry["kind"] == "start":
            before += tokens
            tokens = 0
            switches.append((before, f"stage {entry['stage']}"))
            continue
        tokens = entry["tokens"]
        at = (before + tokens) / 1e6
        if entry["kind"] == "train":
            lines["training"].append((at, entry["loss"]))
        else:
            for family, losses in entry["losses"].items():
                lines[family].append((at, losses["answers"]))
    out.write_text(_svg(lines, [(at / 1e6, name) for at, name in switches]), encoding="utf-8")


def _svg(lines: Mapping[str, Line], switches: Sequence[tuple[float, str]]) -> str:
    most_tokens = max((x for line in lines.values() for x, _ in line), default=1.0)
    highest = max((y for line in lines.values() for _, y in line), default=1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _MARGIN + x / most_tokens * (_WIDTH - _MARGIN - _LEGEND),
            _HEIGHT - _MARGIN - y / highest * (_HEIGHT - 2 * _MARGIN),
        )

    parts = [_line([place(0, highest), place(0, 0), place(most_tokens, 0)], "#888")]
    for value in range(int(highest) + 1):
        x, y = place(0, value)
        parts.append(_text(x - 8, y + 4, str(value), anchor="end"))
    parts.append(_text(*place(0, highest * 1.04), "nats a token"))
    right, bottom = place(most_tokens, 0)
    parts.append(_text(right, bottom + 32, f"{most_tokens:.3g} M tokens", anchor="end"))
    for at, name in switches:
        parts.append(_line([place(at, highest), place(at, 0)], "#ddd"))
        parts.append(_text(place(at, 0)[0], bottom + 16, name))
    for number, (name, line) in enumerate(lines.items()):
        red, green, blue = colorsys.hls_to_rgb(number / len(lines), 0.42, 0.7)
        colour = f"rgb({red:.0%} {green:.0%} {blue:.0%})"
        parts.append(_line([place(*point) for point in line], colour))
        last = f"{name} {line[-1][1]:.2f}"
        parts.append(_text(_WIDTH - _LEGEND + 12, _MARGIN + 16 * number, last, colour=colour))
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {at}>{escape(text)}</text>"
