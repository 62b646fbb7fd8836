"""Arms of an evaluation: the same model with one switch turned."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.config.args import closest, parse_count, settings
from leadline.config.engine import EngineConfig
from leadline.config.families import AnyConfig, any_config_to_json, load_any_config
from leadline.config.model import ModelConfig
from leadline.config.optimization import make_engine_config
from leadline.core.errors import ConfigError
from leadline.weights.checkpoint import resolve_checkpoint

# What every arm starts from: each layer runs on each row, and nothing that is kept is rounded.
EXACT_SETTINGS: Mapping[str, Any] = {"swa_bounded_replay": False, "kv_cache_dtype": "float32"}
# More than any prompt has entries: all that is visible is selected.
_EVERYTHING = 2**24


@dataclass(frozen=True, slots=True)
class Arm:
    """A name, and what it changes of the exact settings.

    Attributes:
        changes: engine settings, or keys of the model's ``config.json`` such as ``index_topk``.
        meaning: a few words for the report.
        fits_v4: whether DeepSeek-V4 has what is changed.
    """

    name: str
    changes: Mapping[str, Any]
    meaning: str = ""
    fits_v4: bool = False


REFERENCE = "exact"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, {}, "every layer on every row, float32 caches", fits_v4=True),
        Arm("replay-lower", {"swa_replay_lower": True}, "bounded replay after a prefix hit"),
        Arm("replay-upper", {"swa_replay_upper": True}, "upper layers on the last rows only"),
        Arm("replay-both", {"swa_bounded_replay": True}, "bounded replay of both halves"),
        Arm(
            "kv-fp8",
            {"kv_cache_dtype": "fp8"},
            "FP8 window and compressed KV, FP4 index",
            fits_v4=True,
        ),
        Arm("kv-nvfp4", {"kv_cache_dtype": "nvfp4_ds_mla"}, "FP8 window, FP4 compressed and index"),
        Arm(
            "dense",
            {"index_topk": _EVERYTHING, "candidate_topk_blocks": _EVERYTHING},
            "attends to every compressed entry",
        ),
        Arm(
            "served",
            {"swa_bounded_replay": None, "kv_cache_dtype": "auto"},
            "what leadline serve does by default",
            fits_v4=True,
        ),
    )
}


def default_arms(names: str, config: AnyConfig) -> str:
    """Those of ``names``, with commas between them, that the model has a use for."""
    if isinstance(config, ModelConfig):
        return names
    return ",".join(name for name in names.split(",") if ARMS[name].fits_v4)


def choose_arms(names: str, own: Sequence[str] = ()) -> list[Arm]:
    """The reference first, then those that are asked for, each once.

    Args:
        names: of ``ARMS``, with commas between them.
        own: further ones, each ``name:setting=value,setting=value``.

    Raises:
        ConfigError: an unknown name or setting, or a value that does not fit it.
    """
    chosen = {REFERENCE: ARMS[REFERENCE]}
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in ARMS:
            raise ConfigError(
                f"arms has {name!r}{closest(name, ARMS)}; there are {', '.join(ARMS)}, and "
                "--arm NAME:SETTING=VALUE makes others"
            )
        chosen[name] = ARMS[name]
    for text in own:
        arm = parse_arm(text)
        if arm.name in chosen:
            raise ConfigError(f"arm {arm.name!r} is named twice; choose another name")
        chosen[arm.name] = arm
    return list(chosen.values())


def parse_arm(text: str) -> Arm:
    """``name:setting=value,setting=value`` as an arm.

    Raises:
        ConfigError: another form, an unknown setting, a value that does not fit it.
    """
    name, colon, rest = text.partition(":")
    if not (name and colon and rest):
        raise ConfigError(f"arm is {text!r}; write it as NAME:SETTING=VALUE,SETTING=VALUE")
    changes = dict(_change(part) for part in rest.split(","))
    return Arm(name, changes, rest.replace(",", ", "))


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    types = {setting.name: setting.type for setting in settings(EngineConfig)}
    types |= dict.fromkeys(_model_keys(), int)
    if not equals or key not in types:
        raise ConfigError(
            f"arm sets {text!r}; write SETTING=VALUE with a setting of the engine or a number of "
            f"the model's config.json{closest(key, types)}"
        )
    return key, _typed(key, value, types[key])


def _typed(key: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"arm sets {key} to {text!r}; write true or false")
        return text.lower() == "true"
    try:
        return parse_count(text) if kind is int else kind(text)
    except ValueError as error:
        raise ConfigError(f"arm sets {key}: {error}") from None


def _model_keys() -> list[str]:
    """Whole numbers of a model's configuration."""
    return [f.name for f in dataclasses.fields(ModelConfig) if f.init and f.type in ("int", int)]


@contextmanager
def arm_config(arm: Arm, base: Mapping[str, Any]) -> Iterator[EngineConfig]:
    """The settings of an engine for an arm; good for as long as the block runs.

    Args:
        arm: what is changed.
        base: settings of all arms, ``model`` among them; they win over the exact ones.

    Raises:
        ConfigError: settings that cannot be used together, or a model that is not there.
    """
    model_keys = _model_keys()
    own = {key: value for key, value in arm.changes.items() if key in model_keys}
    values = {**EXACT_SETTINGS, **base}
    values |= {key: value for key, value in arm.changes.items() if key not in own}
    with ExitStack() as stack:
        if own:
            source = resolve_checkpoint(values["model"], values.get("revision"))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="leadline-arm-"))
            _overlay(source, Path(folder), own)
            values["model"] = folder
        yield make_engine_config(values)


def _overlay(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """A checkpoint of the same files with another ``config.json``."""
    config = load_any_config(source)
    for key in changes:
        if not hasattr(config, key):
            raise ConfigError(f"arm sets {key}, which {source / 'config.json'} does not have")
    config = dataclasses.replace(config, **changes)
    for file in source.resolve().iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(any_config_to_json(config)))
