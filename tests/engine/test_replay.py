"""Prefix hits through the whole engine: replay, snapshots and hot slots, rule by rule.

Pages of 16 tokens and a window of 8; the fake model proves that every row reads its own request's
window and pages, so a right answer means that nothing stale was read.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from leadline.cache.replay import ReplayPolicy
from leadline.core.request import EngineRequest, FinishReason, TokenOutput
from leadline.engine.plan import RowKind
from tests.fakes import FIRST_ID, VOCAB_SIZE, FakeEngine, expected_tokens, fake_engine, request

WINDOW, PAGE = 8, 16
BOUNDED = ReplayPolicy(lower=True, upper=True, length=WINDOW, window=WINDOW)
EXACT = ReplayPolicy(lower=False, upper=False, length=WINDOW, window=WINDOW)
both_modes = pytest.mark.parametrize("policy", [BOUNDED, EXACT], ids=["bounded", "exact"])
both_depths = pytest.mark.parametrize("asynchronous", [False, True], ids=["depth 0", "depth 1"])


def small(policy: ReplayPolicy = BOUNDED, **options: object) -> FakeEngine:
    snapshots = 8 if policy.needs_snapshot else 0
    settings = {"num_pages": 33, "num_snapshots": snapshots, "max_num_batched_tokens": 64}
    return fake_engine(page_size=PAGE, policy=policy, **settings | options)  # type: ignore[arg-type]


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, VOCAB_SIZE), k=num_tokens)


def run(engine: FakeEngine, *requests: EngineRequest) -> dict[str, TokenOutput]:
    """All requests together to their end, with the tokens each gets alone; the last outputs."""
    tokens: dict[str, list[int]] = defaultdict(list)
    last = {}
    for item in requests:
        engine.add(item)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    for item in requests:
        want = expected_tokens(item.prompt_token_ids, item.sampling.max_tokens)
        assert last[item.request_id].finish_reason is FinishReason.LENGTH
        assert tokens[item.request_id] == want
    return last


def fed(engine: FakeEngine, request_id: str) -> list[tuple[int, int, int]]:
    """Of every prefill chunk of a request: first position, rows, rows of the upper half."""
    return [
        (group.start, group.num_rows, group.num_upper)
        for plan in engine.scheduler.plans
        for group in plan.groups
        if group.request.request_id == request_id and group.kind is RowKind.PREFILL
    ]


def check_nothing_is_held(engine: FakeEngine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)


# Bounded replay (3, 4).


@both_depths
@pytest.mark.parametrize("num_pages", [1, 2, 4])
def test_a_hit_of_the_whole_prompt_feeds_one_window_and_takes_no_page(
    num_pages: int, asynchronous: bool
) -> None:
    """Invariant 21."""
    engine = small(asynchronous=asynchronous)
    ids = text(num_pages * PAGE)
    run(engine, request("first", ids, 1))
    num_free = engine.stats().num_free_pages
    engine.add(request("again", ids, 2))
    engine.step()
    assert fed(engine, "again") == [(len(ids) - WINDOW, WINDOW, WINDOW)]
    assert engine.stats().num_free_pages == num_free - num_pages
    while engine.has_work:
        outputs = engine.step()
    [output] = outputs
    assert (output.num_cached_tokens, output.num_replayed_tokens) == (len(ids) - 1, WINDOW)


@both_modes
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65])
def test_c60_item_90_a_prompt_that_is_sent_again_hits_at_its_last_usable_boundary(
    num_tokens: int, policy: ReplayPolicy
) -> None:
    """Invariant 12 and vLLM PR 54713 and 52287: an aligned prompt must not miss everything."""
    engine = small(policy)
    ids = text(num_tokens)
    run(engine, request("first", ids, 1))
    again = run(engine, request("again", ids, 3))["again"]
    boundary = policy.hit_limit(num_tokens) // PAGE * PAGE
    assert again.num_cached_tokens == min(boundary, num_tokens - 1)
    assert again.num_replayed_tokens == (min(WINDOW, boundary) if policy.lower else 0)
    assert (again.num_cached_tokens > 0) == (boundary > 0)


@pytest.mark.parametrize("num_shared", [16, 32, 33, 47, 48, 50])
def test_a_hit_within_the_window_is_a_miss(num_shared: int) -> None:
    """cache-and-scheduling 3.7, which pages of 256 never meet."""
    engine = small(replace(BOUNDED, window=32, length=32))
    shared = text(num_shared)
    run(engine, request("first", shared + text(20, seed=1), 1))
    output = run(engine, request("second", shared + text(20, seed=2), 1))["second"]
    hit = num_shared // PAGE * PAGE
    assert output.num_cached_tokens == (hit if hit > 32 else 0)
    assert fed(engine, "second")[0][0] == (hit - 32 if hit > 32 else 0)


def test_a_replay_waits_for_a_step_that_holds_it_whole() -> None:
    """cache-and-scheduling 3.5."""
    engine = small(max_num_batched_tokens=40)
    ids = text(32)
    run(engine, request("first", ids, 1))
    run(engine, request("fresh", text(35, seed=1), 1), request("hit", [*ids, 30], 1))
    assert fed(engine, "hit") == [(24, 9, 8)]
    together = [p for p in engine.scheduler.plans if len(p.groups) == 2]
    assert not together, "5 of 8 rows were left beside the fresh prompt"


def test_a_replay_that_no_step_holds_is_split() -> None:
    engine = small(max_prefill_rows=3)
    ids = text(32)
    run(engine, request("first", ids, 1))
    engine.add(request("decoding", text(3, seed=1), 20))
    engine.step()
    run(engine, request("hit", [*ids, 30], 1))
    assert fed(engine, "hit") == [(24, 1, 0), (25, 3, 3), (28, 3, 3), (31, 2, 2)]


def test_a_replay_longer_than_a_prompts_share_of_a_step_is_split_and_not_stuck() -> None:
    """``long_prefill_threshold`` below the window once left the request waiting for ever."""
    engine = small(long_prefill_threshold=5)
    ids = text(32)
    run(engine, request("first", ids, 1))
    run(engine, request("again", ids, 1))
    assert fed(engine, "again") == [(24, 5, 5), (29, 3, 3)]


@pytest.mark.parametrize("rows", [3, 7, 8, 16, 33, 64])
def test_the_upper_half_runs_on_the_last_window_of_a_prompt_in_any_chunks(rows: int) -> None:
    """Invariants 26 and 27; a chunk stops where the upper half begins."""
    engine = small(num_slots=2, max_num_batched_tokens=rows)
    run(engine, request("cold", text(60), 4))
    chunks = fed(engine, "cold")
    assert not any(start < 52 < start + num_rows < 60 for start, num_rows, _ in chunks)
    assert sum(num_upper for _, _, num_upper in chunks) == WINDOW
    run(engine, request("turn", text(60) + text(5, seed=1), 4))
    assert sum(num_upper for _, _, num_upper in fed(engine, "turn")) == WINDOW


def test_hits_of_different_lengths_replay_in_one_step() -> None:
    """Invariant 24."""
    engine = small()
    texts = [text(size, seed=size) for size in (20, 40, 70)]
    for ids in texts:
        run(engine, request("before", ids, 1))
    turns = [request(f"r{i}", [*ids, 30, 31], 5) for i, ids in enumerate(texts)]
    last = run(engine, *turns)
    assert [last[f"r{i}"].num_cached_tokens for i in range(3)] == [16, 32, 64]
    assert [fed(engine, f"r{i}") for i in range(3)] == [[(8, 14, 8)], [(24, 18, 8)], [(56, 16, 8)]]
    [plan] = [p for p in engine.scheduler.plans if p.num_prefill_rows == 14 + 18 + 16]
    assert len(plan.groups) == 3


@both_depths
def test_an_abort_in_the_middle_of_a_replay_writes_nothing_shared(asynchronous: bool) -> None:
    """cache-and-scheduling 3.8, invariants 8 and 17."""
    engine = small(max_prefill_rows=3, asynchronous=asynchronous)
    ids = text(32)
    run(engine, request("first", ids, 1))
    engine.add(request("decoding", text(3, seed=1), 9))
    engine.step()
    before = engine.model.written_at[:3].copy()
    engine.add(request("hit", [*ids, 30], 1))
    engine.step()
    assert fed(engine, "hit") == [(24, 1, 0)]
    engine.abort("hit")
    while engine.has_work:
        engine.step()
    assert (engine.model.written_at[:3] == before).all()
    check_nothing_is_held(engine)
    assert run(engine, request("again", ids, 2))["again"].num_cached_tokens == 31


@both_depths
@both_modes
def test_a_preempted_request_resumes_from_its_own_pages(
    policy: ReplayPolicy, asynchronous: bool
) -> None:
    """cache-and-scheduling 3.8 and 5.7; usage stays that of the first admission."""
    engine = small(policy, num_pages=7, asynchronous=asynchronous, max_prefills=1)
    load = [request(f"r{i}", text(18, seed=i), 40) for i in range(3)]
    last = run(engine, *load)
    assert engine.stats().counters["num_preemptions"] > 0
    resumed = [first for (_, generation), first in engine.scheduler.first_fed.items() if generation]
    assert any(resumed)
    assert [output.num_cached_tokens for output in last.values()] == [0, 0, 0]
    assert engine.stats().counters["prefix_cache_hits"] == 0
    assert engine.stats().counters["prompt_tokens"] == 3 * 18
    check_nothing_is_held(engine)


@both_modes
@pytest.mark.parametrize("rows", [3, 64])
def test_a_hit_writes_no_page_below_it(policy: ReplayPolicy, rows: int) -> None:
    """Invariant 17."""
    engine = small(policy, num_slots=2, max_num_batched_tokens=rows)
    ids = text(48)
    run(engine, request("first", ids, 1))
    before = engine.model.written_at[:4].copy()
    run(engine, request("same", ids, 3))
    run(engine, request("longer", [*ids, 30, 31], 20))
    assert engine.stats().counters["prompt_tokens_cached"] > 0
    unchanged = 4 if policy.lower else 3  # without replay, the last page is computed again
    assert (engine.model.written_at[:unchanged] == before[:unchanged]).all()


def test_prompt_logits_use_neither_hits_nor_trim_and_their_neighbours_keep_both() -> None:
    """Invariant 29."""
    engine = small()
    ids = text(48)
    run(engine, request("first", ids, 1))
    engine.add(request("beside", [*ids, 30], 4))
    logits = engine.prompt_logits(ids)
    assert logits.argmax(-1).tolist() == [expected_tokens(ids[: i + 1], 1)[0] for i in range(48)]
    assert sum(upper for _, _, upper in fed(engine, "prompt-logits")) == 48
    assert fed(engine, "prompt-logits")[0][0] == 0
    assert fed(engine, "beside") == [(40, 9, 8)]


@pytest.mark.parametrize("num_slots", [2, 4])
@pytest.mark.parametrize("hit", [7, 8, 9, 15, 16, 17, 31, 32, 33, 48])
@both_modes
def test_r7_a_hit_across_requests_reads_no_window_of_another_request(
    policy: ReplayPolicy, hit: int, num_slots: int
) -> None:
    """user-reports R7 (ROCm/ATOM 1417, SGLang PR 30339): three times, others in between."""
    engine, uncached = small(policy, num_slots=num_slots), small(policy, prefix_caching=False)
    shared = text(hit)
    for i in range(3):
        same = request("same", shared + text(30, seed=9), 12)
        others = [request(f"other{j}", shared + text(5 + 7 * i, seed=j), 10 + j) for j in range(3)]
        run(engine, same)
        run(engine, *others, same)
        run(uncached, same)
    assert engine.stats().counters["prompt_tokens_cached"] > 0


# Usage and metrics (5.6).


@both_depths
def test_cached_plus_computed_is_the_prompt_plus_what_was_replayed(asynchronous: bool) -> None:
    """Invariant 36: of each request, and of the engine over all of them."""
    engine = small(asynchronous=asynchronous)
    ids = text(70)
    sizes = [40, 70, 64, 50, 3]
    cached = replayed = 0
    for i, size in enumerate(sizes):
        output = run(engine, request(f"r{i}", ids[:size], 2))[f"r{i}"]
        rows = sum(num_rows for _, num_rows, _ in fed(engine, f"r{i}"))
        hit = output.num_cached_tokens + (output.num_cached_tokens == size - 1 and size > 3)
        assert hit + rows == size + output.num_replayed_tokens
        cached, replayed = cached + hit, replayed + output.num_replayed_tokens
    counters = engine.stats().counters
    assert counters["prefix_cache_queries"] == counters["prompt_tokens"] == sum(sizes)
    assert counters["prefix_cache_hits"] == cached == 32 + 64 + 48
    assert counters["prompt_tokens_cached"] == 32 + 63 + 48
    assert counters["replayed_tokens"] == replayed == 3 * WINDOW
    assert counters["computed_tokens"] == sum(sizes) - cached
    num_decodes = len(sizes)
    assert counters["upper_rows"] == 4 * WINDOW + 3 + num_decodes


def test_evicted_and_cached_pages_are_counted() -> None:
    engine = small(num_pages=5)
    run(engine, request("a", text(48), 1))
    assert engine.stats().num_cached_pages == 3
    run(engine, request("b", text(60, seed=1), 1))
    stats = engine.stats()
    assert stats.counters["evicted_pages"] == 3
    assert (stats.num_free_pages, stats.num_cached_pages) == (4, 3)


def test_the_page_size_is_reported_as_it_is() -> None:
    """vLLM 51163: not the smallest of several groups."""
    stats = small().stats()
    assert (stats.page_size, stats.num_pages, stats.max_model_len) == (PAGE, 32, 2048)


# Exact mode (2.8).


@both_depths
def test_a_branch_after_the_prompt_hits_at_the_prompts_end(asynchronous: bool) -> None:
    engine = small(replace(EXACT, snapshot_interval=0), asynchronous=asynchronous)
    ids = text(40)
    run(engine, request("a", ids, 30))
    assert run(engine, request("b", [*ids, 30, 31], 4))["b"].num_cached_tokens == 32


@both_depths
@pytest.mark.parametrize("num_answer", [1, 7, 8, 9, 10, 23, 24, 25, 26])
def test_the_next_turn_hits_at_the_end_of_the_last_one(num_answer: int, asynchronous: bool) -> None:
    """Also where the answer ends a token before, at and behind a boundary."""
    engine = small(replace(EXACT, snapshot_interval=0), asynchronous=asynchronous)
    turn = [*text(40), *expected_tokens(text(40), num_answer)]
    run(engine, request("a", text(40), num_answer))
    hit = (len(turn) - 1) // PAGE * PAGE  # the last token was never fed
    assert run(engine, request("b", [*turn, 30], 4))["b"].num_cached_tokens == hit


def test_where_two_texts_part_a_third_one_hits() -> None:
    engine = small(replace(EXACT, snapshot_interval=0))
    shared = text(40)
    cached = []
    for i in range(3):
        output = run(engine, request("r", shared + text(40, seed=i + 1), 1))["r"]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 32]


@pytest.mark.parametrize(("interval", "cached"), [(0, 0), (20, 64), (32, 64), (48, 48)])
def test_a_long_prompt_can_be_hit_at_every_interval(interval: int, cached: int) -> None:
    engine = small(replace(EXACT, snapshot_interval=interval))
    run(engine, request("a", text(130), 1))
    output = run(engine, request("b", text(130)[:70] + text(20, seed=1), 1))["b"]
    assert output.num_cached_tokens == cached


def test_few_boundaries_are_saved() -> None:
    """vLLM PR 43447: one at the prompt's end and one a turn's end, not one a page."""
    engine = small(replace(EXACT, snapshot_interval=0))
    run(engine, request("a", text(130), 40))
    assert engine.cache.num_snapshots == 2


@both_modes
@both_depths
def test_a_long_session_hits_every_turn(policy: ReplayPolicy, asynchronous: bool) -> None:
    """SGLang 35129 and vLLM 42948: with others in between, and a cache that is always full."""
    engine = small(policy, num_pages=41, num_slots=4, asynchronous=asynchronous)
    ids, known = text(30), 0
    for turn in range(14):
        others = [request(f"other{i}", text(25, seed=100 * turn + i), 6) for i in range(2)]
        output = run(engine, request("turn", ids, 11), *others)["turn"]
        assert output.num_cached_tokens == known // PAGE * PAGE
        known = len(ids) + 10  # the answer's last token was never fed
        ids += expected_tokens(ids, 11) + text(7, seed=turn)
    assert engine.stats().counters["evicted_pages"] > 0


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])
def test_item_90_exact_mode_answers_alike_with_and_without_caching(num_tokens: int) -> None:
    """Invariant 9."""
    cached, uncached = small(EXACT), small(EXACT, prefix_caching=False)
    for _ in range(2):
        turn = request("a", text(num_tokens), 20)
        run(cached, turn)  # which compares with what it gets alone
        assert run(uncached, turn)["a"].num_cached_tokens == 0
    assert cached.stats().counters["prompt_tokens_cached"] > 0 or num_tokens <= PAGE


# Salts, reset, hot slots.


@both_modes
def test_c59_salts_share_nothing(policy: ReplayPolicy) -> None:
    """Invariant 11."""
    engine = small(policy)
    turns = [replace(request("a", text(40), 1), cache_salt=salt) for salt in (None, "x", "y", "x")]
    cached = [run(engine, turn)["a"].num_cached_tokens for turn in turns]
    assert cached == [0, 0, 0, 32]


@both_modes
@both_depths
def test_after_a_reset_nothing_older_is_found(policy: ReplayPolicy, asynchronous: bool) -> None:
    engine = small(policy, asynchronous=asynchronous)
    engine.add(request("running", text(40), 20))
    engine.step()
    assert not engine.reset_prefix_cache()  # what runs keeps its pages
    while engine.has_work:
        engine.step()
    assert run(engine, request("a", text(40), 1))["a"].num_cached_tokens == 0
    assert engine.reset_prefix_cache()


def turn_of(name: str, ids: list[int], max_tokens: int = 6, session: str = "s") -> EngineRequest:
    return replace(request(name, ids, max_tokens), session_key=session)


@both_modes
@both_depths
@pytest.mark.parametrize("num_new", [1, 5, 20])
def test_the_next_turn_of_a_hot_session_feeds_its_new_tokens_only(
    num_new: int, asynchronous: bool, policy: ReplayPolicy
) -> None:
    """cache-and-scheduling 4.6: not even the tail of the last page is computed again."""
    engine = small(policy, hot_slots=2, asynchronous=asynchronous)
    ids = text(30)
    run(engine, turn_of("a", ids))
    known = len(ids) + 5  # the answer's last token was never fed
    ids += expected_tokens(ids, 6) + text(num_new, seed=1)
    output = run(engine, turn_of("b", ids))["b"]
    assert (output.num_cached_tokens, output.num_replayed_tokens) == (known, 0)
    assert fed(engine, "b")[0][0] == known
    assert sum(num_rows for _, num_rows, _ in fed(engine, "b")) == num_new + 1
    assert sum(upper for *_, upper in fed(engine, "b")) == (
        min(num_new + 1, WINDOW) if policy.upper else num_new + 1
    )


@pytest.mark.parametrize("change", ["token", "session", "salt"])
def test_a_hot_slot_serves_its_own_text_session_and_salt_only(change: str) -> None:
    engine = small(hot_slots=2)
    ids = text(40)
    run(engine, turn_of("a", ids))
    turn = turn_of("b", ids + expected_tokens(ids, 6) + [30])
    if change == "token":
        prompt = list(turn.prompt_token_ids)
        prompt[42] = FIRST_ID if prompt[42] != FIRST_ID else FIRST_ID + 1
        turn = replace(turn, prompt_token_ids=tuple(prompt))
    elif change == "session":
        turn = replace(turn, session_key="t")
    else:
        turn = replace(turn, cache_salt="x")
    assert run(engine, turn)["b"].num_cached_tokens == (0 if change == "salt" else 32)


def test_hot_slots_are_dropped_before_anybody_waits_or_is_preempted() -> None:
    engine = small(hot_slots=3, num_pages=7, num_slots=4)
    for name in "abc":
        run(engine, turn_of(name, text(20, seed=ord(name)), session=name))
    assert engine.stats().num_free_pages == 0
    assert engine.cache.num_hot_slots == 3
    run(engine, request("large", text(70), 10))
    assert engine.stats().counters["num_preemptions"] == 0
    assert engine.cache.num_hot_slots == 0


def test_a_hot_session_that_needs_more_pages_takes_those_of_another() -> None:
    """Its own slot is hot and every page is held by hot slots: it once waited for ever."""
    engine = small(hot_slots=2, num_pages=6, num_slots=4)
    ids = text(28)
    run(engine, turn_of("a", ids, session="a"), turn_of("b", text(28, seed=1), session="b"))
    ids += expected_tokens(ids, 6) + text(20, seed=2)
    assert run(engine, turn_of("c", ids, session="a"))["c"].num_cached_tokens >= 32


def test_a_hot_slot_is_kept_where_dropping_it_would_not_help() -> None:
    """cache-and-scheduling 2.6 and 5.5: the arithmetic first."""
    engine = small(hot_slots=1, num_pages=9, num_slots=4)
    run(engine, turn_of("a", text(20)))
    engine.add(request("running", text(60, seed=1), 30))
    engine.step()
    engine.add(request("large", text(60, seed=2), 30))
    engine.step()
    assert engine.stats().num_waiting == 1
    assert engine.cache.num_hot_slots == 1
