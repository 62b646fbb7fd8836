"""The optimiser step around a model: passes, gradients, masters, the balance of experts.

Nothing in a step waits for the GPU: figures are summed there and read once per line of the log.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.masters import Masters
from leadline.tools.train_tiny.model import Losses, Phase
from leadline.tools.train_tiny.optim import Muon, adamw, clip_gradients
from leadline.tools.train_tiny.recipes import Recipe
from leadline.tools.train_tiny.replicas import Replicas
from leadline.weights.table import WeightSpec

# What a step is judged by, as the log calls it; means over the steps of a line.
_FIGURES = ("loss", "index_loss", "index_mass", "gradient_norm", "max_expert_share")


class Trainer:
    """Trains a model step by step.

    Args:
        model: ``model.Transformer`` on its device, with the values to start from.
        specs: ``official.parameter_formats`` of its configuration.
        recipe: learning rates and the like.
        replicas: those who train the same model on other rows.

    Attributes:
        steps: taken by this object.
        tokens: read for them, over all replicas.
        is_quantized: the model computes with quantised weights.
        num_parameters: of the model.
        device: its.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[str, WeightSpec],
        recipe: Recipe,
        *,
        replicas: Replicas,
    ) -> None:
        self.steps = self.tokens = 0
        self.is_quantized = False
        self._model, self._recipe, self._replicas = model, recipe, replicas
        self._masters = Masters(model, specs)
        groups = self._masters.groups
        self._muon = Muon(
            [group.master for group in groups if group.is_matrix],
            lr=recipe.muon_lr,
            weight_decay=recipe.weight_decay,
        )
        self._adamw = adamw(
            {"params": group.master, "lr": recipe.adamw_lr * group.lr_scale}
            for group in groups
            if not group.is_matrix
        )
        for settings in (*self._muon.param_groups, *self._adamw.param_groups):
            settings["peak_lr"] = settings["lr"]
        self._warmup_steps = recipe.warmup_steps
        self._gate_biases = {n: b for n, b in model.named_buffers() if n.endswith("gate.bias")}
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.device = next(model.parameters()).device
        self._figures = torch.zeros(len(_FIGURES), device=self.device)
        self._num_good = torch.zeros((), device=self.device)
        self._num_steps, self._waited_seconds = 0, 0.0  # since the figures were read

    def step(
        self, batches: Iterator[Batch], phase: Phase, *, passes: int, lr_factor: float
    ) -> None:
        """One optimiser step on the mean gradient of ``passes`` batches, per replica.

        A step whose gradient is not finite leaves it out: only the momentum moves the weights.
        """
        if phase.quantize and not self.is_quantized:
            self._publish(quantize=True)
        of_model = torch.zeros(3, device=self.device)
        expert_counts: Tensor | float = 0.0
        for _ in range(passes):
            began = time.perf_counter()
            batch = next(batches).to(self.device)
            self._waited_seconds += time.perf_counter() - began
            output = self.forward(batch, phase)
            loss = output.loss + self._recipe.index_weight * output.index_loss
            (loss / passes).backward()
            told = (output.loss.detach(), output.index_loss.detach(), output.index_mass)
            of_model += torch.stack(told) / passes
            expert_counts = expert_counts + output.expert_counts
            self.tokens += batch.ids.numel() * self._replicas.size
        assert isinstance(expert_counts, Tensor)
        gradients = self._masters.collect_gradients()
        self._replicas.average_([*gradients, expert_counts])
        norm, is_finite = clip_gradients(gradients, self._recipe.max_gradient_norm)
        factor = lr_factor * min(1.0, (self.steps + 1) / max(1, self._warmup_steps))
        for group in (*self._muon.param_groups, *self._adamw.param_groups):
            group["lr"] = group["peak_lr"] * factor
        self._muon.step()
        self._adamw.step()
        self._publish(quantize=phase.quantize)
        if not phase.quantize:  # frozen then: routing is a part of what is measured (section 5)
            self._balance(expert_counts)
        share = (expert_counts / expert_counts.sum(-1, keepdim=True)).amax()
        figures = torch.stack((*of_model, norm, share))
        self._figures += torch.where(is_finite, figures, 0.0)
        self._num_good += is_finite
        self._num_steps += 1
        self.steps += 1

    def forward(self, batch: Batch, phase: Phase) -> Losses:
        """What a step learns from; not for evaluation."""
        losses: Losses = self._model(batch, phase)
        return losses

    def read_figures(self) -> dict[str, float]:
        """Means since the last reading, over steps with finite gradients; waits for the device.

        ``skipped`` is the number of the others, ``data_seconds`` the time without a batch ready.
        """
        *sums, num_good = torch.stack((*self._figures, self._num_good)).tolist()
        figures = {name: x / max(1, num_good) for name, x in zip(_FIGURES, sums, strict=True)}
        figures |= {
            "skipped": self._num_steps - int(num_good),
            "lr": self._muon.param_groups[0]["lr"],
            "data_seconds": self._waited_seconds,
        }
        self._figures.zero_()
        self._num_good.zero_()
        self._num_steps, self._waited_seconds = 0, 0.0
        return figures

    def evaluate(self, held_out: Mapping[str, Batch], phase: Phase) -> dict[str, dict[str, float]]:
        """Family -> mean loss of its batch, ``all`` as trained and ``answers`` of full weight."""
        means = []
        for batch in held_out.values():
            # With gradients, though nothing needs them: compiled code is that of training then.
            output = self._model(batch, phase)
            is_answer = batch.weights >= 1
            answers = output.token_losses[is_answer].sum() / batch.weights[is_answer].sum()
            means.append(torch.stack((output.loss.detach(), answers)))
        rows = torch.stack(means).tolist()
        return {
            family: {"all": of_all, "answers": of_answers}
            for family, (of_all, of_answers) in zip(held_out, rows, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """What another trainer of the same model goes on from, as if this one went on."""
        return {
            "masters": self._masters.state_dict(),
            "gate_biases": dict(self._gate_biases),
            "muon": self._muon.state_dict()["state"],
            "adamw": self._adamw.state_dict()["state"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``; learning rates need no warming up then."""
        self._masters.load_state_dict(state["masters"])
        for name, bias in self._gate_biases.items():
            bias.copy_(state["gate_biases"][name])
        for optimizer, name in ((self._muon, "muon"), (self._adamw, "adamw")):
            # Settings are those of this recipe, not of the one that wrote the state.
            settings = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state[name], "param_groups": settings})
        self._warmup_steps = 0
        self._publish(quantize=False)

    def _publish(self, *, quantize: bool) -> None:
        self._masters.publish(quantize=quantize)
        self.is_quantized = quantize

    def _balance(self, expert_counts: Tensor) -> None:
        """Raise the bias of experts picked less than the mean, lower that of the others."""
        lacks = (expert_counts.mean(-1, keepdim=True) - expert_counts).sign()
        steps = (lacks * self._recipe.balance_speed).unbind()
        torch._foreach_add_(list(self._gate_biases.values()), list(steps))
