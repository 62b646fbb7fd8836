"""How far the trainer's logits are from the engine's, against the noise of the quantisers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.model import Phase, Transformer
from tests.steps import Stepper

_DRAWS = 3


def one_row(ids: Tensor, first: Tensor | None = None) -> Batch:
    ids = ids.unsqueeze(0)
    first = torch.zeros_like(ids) if first is None else first.unsqueeze(0)
    return Batch(ids, first, torch.ones(ids.shape))


@torch.no_grad()
def compare_to_noise(model: Transformer, stepper: Stepper, documents: Sequence[Tensor]) -> None:
    """Logits with every quantiser on are as near to the engine's as to the model's own, moved.

    One code that flips in an early layer reaches every later row, so single logits differ widely
    (v41-model 9.13), and one small change may flip none: only means over many can be compared.

    Args:
        model: as trained; left as it was.
        stepper: the engine's model of the same files.
        documents: ids ``[n]``.
    """
    weight = model.embed.weight
    kept = weight.clone()
    apart, noise = [], []
    for ids in documents:
        found = _quantized(model, ids)
        apart.append(_differences(found, stepper.feed(stepper.start(ids.tolist()))))
        for seed in range(_DRAWS):
            drawn = torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed))
            weight.copy_(kept * (1 + 1e-6 * drawn))
            noise.append(_differences(found, _quantized(model, ids)))
        weight.copy_(kept)
    deviation, disagreement = torch.stack(apart).mean(0).tolist()
    noisy_deviation, noisy_disagreement = torch.stack(noise).mean(0).tolist()
    assert deviation < 2 * noisy_deviation
    assert disagreement < 2 * noisy_disagreement


def _quantized(model: Transformer, ids: Tensor) -> Tensor:
    return model.logits(one_row(ids), Phase(sparse=True, quantize=True))[0]


def _differences(logits: Tensor, others: Tensor) -> Tensor:
    """Mean deviation, and share of rows whose best token is another one."""
    moved = logits.argmax(-1) != others.argmax(-1)
    return torch.stack(((logits - others).abs().mean(), moved.float().mean()))
