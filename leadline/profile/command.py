"""``leadline profile``: from flags to tables and a trace."""

from __future__ import annotations

import logging
from typing import Literal

from rich.console import Console
from rich.table import Table

from leadline.bench.record import writable, write_record
from leadline.cache.layout import cache_layout
from leadline.config.engine import EngineConfig
from leadline.config.model import ModelConfig
from leadline.engine.launch import build_engine
from leadline.engine.settings import resolve_device, resolve_policy
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.profile.bypass import GraphBypass
from leadline.profile.measure import measure
from leadline.profile.options import ProfileOptions
from leadline.profile.report import component_table, numbers, step_table
from leadline.profile.roofline import decode_bound, prefill_bound
from leadline.profile.steps import DecodeSteps, Prompts, Steps

Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")


def profile_main(kind: Kind, options: ProfileOptions, config: EngineConfig, command: str) -> None:
    """Run, show the tables, write the files.

    Args:
        kind: which steps: rows of running requests, or whole prompts.
        options: how many, and of which size.
        config: of the engine.
        command: how this was called, for the file.

    Raises:
        ConfigError: options or settings that cannot be used.
        BadRequest: contexts or prompts are longer than the model takes.
        LeadlineError: the model cannot be loaded, or a request failed.
    """
    names = ("trace", "json")
    trace, file = (writable(name, getattr(options, name)) for name in names)
    logging.basicConfig(level=logging.WARNING)
    bypass, device = GraphBypass(), resolve_device(config.device)
    engine = build_engine(config, make_capture=lambda: bypass)
    steps: Steps
    if kind == "decode":
        steps = DecodeSteps(engine, options.batch_size, options.context, config.seed)
        size = f"{options.batch_size} x {options.context} tokens"
    else:
        steps = Prompts(engine, options.input_len, config.seed)
        size = f"{options.input_len} tokens"
    found = measure(
        engine, steps, bypass, device, warmup=options.warmup, count=options.steps, file=trace
    )
    # Bounds are those of packed weights and a GPU's units, and of V4.1.
    bound = None
    if device.type != "cpu" and isinstance(engine.model, DeepseekV41):
        bound = step_bound(kind, options, config, engine.model.config)
    if file is not None:
        results = numbers(found, bound)
        write_record(file, results, kind=kind, options=options, config=config, command=command)
    console = Console()
    parts = component_table(found, bound)
    _show(console, parts, f"{kind}: {size}; a {steps.unit} by {found.source}")
    _show(console, step_table(found), "")


def step_bound(
    kind: Kind, options: ProfileOptions, config: EngineConfig, model: ModelConfig
) -> dict[str, float]:
    """Microseconds that no step of this kind can stay below, by component."""
    layout = cache_layout(model, kv_cache_dtype=config.cache.kv_cache_dtype)
    kv, window = (r.num_bytes(model.head_dim) for r in (layout.kv_record, layout.window_record))
    index = layout.index_record.num_bytes(model.index_head_dim)
    if kind == "decode":
        return decode_bound(
            model,
            options.machine,
            batch=options.batch_size,
            context=options.context,
            kv_record_bytes=kv,
            window_record_bytes=window,
            index_record_bytes=index,
        )
    policy = resolve_policy(config.cache, model)
    return prefill_bound(
        model,
        options.machine,
        prompt=options.input_len,
        upper_rows=policy.length if policy.upper else None,
        fp8=options.bound_fp8,
        kv_record_bytes=kv,
        window_record_bytes=window,
        index_record_bytes=index,
    )


def _show(console: Console, lines: list[list[str]], title: str) -> None:
    header, *rows = lines
    table = Table(title=title)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
