"""Steps of a real model that memory did not suffice for, wherever in it: fed again, and exact.

What a forward leaves behind that ended in some layer is in the caches of those below it only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from leadline.models.deepseek_v41.model import Block, DeepseekV41
from tests.replay.harness import Answer, Service, assert_same, bounded, exact, tokens_of
from tests.replay.test_any_trace import model

LENGTHS = (3, 17, 40)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Sets when memory is short: asked in front of each half of each block, and of logits."""

    def set_to(is_short: Callable[[], bool]) -> None:
        for owner, name in ((Block, "begin"), (Block, "finish"), (DeepseekV41, "logits")):
            original = getattr(owner, name)

            def watched(*args: object, original: Callable[..., object] = original) -> object:
                if is_short():
                    raise torch.OutOfMemoryError(f"no memory for {original.__name__}")
                return original(*args)

            monkeypatch.setattr(owner, name, watched)

    return set_to


@pytest.mark.parametrize("asynchronous", [False, True], ids=["one_at_a_time", "ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_exact_answers_are_those_of_a_run_with_memory_enough(
    shortage: Callable[[Callable[[], bool]], None], seed: int, asynchronous: bool
) -> None:
    """Chunks longer than rings and shorter, decodes beside them, hits with snapshots."""
    texts = [tokens_of(length, seed=length) for length in LENGTHS]

    def two_turns(service: Service) -> list[Answer]:
        first = service.ask(*texts, max_tokens=4)
        return first + service.ask(*(a.text + tokens_of(4, seed=1) for a in first), max_tokens=2)

    wanted = two_turns(exact(model()))
    draw, places = random.Random(seed), iter(range(10**6))
    short = [60 * number + draw.randrange(50) for number in range(3)]
    shortage(lambda: next(places) in short)
    rows = (60, 30)[seed % 2]
    service = exact(model(), max_num_batched_tokens=rows, asynchronous=asynchronous)
    for got, want in zip(two_turns(service), wanted, strict=True):
        assert_same(got, want)
    assert service.counters["oom_steps"] > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["one_at_a_time", "ahead"])
@pytest.mark.parametrize("place", [0, 4, 7, 10])
def test_decodes_that_are_fed_again_stay_exact_with_bounded_replay_too(
    shortage: Callable[[Callable[[], bool]], None], place: int, asynchronous: bool
) -> None:
    """Nothing of them is replayed, whichever layers had stored their rows before."""
    texts = [tokens_of(length, seed=length) for length in LENGTHS]
    wanted = bounded(model()).ask(*texts, max_tokens=9)
    service = bounded(model(), asynchronous=asynchronous)
    answers = [service.add(str(i), text, 9) for i, text in enumerate(texts)]
    for _ in range(2):
        service.step()
    places = iter(range(10**6))
    shortage(lambda: next(places) in (place, place + 40))
    service.run()
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)
    assert service.counters["oom_steps"] == 2
    assert service.counters["num_preemptions"] == 0
