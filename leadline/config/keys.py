"""From a JSON object to a frozen dataclass whose fields are the file's keys, strictly typed."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leadline.core.errors import ConfigError

logger = logging.getLogger(__name__)

# Keys that describe the file or the program that wrote it, not the model.
IGNORED = {"model_type", "transformers_version", "auto_map", "_name_or_path"}


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ConfigError: the file is missing or no JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ConfigError: the file is missing or no JSON object.
    """
    return as_object(read_json(file), where=str(file))


def as_object(raw: Any, *, where: str) -> dict[str, Any]:
    """A copy of a JSON object.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: must hold a JSON object, not {type(raw).__name__}")
    return dict(raw)


def collect(
    kind: Any,
    sources: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    aliases: Mapping[str, str],
    where: str,
) -> dict[str, Any]:
    """Arguments of the dataclass ``kind``; unknown keys are warned of and left out.

    Args:
        kind: its fields are the known keys, their types what values must be.
        sources: objects, each with the prefix by which messages call its keys.
        aliases: other spellings of keys.
        where: what messages call the file.

    Raises:
        ConfigError: a value is of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    known = {item.name: hints[item.name] for item in dataclasses.fields(kind) if item.init}
    found: dict[str, Any] = {}
    for prefix, source in sources:
        for key, value in source.items():
            name = aliases.get(key, key)
            if name in IGNORED:
                continue
            if name in known:
                found[name] = convert(known[name], value, f"{where}: {prefix}{key}")
            else:
                _warn_unknown(f"{where}: unknown key {prefix}{key} is ignored")
    return found


def missing_keys(kind: Any, found: Mapping[str, Any]) -> list[str]:
    """Fields of the dataclass ``kind`` that have no default and no value."""
    required = (f.name for f in dataclasses.fields(kind) if f.init and not _has_default(f))
    return [name for name in required if name not in found]


def convert(hint: Any, value: Any, name: str) -> Any:
    """Check a JSON value against a type hint; lists become tuples, objects dataclasses.

    Raises:
        ConfigError: it is of another type; the message calls it ``name``.
    """
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in hint.__args__:
            return None
        (hint,) = (arg for arg in hint.__args__ if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} is {value!r}; it must be a list")
        inner = typing.get_args(hint)[0]
        return tuple(convert(inner, item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _convert_object(hint, value, name)
    accepts = {float: (int, float)}.get(hint, hint)
    if not isinstance(value, accepts) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be of type {hint.__name__}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be finite")
    return hint(value)


def _convert_object(hint: Any, value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be an object")
    hints = typing.get_type_hints(hint)
    known = {}
    for key, item in value.items():
        if key in hints:
            known[key] = convert(hints[key], item, f"{name}.{key}")
        elif key != "model_type":
            _warn_unknown(f"{name}: unknown key {key} is ignored")
    if missing := missing_keys(hint, known):
        raise ConfigError(f"{name}: missing key {missing[0]}")
    return hint(**known)


def to_json(value: Any) -> Any:
    """The inverse of ``convert``: lists and objects again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: to_json(v) for k, v in dataclasses.asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


def keys_to_json(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that have a value, as JSON, by name."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    return {key: to_json(value) for key, value in fields.items() if value is not None}


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not dataclasses.MISSING


@functools.cache  # once per message
def _warn_unknown(message: str) -> None:
    logger.warning(message)
