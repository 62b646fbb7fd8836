"""One rank: forward, logits, tokens.

A step goes through three calls, so that the next one can be prepared while it runs: ``launch`` the
forward, ``sample`` from its hidden rows, and wait for the ``results``. Only the last one waits for
the device, and ``sample`` where a prompt is scored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.core.errors import LeadlineError
from leadline.core.request import Request, TokenLogprobs
from leadline.engine.forwards import Forwards
from leadline.engine.logprobs import token_logprobs
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import GroupResult, RowGroup, StepPlan
from leadline.kernels.debug import NonFiniteError
from leadline.kernels.registry import REFERENCE, Kernels
from leadline.kernels.transfer import upload
from leadline.models.batch import ForwardBatch, Model

if TYPE_CHECKING:
    from leadline.engine.sampler import Draw, SampledToken, Sampler

logger = logging.getLogger(__name__)

# Prompt logits leave the device in blocks, so that a long chunk never needs [rows, V] twice there.
LOGITS_BLOCK_ROWS = 256
# Logprobs are taken in float64, so their blocks are smaller.
LOGPROBS_BLOCK_ROWS = 64


class StepInFlight:
    """A step whose forward was launched; made by ``Runner.launch``.

    Attributes:
        plan: what it consists of.
        hidden: ``[v, D]`` rows whose logits are wanted; None where there are none.
        is_sampled: whether its tokens were drawn.
        draw: its tokens, once sampled.
        error: why the whole step failed, if it did.
        is_short: what failed is that device memory did not suffice, so that smaller steps may go.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.hidden: Tensor | None = None
        self.is_sampled = False
        self.draw: Draw | None = None
        self.error: str | None = None
        self.is_short = False
        self.row_of: dict[str, int] = {}  # request -> row of the draw
        self.logits: dict[str, NDArray[np.float32]] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}


class Runner:
    """Runs the model on a plan and draws the tokens that its groups want.

    A step that fails ends its requests and not the engine; one that is short of memory may be
    planned again.

    Args:
        forwards: launches the model.
        copy_slots: copies slots of the cache, ``(from, to)`` pairs, in stream order.
        kernels: what runs the ops.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        forwards: Forwards,
        metrics: EngineMetrics,
        copy_slots: Callable[[Sequence[tuple[int, int]]], None],
        kernels: Kernels = REFERENCE,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._forwards = forwards
        self._metrics = metrics
        self._copy_slots = copy_slots
        self._kernels = kernels

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: StepInFlight | None) -> StepInFlight:
        """Start the forward of a step.

        Args:
            plan: the step.
            previous: the step before it where that is not booked yet: it has been sampled, and
                the tokens that the host does not know are taken from it.
        """
        step = StepInFlight(plan)
        with _failing_alone(step), self._kernels.active():
            with self._metrics.timed("build"):
                batch, run = self._forwards.prepare(plan.groups)
            with self._metrics.timed("forward"), _naming_requests(plan.groups, batch):
                if previous is not None:
                    _fill_unknown_tokens(plan, batch, previous)
                self._copy_slots(plan.copies_before)
                step.hidden = run()
                self._copy_slots(plan.copies_after)
        return step

    @torch.inference_mode()
    def sample(self, step: StepInFlight) -> None:
        """Draw the step's tokens once; those of the steps before it must be booked.

        A row without a valid distribution fails its own request and no other.
        """
        if step.is_sampled or step.hidden is None or step.error is not None:
            return
        with (
            _failing_alone(step),
            self._kernels.active(),
            self._metrics.timed("sample"),
        ):
            step.is_sampled = True
            ends = list(accumulate(group.num_sampled for group in step.plan.groups))
            drawn: list[tuple[int, Request]] = []
            for end, group in zip(ends, step.plan.groups, strict=True):
                name = group.request.request_id
                if group.is_stale or not group.num_sampled:
                    continue
                rows = step.hidden[end - group.num_sampled : end]
                if group.request.wants_prompt_logits:
                    step.logits[name] = self._prompt_logits(rows)
                elif group.num_scored > 0:
                    step.prompt_logprobs[name] = self._prompt_logprobs(rows, group)
                if group.draws:
                    step.row_of[name] = len(drawn)
                    drawn.append((end - 1, group.request))
            if drawn:
                chosen, requests = [row for row, _ in drawn], [request for _, request in drawn]
                hidden = step.hidden[: len(chosen)]
                if chosen[-1] >= len(chosen):  # some are left out
                    hidden = step.hidden.index_select(0, upload(chosen, hidden.device))
                step.draw = self._sampler.launch(self._model.logits(hidden), requests)

    def results(self, step: StepInFlight) -> list[GroupResult]:
        """What the step brought for each group of its plan, once it has ended on the device."""
        tokens: list[SampledToken] = []
        with _failing_alone(step), self._metrics.timed("sample"):
            tokens = step.draw.tokens() if step.draw is not None else []
        if step.error is not None:
            return [GroupResult(error=step.error) for _ in step.plan.groups]
        corrupted = sum(token.is_corrupted for token in tokens)
        self._metrics.counters["corrupted_requests"] += corrupted
        return [_result(step, group, tokens) for group in step.plan.groups]

    def _prompt_logits(self, hidden: Tensor) -> NDArray[np.float32]:
        """Logits of every row, float32 ``[rows, V]`` in host memory."""
        blocks = hidden.split(LOGITS_BLOCK_ROWS)
        return np.concatenate([self._model.logits(rows).float().cpu().numpy() for rows in blocks])

    def _prompt_logprobs(self, hidden: Tensor, group: RowGroup) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow the group's rows, block by block."""
        request, first = group.request, group.end - group.num_sampled + 1
        wanted = request.sampling.prompt_logprobs
        assert wanted is not None
        found: list[TokenLogprobs] = []
        for rows in hidden[: group.num_scored].split(LOGPROBS_BLOCK_ROWS):
            start = first + len(found)
            ids = request.tokens[start : start + len(rows)].tolist()
            found += token_logprobs(self._model.logits(rows), ids, [wanted] * len(rows))
        return tuple(found)


def _result(step: StepInFlight, group: RowGroup, tokens: Sequence[SampledToken]) -> GroupResult:
    name = group.request.request_id
    result = GroupResult(
        logits=step.logits.get(name), prompt_logprobs=step.prompt_logprobs.get(name, ())
    )
    if name in step.row_of:
        token = tokens[step.row_of[name]]
        if token.error is not None:
            place = f"no token can be drawn after position {group.end - 1}"
            return GroupResult(error=f"request {name}: {place}: {token.error}")
        result.token_ids = (token.token_id,)
        result.logprobs = () if token.logprobs is None else (token.logprobs,)
    return result


@contextmanager
def _naming_requests(groups: Sequence[RowGroup], batch: ForwardBatch) -> Iterator[None]:
    """Add the request to an error that names a row of a step."""
    try:
        yield
    except NonFiniteError as error:
        # An op over something else than rows cannot name a request.
        name = "unknown"
        if error.row < len(batch.ids):
            name = groups[int(batch.req_of_row[error.row])].request.request_id
        raise LeadlineError(f"{error} (request {name})") from error


@contextmanager
def _failing_alone(step: StepInFlight) -> Iterator[None]:
    """Note an exception in the step whose requests it ends, or which is planned anew."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        step.error, step.is_short = str(error), True
        step.hidden = step.draw = None
    except Exception as error:
        names = ", ".join(group.request.request_id for group in step.plan.groups)
        logger.exception("a step failed; its requests end: %s", names)
        step.error = f"the forward pass failed: {type(error).__name__}: {error}"


def _fill_unknown_tokens(plan: StepPlan, batch: ForwardBatch, previous: StepInFlight) -> None:
    """Put the tokens of ``previous`` where groups feed them, on the device (5.9, rule 1).

    Where it drew none, its requests end once it is booked, and what they feed here is dropped.
    """
    if previous.error is not None:
        return
    rows, sources, end = [], [], 0
    for group in plan.groups:
        end += group.num_rows
        if group.end > len(group.request.tokens):
            rows.append(end - 1)
            sources.append(previous.row_of[group.request.request_id])
    if rows:
        assert previous.draw is not None
        targets, places = upload((rows, sources), batch.ids.device)
        known = previous.draw.token_ids.index_select(0, places)
        # Whose request has ended with an error is fed any token.
        batch.ids.index_copy_(0, targets, known.clamp(min=0).int())
