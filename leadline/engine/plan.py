"""What one step consists of, and what it brought: values between scheduler, builder and runner."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leadline.core.request import Request, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np


class RowKind(enum.Enum):
    """Whether a group's rows belong to a known prompt or continue it."""

    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(slots=True)
class RowGroup:
    """One request's rows of a step: positions ``[start, start + num_rows)``.

    Attributes:
        generation: the request's when the step was planned; a later one makes the result stale.
        num_upper: the last rows of the group that run the upper half.
        num_sampled: the last rows whose logits are wanted; at most ``num_upper``.
    """

    request: Request
    kind: RowKind
    start: int
    num_rows: int
    num_upper: int
    num_sampled: int
    generation: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after the last row."""
        request = self.request
        return (
            self.num_sampled > 0
            and self.end >= request.num_prompt_tokens
            and request.sampling.max_tokens > 0
        )

    @property
    def num_scored(self) -> int:
        """First rows whose next token the prompt knows, where its logprobs are wanted."""
        if self.request.prompt_logprobs is None:
            return 0
        return min(self.end, self.request.num_prompt_tokens - 1) - (self.end - self.num_sampled)

    @property
    def is_stale(self) -> bool:
        """Whether the request ended or was preempted since the step was planned."""
        return self.generation != self.request.generation


@dataclass(slots=True)
class StepPlan:
    """The row groups of one step, at most one per request.

    Attributes:
        copies_before: slots copied before the forward, ``(from, to)``: snapshots restored.
        copies_after: slots copied after the forward: snapshots taken.
    """

    groups: list[RowGroup] = field(default_factory=list)
    num_rows: int = 0
    num_prefill_rows: int = 0
    copies_before: list[tuple[int, int]] = field(default_factory=list)
    copies_after: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class GroupResult:
    """What a step brought for one group.

    Attributes:
        token_ids: sampled tokens; none where no row was sampled.
        logprobs: one per token when the request asked for them.
        logits: float32 ``[num_rows, V]`` of a prompt-logits group.
        prompt_logprobs: of the prompt tokens behind the group's rows, where they are wanted.
        error: why the request cannot go on.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    logits: np.ndarray | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
