"""What differs between the chat formats of V4 and V4.1, in one table (serving-api 2)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Literal, TypeAlias

import deepseek_recipe as recipe

from leadline.config import v4
from leadline.config.compat import CHAT_FORMAT
from leadline.config.families import any_config_to_json
from leadline.config.keys import read_object
from leadline.config.model import MODEL_TYPE
from leadline.config.presets import any_preset
from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.text.chat import Effort

logger = logging.getLogger(__name__)

# What clients may ask for -> the levels that models know (2.3).
_LEVELS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
DEFAULT_LEVEL = "high"

# A level whose text ``deepseek-recipe`` knows.
EffortText: TypeAlias = Literal["low", "high", "max"]


@dataclass(frozen=True, slots=True)
class DsmlTags:
    """Names of the elements of a tool block, as they follow the DSML marker."""

    calls: str
    invoke: str
    parameter: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The chat format that a checkpoint was trained with.

    Attributes:
        name: as ``--effort-profile`` takes it.
        parser: what other servers call it.
        efforts: level -> the number of the effort line, or the library's name of the text. The
            only such table (R2).
        tags: elements of tool blocks.
        has_system_marker: late system messages have a marker, so they stay in place.
        has_namespaces: tools may be called ``namespace::name``.
        empty_call_line: a call without arguments holds an empty line (2.6).
    """

    name: str
    parser: str
    efforts: Mapping[str, int | EffortText]
    tags: DsmlTags
    has_system_marker: bool
    has_namespaces: bool
    empty_call_line: bool

    def recipe_encoding(self) -> recipe.DeepseekV4Encoding | recipe.DeepseekV41Encoding:
        """The model maker's renderer of this format."""
        if self.has_system_marker:
            return recipe.DeepseekV41Encoding()
        return recipe.DeepseekV4Encoding()

    def effort(self, requested: Effort) -> int | EffortText:
        """The number or text that a requested effort becomes (C6, C7).

        Raises:
            BadRequest: an unknown level, a number out of range, a number where texts are used.
        """
        if isinstance(requested, str) and requested in _LEVELS:
            return self.efforts[_LEVELS[requested]]
        number = _whole_number(requested)
        takes_numbers = isinstance(self.efforts[DEFAULT_LEVEL], int)
        if takes_numbers and number is not None and 1 <= number <= 100:
            return number
        hint = ", or an integer from 1 to 100" if takes_numbers else ""
        if number is not None and not takes_numbers:
            hint = "; DeepSeek-V4 has no numeric effort"
        raise BadRequest(
            f"reasoning_effort is {brief(requested)}; choose one of none, {', '.join(_LEVELS)}"
            f"{hint}",
            param="reasoning_effort",
        )

    def is_max_effort(self, effort: int | str) -> bool:
        """Whether an outcome of ``effort`` is the highest that there is."""
        return effort == self.efforts["max"]


V4_TAGS = DsmlTags("tool_calls", "invoke", "parameter")
V41_TAGS = DsmlTags(" calls", " invoke", " parameter")
V41 = Profile(
    "v41",
    "deepseek_v41",
    efforts={"low": 50, "high": 75, "max": 100},
    tags=V41_TAGS,
    has_system_marker=True,
    has_namespaces=True,
    empty_call_line=True,
)
V4 = Profile(
    "v4",
    "deepseek_v4",
    efforts={"low": "low", "high": "high", "max": "max"},
    tags=V4_TAGS,
    has_system_marker=False,
    has_namespaces=False,
    empty_call_line=False,
)
# The April checkpoints: their only text is the one that is "high" in the released ones.
V4_PREVIEW = replace(V4, name="v4-preview", efforts={"low": "low", "high": "low", "max": "high"})
PROFILES = {profile.name: profile for profile in (V41, V4, V4_PREVIEW)}

# Only the released encoder knows the text of "max".
_RELEASED_TEXT = "Beyond maximum"


def choose_profile(setting: str, folder: Path | None, preset: str | None = None) -> Profile:
    """The profile that ``--effort-profile`` names, and a line in the log that says so (C6).

    Args:
        setting: ``auto`` or a profile's name.
        folder: the checkpoint, whose ``config.json`` names the model. V4's previews are told from
            its releases by the encoder beside the weights, or by the kind of draft.
        preset: the model's name where it has no files; without either it is a V4.1.

    Raises:
        ConfigError: an unknown name or model.
    """
    if setting != "auto":
        if setting not in PROFILES:
            raise ConfigError(
                f"effort_profile is {setting!r}; choose one of auto, {', '.join(PROFILES)}"
            )
        profile, reason = PROFILES[setting], "as set"
    else:
        profile, reason = _profile_of(folder, preset)
    efforts = ", ".join(f"{level} is {effort}" for level, effort in profile.efforts.items())
    logger.info("chat format %s (%s): effort %s", profile.name, reason, efforts)
    return profile


def check_other_names(profile: Profile, options: ChatConfig) -> None:
    """A line in the log for each flag that calls the chat format by another's name (15.1)."""
    for name in CHAT_FORMAT:
        asked = getattr(options, name)
        if _letters(asked) not in ("auto", "hf", _letters(profile.parser)):
            flag = "--" + name.replace("_", "-")
            logger.warning("%s %s: this model's chat format is %s", flag, asked, profile.parser)


def _letters(name: str) -> str:
    """``deepseek-v4`` and ``DeepSeekV4`` are spellings of ``deepseek_v4``."""
    return re.sub("[-_]", "", name).lower()


def _profile_of(folder: Path | None, preset: str | None) -> tuple[Profile, str]:
    """The profile of a model, and what tells so."""
    if folder is not None:
        keys: Mapping[str, Any] = read_object(folder / "config.json")
    else:
        keys = {} if preset is None else any_config_to_json(any_preset(preset))
    model_type = keys.get("model_type", MODEL_TYPE)
    if model_type == MODEL_TYPE:
        return V41, f"model_type is {model_type}"
    if model_type == v4.MODEL_TYPE:
        return _v4_profile(keys, folder)
    raise ConfigError(
        f"no chat format is known for model_type {model_type!r}; name one by --effort-profile"
    )


def _v4_profile(keys: Mapping[str, Any], folder: Path | None) -> tuple[Profile, str]:
    encoders = [] if folder is None else sorted(folder.glob("**/encoding*.py"))
    for path in encoders:
        if _RELEASED_TEXT in path.read_text(encoding="utf-8", errors="replace"):
            return V4, f"{path.name} beside the weights is the released one"
    if encoders:
        return V4_PREVIEW, f"{encoders[0].name} beside the weights is the preview's"
    if keys.get("num_nextn_predict_layers") and not keys.get("dspark_block_size"):
        return V4_PREVIEW, "its draft is the preview's, and no encoder lies beside the weights"
    return V4, "no encoder lies beside the weights, the released one is assumed"


def _whole_number(value: object) -> int | None:
    """A whole number in any of JSON's spellings; booleans are none."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
