"""The optimiser step around a model."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain, islice

import pytest
import torch

from leadline.tools.train_tiny.model import Phase
from leadline.tools.train_tiny.official import round_weight
from leadline.tools.train_tiny.recipes import REHEARSAL, Recipe
from leadline.tools.train_tiny.replicas import Replicas
from leadline.tools.train_tiny.trainer import Trainer
from tests.tools.train_tiny.standin import EXPERTS, LENGTH, ROWS, SPECS, StandIn, batches

RECIPE = REHEARSAL.changed(["warmup_steps=0"])


def trainer_of(model: StandIn, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(model, SPECS, recipe, replicas=Replicas())


def take(trainer: Trainer, count: int, phase: Phase = Phase(), passes: int = 1) -> None:
    stream = batches()
    for _ in range(count):
        trainer.step(stream, phase, passes=passes, lr_factor=1.0)


def test_the_loss_falls() -> None:
    trainer = trainer_of(StandIn())
    take(trainer, 2)
    first = trainer.read_figures()["loss"]
    take(trainer, 60)
    trainer.read_figures()
    take(trainer, 5)
    assert trainer.read_figures()["loss"] < first / 10


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "quantised"])
def test_the_model_computes_with_the_masters_values(quantize: bool) -> None:
    model = StandIn()
    trainer = trainer_of(model)
    take(trainer, 3, Phase(quantize=quantize))
    masters = trainer.state_dict()["masters"]
    for name, parameter in model.named_parameters():
        master = masters[name]
        expected = round_weight(master, SPECS[name]) if quantize else master
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0)
    experts = model.get_parameter("layers.0.ffn.experts.w1.weight")
    assert (len(experts.unique()) < 100) == quantize  # FP4 has few values


def test_the_first_pass_of_a_quantised_phase_sees_quantised_weights() -> None:
    model = StandIn()
    trainer = trainer_of(model)
    assert not trainer.is_quantized
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(trainer.is_quantized))
    take(trainer, 1, Phase(quantize=True))
    assert seen == [True]


def test_passes_add_up_to_one_step_on_their_mean() -> None:
    torch.manual_seed(0)
    model, same = StandIn(), StandIn()
    same.load_state_dict(model.state_dict())
    two = list(islice(batches(), 2))
    whole = two[0].__class__(
        *(torch.cat([getattr(b, f) for b in two]) for f in ("ids", "first", "weights"))
    )
    trainer, other = trainer_of(model), trainer_of(same)
    trainer.step(iter(two), Phase(), passes=2, lr_factor=1.0)
    other.step(iter([whole]), Phase(), passes=1, lr_factor=1.0)
    assert trainer.tokens == other.tokens == 2 * ROWS * LENGTH
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, same.get_parameter(name), atol=1e-4, rtol=1e-3)


def test_a_batch_with_a_loss_that_is_no_number_leaves_the_weights_alone() -> None:
    model = StandIn()
    trainer = trainer_of(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.step(batches(poison=True), Phase(), passes=1, lr_factor=1.0)
    figures = trainer.read_figures()
    assert figures["skipped"] == 1
    for name, parameter in model.named_parameters():
        decay = 1 - RECIPE.muon_lr * RECIPE.weight_decay
        torch.testing.assert_close(parameter.detach(), before[name], rtol=1 - decay + 1e-6, atol=0)


def test_training_goes_on_after_a_bad_batch() -> None:
    trainer = trainer_of(StandIn())
    stream = chain(islice(batches(), 20), islice(batches(poison=True), 2), batches())
    for _ in range(60):
        trainer.step(stream, Phase(), passes=1, lr_factor=1.0)
    figures = trainer.read_figures()
    assert figures["skipped"] == 2
    take(trainer, 5)
    assert trainer.read_figures()["loss"] < 0.5


def test_the_bias_evens_the_experts_out_until_routing_is_quantised() -> None:
    model = StandIn()
    trainer = trainer_of(model, RECIPE.changed(["balance_speed=0.02"]))
    take(trainer, 3)
    before = trainer.read_figures()["max_expert_share"]
    take(trainer, 40)
    trainer.read_figures()
    take(trainer, 10)
    after = trainer.read_figures()["max_expert_share"]
    assert before > 0.38
    assert 1 / EXPERTS < after < 0.33
    bias = model.get_buffer("layers.0.ffn.gate.bias").clone()
    take(trainer, 3, Phase(quantize=True))
    assert torch.equal(model.get_buffer("layers.0.ffn.gate.bias"), bias)


def test_learning_rates_rise_over_the_first_steps() -> None:
    trainer = trainer_of(StandIn(), REHEARSAL.changed(["warmup_steps=4", "muon_lr=0.004"]))
    seen = []
    for _ in range(5):
        take(trainer, 1)
        seen.append(trainer.read_figures()["lr"])
    assert seen == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004])


def test_a_state_is_gone_on_from_as_if_nothing_had_happened() -> None:
    model, heir = StandIn(), StandIn()
    trainer = trainer_of(model)
    take(trainer, 5)
    successor = trainer_of(heir)
    successor.load_state_dict(deepcopy(trainer.state_dict()))
    again = list(islice(batches(), 3))
    for one in (trainer, successor):
        stream = iter(again)
        torch.manual_seed(1)  # of the stand-in's routing
        for _ in again:
            one.step(stream, Phase(), passes=1, lr_factor=1.0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, heir.state_dict()[name], rtol=0, atol=0)


def test_a_state_does_not_bring_its_settings_along() -> None:
    trainer = trainer_of(StandIn())
    take(trainer, 1)
    state = trainer.state_dict()
    heir = StandIn()
    successor = trainer_of(heir, RECIPE.changed(["weight_decay=0.0", "muon_lr=0.0", "adamw_lr=0"]))
    successor.load_state_dict(state)
    before = heir.get_parameter("layers.0.attn.wq_a.weight").detach().clone()
    take(successor, 1)
    assert torch.equal(heir.get_parameter("layers.0.attn.wq_a.weight"), before)


def test_held_out_losses_come_by_family_and_change_nothing() -> None:
    model = StandIn()
    trainer = trainer_of(model)
    stream = batches()
    held_out = dict(zip(("prose", "recall"), stream, strict=False))
    held_out["recall"].weights[:, 1:9] = 0.1
    losses = trainer.evaluate(held_out, Phase())
    assert losses.keys() == held_out.keys()
    assert losses["prose"]["all"] == pytest.approx(losses["prose"]["answers"])
    assert losses["recall"]["all"] != pytest.approx(losses["recall"]["answers"])
    assert all(parameter.grad is None for parameter in model.parameters())
