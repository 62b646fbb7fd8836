"""The log of a run: a JSON object a line, and a short line for who watches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO


class Journal:
    """Appends entries to a file as they happen.

    Args:
        file: ``log.jsonl``; None keeps quiet (replicas but the first).
        common: fields of every entry.
    """

    def __init__(self, file: Path | None, **common: Any) -> None:
        self._common = common
        self._file: TextIO | None = None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Add an entry; floats are rounded to what a reader can use."""
        if self._file is None:
            return
        entry = {"kind": kind, **self._common, **{k: _short(v) for k, v in fields.items()}}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        print(kind, *(f"{k}={v}" for k, v in entry.items() if k != "kind"), flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_journal(file: Path) -> list[dict[str, Any]]:
    """The entries of a log."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
