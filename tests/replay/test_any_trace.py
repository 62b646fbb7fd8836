"""Random traces of a tiny engine: whatever happens, each request gets what it gets alone.

The state machine of the scheduler's tests on a real model, in exact mode and float64 (invariants
8, 34 and 35).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from leadline.config.presets import TINY_WINDOW128
from leadline.core.request import FinishReason
from leadline.engine.launch import AnyModel
from leadline.models.deepseek_v41.model import DeepseekV41
from tests.replay.harness import WINDOW, Answer, exact, tiny_v4_model, tokens_of
from tests.steps import make_stepper

NUM_TRACES = 50
MAX_TOKENS = 6

# One layer of each kind, for speed.
FIVE_LAYERS = dataclasses.replace(
    TINY_WINDOW128,
    num_hidden_layers=5,
    sliding_window=WINDOW,
    compress_ratios=(0, 0, 2, 1, 1),
    kv_source_layer_ids=(2, 3),
    index_source_layer_ids=(2, 3),
    candidate_source_layer_id=3,
    engram_layer_ids=(1,),
    engram_num_embeddings=TINY_WINDOW128.engram_num_embeddings[:1],
    hc_sinkhorn_iters=2,
    num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
)


@functools.cache
def model() -> DeepseekV41:
    return make_stepper(FIVE_LAYERS, dtype=torch.float64).model


MODELS: dict[str, Callable[[], AnyModel]] = {"v41": model, "v4": tiny_v4_model}


@functools.cache
def alone(name: str) -> list[Answer]:
    """Prompts that share prefixes of several lengths, their next turns, and what follows."""
    service = exact(MODELS[name](), caching=False, num_seqs=20)
    one, other = tokens_of(50, seed=1), tokens_of(50, seed=2)
    prompts = [one[:n] for n in (7, 16, 31, 50)] + [other[:n] for n in (15, 16, 32)]
    prompts += [one[:20] + other[:12], one[:32] + other[:1]]
    first = service.ask(*prompts, max_tokens=MAX_TOKENS)
    turns = [answer.text + tokens_of(3, seed=3) for answer in first if len(answer.prompt) < 32]
    return first + service.ask(*turns, max_tokens=MAX_TOKENS)


def run_trace(seed: int, of: str) -> Counter[str]:
    """Add, step, abort, preempt and let end, with fewer pages and snapshots than all need."""
    draw = random.Random(seed)
    service = exact(
        MODELS[of](),
        num_pages=draw.randrange(7, 10),
        num_seqs=4,
        num_snapshots=draw.randrange(1, 5),
        chunk=draw.choice((None, None, 9)),
        asynchronous=seed % 2 == 1,
    )
    wanted: dict[str, Answer] = {}

    def add() -> None:
        name, want = str(len(wanted)), draw.choice(alone(of))
        max_tokens = draw.randrange(1, MAX_TOKENS + 1)
        service.add(name, want.prompt, max_tokens, priority=draw.randrange(2), logprobs=0)
        wanted[name] = want

    def abort() -> None:
        if wanted:
            service.engine.abort(draw.choice(list(wanted)))

    def preempt() -> None:
        """As for want of pages, which answers this short hardly ever bring about."""
        service.engine.pause(True)
        service.step()  # books what is in flight, as is done before a real preemption
        service.engine.pause(False)
        scheduler = service.engine._scheduler
        if scheduler.running:
            scheduler._preempt(draw.choice(scheduler.running))

    for _ in range(draw.randrange(10, 20)):
        [act] = draw.choices((add, abort, preempt, service.step), weights=(6, 1, 2, 8))
        act()
    service.run()

    events = Counter(service.counters)
    for name, want in wanted.items():
        got = service.answers[name]
        assert got.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        count = len(got.tokens)
        assert got.tokens == want.tokens[:count], f"trace {seed}, request {name}"
        assert got.chosen == pytest.approx(want.chosen[:count], rel=0, abs=1e-12), seed
        events[got.finish_reason.value] += 1
    return events


@pytest.mark.parametrize(("of", "number"), [("v41", NUM_TRACES), ("v4", NUM_TRACES // 2)])
def test_any_trace_gives_each_request_its_tokens(of: str, number: int) -> None:
    events = sum((run_trace(seed, of) for seed in range(number)), Counter[str]())
    assert events["length"] > 3 * number
    for event in ("abort", "prefix_cache_hits", "num_preemptions", "evicted_pages"):
        assert events[event] > number / 2, events
