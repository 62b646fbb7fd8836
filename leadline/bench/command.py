"""``leadline bench``: from flags to a table."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from leadline.bench.measure import run
from leadline.bench.options import BenchOptions
from leadline.bench.report import summary, table
from leadline.bench.workload import file_prompts, random_prompts
from leadline.config.engine import EngineConfig
from leadline.config.server import shown
from leadline.core.errors import ConfigError
from leadline.core.version import __version__
from leadline.engine.launch import build_engine
from leadline.engine.settings import resolve_device
from leadline.offline.options import checkpoint_folder, load_tokenizer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = Literal["latency", "throughput"]
KINDS: tuple[Kind, ...] = ("latency", "throughput")


def bench_main(kind: Kind, options: BenchOptions, config: EngineConfig, command: str) -> None:
    """Run, show the table, write the file.

    Args:
        kind: how many requests: ``batch_size`` or ``num_prompts``.
        options: what runs.
        config: of the engine.
        command: how this was called, for the file.

    Raises:
        ConfigError: options or settings that cannot be used.
        BadRequest: prompts and answers are longer than the model takes.
        LeadlineError: the model cannot be loaded, or a request failed.
    """
    count = options.batch_size if kind == "latency" else options.num_prompts
    prompts = _file_prompts(options, config, count) if options.dataset else None
    file = writable("json", options.json)
    logging.basicConfig(level=logging.WARNING)
    engine = build_engine(config)
    runs = []
    rounds = range(options.warmup + options.runs)
    for number in track(rounds, kind, console=Console(stderr=True), transient=True):
        seed = f"{options.bench_seed} {number}"
        asked = prompts or random_prompts(count, options.input_len, engine.limits.vocab_size, seed)
        measured = run(engine, asked, options.output_len)
        if number >= options.warmup:
            runs.append(measured)
    found = summary(runs)
    if file is not None:
        about = circumstances(kind, options, config, command)
        file.write_text(json.dumps(about | {"results": found}, indent=2) + "\n", encoding="utf-8")
    header, *rows = table(found)
    size = f"{count} x ({options.input_len} + {options.output_len}) tokens"
    shown = Table(*header, title=f"{kind}: {size}, {len(runs)} runs")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


def _file_prompts(options: BenchOptions, config: EngineConfig, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(None, checkpoint_folder(config))
    if tokenizer is None:
        raise ConfigError(f"dataset is {options.dataset!r}, but {config.model} has no tokenizer")
    assert options.dataset is not None
    return file_prompts(Path(options.dataset), count, options.input_len, tokenizer.encode_prompt)


def circumstances(
    kind: str, options: DataclassInstance, config: EngineConfig, command: str
) -> dict[str, Any]:
    """What it takes to measure the same again."""
    device = resolve_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "kind": kind,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name or platform.machine(),
        "leadline": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "options": asdict(options),
        "settings": shown(config),
    }


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
