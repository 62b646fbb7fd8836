"""A profile as tables and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from leadline.profile.measure import Profile


def numbers(profile: Profile, bound: Mapping[str, float] | None) -> dict[str, Any]:
    """All of it, and the bound by component, for a file."""
    idle = None if profile.busy is None else max(0.0, profile.wall - profile.busy)
    return asdict(profile) | {"idle": idle, "bound": None if bound is None else dict(bound)}


def component_table(profile: Profile, bound: Mapping[str, float] | None) -> list[list[str]]:
    """Header and rows: of each component its time, its share, its bound and how far it is away."""
    spent, total = profile.components, sum(profile.components.values())
    lines = [["", "us", "%"]]
    lines += [[name, _short(us), f"{100 * us / total:.1f}"] for name, us in spent.items()]
    lines += [["all", _short(total), "100.0"]]
    if bound is not None:
        lines[0] += ["bound, us", "times the bound"]
        known = dict(bound) | {"all": sum(bound.values())}
        for line, us in zip(lines[1:], (*spent.values(), total), strict=True):
            least = known.get(line[0])
            # The bound is 0 of what the model lacks.
            line += ["" if least is None else _short(least), f"{us / least:.2f}" if least else ""]
    return lines


def step_table(profile: Profile) -> list[list[str]]:
    """Header and rows: the step as a whole, and what the host does in it."""
    found = numbers(profile, None)
    rows = [["", f"a {profile.unit}"], ["whole, us", _short(profile.wall)]]
    rows += [
        [name, _short(found[key])]
        for name, key in (
            ("device busy, us", "busy"),
            ("device idle, us", "idle"),
            ("kernels and copies", "pieces"),
            ("launches by the host", "launches"),
        )
        if found[key] is not None
    ]
    return rows + [[f"host: {part}, us", _short(us)] for part, us in profile.host.items()]


def _short(number: float) -> str:
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"
