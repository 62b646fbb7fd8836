"""A model small enough to train within a test: each token follows from the one before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.model import Output, Phase
from leadline.tools.train_tiny.official import parameter_formats
from leadline.tools.train_tiny.recipes import REHEARSAL_CONFIG

WIDTH, VOCAB, EXPERTS = 32, 32, 4
ROWS, LENGTH = 4, 16

# Names are those of real weights, and so are their formats; shapes are the stand-in's own.
SPECS = parameter_formats(REHEARSAL_CONFIG)


class _Gate(nn.Module):
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.1)


class StandIn(nn.Module):
    """Has weights of every format that is trained; remembers the phases it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        attn = nn.ModuleDict({"wq_a": nn.Linear(WIDTH, WIDTH, bias=False)})
        ffn = nn.ModuleDict({"gate": _Gate(), "experts": nn.ModuleDict({"w1": _Experts()})})
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": attn, "ffn": ffn})])
        self.layers[0].register_parameter("hc_attn_base", nn.Parameter(torch.zeros(WIDTH)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.phases: list[Phase] = []

    def forward(self, batch: Batch, phase: Phase) -> Output:
        self.phases.append(phase)
        layer = self.layers[0]
        x = self.embed(batch.ids) + layer.get_parameter("hc_attn_base")
        x = x + layer.get_submodule("attn.wq_a")(x)
        x = x + x @ layer.get_parameter("ffn.experts.w1.weight").mean(0)
        losses = F.cross_entropy(
            self.head(x)[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
        )
        token_losses = F.pad(losses.view(len(batch.ids), -1), (1, 0)) * batch.weights
        scores = torch.rand(batch.ids.numel(), EXPERTS) + layer.get_buffer("ffn.gate.bias")
        scores[:, 0] += 0.2  # without the bias it would be picked too often
        counts = F.one_hot(scores.argmax(-1), EXPERTS).sum(0, keepdim=True).float()
        return Output(
            loss=token_losses.sum() / batch.weights.sum(),
            token_losses=token_losses.detach(),
            index_loss=torch.zeros(()),
            index_mass=torch.ones(()),
            expert_counts=counts,
        )


def batches(poison: bool = False) -> Iterator[Batch]:
    """Counting up in steps of three, from anywhere; ``poison`` makes every loss NaN."""
    while True:
        ids = (torch.randint(VOCAB, (ROWS, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
        weights = torch.ones(ROWS, LENGTH)
        weights[:, 0] = 0
        if poison:
            weights[0, 3] = torch.nan
        yield Batch(ids, torch.zeros_like(ids), weights)
