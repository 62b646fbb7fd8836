"""The log of a run: a JSON object a line, and a short line for who watches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """Appends entries to a file as they happen.

    Args:
        file: ``log.jsonl``; None keeps quiet (replicas but the first).
        common: fields of every entry.
    """

    def __init__(self, file: Path | None, **common: Any) -> None:
        self._file, self._common = file, common
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **fields: Any) -> None:
        """Add an entry; floats are rounded to what a reader can use."""
        if self._file is None:
            return
        entry = {"kind": kind, **self._common, **{k: _short(v) for k, v in fields.items()}}
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")
        print(*(f"{key}={value}" for key, value in entry.items()), flush=True)


def read_journal(file: Path) -> list[dict[str, Any]]:
    """The entries of a log."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
