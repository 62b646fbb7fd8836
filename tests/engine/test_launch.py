from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.cache.pool import CachePool
from leadline.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from leadline.core.errors import BadRequest, CheckpointError, ConfigError, NotSupported
from leadline.core.request import Constraint, FinishReason, TokenOutput
from leadline.engine import launch
from leadline.engine.engine import Engine
from leadline.engine.launch import build_engine, engine_around, load_model
from leadline.text.tokenizer import Tokenizer
from tests.fakes import request

TINY = EngineConfig(
    model="tiny-window128",
    load_format="dummy",
    dtype="float64",
    device="cpu",
    cache=CacheConfig(kv_cache_dtype="float32", kv_cache_memory_bytes=16 * 2**20),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=96, max_prefill_rows=40),
)


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers, all prompts together."""
    got: dict[str, list[int]] = {}
    for i, ids in enumerate(prompts):
        engine.add(request(str(i), ids, max_tokens, ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            got.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    return [got[str(i)] for i in range(len(prompts))]


def test_the_real_model_answers_alike_together_and_in_one_prefill() -> None:
    """Chunked, batched decoding equals the argmax of a plain full pass over prompt and answer."""
    rng = random.Random(0)
    prompts = [rng.choices(range(3, 500), k=num_tokens) for num_tokens in (5, 150, 301)]
    engine = build_engine(TINY)
    for ids, answer in zip(prompts, generate(engine, prompts, 6), strict=True):
        whole = engine.prompt_logits(ids + answer).argmax(-1).tolist()
        assert whole[len(ids) - 1 : -1] == answer
    stats = engine.stats()
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)


def test_engines_around_one_loaded_model_answer_like_engines_of_their_own() -> None:
    """Whatever differs between them: here which layers run, and how the cache is cut."""
    prompts = [random.Random(1).choices(range(3, 500), k=n) for n in (140, 220)]
    configs = [
        replace(TINY, cache=replace(TINY.cache, swa_bounded_replay=replays, block_size=size))
        for replays, size in ((False, 256), (True, 16), (False, 16))
    ]
    loaded = load_model(TINY)
    shared = [generate(engine_around(loaded, config), prompts, 5) for config in configs]
    assert shared == [generate(build_engine(config), prompts, 5) for config in configs]


def test_the_cache_of_the_engine_before_is_gone_before_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[weakref.ref[CachePool]] = []
    left: list[int] = []

    def allocate(*args: Any, **kwargs: Any) -> CachePool:
        gc.collect()
        left.append(sum(pool() is not None for pool in pools))
        pool = CachePool(*args, **kwargs)
        pools.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(launch, "CachePool", allocate)
    loaded = load_model(TINY)
    for _ in range(2):
        engine_around(loaded, TINY)
    assert left == [0, 0]


def test_the_chosen_kernels_run_its_steps_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba", reason="the extra 'cpu' is not installed")
    from leadline.kernels import cpu, ops

    fast, calls = cpu.IMPLEMENTATIONS["rms_norm"], 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return fast(*args, **kwargs)

    monkeypatch.setitem(cpu.IMPLEMENTATIONS, "rms_norm", counted)
    settings = replace(TINY, dtype="float32", kernel_backend="auto,route=reference")
    chosen = build_engine(settings)
    reference = build_engine(replace(settings, kernel_backend="reference"))
    answer = generate(chosen, [[3, 4, 5]], 2)
    assert calls > 0
    before = calls
    assert generate(reference, [[3, 4, 5]], 2) == answer
    ops.rms_norm(torch.ones(1, 4), torch.ones(4), eps=0.0)
    assert calls == before


def test_kernels_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="'numba' cannot run: it computes in"):
        build_engine(replace(TINY, kernel_backend="numba"))


def test_batch_invariance_is_refused_where_no_kernels_have_it() -> None:
    with pytest.raises(ConfigError, match="batch_invariant needs all ops by triton"):
        build_engine(replace(TINY, batch_invariant=True))


def test_the_form_of_moe_activations_reaches_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    from leadline.kernels import ops

    original, seen = ops.routed_experts, []

    def watched(*args: Any, row_scales: bool, **kwargs: Any) -> Any:
        seen.append(row_scales)
        return original(*args, row_scales=row_scales, **kwargs)

    monkeypatch.setattr(ops, "routed_experts", watched)
    for setting, row_scales in (("mxfp8", False), ("fp8", True)):
        seen.clear()
        generate(build_engine(replace(TINY, moe_activations=setting)), [[3, 4, 5]], 1)
        assert set(seen) == {row_scales}


def test_caching_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = replace(TINY.cache, hot_slots=2, block_size=32)
    engine = build_engine(replace(TINY, cache=cache, async_scheduling=True, check_integrity=True))
    num_checks = 0

    def count() -> None:
        nonlocal num_checks
        num_checks += 1

    monkeypatch.setattr(engine, "check_integrity", count)
    ids = random.Random(1).choices(range(3, 500), k=50)
    answer: list[int] = []
    engine.add(replace(request("a", ids, 3, ignore_eos=True), session_key="s"))
    engine.step()
    assert num_checks == 1
    assert engine.has_work  # the first step is still to be booked
    while engine.has_work:
        answer += [token for output in engine.step() for token in output.token_ids]
    engine.add(replace(request("b", [*ids, *answer], 1), session_key="s"))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert outputs[-1].num_cached_tokens == 52  # all but the last token: the slot was hot


@pytest.mark.parametrize("source", ["checkpoint", "preset"])
def test_a_v4_answers_alike_together_and_in_one_prefill(golden: Path, source: str) -> None:
    names = {"checkpoint": str(golden / "v4-tiny"), "preset": "tiny-v4"}
    load_format = "auto" if source == "checkpoint" else "dummy"
    memory = replace(TINY.cache, kv_cache_memory_bytes=2**26)
    config = replace(TINY, model=names[source], load_format=load_format, cache=memory)
    prompts = [random.Random(n).choices(range(3, 500), k=n) for n in (5, 150, 301)]
    engine = build_engine(config)
    for ids, answer in zip(prompts, generate(engine, prompts, 6), strict=True):
        whole = engine.prompt_logits(ids + answer).argmax(-1).tolist()
        assert whole[len(ids) - 1 : -1] == answer


def test_a_model_of_another_kind_ends_with_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(NotSupported, match="there is no leadline/models/llama"):
        build_engine(replace(TINY, model=str(tmp_path), load_format="auto"))


def test_a_checkpoint_without_its_tokenizer_is_named(tmp_path: Path, golden: Path) -> None:
    config = (golden / "v41-tiny" / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, but the model has Engram"):
        build_engine(replace(TINY, model=str(tmp_path), load_format="auto"))


def test_a_cache_too_small_for_the_wanted_length_is_told_what_fits() -> None:
    small = replace(TINY, max_model_len=32768, cache=CacheConfig(kv_cache_memory_bytes=2**21))
    with pytest.raises(ConfigError, match=r"max_model_len is 32768.*lower max_model_len to \d+ or"):
        build_engine(small)


def test_graphs_that_cannot_be_captured_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="cuda_graphs is 'all', but there is no GPU; set it to"):
        build_engine(replace(TINY, cuda_graphs="all"))


def test_a_checkpoint_answers_within_a_grammar(random_tiny: Path) -> None:
    """In this process, without an event loop: ``wait`` stands in for its wake-up."""
    engine = build_engine(EngineConfig(model=str(random_tiny), device="cpu", cache=TINY.cache))
    tokenizer = Tokenizer(random_tiny / "tokenizer.json")
    text = "Z\N{LATIN SMALL LETTER U WITH DIAERESIS}rich, 9 \N{ROCKET}"
    constraint = Constraint(f'start: "{text}"')
    engine.add(replace(request("a", [5, 6, 7], 60), constraint=constraint))
    engine.wait()
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    token_ids = [token for output in outputs for token in output.token_ids]
    assert tokenizer.decode(token_ids) == text
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_preset_has_no_tokenizer_and_refuses_grammars() -> None:
    with pytest.raises(BadRequest, match="llguidance"):
        build_engine(TINY).add(replace(request("a", [5], 9), constraint=Constraint('start: "a"')))


def test_answers_do_not_depend_on_where_tables_lie(tmp_path: Path) -> None:
    prompt = random.Random(1).choices(range(3, 500), k=40)
    configs = (
        TINY,
        replace(TINY, engram_tables="memory"),
        replace(TINY, engram_shared_memory=str(tmp_path)),
    )
    answers = [generate(build_engine(config), [prompt], 5) for config in configs]
    assert answers[0] == answers[1] == answers[2]
    assert list(tmp_path.glob("*.table"))
