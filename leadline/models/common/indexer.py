"""Scores of entries, by which some of them are selected."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from leadline.config.families import AnyConfig
from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.reference.blocks import rows_of_scores
from leadline.models.common.attention import StepRows
from leadline.models.common.parameters import Parameters


class EntryScores:
    """Queries against index keys (v41-model 3.5).

    Attributes:
        topk: entries that a row selects, at most.
    """

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        config: AnyConfig,
        exact_rounding: bool,
        *,
        hadamard: bool = False,
    ) -> None:
        """Fetch the projections.

        Args:
            params: where they come from.
            prefix: of their names.
            config: the model.
            exact_rounding: see ``ops.index_logits``.
            hadamard: keys that are packed went through the Hadamard transform, so queries do.
        """
        self.exact_rounding, self.hadamard = exact_rounding, hadamard
        self.num_heads, self.dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.wq_b = params.linear(f"{prefix}.wq_b")
        self.weights_proj = params.linear(f"{prefix}.weights_proj")

    def query(
        self, u: Tensor, qr: Tensor, step: StepRows, keys: RecordField
    ) -> tuple[Tensor, Tensor]:
        """Queries ``[r, Hi, di]``, rounded as keys are, and the heads' weights ``[r, Hi]``."""
        q = ops.linear(qr, self.wq_b).unflatten(1, (self.num_heads, self.dim))
        if keys.scales is None:
            q = ops.rotate(q, *step.yarn)
        else:
            q = ops.prepare_index_query(q, *step.yarn, hadamard=self.hadamard)
        weights = ops.linear(u, self.weights_proj) * (self.dim**-0.5 * self.num_heads**-0.5)
        return q, weights

    def blocks(
        self, q: Tensor, weights: Tensor, step: StepRows, keys: RecordField, ratio: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Scores ``[b, N]`` of every entry, and ``[b]`` how many of them count, for blocks of rows.

        Args:
            q: of ``query``.
            weights: likewise.
            step: of these rows.
            keys: those of the entries.
            ratio: tokens of an entry.
        """
        rows, visible = step.rows, step.visible[ratio]
        num_entries = rows.max_len // ratio
        at_once = rows_of_scores(num_entries)
        for first in range(0, len(visible), at_once):
            part = slice(first, first + at_once)
            scores = ops.index_logits(
                q[part],
                weights[part],
                keys,
                rows.page_table,
                rows.req_of_row[part],
                visible[part],
                num_entries,
                exact_rounding=self.exact_rounding,
            )
            yield scores, visible[part]


def joined(parts: list[Tensor]) -> Tensor:
    """Rows of all blocks; of one block itself, not a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
