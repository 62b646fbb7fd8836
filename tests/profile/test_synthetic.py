"""Contexts that nobody computed: the engine takes them for its own."""

from __future__ import annotations

import math

import pytest
import torch

from leadline.bench.workload import random_prompts
from leadline.cli import bundled_model
from leadline.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from leadline.core.errors import ConfigError
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine
from leadline.engine.launch import build_engine
from leadline.kernels import ops
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.profile.synthetic import remember, start_decoding


def build(**cache: object) -> Engine:
    settings = {"block_size": 64, "kv_cache_memory_bytes": 64 * 2**20} | cache
    return build_engine(
        EngineConfig(
            model=str(bundled_model()),
            device="cpu",
            max_model_len=8192,
            check_integrity=True,
            cache=CacheConfig(**settings),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256),
        )
    )


@pytest.mark.parametrize("bounded", [True, False], ids=["replay", "exact"])
def test_long_contexts_decode_after_a_handful_of_rows(bounded: bool) -> None:
    engine = build(swa_bounded_replay=bounded)
    names = start_decoding(engine, batch=3, context=3000, max_tokens=8)
    counters = engine.metrics.counters
    window = 32 if bounded else 0  # replayed
    assert counters["prefix_cache_hits"] == 3 * (3000 // 64 * 64)
    fed = counters["computed_tokens"] + counters["replayed_tokens"]
    assert fed == 3 * (3000 % 64 + window)
    before = counters["steps"]
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == sorted(names)
    assert counters["steps"] == before + 1
    assert engine.stats().num_running == 3
    while engine.has_work:
        assert all(output.error is None for output in engine.step())
    assert engine.stats().counters["generation_tokens"] == 3 * 8


def test_records_are_finite_and_no_two_are_alike() -> None:
    engine = build()
    [text] = random_prompts(1, 1024, engine.limits.vocab_size, "1")
    remember(engine, [text])
    model = engine.model
    assert isinstance(model, DeepseekV41)
    for field in [*model.cache.kv.values(), *model.cache.index.values()]:
        used = field.values.flatten(1).any(1).nonzero().squeeze(1)
        assert len(used) == 1024 // 64
        assert field.scales is not None
        rows = ops.unpack_rows(field.values[used], field.scales[used], field.record, torch.float32)
        rows = rows.flatten(0, 1)
        assert rows.isfinite().all()
        assert len(rows.unique(dim=0)) == len(rows)
        assert math.isclose(float(rows.std()), 1, rel_tol=0.1)


def test_a_remembered_prompt_is_found_by_whoever_asks() -> None:
    engine = build()
    [text] = random_prompts(1, 200, engine.limits.vocab_size, "2")
    remember(engine, [text])
    engine.add(EngineRequest("asked", tuple(text), SamplingParams(max_tokens=1)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens == 192


def test_without_a_prefix_cache_prompts_are_computed() -> None:
    engine = build(enable_prefix_caching=False)
    start_decoding(engine, batch=2, context=300, max_tokens=4)
    assert engine.metrics.counters["computed_tokens"] == 600


def test_what_cannot_run_side_by_side_is_refused() -> None:
    engine = build(kv_cache_memory_bytes=8 * 2**20)
    with pytest.raises(ConfigError, match="5 requests are to decode at once, but 4 have slots"):
        start_decoding(engine, batch=5, context=64, max_tokens=4)
    with pytest.raises(ConfigError, match="4 requests of 500004 tokens need 31252 pages"):
        start_decoding(engine, batch=4, context=500_000, max_tokens=4)
    with pytest.raises(ConfigError, match="a context of 500000 tokens needs 7813 pages"):
        remember(engine, random_prompts(1, 500_000, 512, "0"))


def test_pages_that_the_scheduler_keeps_are_not_there_to_decode_in() -> None:
    engine = build(kv_cache_memory_bytes=2 * 2**20, block_size=16)
    context = (engine.cache.num_pages // 3 - 1) * 16
    with pytest.raises(ConfigError, match=f"2 of 3 requests of {context} tokens fit side by side"):
        start_decoding(engine, batch=3, context=context)
