"""Which blocks of a batch a draft head learns from, and where in the batch all of it lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.tools.train_tiny.batch import Batch

# Position of the earliest first prediction: behind the anchor, and behind two committed tokens.
_FIRST_POSITION = 3


@dataclass(frozen=True, slots=True)
class Blocks:
    """n blocks of ``dspark_block_size`` slots, teacher-forced (v41-model 8.3).

    With q the last token whose features a block may use, slot i reads the token at q + 1 + i (the
    anchor for i = 0) and predicts the one at q + 2 + i. Rows count the batch's tokens ``B S``.

    Attributes:
        previous: ``[n, slots]`` int64, the token in front of each prediction.
        targets: ``[n, slots]`` int64, the token that follows it in the text.
        weights: ``[n, slots]`` float32, how much predicting it counts, as the batch says; 0 from
            the first slot on whose target is not to be learnt.
        rows: ``[n, slots]``, of ``previous``: where the target model makes the same prediction.
        positions: ``[n, slots]`` of the slots.
        context: ``[n, W]`` rows of the window up to q.
        sees: ``[n, W]`` bool, those of them that are of the block's document.
    """

    previous: Tensor
    targets: Tensor
    weights: Tensor
    rows: Tensor
    positions: Tensor
    context: Tensor
    sees: Tensor


def choose_blocks(
    batch: Batch, config: ModelConfig, per_row: int, generator: torch.Generator
) -> Blocks:
    """``per_row`` blocks of every row, those likelier whose first tokens weigh more, none twice.

    The anchor and the first prediction are tokens that a model writes: both must weigh. A row with
    too few of them is filled up with blocks of weight 0.

    Args:
        batch: the text.
        config: of the model.
        per_row: blocks of each row; n is B times as many.
        generator: on the batch's device.
    """
    at = torch.minimum(batch.weights, batch.weights.roll(1, 1))  # by row of the first target
    at = torch.where(batch.positions >= _FIRST_POSITION, at, 0.0)
    # The largest of u^(1 / w) are a weighted sample without replacement (Efraimidis, Spirakis).
    draws = torch.rand(at.shape, generator=generator, device=at.device)
    first_target = (draws ** (1 / at)).topk(per_row, dim=1).indices
    is_wanted = at.gather(1, first_target) > 0
    return _blocks_at(batch, config, first_target.clamp(min=2), is_wanted)


def _blocks_at(
    batch: Batch, config: ModelConfig, first_target: Tensor, is_wanted: Tensor
) -> Blocks:
    """Blocks whose slot 0 predicts the tokens ``first_target [B, A]``, at least 2."""
    length, device = batch.ids.shape[1], batch.ids.device
    slots = torch.arange(config.dspark_block_size, device=device)
    targets = first_target.unsqueeze(2) + slots
    is_inside = targets < length
    targets = targets.clamp(max=length - 1)
    weights = _take(batch.weights, targets)
    # The first token of a document and padding weigh 0, so no block leaves its document.
    goes_on = (is_wanted.unsqueeze(2) & is_inside & (weights > 0)).cumprod(2)
    q = first_target - 2
    context = q.unsqueeze(2) - torch.arange(config.sliding_window, device=device)
    sees = context >= batch.first.gather(1, q).unsqueeze(2)
    row_starts = torch.arange(len(batch.ids), device=device).view(-1, 1, 1) * length
    parts = (
        _take(batch.ids, targets - 1),
        _take(batch.ids, targets),
        weights * goes_on,
        targets - 1 + row_starts,
        batch.positions.gather(1, first_target - 1).unsqueeze(2) + slots,
        context.clamp(min=0) + row_starts,
        sees,
    )
    return Blocks(*(part.flatten(0, 1) for part in parts))


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """``[B, S]`` at ``[B, A, slots]``."""
    return values.gather(1, rows.flatten(1)).view_as(rows)
