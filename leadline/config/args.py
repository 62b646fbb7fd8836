"""One dataclass tree <-> command-line flags, environment and ``--help``.

A leaf field is a flag of the same name, its docstring entry is the help and its default is the
default: nothing is written twice (serving-api 15.1).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from leadline.config import compat
from leadline.core.errors import ConfigError

ConfigT = TypeVar("ConfigT")

_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_count(text: str) -> int:
    """An integer as people type lengths and sizes: ``8192``, ``128k``, ``1m``, ``2GiB``, ``2GB``.

    A bare letter and ``iB`` are powers of 1024, ``kB MB GB TB`` are powers of 1000.

    Raises:
        ValueError: it is neither, or not a whole number.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?)?", text.strip().lower())
    if match:
        number, unit, suffix = match.groups()
        value = float(number) * (1000 if suffix == "b" else 1024) ** _UNITS.get(unit, 0)
        if value.is_integer():
            # Through float only where there is a fraction: seeds have 64 bits.
            return int(value) if unit else int(number.partition(".")[0])
    raise ValueError(f"{text!r} is not a whole number (such as 8192, 128k or 2GiB)")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A leaf of the tree.

    Attributes:
        type: ``int``, ``float``, ``str``, ``bool``, ``tuple`` (of strings) or ``dict`` (JSON).
        optional: None is a value of its own: what the engine finds best.
    """

    name: str
    type: type
    optional: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable of the flag."""
        return "LEADLINE_" + self.name.upper()


def settings(config_type: type) -> Iterator[Setting]:
    """Every leaf of a configuration dataclass, nested ones included, in order."""
    hints = typing.get_type_hints(config_type)
    docs = _attribute_docs(config_type)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from settings(typing.cast(type, hint))
            continue
        optional = isinstance(hint, types.UnionType)
        if optional:
            (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        kind = typing.get_origin(hint) or hint
        yield Setting(field.name, kind, optional, field.default, docs[field.name])


def from_values(config_type: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build a configuration from leaf values by name; absent ones take their defaults.

    Values of other names are left alone: they belong to another tree.
    """
    hints = typing.get_type_hints(config_type)
    arguments = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = from_values(hints[field.name], values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return config_type(**arguments)


def closest(name: str, names: Iterable[str]) -> str:
    """``"; did you mean X?"`` for a misspelt name, or nothing when no name is near."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


class FlagParser(argparse.ArgumentParser):
    """The flags of configuration dataclasses, and of other servers where that costs nothing.

    Args:
        prog: the command, such as ``leadline serve``.
        arguments: what may stand beside the flags, as the usage line shows it.
        description: one sentence for ``--help``.
        config_types: the trees whose leaves become flags.
    """

    def __init__(
        self, prog: str, arguments: str, description: str, config_types: Sequence[type]
    ) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {arguments} [flags]",
            description=description,
            epilog="Every flag is also read from the environment, as LEADLINE_FLAG_NAME, and from "
            "the file that --config names; the command line wins over the environment, and that "
            "over the file. A JSON flag takes single keys too: --flag.key VALUE.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self._settings = [s for config_type in config_types for s in settings(config_type)]
        for setting in self._settings:
            self._add(setting)
        self.add_argument("--config", metavar="FILE", help="YAML file of flags, without dashes")
        compat.add_flags(self, {setting.name for setting in self._settings})

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage: the command line ends with one line."""
        raise ConfigError(message.removeprefix("argument "))

    def parse(
        self, argv: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[str]]:
        """The values that were given, by field name, and the arguments that are no flags.

        The command line wins over the environment, and that over ``--config``. Flags of other
        servers are dealt with here.

        Raises:
            ConfigError: an unknown flag, or a value that does not fit its flag.
            NotSupported: a flag of another server that asks for what does not exist here.
        """
        try:
            values, _ = self._parse(list(self._environment(environ)))
        except ConfigError as error:
            raise ConfigError(f"in the environment: {error}") from None
        given, positionals = self._parse(argv)
        values |= given
        if file := values.pop("config", environ.get("LEADLINE_CONFIG")):
            flags = list(file_flags(file))
            try:
                in_file, more = self._parse(flags)
            except ConfigError as error:
                raise ConfigError(f"in {file}: {error}") from None
            values, positionals = in_file | values, positionals or more
        return compat.settle(values), positionals

    def _parse(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        flags, after = list(argv), []
        if "--" in flags:
            end = flags.index("--")
            flags, after = flags[:end], flags[end + 1 :]
        namespace, rest = self.parse_known_args(list(_normalised(flags)))
        for arg in rest:
            if arg.startswith("-") and len(arg) > 1 and " " not in arg:
                flag = arg.partition("=")[0]
                raise ConfigError(
                    f"unknown flag {flag}{closest(flag, self._option_string_actions)}"
                )
        return vars(namespace), rest + after

    def _environment(self, environ: Mapping[str, str]) -> Iterator[str]:
        for setting in self._settings:
            if (text := environ.get(setting.variable)) is None:
                continue
            if setting.type is bool:
                if text.lower() not in _TRUE + _FALSE:
                    raise ConfigError(f"{setting.variable} is {text!r}; write true or false")
                yield setting.flag if text.lower() in _TRUE else "--no-" + setting.flag[2:]
            elif setting.type is tuple:
                yield from (setting.flag, *([text] if text.startswith("[") else text.split()))
            else:
                yield f"{setting.flag}={text}"

    def _add(self, setting: Setting) -> None:
        help_text = setting.help.replace("%", "%%").replace("``", "")
        if setting.default not in (None, dataclasses.MISSING, ()):
            help_text += f" (default: {setting.default})"
        if setting.type is bool:
            self.add_argument(
                setting.flag,
                dest=setting.name,
                action=argparse.BooleanOptionalAction,
                help=help_text,
            )
        elif setting.type is tuple:
            self.add_argument(
                setting.flag, dest=setting.name, nargs="+", action=_Extend, help=help_text
            )
        elif setting.type is dict:
            self.add_argument(
                setting.flag,
                dest=setting.name,
                type=json_object,
                action=_Merge,
                metavar="JSON",
                help=help_text,
            )
        else:
            self.add_argument(
                setting.flag,
                dest=setting.name,
                type=_converter(setting),
                metavar=setting.type.__name__.upper(),
                help=help_text,
            )


def _converter(setting: Setting) -> Callable[[str], Any]:
    parsers: dict[type, Callable[[str], Any]] = {
        int: parse_count,
        float: float,
        str: str,
    }
    parse = parsers[setting.type]

    def convert(text: str) -> Any:
        if setting.optional and setting.type is not str and text == "auto":
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


class _Extend(argparse.Action):
    """Strings of one flag given several times, apart or as a JSON list."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, values: Any, _flag: object = None
    ) -> None:
        if len(values) == 1 and values[0].startswith("["):
            values = _json_strings(self, values[0])
        setattr(namespace, self.dest, getattr(namespace, self.dest, []) + values)


class _Merge(argparse.Action):
    """JSON objects of one flag given several times, key by key."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, values: Any, _flag: object = None
    ) -> None:
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest, {}), values))


def _json_strings(action: argparse.Action, text: str) -> list[str]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if all(isinstance(item, str) for item in value):
            return list(value)
    raise argparse.ArgumentError(action, f"{text!r} is not a JSON list of strings")


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = old | new
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            both[key] = _merged(old[key], new[key])
    return both


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _normalised(argv: Sequence[str]) -> Iterator[str]:
    """``--flag_name=a_b`` -> ``--flag-name=a_b``, ``--flag.key 1`` -> ``--flag={"key": 1}``."""
    rest = iter(argv)
    for arg in rest:
        if not arg.startswith("--"):
            yield arg
            continue
        name, equals, value = arg.partition("=")
        flag, *keys = name.split(".")
        flag = flag.replace("_", "-")
        if not keys:
            yield flag + equals + value
            continue
        if not equals and (value := next(rest, "")) == "":
            raise ConfigError(f"{name}: expected one argument")
        yield f"{flag}={json.dumps(_nested(keys, value))}"


def _nested(keys: Sequence[str], text: str) -> dict[str, Any]:
    value: Any
    try:
        # True and False as Python's users type them.
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        value = text
    for key in reversed(keys):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def file_flags(file: str) -> Iterator[str]:
    """The flags that a YAML file of settings stands for.

    Raises:
        ConfigError: the file cannot be read, or is no mapping.
    """
    import yaml

    try:
        settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config is {file!r}, which cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"config is {file!r}, which is no mapping of flags to values")
    for name, value in settings.items():
        flag = "--" + str(name).removeprefix("--")
        if isinstance(value, bool):
            yield flag if value else "--no-" + flag[2:]
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            yield from (flag, *value)
        elif value is not None:
            yield f"{flag}={value if isinstance(value, str) else json.dumps(value)}"


def _attribute_docs(config_type: type) -> dict[str, str]:
    """Entries of the docstring's ``Attributes`` section, each on one line."""
    section = (inspect.getdoc(config_type) or "").partition("Attributes:\n")[2]
    entries = (entry.partition(": ") for entry in re.split(r"^    (?=\w+: )", section, flags=re.M))
    docs = {name: " ".join(text.split()) for name, _, text in entries}
    return {field.name: docs.get(field.name, "") for field in dataclasses.fields(config_type)}
