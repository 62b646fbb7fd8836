"""A measurement as a file: the numbers, and what it takes to measure the same again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leadline.config.engine import EngineConfig
from leadline.config.server import shown
from leadline.core.errors import ConfigError
from leadline.core.provenance import provenance
from leadline.engine.settings import resolve_device

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def writable(option: str, path: str | None) -> Path | None:
    """The file that an option names.

    Raises:
        ConfigError: it cannot be written; told of before anything has run.
    """
    if path is None:
        return None
    file = Path(path)
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"{option} is {path!r}, which cannot be written: {error}") from error
    return file


def write_record(
    file: Path,
    results: Mapping[str, Any],
    *,
    kind: str,
    options: DataclassInstance,
    config: EngineConfig,
    command: str,
) -> None:
    """Write one measurement as JSON.

    Args:
        file: what it replaces.
        results: what was measured.
        kind: of the measurement.
        options: what was asked for.
        config: of the engine.
        command: how all this was called.
    """
    device = resolve_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    record = {
        "kind": kind,
        **provenance(command),
        "device": name or platform.machine(),
        "torch": torch.__version__,
        "options": asdict(options),
        "settings": shown(config),
        "results": results,
    }
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
