"""``leadline bench``: from flags to a table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import track
from rich.table import Table

from leadline.bench.measure import run
from leadline.bench.options import BenchOptions
from leadline.bench.record import writable, write_record
from leadline.bench.report import summary, table
from leadline.bench.workload import file_prompts, random_prompts
from leadline.config.engine import EngineConfig
from leadline.core.errors import ConfigError
from leadline.engine.launch import build_engine
from leadline.offline.options import checkpoint_folder, load_tokenizer

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
        write_record(file, found, kind=kind, options=options, config=config, command=command)
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
