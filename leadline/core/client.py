"""The door between serving and the engine: seven calls, and nothing else crosses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from leadline.core.request import EngineRequest, TokenOutput

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, cheap enough to take at every scrape.

    Attributes:
        num_free_pages: pages that no request holds, those with a cached prefix included.
        num_cached_pages: of these, the ones that a prefix hit can still find.
        page_bytes: of one page, over all layers.
        slot_bytes: of one slot.
        num_deferred: of the waiting ones, those whose grammar is being compiled.
        num_hot_slots: slots kept for a session between its turns.
        num_queued_tokens: prompt tokens that no step has fed yet.
        stalled_seconds: since the last step, while requests run; else 0.
        counters: monotonic counts by metric name without prefix (``prompt_tokens`` ...).
        iteration_tokens: steps by the rows that they fed: (upper bound, steps) pairs, cumulative,
            the last bound infinite.
        finished: requests ended, by finish reason.
        step_seconds: seconds spent so far per part of a step (``schedule``, ``build``,
            ``forward``, ``sample``).
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_slots: int = 0
    num_free_slots: int = 0
    num_deferred: int = 0
    num_hot_slots: int = 0
    num_queued_tokens: int = 0
    stalled_seconds: float = 0.0
    page_size: int = 256
    page_bytes: int = 0
    slot_bytes: int = 0
    max_model_len: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    iteration_tokens: list[tuple[float, int]] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)


class EngineClient(Protocol):
    """What serving may ask of an engine; implemented by ``engine.async_engine.AsyncEngine``."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Queue a request and yield its outputs; closing the iterator aborts it.

        Raises:
            BadRequest: it can never be served (too long, an id outside the vocabulary ...); of a
                grammar that does not compile, the iterator tells before any output.
            EngineOverloaded: the engine takes no work now.
            EngineDead: the engine process has ended.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request at the next step; an unknown or finished id is ignored."""
        ...

    async def stats(self) -> EngineStats:
        """The engine's counters and gauges; those before the step, where a step takes long."""
        ...

    async def health(self) -> None:
        """Return when the engine answers; raise ``EngineDead`` when it cannot."""
        ...

    async def pause(self, paused: bool) -> None:
        """Stop or resume scheduling; queued and running requests stay as they are."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached page that no request holds; False when some stayed."""
        ...

    async def prompt_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of a prompt: float32 ``[T, V]``, exact full forward."""
        ...
