"""Recipes, their settings, and the schedules of a stage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from leadline.core.errors import ConfigError
from leadline.tools.train_tiny.clock import Clock
from leadline.tools.train_tiny.model import Phase
from leadline.tools.train_tiny.recipes import H200, RECIPES, REHEARSAL, Recipe, Stage

STAGE = replace(REHEARSAL.stages[0], seconds=100.0, max_steps=math.inf)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_begins_dense_and_ends_with_what_is_exported(recipe: Recipe) -> None:
    assert not recipe.stages[0].phase(0.0, 0).sparse
    last = recipe.stages[-1]
    assert last.phase(0.0, 0) == Phase(sparse=True, quantize=True, index_loss=True)
    assert last.lr_factor(1.0) < 0.05


def test_stages_on_a_gpu_take_eight_minutes_at_most() -> None:
    assert all(stage.seconds <= 480 for stage in H200.stages)


def test_switches_follow_progress_and_the_indexers_follow_steps() -> None:
    stage = replace(STAGE, sparse_from=0.4, quantize_from=0.9, index_from=10)
    assert stage.phase(0.39, 9) == Phase(sparse=False, quantize=False, index_loss=False)
    assert stage.phase(0.4, 10) == Phase(sparse=True, quantize=False, index_loss=True)
    assert stage.phase(0.9, 10) == Phase(sparse=True, quantize=True, index_loss=True)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 0.8), (0.59, 0.8), (0.6, 0.8), (0.8, 0.5), (1.0, 0.2), (1.1, 0.2)],
)
def test_the_learning_rate_is_flat_and_then_falls(progress: float, factor: float) -> None:
    stage = replace(STAGE, lr_start=0.8, decay_from=0.6, lr_end=0.2)
    assert stage.lr_factor(progress) == pytest.approx(factor)


def test_early_steps_are_smaller() -> None:
    stage = replace(STAGE, tokens_per_step=4096, early_tokens=2048, early_until=0.1)
    assert [stage.tokens(p) for p in (0.0, 0.09, 0.1, 0.5)] == [2048, 2048, 4096, 4096]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 5000}, "tokens_per_step is 5000; it must be a multiple"),
        ({"early_tokens": 1}, "early_tokens is 1; it must be a multiple"),
        ({"seq_len": 300}, "micro_tokens is 2048; it must be a multiple of seq_len"),
        ({"seconds": math.inf}, "needs seconds or max_steps"),
    ],
    ids=["step", "early", "rows", "endless"],
)
def test_stages_that_cannot_be_run_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(STAGE, **changes)  # type: ignore[arg-type]


def test_settings_change_the_recipe_its_stages_and_their_mixtures() -> None:
    recipe = REHEARSAL.changed(
        ["muon_lr=0.01", "seconds=30", "micro_tokens=1024", "mixture.prose=3", "log_steps=7"]
    )
    assert (recipe.muon_lr, recipe.log_steps) == (0.01, 7)
    for stage in recipe.stages:
        assert (stage.seconds, stage.rows) == (30.0, 1024 // stage.seq_len)
        assert stage.mixture["prose"].share == 3.0
    assert recipe.stages[0].max_steps == REHEARSAL.stages[0].max_steps


def test_a_family_without_a_share_is_left_out() -> None:
    assert "prose" not in REHEARSAL.changed(["mixture.prose=0"]).stages[0].mixture


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("colour=red", "unknown key 'colour'"),
        ("config=1", "unknown key 'config'"),
        ("muon_lr=fast", "'fast' is no float"),
        ("log_steps=1.5", "'1.5' is no int"),
        ("muon_lr", "'' is no float"),
        ("mixture.poems=3", "no such family"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        REHEARSAL.changed([setting])


def test_settings_of_a_stage_bring_it_back() -> None:
    stage = H200.stages[2]
    told = H200.settings(stage)
    assert told["seq_len"] == stage.seq_len
    assert told["mixture.prose"] == stage.mixture["prose"].share
    again = H200.changed([f"{key}={value}" for key, value in told.items()])
    assert again.stages[2] == stage


def test_a_stage_that_a_recipe_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage is 4; recipe 'rehearsal' has stages 1 to 3"):
        REHEARSAL.stage(4)


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def ticking(stage: Stage) -> tuple[Watch, Clock]:
    watch = Watch()
    return watch, Clock(stage, 1000.0, now=watch)


def test_progress_is_over_while_there_is_time_to_end() -> None:
    watch, clock = ticking(STAGE)
    clock.paused(5.0)  # what an evaluation with its checkpoint took
    watch.time += 80
    assert 0.9 < clock.progress(1) < 1
    watch.time += 10
    assert clock.progress(1) >= 1


def test_progress_follows_steps_where_there_are_no_seconds() -> None:
    watch, clock = ticking(replace(STAGE, seconds=math.inf, max_steps=8))
    watch.time += 1e6
    assert [clock.progress(step) for step in (0, 4, 8)] == [0, 0.5, 1]


def test_what_ends_first_ends_a_stage() -> None:
    watch, clock = ticking(replace(STAGE, max_steps=10))
    assert clock.progress(10) == 1
    watch.time += 100
    assert clock.progress(0) >= 1
