"""Training of the draft head as a whole: a last stage, on the backbone as it will be exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from leadline.core.errors import ConfigError
from leadline.tools.train_tiny.checkpoints import Progress, save_weights
from leadline.tools.train_tiny.draft_trainer import DraftTrainer
from leadline.tools.train_tiny.official import parameter_formats, round_weight
from leadline.tools.train_tiny.recipes import Recipe
from leadline.tools.train_tiny.replicas import joined
from leadline.tools.train_tiny.runs import WEIGHTS, Places, run_stage
from leadline.tools.train_tiny.whole import Whole, load_whole

ACCEPTANCE_FILE = "acceptance.json"
_CONDITIONS = "greedy drafts against the model's greedy tokens, both behind the text's own tokens"

# Half a minute goes to the quantised weights; a draft looks back no further than a window,
# so short rows will do, and a head of this size learns more from many steps than from large ones.
_SECONDS = 180.0
_QUANTIZE_FROM = 0.8
_MOST_LENGTH = 2048
_MOST_TOKENS = 32768


def draft_recipe(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """A recipe with the draft head's stage behind its own, on the text of the last of them.

    Args:
        recipe: of the backbone.
        settings: for ``Recipe.changed``; stages but the draft head's stay as they are.

    Raises:
        ConfigError: a setting does not fit.
    """
    last = recipe.stages[-1]
    tokens = min(last.micro_tokens, _MOST_TOKENS)
    stage = replace(
        last,
        seconds=min(last.seconds, _SECONDS),
        seq_len=min(last.seq_len, _MOST_LENGTH),
        micro_tokens=tokens,
        tokens_per_step=tokens,
        early_tokens=tokens,
        quantize_from=_QUANTIZE_FROM,
        lr_start=1.0,
        decay_from=0.3,
        lr_end=0.02,
    )
    changed = replace(recipe, stages=(stage,)).changed(settings)
    return replace(changed, stages=(*recipe.stages, *changed.stages))


def train_draft(places: Places, settings: Sequence[str], *, started: float) -> None:
    """Train the head of the backbone in ``places.start``, within a stage's seconds.

    Writes weights of both, and ``acceptance.json``: family -> ``draft_trainer.Acceptance``.

    Args:
        places: folders and devices; ``state`` is not used, ``start`` may hold a head to go on with.
        settings: for ``draft_recipe``.
        started: ``time.monotonic()`` when the command began.

    Raises:
        ConfigError: the model has no draft head, or a setting does not fit.
        CheckpointError: ``places.start`` holds no weights of a recipe's model.
        TrainingDiverged: the weights before it are saved.
    """
    assert places.start is not None
    with joined(places.device) as (replicas, device):
        on_gpu = device.type == "cuda"
        torch.manual_seed(0)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        whole = load_whole(places.start, places.data, dtype=dtype, fused=on_gpu)
        if not whole.config.num_nextn_predict_layers:
            raise ConfigError(
                f"{places.start}: num_nextn_predict_layers is 0 in recipe {whole.recipe.name!r}; "
                "there is no draft head to train"
            )
        recipe = draft_recipe(whole.recipe, settings)
        specs = parameter_formats(whole.config)
        _round_backbone(whole)
        trainer = DraftTrainer(
            whole.draft.to(device), whole.backbone.to(device), recipe, replicas=replicas
        )

        def save(progress: Progress) -> None:
            both = replace(progress, has_draft=True)
            save_weights(places.out / WEIGHTS, whole.module(), specs, both)

        _, held_out = run_stage(
            trainer,
            whole.config,
            recipe,
            len(recipe.stages),
            places,
            before=whole.progress,
            save=save,
            replicas=replicas,
            started=started,
        )
        found = {name: asdict(value) for name, value in trainer.acceptance(held_out).items()}
        if replicas.rank == 0:
            told = {"conditions": _CONDITIONS, "families": found}
            text = json.dumps(told, indent=1) + "\n"
            (places.out / ACCEPTANCE_FILE).write_text(text, encoding="utf-8")


@torch.no_grad()
def _round_backbone(whole: Whole) -> None:
    """The values that files will hold: what served features are made of."""
    specs = parameter_formats(whole.config)
    for name, parameter in whole.backbone.named_parameters():
        parameter.copy_(round_weight(parameter.float(), specs[name]))
