"""One rank: forward, logits, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.core.errors import LeadlineError
from leadline.engine.metrics import EngineMetrics
from leadline.engine.scheduler import GroupResult, RowGroup
from leadline.kernels.debug import NonFiniteError
from leadline.models.batch import ForwardBatch, Model

if TYPE_CHECKING:
    from leadline.engine.sampler import Sampler

# Prompt logits leave the device in blocks, so that a long chunk never needs [rows, V] twice there.
LOGITS_BLOCK_ROWS = 256


class Runner:
    """Runs the model on a batch and draws the tokens that its groups want."""

    def __init__(self, model: Model, sampler: Sampler, metrics: EngineMetrics) -> None:
        self._model = model
        self._sampler = sampler
        self._metrics = metrics

    @torch.inference_mode()
    def run(self, groups: Sequence[RowGroup], batch: ForwardBatch) -> list[GroupResult]:
        """One step of the model; a result per group, in order.

        A row without a valid distribution fails its own request and no other.

        Raises:
            LeadlineError: a watched op gave a non-finite value (``debug_nonfinite``); it names
                op, layer and request.
        """
        with self._metrics.timed("forward"):
            hidden = self._forward(groups, batch)
        with self._metrics.timed("sample"):
            results = [GroupResult() for _ in groups]
            ends = list(accumulate(group.num_sampled for group in groups))
            drawn = []
            for i, group in enumerate(groups):
                if group.request.wants_prompt_logits:
                    rows = hidden[ends[i] - group.num_sampled : ends[i]]
                    results[i] = GroupResult(logits=self._prompt_logits(rows))
                elif group.num_sampled:
                    drawn.append(i)
            if drawn:
                logits = self._model.logits(hidden[[ends[i] - 1 for i in drawn]])
                tokens = self._draw([groups[i] for i in drawn], logits)
                for i, result in zip(drawn, tokens, strict=True):
                    results[i] = result
        return results

    def _forward(self, groups: Sequence[RowGroup], batch: ForwardBatch) -> Tensor:
        """Hidden rows whose logits are wanted ``[v, D]``."""
        row_of = torch.arange(len(batch.ids))
        try:
            state = self._model.lower(batch)
            row_of = batch.rows_upper
            return self._model.upper(state, batch)[batch.sample_rows]
        except NonFiniteError as error:
            # An op over something else than rows (the window workspace) cannot name a request.
            name = "unknown"
            if error.row < len(row_of):
                group = batch.req_of_row[row_of[error.row]]
                name = groups[int(group)].request.request_id
            raise LeadlineError(f"{error} (request {name})") from error

    def _draw(self, groups: list[RowGroup], logits: Tensor) -> list[GroupResult]:
        """One token per group from its row of ``logits`` ``[v, V]``, or an error naming it."""
        results = []
        requests = [group.request for group in groups]
        for group, token in zip(groups, self._sampler.sample(logits, requests), strict=True):
            if token.token_id < 0:
                message = (
                    f"request {group.request.request_id}: no token can be drawn after position "
                    f"{group.end - 1}: its logits are not finite, or nothing is allowed"
                )
                results.append(GroupResult(error=message))
            else:
                logprobs = () if token.logprobs is None else (token.logprobs,)
                results.append(GroupResult(token_ids=(token.token_id,), logprobs=logprobs))
        return results

    def _prompt_logits(self, hidden: Tensor) -> NDArray[np.float32]:
        """Logits of every row, float32 ``[rows, V]`` in host memory."""
        blocks = hidden.split(LOGITS_BLOCK_ROWS)
        return np.concatenate([self._model.logits(rows).float().cpu().numpy() for rows in blocks])
