"""What an engine can serve at all: checked where a request arrives, on both sides of the pipe."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from leadline.cache.sizing import pages_of
from leadline.core.errors import BadRequest, EngineOverloaded
from leadline.core.pace import Pace
from leadline.core.request import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The numbers that decide whether a request can ever be served, and whether now.

    Attributes:
        max_model_len: prompt and output tokens of one request.
        num_pages: pages of ``page_size`` tokens that one request may hold.
        max_open: requests open at the same time, running or waiting; 0 is no bound.
        max_queued_tokens: prompt tokens that wait for their step; 0 is no bound.
    """

    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    max_open: int = 0
    max_queued_tokens: int = 0

    def check(self, request: EngineRequest) -> SamplingParams:
        """The request's parameters with ``max_tokens`` lowered to what the context leaves.

        Raises:
            BadRequest: it can never be served; the message says which value and which limit.
        """
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        self.check_prompt(request.prompt_token_ids, num_new=min(1, sampling.max_tokens))
        if not sampling.max_tokens and sampling.prompt_logprobs is None:
            raise BadRequest(
                "max_tokens is 0; it must be at least 1, unless prompt_logprobs are asked for",
                param="max_tokens",
            )
        for param in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_ids(param, getattr(sampling, param) or ())
        self._check_ids("bad_words", [*chain(*request.bad_token_ids)])
        max_tokens = min(sampling.max_tokens, self.max_model_len - num_prompt)
        self._check_pages(num_prompt + max_tokens, "prompt and max_tokens")
        if max_tokens == sampling.max_tokens:
            return sampling
        return replace(
            sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
        )

    def check_prompt(self, token_ids: Sequence[int], *, num_new: int) -> None:
        """Check a prompt that must leave room for ``num_new`` tokens.

        Raises:
            BadRequest: it is empty, too long, or holds an id outside the vocabulary.
        """
        if not token_ids:
            raise BadRequest("the prompt is empty; it needs at least one token", param="prompt")
        if len(token_ids) + num_new > self.max_model_len:
            room = f" and needs room for {num_new} more" if num_new else ""
            raise BadRequest(
                f"this model's maximum context length is {self.max_model_len} tokens, but the "
                f"prompt has {len(token_ids)} tokens{room}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        self._check_ids("prompt", token_ids)
        self._check_pages(len(token_ids), "prompt")

    def check_room(self, num_open: int, pace: Pace) -> None:
        """Check that one more request may come in beside ``num_open``.

        Args:
            num_open: requests running or waiting.
            pace: at which requests end.

        Raises:
            EngineOverloaded: as many as allowed are open.
        """
        if self.max_open and num_open >= self.max_open:
            raise EngineOverloaded(
                f"{num_open} requests are running or waiting, and no more than {self.max_open} "
                "may be; try again later",
                retry_after=pace.seconds_for(1),
            )

    def check_queue(self, num_prompt: int, num_queued: int, pace: Pace) -> None:
        """Check that a prompt may wait beside ``num_queued`` tokens; alone any prompt may.

        Args:
            num_prompt: tokens of the prompt.
            num_queued: prompt tokens that wait for their step.
            pace: at which prompt tokens are fed.

        Raises:
            EngineOverloaded: they would be more than allowed.
        """
        excess = num_queued + num_prompt - self.max_queued_tokens
        if num_queued and excess > 0:
            raise EngineOverloaded(
                f"{num_queued} prompt tokens are waiting and this prompt has {num_prompt}, and "
                f"together they may be no more than {self.max_queued_tokens}; try again later",
                retry_after=pace.seconds_for(min(excess, num_queued)),
            )

    def _check_ids(self, param: str, token_ids: Collection[int]) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise BadRequest(
                f"{param} holds token id {wrong}, but the vocabulary has ids 0 to "
                f"{self.vocab_size - 1}",
                param=param,
            )

    def _check_pages(self, num_tokens: int, what: str) -> None:
        if pages_of(num_tokens, self.page_size) > self.num_pages:
            raise BadRequest(
                f"{what} come to {num_tokens} tokens, but the whole KV cache holds "
                f"{self.num_pages * self.page_size}; shorten them or give the cache more memory",
                param="prompt",
                code="context_length_exceeded",
            )
