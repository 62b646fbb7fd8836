"""The configs that tuned kernels run best with, measured before: one file here for a kind of GPU.

Each kernel has a list of choices, a tuning key and the options of the config that was fastest.
``scripts/collect_tunings.py`` writes the files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

Choices = dict[tuple[str, tuple[Any, ...]], dict[str, Any]]
"""(name of a tuner, its tuning key) -> options of the config that was fastest."""

DIRECTORY = Path(__file__).parent


@functools.cache
def shipped(device_name: str) -> Choices:
    """What is known of a GPU, by the name that its driver gives; nothing of most."""
    path = path_of(device_name)
    return read(path) if path.exists() else {}


def path_of(device_name: str) -> Path:
    """The file of a GPU, such as ``NVIDIA_H200.json``."""
    return DIRECTORY / f"{re.sub(r'[^A-Za-z0-9]+', '_', device_name)}.json"


def read(path: Path) -> Choices:
    """What ``write`` wrote."""
    by_kernel = json.loads(path.read_text("utf-8"))
    return {
        (name, tuple(choice["key"])): choice["config"]
        for name, choices in by_kernel.items()
        for choice in choices
    }


def write(path: Path, choices: Mapping[tuple[str, tuple[Any, ...]], Mapping[str, Any]]) -> None:
    """A choice a line, in an order that does not depend on when they were found."""
    # Keys of one kernel may hold None where others hold numbers: their text has an order.
    ordered = sorted(choices.items(), key=lambda item: (item[0][0], json.dumps(item[0][1])))
    kernels = []
    for name, group in groupby(ordered, key=lambda item: item[0][0]):
        lines = [json.dumps({"key": key, "config": config}) for (_, key), config in group]
        kernels.append(f"{json.dumps(name)}: [\n  " + ",\n  ".join(lines) + "\n]")
    path.write_text("{\n" + ",\n".join(kernels) + "\n}\n", "utf-8")
