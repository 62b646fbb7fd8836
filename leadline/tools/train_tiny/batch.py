"""``Batch``: packed rows of documents, the trainer's only view of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of S tokens; a row holds whole documents one behind the other, then padding.

    A document starts at a multiple of every compression ratio, so that no group of tokens that
    are compressed together spans two documents. Rows before a start are padded with the pad token;
    padding belongs to the document before it and has no weight.

    Attributes:
        ids: ``[B, S]`` int64.
        first: ``[B, S]`` int64, the row index at which the token's document begins.
        weights: ``[B, S]`` float32, how much predicting this token (from those before it in its
            document) counts; 0 for the first token of a document, prompts and padding.
    """

    ids: Tensor
    first: Tensor
    weights: Tensor

    @property
    def positions(self) -> Tensor:
        """``[B, S]`` int64 positions within the documents."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) - self.first

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``, copied without waiting where memory is pinned."""
        return Batch(
            *(t.to(device, non_blocking=True) for t in (self.ids, self.first, self.weights))
        )
