"""Which of the known models a ``config.json`` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadline.config import model, v4
from leadline.config.keys import as_object, read_json
from leadline.config.model import (
    ModelConfig,
    QuantizationConfig,
    model_config_to_json,
    parse_model_config,
)
from leadline.config.v4 import (
    V4Config,
    V4QuantizationConfig,
    parse_v4_config,
    v4_config_to_json,
)
from leadline.core.errors import NotSupported

AnyConfig = ModelConfig | V4Config
"""Of a model that is known."""

_PARSERS: Mapping[str, Callable[..., AnyConfig]] = {
    v4.MODEL_TYPE: parse_v4_config,
    model.MODEL_TYPE: parse_model_config,
}


def load_any_config(path: str | Path) -> AnyConfig:
    """Read ``config.json`` from a checkpoint folder, or from the file itself.

    Raises:
        ConfigError: the file is missing, is no JSON object, or breaks a rule of its model.
        NotSupported: another model.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    return parse_any_config(read_json(file), where=str(file))


def parse_any_config(raw: Any, *, where: str = "config.json") -> AnyConfig:
    """The configuration of the model that ``model_type`` names, V4.1 where nothing does.

    Raises:
        ConfigError: one message naming the key.
        NotSupported: another model.
    """
    model_type = as_object(raw, where=where).get("model_type", model.MODEL_TYPE)
    if model_type not in _PARSERS:
        raise NotSupported(
            f"{where}: model_type is {model_type!r}; this version serves {' and '.join(_PARSERS)}: "
            f"there is no leadline/models/{model_type}"
        )
    return _PARSERS[model_type](raw, where=where)


def any_config_to_json(config: AnyConfig) -> dict[str, Any]:
    """The inverse of ``parse_any_config``."""
    if isinstance(config, V4Config):
        return v4_config_to_json(config)
    return model_config_to_json(config)


def quantized(config: AnyConfig) -> AnyConfig:
    """The same with packed weights: every model is defined for one packing."""
    if isinstance(config, V4Config):
        return replace(config, quantization_config=V4QuantizationConfig())
    return replace(config, quantization_config=QuantizationConfig())
