from __future__ import annotations

import itertools
from typing import Any

import pytest

from leadline.core.errors import BadRequest, LeadlineError
from leadline.core.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from leadline.offline.outputs import Answer, Logprob
from leadline.offline.prompts import Query
from leadline.text.markers import THINK_END
from leadline.text.tokenizer import Tokenizer

END = FinishReason.LENGTH


def ask(
    tokenizer: Tokenizer | None = None, reasoning_end: int | None = None, **params: Any
) -> Answer:
    request = EngineRequest("", (5, 6), SamplingParams(**params))
    ticks = itertools.count(100.0)
    return Answer("a", Query(None, request, reasoning_end), tokenizer, lambda: next(ticks))


def news(*token_ids: int, choice: int = 0, **fields: Any) -> TokenOutput:
    logprobs = tuple(TokenLogprobs(id, -0.5, 2, ((id + 1, -0.25),)) for id in token_ids)
    return TokenOutput(f"a-{choice}", token_ids, logprobs, **fields)


def test_results_grow_and_those_taken_before_stay(tokenizer: Tokenizer) -> None:
    answer = ask(tokenizer, logprobs=0)
    ids = tokenizer.encode("one two")
    assert not answer.push(news(*ids[:1]))
    first = answer.output()
    assert answer.push(news(*ids[1:], finish_reason=END))
    last = answer.output()
    assert first.outputs[0].token_ids == ids[:1]
    assert first.outputs[0].logprobs is not None
    assert len(first.outputs[0].logprobs) == 1
    assert (first.finished, first.outputs[0].finish_reason) == (False, None)
    assert (last.finished, last.outputs[0].finish_reason) == (True, "length")
    assert last.outputs[0].text == "one two"
    assert last.outputs[0].cumulative_logprob == -0.5 * len(ids)
    assert (last.request_id, last.prompt_token_ids) == ("a", [5, 6])


def test_metrics_tell_when_what_happened() -> None:
    answer = ask(n=2)
    assert answer.output().metrics.time_in_queue is None
    answer.push(news(7, queue_seconds=0.25))
    answer.push(news(8, choice=1, queue_seconds=0.75, finish_reason=END))
    middle = answer.output().metrics
    answer.push(news(finish_reason=END))
    metrics = answer.output().metrics
    assert (metrics.arrival_time, metrics.time_in_queue) == (100.0, 0.25)
    assert (metrics.first_token_time, metrics.last_token_time) == (101.0, 102.0)
    assert (middle.finished_time, metrics.finished_time) == (None, 103.0)


def test_cached_tokens_are_those_of_the_first_choice() -> None:
    """The others find what the first one computed: over HTTP that is no hit either."""
    answer = ask(n=2)
    answer.push(news(7, num_cached_tokens=3))
    answer.push(news(8, choice=1, num_cached_tokens=9))
    assert answer.output().num_cached_tokens == 3


def test_prompt_logprobs_have_no_entry_for_the_first_token(tokenizer: Tokenizer) -> None:
    answer = ask(tokenizer, prompt_logprobs=1)
    assert answer.output().prompt_logprobs is None
    answer.push(news(7, prompt_logprobs=(None, TokenLogprobs(6, -3.0, 9, ((8, -1.0),)))))
    answer.push(news(7))
    decode = tokenizer.decode
    assert answer.output().prompt_logprobs == [
        None,
        {8: Logprob(-1.0, 1, decode([8])), 6: Logprob(-3.0, 9, decode([6]))},
    ]


def test_stop_strings_are_searched_behind_the_reasoning(tokenizer: Tokenizer) -> None:
    end = tokenizer.marker_id(THINK_END)
    said = tokenizer.encode("stop. Then stop.")
    answer = ask(tokenizer, end, stop=("stop",), max_tokens=99)
    assert not answer.push(news(*said, end))
    assert answer.push(news(*said))
    [output] = answer.output().outputs
    assert (output.text, output.stop_reason) == ("stop. Then stop.</think>", "stop")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"refusal": BadRequest("no such rule")}, BadRequest, "^no such rule$"),
        ({"finish_reason": FinishReason.ERROR, "error": "boom"}, LeadlineError, "a failed: boom"),
    ],
    ids=["refused", "failed"],
)
def test_requests_that_fail_raise(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask().push(news(**fields))


def test_what_the_engine_ended_by_itself_says_so() -> None:
    answer = ask()
    assert answer.push(news(7, finish_reason=FinishReason.ABORT))
    assert answer.output().outputs[0].finish_reason == "abort"
