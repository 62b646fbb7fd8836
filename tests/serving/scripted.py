"""An engine that answers every request with the same tokens; needs no model and no GPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np

from leadline.core.client import EngineStats
from leadline.core.errors import EngineDead
from leadline.core.request import (
    EngineRequest,
    FinishReason,
    TokenLogprobs,
    TokenOutput,
)
from leadline.engine.metrics import COUNTERS

Step = Sequence[int] | BaseException


@dataclass
class ScriptedEngine:
    """Implements ``EngineClient`` by replaying ``script``, cut as a real engine would.

    Attributes:
        script: the outputs of every request, ids of one step each; an exception is raised when
            its turn comes.
        eos: the id that ends a request unless it ignores it.
        num_cached_tokens: reported with every output.
        num_replayed_tokens: the same.
        refuse: raised by every ``submit`` instead of an answer.
        gate: an event that every step but the first waits for; None lets them run.
        is_dead: ``health`` and ``stats`` raise.
        is_paused: what ``pause`` was told last.
        died: what the server of it waits for; ``restart`` makes it live again.
        requests: what was submitted, in order.
        aborted: ids of the requests that were closed before their end.
    """

    script: Sequence[Step]
    eos: int
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0
    refuse: Exception | None = None
    gate: asyncio.Event | None = None
    is_dead: bool = False
    is_paused: bool = False
    died: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        num_left = request.sampling.max_tokens
        try:
            for i, step in enumerate(self.script):
                if self.gate is not None and i:
                    await self.gate.wait()
                    if self.is_dead:
                        raise EngineDead("the engine was shut down")
                await asyncio.sleep(0)
                if isinstance(step, BaseException):
                    raise step
                output = self._output(request, tuple(step)[:num_left], num_left, is_first=i == 0)
                num_left -= len(output.token_ids)
                yield output
                if output.finish_reason is not None:
                    return
            yield TokenOutput(request.request_id, finish_reason=FinishReason.LENGTH)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.request_id)
            raise

    def _output(
        self, request: EngineRequest, ids: tuple[int, ...], num_left: int, *, is_first: bool
    ) -> TokenOutput:
        stops = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops.add(self.eos)
        reason, stop_token_id = None, None
        for i, token_id in enumerate(ids):
            if token_id in stops:
                ids, reason, stop_token_id = ids[: i + 1], FinishReason.STOP, token_id
                break
        if reason is None and len(ids) == num_left:
            reason = FinishReason.LENGTH
        top = request.sampling.logprobs
        return TokenOutput(
            request.request_id,
            ids,
            logprobs=tuple(_logprobs(token_id, top) for token_id in ids) if top is not None else (),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=self.num_cached_tokens,
            num_replayed_tokens=self.num_replayed_tokens,
            prompt_logprobs=_prompt_logprobs(request) if is_first else (),
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> EngineStats:
        if self.is_dead:
            raise EngineDead("the engine process has ended")
        return EngineStats(
            num_running=1,
            num_pages=10,
            num_free_pages=7,
            num_cached_pages=1,
            page_bytes=256 * 890,
            slot_bytes=4096,
            num_slots=4,
            num_free_slots=3,
            counters={name: i for i, name in enumerate(COUNTERS)} | {"evicted_pages": 99},
            step_seconds={"forward": 0.5},
        )

    async def health(self) -> None:
        if self.is_dead:
            raise EngineDead("the engine process has ended")

    async def pause(self, paused: bool) -> None:
        self.is_paused = paused

    async def reset_prefix_cache(self) -> bool:
        return True

    async def restart(self) -> None:
        self.is_dead = False
        self.died.clear()

    async def shutdown(self) -> None:
        self.is_dead = True
        if self.gate is not None:
            self.gate.set()

    async def prompt_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        raise NotImplementedError


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs | None, ...]:
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return ()
    return (None, *(_logprobs(token_id, num_top) for token_id in request.prompt_token_ids[1:]))


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """A sampled token at -0.5, and ``num_top`` rivals from id 3 on, the last impossible."""
    top = tuple((3 + i, -float(i) if i < 2 else float("-inf")) for i in range(num_top))
    return TokenLogprobs(token_id, -0.5, rank=1, top=top)
