"""Every optimisation can be turned off alone, and the bundled model says the same without it.

Where sums are taken in another order, last bits decide some tokens; then it reads texts the same.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leadline.cli import bundled_model
from leadline.config.optimization import make_engine_config
from leadline.engine.engine import Engine
from leadline.engine.launch import build_engine
from leadline.kernels.fusions import FUSIONS
from leadline.text.tokenizer import Tokenizer
from tests.fakes import request

Answers = dict[str, list[int]]

ROUNDED = ("mhc", "gate", "attention", "engram")
"""Groups whose separate steps take sums in another order."""

TEXTS = (
    "The museum opens at nine. Tickets are sold at the gate, and",
    "Write a list of five fruits and say which of them grow on trees.",
    "Anna has three apples. She gives one to Ben and buys four more. How many apples has Anna now?",
    "A long time ago, a king lived in a castle by the sea. " * 12 + "Where did the king live?",
    "Name the capital of France.",
)


def build(**changes: Any) -> Engine:
    return build_engine(
        make_engine_config(
            {
                "model": str(bundled_model()),
                "device": "cpu",
                "kv_cache_memory_bytes": 64 * 2**20,
                "block_size": 32,
                "max_num_batched_tokens": 128,
                "max_num_seqs": 4,
                "check_integrity": True,
                **changes,
            }
        )
    )


def traffic(engine: Engine) -> Answers:
    """Sessions that come one after the other, of two turns each: prompts, hits and decodes mix."""
    tokenizer = Tokenizer(bundled_model() / "tokenizer.json")
    draw, got = random.Random(0), Answers()
    waiting = [(f"{i} first", list(tokenizer.encode(text))) for i, text in enumerate(TEXTS)]
    prompts = dict(waiting)
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.4:
            name, ids = waiting.pop(0)
            engine.add(request(name, ids, 12, ignore_eos=True))
        for output in engine.step():
            assert output.error is None
            said = got.setdefault(output.request_id, [])
            said.extend(output.token_ids)
            session, turn = output.request_id.split()
            if output.finish_reason is not None and turn == "first":
                more = list(tokenizer.encode(" And then? "))
                waiting.append((f"{session} second", prompts[output.request_id] + said + more))
    return got


@functools.cache
def answers(*changes: tuple[str, Any]) -> Answers:
    return traffic(build(**dict(changes)))


@functools.cache
def logprobs(*changes: tuple[str, Any]) -> NDArray[np.float32]:
    """Of every token of the texts."""
    engine, found = build(**dict(changes)), []
    tokenizer = Tokenizer(bundled_model() / "tokenizer.json")
    for ids in map(tokenizer.encode, TEXTS):
        logits = engine.prompt_logits(ids)[:-1]
        rows = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        found.append(rows[np.arange(len(ids) - 1), ids[1:]])
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("side_streams", "none"),
        ("engram_prefetch", False),
        ("async_scheduling", True),
        ("cuda_graphs", "off"),
        *(("fusions", f"all,-{group}") for group in FUSIONS if group not in ROUNDED),
    ],
)
def test_tokens_are_the_same_with_a_switch_turned(setting: str, value: Any) -> None:
    assert answers((setting, value)) == answers()


@pytest.mark.parametrize("fusions", ["none", *(f"all,-{group}" for group in ROUNDED)])
def test_texts_are_as_likely_without_fusions(fusions: str) -> None:
    """As near as sums in another order are; a step that is wrong is off by whole nats."""
    assert np.abs(logprobs(("fusions", fusions)) - logprobs()).mean() < 0.1


def test_exact_mode_says_the_same_where_nothing_is_replayed() -> None:
    """The first turns of prompts that a window holds (cache-and-scheduling 7, 20)."""
    exact = answers(("swa_bounded_replay", False))
    first = [f"{i} first" for i in (0, 1, 2, 4)]
    assert [exact[name] for name in first] == [answers()[name] for name in first]


def test_the_plainest_engine_says_what_its_approximations_alone_do() -> None:
    """But for fusions, whose last bits are others."""
    approximations = ("swa_bounded_replay", False), ("kv_cache_dtype", "fp8")
    wanted = answers(*approximations)
    assert answers(("optimization", "day0"), ("fusions", "all")) == wanted
    day0 = answers(("optimization", "day0"))
    assert {name: len(ids) for name, ids in day0.items()} == dict.fromkeys(wanted, 12)
    difference = logprobs(("optimization", "day0")) - logprobs(*approximations)
    assert np.abs(difference).mean() < 0.1
