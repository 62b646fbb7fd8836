from __future__ import annotations

import time
from typing import Any

import pytest

from leadline.core.errors import BadRequest, EngineOverloaded
from leadline.core.pace import Pace
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.limits import RequestLimits

LIMITS = RequestLimits(vocab_size=100, max_model_len=1000, num_pages=8, page_size=256, max_open=3)


def make(prompt: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest("a", tuple(prompt), SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("request_", "message", "param", "code"),
    [
        (make([]), "the prompt is empty", "prompt", None),
        (make([5, 100]), "token id 100, but the vocabulary has ids 0 to 99", "prompt", None),
        (make([5, -1]), "token id -1, but the vocabulary", "prompt", None),
        (
            make([5] * 1200),
            "maximum context length is 1000 tokens, but the prompt has 1200 tokens",
            "prompt",
            "context_length_exceeded",
        ),
        (
            make([5] * 1000),
            "maximum context length is 1000 tokens.* 1000 tokens and needs room for 1 more",
            "prompt",
            "context_length_exceeded",
        ),
        (make([5], max_tokens=0), "max_tokens is 0", "max_tokens", None),
        (make([5], logit_bias={100: 1.0}), "logit_bias holds token id 100", "logit_bias", None),
        (make([5], allowed_token_ids=(3, 777)), "token id 777", "allowed_token_ids", None),
        (make([5], stop_token_ids=(100,)), "token id 100", "stop_token_ids", None),
    ],
    ids=[
        "empty",
        "high id",
        "low id",
        "too long",
        "no room",
        "no output",
        "bias",
        "allowed",
        "stop id",
    ],
)
def test_c54_what_can_never_be_served_is_a_bad_request(
    request_: EngineRequest, message: str, param: str, code: str | None
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        LIMITS.check(request_)
    assert caught.value.param == param
    assert caught.value.code == (code or "invalid_value")


def test_c54_a_request_larger_than_the_whole_cache_is_refused_at_once() -> None:
    small = RequestLimits(vocab_size=100, max_model_len=10_000, num_pages=2, page_size=256)
    with pytest.raises(BadRequest, match="600 tokens, but the whole KV cache holds 512"):
        small.check(make([5] * 600))
    with pytest.raises(BadRequest, match="prompt and max_tokens come to 513 tokens"):
        small.check(make([5] * 500, max_tokens=13))
    assert small.check(make([5] * 500, max_tokens=12)).max_tokens == 12


@pytest.mark.parametrize(
    ("num_prompt", "asked", "given"), [(900, 50, 50), (900, 101, 100), (999, 64, 1)], ids=str
)
def test_max_tokens_is_lowered_to_what_the_context_leaves(
    num_prompt: int, asked: int, given: int
) -> None:
    sampling = LIMITS.check(make([5] * num_prompt, max_tokens=asked, min_tokens=asked))
    assert (sampling.max_tokens, sampling.min_tokens) == (given, given)


def test_a_prompt_for_its_logits_may_fill_the_context() -> None:
    LIMITS.check_prompt([5] * 1000, num_new=0)
    with pytest.raises(BadRequest, match="the prompt has 1001 tokens; shorten it"):
        LIMITS.check_prompt([5] * 1001, num_new=0)


def test_a_full_queue_is_an_overload() -> None:
    LIMITS.check_room(2, Pace(time.monotonic))
    with pytest.raises(EngineOverloaded, match="3 requests are running or waiting"):
        LIMITS.check_room(3, Pace(time.monotonic))


def test_more_prompt_tokens_than_may_wait_are_an_overload() -> None:
    limits = RequestLimits(
        vocab_size=100, max_model_len=1000, num_pages=8, page_size=256, max_queued_tokens=500
    )
    now = 0.0
    pace = Pace(lambda: now)
    limits.check_queue(900, 0, pace)  # alone any prompt may wait
    limits.check_queue(200, 300, pace)
    with pytest.raises(EngineOverloaded, match="300 prompt tokens are waiting") as caught:
        limits.check_queue(201, 300, pace)
    assert caught.value.retry_after == 1
    pace.count(100)
    now = 10.0
    with pytest.raises(EngineOverloaded) as caught:
        limits.check_queue(300, 300, pace)  # 100 too many, and so many go in 10 s
    assert caught.value.retry_after == pytest.approx(10)


def test_c31_max_tokens_of_0_scores_a_prompt() -> None:
    sampling = LIMITS.check(make([5] * 1000, max_tokens=0, prompt_logprobs=1))
    assert sampling.max_tokens == 0
