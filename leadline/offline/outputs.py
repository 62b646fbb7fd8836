"""Results by vLLM's names, and how they grow from what the engine says (serving-api 15.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, FinishReason, TokenLogprobs, TokenOutput
from leadline.offline.prompts import Query
from leadline.text.detokenizer import TextOutput
from leadline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, before temperature and masks.

    Attributes:
        rank: among all tokens, from 1.
        decoded_token: None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        text: empty where nothing was detokenized.
        token_ids: generated ids, the end or stop token included; up to a stop string.
        cumulative_logprob: their sum; None where no logprobs were asked for.
        logprobs: per token: id -> its log-probability, the sampled one and the most likely.
        finish_reason: ``stop``, ``length`` or ``abort``; None while the answer goes on.
        stop_reason: the stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened: seconds since the epoch; None is not yet.

    Attributes:
        time_in_queue: seconds from arrival to the first step.
        first_token_time: of whichever choice was first.
        finished_time: when the last choice ended.
    """

    arrival_time: float
    time_in_queue: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its ``n`` answers, so far or whole.

    Attributes:
        prompt: the text, or None where the prompt came as ids.
        prompt_logprobs: per prompt token as ``CompletionOutput.logprobs``, the first is None;
            None where they were not asked for, or nothing is known yet.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


class Answer:
    """All choices of one prompt while they are generated.

    Args:
        request_id: of the result; the engine knows the choices by this and a number.
        query: what is asked.
        tokenizer: None leaves texts empty.
        clock: seconds since the epoch.

    Attributes:
        requests: what the engine is to be asked, one for each choice.
    """

    def __init__(
        self,
        request_id: str,
        query: Query,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.requests = replace(query.request, request_id=request_id).choices()
        self._request_id = request_id
        self._query = query
        self._tokenizer = tokenizer
        self._clock = clock
        # Shared by all outputs: a prompt may be a million ids, and there is one output a token.
        self._prompt_token_ids = list(query.request.prompt_token_ids)
        self._metrics = RequestMetrics(clock())
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._choices = {
            request.request_id: _Choice(index, request, query.reasoning_end, tokenizer)
            for index, request in enumerate(self.requests)
        }

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason for choice in self._choices.values())

    def push(self, news: TokenOutput) -> bool:
        """Take what the engine says; whether that choice has ended, which may be before it does.

        Raises:
            BadRequest: the request cannot be served after all.
            LeadlineError: it failed.
        """
        if news.refusal is not None:
            raise news.refusal
        if news.finish_reason is FinishReason.ERROR:
            raise LeadlineError(f"request {self._request_id} failed: {news.error}")
        metrics, now = self._metrics, self._clock()
        if metrics.time_in_queue is None:
            metrics.time_in_queue = news.queue_seconds
            self._num_cached_tokens = news.num_cached_tokens
        if news.prompt_logprobs:
            self._prompt_logprobs = [
                None if token is None else token_entry(token, self._tokenizer)
                for token in news.prompt_logprobs
            ]
        if news.token_ids:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
        choice = self._choices[news.request_id]
        choice.push(news)
        if self.finished:
            metrics.finished_time = now
        return choice.finish_reason is not None

    def output(self) -> RequestOutput:
        """The result so far; later tokens do not change it."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._query.text,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[choice.output() for choice in self._choices.values()],
            finished=self.finished,
            metrics=replace(self._metrics),
            num_cached_tokens=self._num_cached_tokens,
        )


class _Choice:
    """One answer while it is being generated.

    Attributes:
        finish_reason: set by the engine's end or by a stop string.
    """

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        reasoning_end: int | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._index = index
        self._sampling = request.sampling
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._entries: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._text = ""
        self._reader: TextOutput | None = None
        if tokenizer is not None and self._sampling.detokenize:
            self._reader = TextOutput(tokenizer, self._sampling, stop_after=reasoning_end)

    def push(self, news: TokenOutput) -> None:
        num_new = len(news.token_ids)
        if self._reader is None:
            self.finish_reason = news.finish_reason
            if news.stop_token_id in self._sampling.stop_token_ids:
                self._stop_reason = news.stop_token_id
        else:
            self._text += self._reader.push(news)
            self.finish_reason = self._reader.finish_reason
            self._stop_reason = self._reader.stop_reason
            # Tokens of the same step behind a stop string are not part of the answer.
            num_new = self._reader.num_tokens - len(self._token_ids)
        self._token_ids += news.token_ids[:num_new]
        self._note_logprobs(news.logprobs[:num_new])

    def _note_logprobs(self, tokens: Sequence[TokenLogprobs]) -> None:
        for token in tokens:
            self._cumulative_logprob += token.logprob
            self._entries.append(token_entry(token, self._tokenizer))

    def output(self) -> CompletionOutput:
        has_logprobs = self._sampling.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=list(self._token_ids),
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=list(self._entries) if has_logprobs else None,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
        )


def token_entry(token: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """A token's log-probability and its rivals', by id."""
    ranked = [(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, start=1)]
    return {
        id: Logprob(logprob, rank, tokenizer.decode([id]) if tokenizer else None)
        for id, logprob, rank in [*ranked, (token.token_id, token.logprob, token.rank)]
    }
