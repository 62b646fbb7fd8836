"""All arms of a model over the same dialogues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leadline.config.families import load_any_config
from leadline.engine.settings import resolve_device
from leadline.eval.arms import ARMS, arm_config, choose_arms, default_arms
from leadline.eval.circumstances import circumstances, progress_bars
from leadline.eval.measure import Record, measure
from leadline.eval.options import EvalOptions, Scale
from leadline.eval.questions import Dialogue, as_dialogue, fits
from leadline.eval.report import Report
from leadline.eval.runner import Outcomes, Runner
from leadline.eval.suite import choose_parts
from leadline.eval.summary import summarise
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import choose_profile
from leadline.text.tokenizer import Tokenizer
from leadline.weights.checkpoint import resolve_checkpoint

# All arms answer so many times the concurrency before the next dialogues come. The reference's
# distributions, a float32 per token of the vocabulary, are kept until then.
CHUNK_ROUNDS = 4
# Of each arm, where no setting says so: all engines are alive at once.
CACHE_BYTES = 2**29
DEFAULT_ARMS: Mapping[Scale, str] = {
    "quick": "served",
    "standard": "replay-both,kv-nvfp4,served",
    "full": ",".join(ARMS),
}


def evaluate(options: EvalOptions, settings: Mapping[str, Any], command: str) -> Report:
    """Ask every arm of a model.

    Args:
        options: what is asked.
        settings: of the engine, ``model`` among them, for all arms.
        command: how this was called, for the report.

    Raises:
        ConfigError: options or settings that cannot be used.
        CheckpointError: the model is not there.
    """
    folder = resolve_checkpoint(settings["model"], settings.get("revision"))
    config = load_any_config(folder)
    names = options.arms or default_arms(DEFAULT_ARMS[options.scale], config)
    arms, window = choose_arms(names, options.arm), config.sliding_window
    tokenizer = Tokenizer(folder / "tokenizer.json")
    encoder = ChatEncoder(tokenizer, choose_profile("auto", folder))
    shared = {
        # Pages of 256 tokens would rarely be found again in prompts of a few hundred.
        "block_size": window,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_queued_reqs": 0,
        **settings,
    }
    exercises = [
        exercise
        for part in choose_parts(options.families)
        for exercise in part.exercises(options.scale, options.suite_seed, options.items)
    ]
    asked = [as_dialogue(exercise, i, encoder) for i, exercise in enumerate(exercises)]
    records: dict[str, list[Record]] = {arm.name: [] for arm in arms}
    with ExitStack() as stack:
        runners = {
            arm.name: Runner(stack.enter_context(arm_config(arm, shared)), tokenizer, window)
            for arm in arms
        }
        longest = min(runner.max_model_len for runner in runners.values())
        dialogues = [d for d in asked if d.questions and fits(d, longest)]
        progress = stack.enter_context(progress_bars())
        bars = {arm.name: progress.add_task(arm.name, total=len(dialogues)) for arm in arms}
        size = CHUNK_ROUNDS * options.concurrency
        for start in range(0, len(dialogues), size):
            chunk = dialogues[start : start + size]
            reference: Outcomes = {}  # of the first arm
            for name, runner in runners.items():
                outcomes = runner.run(
                    chunk,
                    concurrency=options.concurrency,
                    advance=partial(progress.advance, bars[name]),
                )
                reference = reference or outcomes
                records[name] += measure_all(chunk, outcomes, reference, window)
        work = {name: runner.counters() for name, runner in runners.items()}
    return Report(
        summary=summarise(records),
        arms={arm.name: arm.meaning for arm in arms},
        circumstances={
            **circumstances(options, command),
            "model": shown_name(settings["model"]),
            "device": device_name(settings.get("device", "auto")),
            "settings": {name: value for name, value in shared.items() if name != "model"},
            "max_model_len": longest,
            "dialogues left out as too long": len(asked) - len(dialogues),
        },
        work=work,
    )


def measure_all(
    dialogues: Sequence[Dialogue], outcomes: Outcomes, reference: Outcomes, window: int
) -> Iterator[Record]:
    """Records of all measured questions, in order."""
    for dialogue in dialogues:
        for place in range(len(dialogue.questions)):
            if (key := (dialogue.number, place)) in outcomes:
                yield measure(dialogue, place, outcomes[key], reference[key], window=window)


def shown_name(model: str) -> str:
    """A model as reports call it: where it lies here is nobody's business."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def device_name(device: str) -> str:
    """Where a model runs, and with what."""
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        return f"{torch.cuda.get_device_name(resolved)}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
