"""What one key may ask for in a minute, and at once."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.config.server import AccessConfig
from leadline.serving.rate_limit import RateLimited, RateLimiter
from tests.serving.conftest import HELLO, MakeRig

CHAT = "/v1/chat/completions"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def limiter(clock: Clock, **config: Any) -> RateLimiter:
    return RateLimiter(AccessConfig(**config), per_key=True, clock=clock)


def shown(limits: RateLimiter, key: str = "k") -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in limits.of(key).headers(limits.now())}


def test_requests_a_minute_refill_evenly() -> None:
    clock = Clock()
    limits = limiter(clock, rate_limit_rpm=6)
    for _ in range(6):
        limits.of("k").start(clock())
    with pytest.raises(RateLimited, match="6 requests a minute") as error:
        limits.of("k").start(clock())
    assert error.value.retry_after == pytest.approx(10)
    limits.of("other").start(clock())
    clock.seconds += error.value.retry_after
    limits.of("k").start(clock())
    with pytest.raises(RateLimited):
        limits.of("k").start(clock())


def test_no_more_than_a_minute_is_saved_up() -> None:
    clock = Clock()
    limits = limiter(clock, rate_limit_rpm=2)
    clock.seconds += 3600
    limits.of("k").start(clock())
    limits.of("k").start(clock())
    with pytest.raises(RateLimited):
        limits.of("k").start(clock())


def test_tokens_are_taken_afterwards_and_waited_for() -> None:
    clock = Clock()
    limits = limiter(clock, rate_limit_tpm=60)
    limits.of("k").start(clock())
    limits.of("k").charge(89)
    with pytest.raises(RateLimited, match="60 tokens a minute") as error:
        limits.of("k").start(clock())
    assert error.value.retry_after == pytest.approx(30)
    assert shown(limits)["x-ratelimit-remaining-tokens"] == "0"
    assert shown(limits)["x-ratelimit-reset-tokens"] == "89.000s"
    clock.seconds += 30
    limits.of("k").start(clock())


def test_headers_show_what_is_limited_only() -> None:
    clock = Clock()
    assert shown(limiter(clock, max_concurrency_per_key=1)) == {}
    limits = limiter(clock, rate_limit_rpm=60)
    limits.of("k").start(clock())
    assert shown(limits) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
    }


def test_invented_keys_share_one_allowance_where_none_are_configured() -> None:
    clock = Clock()
    limits = RateLimiter(AccessConfig(rate_limit_rpm=1), per_key=False, clock=clock)
    limits.of("a").start(clock())
    with pytest.raises(RateLimited):
        limits.of("b").start(clock())


@pytest.mark.parametrize("limit", ["rate_limit_rpm", "rate_limit_tpm"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_key_beyond_its_limit_gets_429_and_others_do_not(
    rig: MakeRig, limit: str, stream: bool
) -> None:
    server = rig("</think>a", api_key=("one", "two"), **{limit: 1})

    def ask(key: str) -> Any:
        body = {"messages": HELLO, "stream": stream}
        return server.http.post(CHAT, json=body, headers={"x-api-key": key})

    first, second = ask("one"), ask("one")
    kind = "requests" if limit == "rate_limit_rpm" else "tokens"
    assert first.status_code == 200
    assert first.headers[f"x-ratelimit-limit-{kind}"] == "1"
    assert second.status_code == 429
    error = second.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    wait = int(second.headers["retry-after"])
    assert wait >= 1
    assert (wait - 1) * 1000 < int(second.headers["retry-after-ms"]) <= wait * 1000
    assert second.headers[f"x-ratelimit-remaining-{kind}"] == "0"
    assert second.headers["x-worker-id"] == first.headers["x-worker-id"]
    assert ask("two").status_code == 200
    assert server.http.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200


def test_choices_pay_for_their_prompt_once(rig: MakeRig) -> None:
    server = rig("</think>ab", rate_limit_tpm=600)
    reply = server.http.post(CHAT, json={"messages": HELLO, "n": 3})
    spent = 600 - int(reply.headers["x-ratelimit-remaining-tokens"])
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] > usage["completion_tokens"] > 0
    assert spent == pytest.approx(usage["total_tokens"], abs=10)  # ten grow back in a second
