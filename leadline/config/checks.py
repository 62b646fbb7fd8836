"""Checks that several settings share; each raises ``ConfigError`` with the field's name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from leadline.core.errors import ConfigError


def choice(config: object, name: str, *choices: str) -> None:
    """The field is one of ``choices``."""
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def some_of(name: str, value: object, known: Collection[str]) -> frozenset[str]:
    """The names that a field's value stands for.

    Args:
        name: of the field.
        value: ``all`` or ``none``, or the names that are wanted, separated by commas; behind
            ``all``, ``-NAME`` takes one out.
        known: the names that there are.
    """
    wanted: set[str] = set()
    for word in str(value).split(","):  # a caller from Python may give anything
        bare = word.removeprefix("-")
        if word in ("all", "none"):
            wanted = set(known if word == "all" else ())
        elif bare not in known:
            raise ConfigError(
                f"{name} has {word!r}; write all, none, or some of {', '.join(known)}"
            )
        elif word == bare:
            wanted.add(bare)
        else:
            wanted.discard(bare)
    return frozenset(wanted)


def at_least(config: object, low: int, *names: str) -> None:
    """Every named field is a number from ``low`` on, or None where that is its default."""
    declared = {field.name: field for field in fields(config)}  # type: ignore[arg-type]
    for name in names:
        value, field = getattr(config, name), declared[name]
        if value is None and field.default is None:
            continue
        is_float = "float" in str(field.type)
        is_number = isinstance(value, (int, float) if is_float else int)
        if not is_number or isinstance(value, bool) or not value >= low:
            kind = "a number" if is_float else "an integer"
            raise ConfigError(f"{name} is {value!r}; it must be {kind} of at least {low}")
