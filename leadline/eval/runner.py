"""Dialogues through one engine: the right answers forced, and the model's own beside them.

A cut of the cache lies before each answer, so what a switch does to it shows in the answer's
tokens only. They are therefore decoded one by one, as they would be generated: the sampler says
the right token, whatever the model prefers, and keeps the model's distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from leadline.config.engine import EngineConfig
from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, Request, SamplingParams, TokenOutput
from leadline.engine.launch import build_engine
from leadline.engine.sampler import Draw, SampledToken, Sampler
from leadline.eval.questions import Dialogue, Question, answer_limit
from leadline.eval.scoring import Answer
from leadline.text.output_parser import OutputParser
from leadline.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Script:
    """The tokens that a request has to say, and what the model thought of each.

    Attributes:
        logits: of each token that was said, float32 ``[V]``.
    """

    token_ids: Sequence[int]
    logits: list[Tensor] = field(default_factory=list)

    def logprobs(self) -> Tensor:
        """The model's distributions, float32 ``[n, V]``."""
        return torch.stack(self.logits).log_softmax(-1)


class ScriptedSampler(Sampler):
    """Draws as the engine's own, but for requests that have a script.

    Attributes:
        scripts: by request id.
    """

    def __init__(self, eos_token_id: int) -> None:
        super().__init__(eos_token_id)
        self.scripts: dict[str, Script] = {}

    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Draw:
        tokens = super().launch(logits, requests).tokens()
        rows = [row for row, r in enumerate(requests) if r.request_id in self.scripts]
        kept = logits[rows].float().cpu()
        for row, own in zip(rows, kept, strict=True):
            script = self.scripts[requests[row].request_id]
            script.logits.append(own)
            tokens[row] = SampledToken(script.token_ids[requests[row].num_output_tokens])
        return Draw.known(tokens, logits.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an engine made of a question.

    Attributes:
        logprobs: of the right answer's tokens, ``[n, V]`` float32.
        answer: the model's own; None where none was asked for.
        num_cached: prompt tokens that the prefix cache knew.
        num_replayed: of these, the ones that were fed again.
    """

    logprobs: Tensor
    answer: Answer | None
    num_cached: int
    num_replayed: int


Outcomes: TypeAlias = dict[tuple[int, int], Outcome]
"""By dialogue and place in it."""


@dataclass(slots=True)
class _Reply:
    """A request on its way: what reads its outputs, and how it began."""

    request: EngineRequest
    parser: OutputParser | None = None
    answer: Answer = field(default_factory=Answer)
    num_cached: int = 0
    num_replayed: int = 0

    def push(self, output: TokenOutput) -> None:
        if output.error is not None:
            raise LeadlineError(f"request {output.request_id} failed: {output.error}")
        self.num_cached, self.num_replayed = output.num_cached_tokens, output.num_replayed_tokens
        if self.parser is not None:
            self.answer.take(self.parser.push(output))
            self.answer.is_cut = self.parser.finish_reason == "length"


@dataclass(slots=True)
class _Course:
    """A dialogue under way: what it sends next, all of it together, and how much is open."""

    steps: Iterator[list[_Reply]]
    num_open: int = 0


class Runner:
    """An engine for dialogues.

    Args:
        config: the arm's.
        tokenizer: the model's.
        window: its ``sliding_window``. The cache knows all of a dialogue's first prompt but its
            last window, about a question's length: agents have sent the rest before.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, window: int) -> None:
        self._engine = build_engine(config, make_sampler=self._make_sampler)
        self._tokenizer = tokenizer
        self._window = window

    def _make_sampler(self, eos_token_id: int) -> ScriptedSampler:
        self._sampler = ScriptedSampler(eos_token_id)
        return self._sampler

    @property
    def max_model_len(self) -> int:
        return self._engine.limits.max_model_len

    def counters(self) -> dict[str, int]:
        """The engine's, since it started."""
        return dict(self._engine.stats().counters)

    def run(
        self,
        dialogues: Sequence[Dialogue],
        *,
        concurrency: int = 32,
        advance: Callable[[], object] = lambda: None,
    ) -> Outcomes:
        """Outcomes of the measured questions.

        The cache is empty at first, and of a dialogue's turns each finds what those before it
        left there.

        Args:
            dialogues: of different numbers.
            concurrency: those under way at once; each has two requests.
            advance: called when a dialogue has ended.

        Raises:
            LeadlineError: a request failed.
        """
        self._engine.reset_prefix_cache()
        found: Outcomes = {}
        # Long ones first, or the last of them would run alone.
        waiting = deque(sorted(dialogues, key=lambda d: len(d.questions), reverse=True))
        running: dict[str, tuple[_Reply, _Course]] = {}
        num_courses = 0
        while True:
            while waiting and num_courses < concurrency:
                num_courses += 1
                self._send(_Course(self._steps(waiting.popleft(), found)), running)
            if not running:
                return found
            for output in self._engine.step():
                reply, course = running[output.request_id]
                reply.push(output)
                if output.finish_reason is None:
                    continue
                del running[output.request_id]
                course.num_open -= 1
                if not course.num_open and not self._send(course, running):
                    num_courses -= 1
                    advance()

    def _send(self, course: _Course, running: dict[str, tuple[_Reply, _Course]]) -> bool:
        """Send what a dialogue has next; False where that is nothing."""
        replies = next(course.steps, [])
        course.num_open = len(replies)
        for reply in replies:
            running[reply.request.request_id] = (reply, course)
            self._engine.add(reply.request)
        return bool(replies)

    def _steps(self, dialogue: Dialogue, found: Outcomes) -> Iterator[list[_Reply]]:
        """What a dialogue sends, one group after the other; notes what it finds."""
        for place, question in enumerate(dialogue.questions):
            name = f"{dialogue.family}-{dialogue.number}-{place}"
            prompt = question.prompt.token_ids
            if not place and len(prompt) > self._window:
                yield [_Reply(_request(f"{name}-known", prompt[: -self._window], 1))]
            forced = _Reply(_request(f"{name}-forced", prompt, len(question.gold)))
            script = self._sampler.scripts[forced.request.request_id] = Script(question.gold)
            own = self._own(f"{name}-own", question)
            # Together: the second of two would find what the first has left.
            yield [forced] if own is None else [forced, own]
            del self._sampler.scripts[forced.request.request_id]
            if question.is_measured:
                found[dialogue.number, place] = Outcome(
                    script.logprobs(),
                    None if own is None else own.answer,
                    forced.num_cached,
                    forced.num_replayed,
                )

    def _own(self, name: str, question: Question) -> _Reply | None:
        """The request for the model's own answer."""
        if question.expectation is None:
            return None
        request = _request(name, question.prompt.token_ids, answer_limit(question))
        return _Reply(request, OutputParser(self._tokenizer, question.prompt, request.sampling))


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
