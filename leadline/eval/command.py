"""``leadline eval``: from flags to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from leadline.core.errors import ConfigError
from leadline.eval import picture
from leadline.eval.endpoint import evaluate_endpoint
from leadline.eval.evaluation import evaluate
from leadline.eval.options import EvalOptions

NAME = "evaluation"


def eval_main(options: EvalOptions, settings: Mapping[str, Any], command: str) -> None:
    """Ask, write the files, show the table.

    Args:
        options: what is asked.
        settings: of the engine, ``model`` among them; of an endpoint's model its name alone.
        command: how this was called, for the report.

    Raises:
        ConfigError: options or settings that cannot be used.
        LeadlineError: the model cannot be loaded, or a request failed.
    """
    draws = picture.is_available() if options.picture is None else options.picture
    if draws:
        picture.check()
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out is {options.out!r}, which cannot be a folder: {error}") from error
    if options.endpoint is not None:
        report = evaluate_endpoint(options, settings.get("model"), command)
    else:
        report = evaluate(options, settings, command)
    (out / f"{NAME}.json").write_text(report.json(), encoding="utf-8")
    (out / f"{NAME}.md").write_text(report.markdown(), encoding="utf-8")
    if draws:
        picture.draw(report.summary, out / f"{NAME}.png")
    Console().print(report.table())
    print(f"All numbers are in {out}/{NAME}.json, tables by cell in {out}/{NAME}.md.")
