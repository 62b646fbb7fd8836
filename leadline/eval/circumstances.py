"""What stands around an evaluation: how it was run, and how far it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leadline.core.provenance import provenance
from leadline.eval.options import EvalOptions


def circumstances(options: EvalOptions, command: str) -> dict[str, Any]:
    """What it takes to ask the same again."""
    return {
        **provenance(command),
        "scale": options.scale,
        "items": options.items,
        "suite_seed": options.suite_seed,
    }


def progress_bars() -> Progress:
    """Bars on stderr: the report may be piped."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
