"""An evaluation from its options to its report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leadline.config.model import load_model_config
from leadline.core.version import __version__
from leadline.engine.launch import resolve_device
from leadline.eval.arms import ARMS, REFERENCE, arm_config, choose_arms
from leadline.eval.measure import Record, measure
from leadline.eval.options import EvalOptions, Scale
from leadline.eval.questions import Dialogue, as_dialogue, fits
from leadline.eval.report import Report
from leadline.eval.runner import Runner
from leadline.eval.suite import choose_parts
from leadline.eval.summary import summarise
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import choose_profile
from leadline.text.tokenizer import Tokenizer
from leadline.weights.checkpoint import resolve_checkpoint

# Dialogues that all arms answer before the next ones come: their distributions, a float32 per
# token of the vocabulary, are kept until then.
CHUNK = 64
# Of each arm, where no setting says so: all engines are alive at once.
CACHE_BYTES = 2**29
COUNTED = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "computed_tokens",
    "replayed_tokens",
    "upper_rows",
    "generation_tokens",
    "steps",
)
DEFAULT_ARMS: Mapping[Scale, str] = {
    "quick": "served",
    "standard": ",".join(ARMS),
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
    window = load_model_config(folder).sliding_window
    tokenizer = Tokenizer(folder / "tokenizer.json")
    encoder = ChatEncoder(tokenizer, choose_profile("auto", folder))
    shared = {
        # Pages of 256 tokens would rarely be found again in prompts of a few hundred.
        "block_size": window,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_queued_reqs": 0,
        **settings,
    }
    parts = choose_parts(options.families)
    arms = choose_arms(options.arms or DEFAULT_ARMS[options.scale], options.arm)
    records: dict[str, list[Record]] = {arm.name: [] for arm in arms}
    num_left_out = 0
    with ExitStack() as stack:
        runners = {
            arm.name: Runner(stack.enter_context(arm_config(arm, shared)), tokenizer, window)
            for arm in arms
        }
        longest = min(runner.max_model_len for runner in runners.values())
        progress = stack.enter_context(progress_bars())
        for part in parts:
            exercises = part.exercises(options.scale, options.suite_seed, options.items)
            asked = [as_dialogue(exercise, i, encoder) for i, exercise in enumerate(exercises)]
            dialogues = [dialogue for dialogue in asked if fits(dialogue, longest)]
            num_left_out += len(asked) - len(dialogues)
            task = progress.add_task(part.family, total=len(dialogues) * len(arms))
            for start in range(0, len(dialogues), CHUNK):
                chunk = dialogues[start : start + CHUNK]
                for arm, found in run_arms(runners, chunk, window, partial(progress.advance, task)):
                    records[arm] += found
        work = {name: counted(runner) for name, runner in runners.items()}
    return Report(
        summary=summarise(records),
        arms={arm.name: arm.meaning for arm in arms},
        circumstances={
            **circumstances(options, command),
            "model": settings["model"],
            "device": device_name(shared),
            "settings": shared,
            "longest dialogue": longest,
            "dialogues left out as too long": num_left_out,
        },
        work=work,
    )


def run_arms(
    runners: Mapping[str, Runner],
    dialogues: Sequence[Dialogue],
    window: int,
    advance: Callable[[], object],
) -> Iterator[tuple[str, list[Record]]]:
    """Records of each arm, the reference first."""
    reference = runners[REFERENCE].run(dialogues, advance)
    for name, runner in runners.items():
        outcomes = reference if name == REFERENCE else runner.run(dialogues, advance)
        yield (
            name,
            [
                measure(dialogue, place, outcomes[key], reference[key], window=window)
                for dialogue in dialogues
                for place in range(len(dialogue.questions))
                if (key := (dialogue.number, place)) in reference
            ],
        )


def counted(runner: Runner) -> dict[str, float]:
    """What an arm's engine has done."""
    counters = runner.counters()
    return {name: counters[name] for name in COUNTED}


def circumstances(options: EvalOptions, command: str) -> dict[str, Any]:
    """What it takes to run the same again."""
    return {
        "command": command,
        "scale": f"{options.items} a cell" if options.items else options.scale,
        "suite seed": options.suite_seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "leadline": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def device_name(settings: Mapping[str, Any]) -> str:
    """Where the model runs, and with what."""
    device = resolve_device(settings.get("device", "auto"))
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def progress_bars() -> Progress:
    """One bar a family, on stderr: the report may be piped."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
