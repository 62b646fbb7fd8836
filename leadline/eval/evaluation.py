"""An evaluation from its options to its report."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leadline.config.model import load_model_config
from leadline.core.errors import ConfigError
from leadline.core.version import __version__
from leadline.eval.arms import REFERENCE, Arm, arm_config, choose_arms
from leadline.eval.measure import Record, measure
from leadline.eval.questions import Dialogue, as_dialogue, fits
from leadline.eval.report import Report
from leadline.eval.runner import Runner
from leadline.eval.suite import Part, Scale, choose_parts, exercises
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
_COUNTED = ("prompt_tokens", "prompt_tokens_cached", "computed_tokens", "replayed_tokens")
_COUNTED += ("upper_rows", "generation_tokens", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What is asked, and in which arms.

    Attributes:
        quick: few exercises: two minutes on two cores.
        full: as many as it takes to see half a percentage point.
        items: exercises of each cell; wins over the two.
        families: with commas between them; all of them if left out.
        arms: with commas between them, beside exact, which is always there; left out it is what
            the server does by default, with quick, else all.
        arm: a further arm, NAME:SETTING=VALUE,SETTING=VALUE; may be given several times.
        suite_seed: of the exercises.
        out: folder of evaluation.json, evaluation.md and evaluation.png.
        picture: draw it, which needs the extra eval; left out it is drawn where that is there.
        endpoint: address of an OpenAI server, such as http://localhost:8000/v1, whose model
            --model names; only its accuracy can be told.
        api_key: of that server.
        concurrency: requests to that server at once.
    """

    quick: bool = False
    full: bool = False
    items: int | None = None
    families: str | None = None
    arms: str | None = None
    arm: tuple[str, ...] = ()
    suite_seed: int = 0
    out: str = "evaluation"
    picture: bool | None = None
    endpoint: str | None = None
    api_key: str | None = None
    concurrency: int = 32

    def __post_init__(self) -> None:
        if self.quick and self.full:
            raise ConfigError("quick and full exclude each other; choose one")
        if self.items is not None and self.items < 1:
            raise ConfigError(f"items is {self.items}; it must be at least 1")

    @property
    def scale(self) -> Scale:
        return "quick" if self.quick else "full" if self.full else "standard"


class Evaluation:
    """All arms of a model, ready to be asked.

    Args:
        options: what is asked.
        settings: of the engine, ``model`` among them, for all arms.
    """

    def __init__(self, options: EvalOptions, settings: Mapping[str, Any]) -> None:
        self._options = options
        folder = resolve_checkpoint(settings["model"], settings.get("revision"))
        model = load_model_config(folder)
        self._window = model.sliding_window
        tokenizer = Tokenizer(folder / "tokenizer.json")
        self._encoder = ChatEncoder(tokenizer, choose_profile("auto", folder))
        self._settings = {
            # Of short prompts whole pages of 256 tokens would rarely be found again.
            "block_size": self._window,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "max_num_queued_reqs": 0,
            **settings,
        }
        default = "served" if options.quick else ...
