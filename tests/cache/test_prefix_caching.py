"""What a lookup finds, rule by rule; tests that name a report keep its failure away (2.7)."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import pytest

from leadline.cache.manager import CacheManager, Hit
from leadline.cache.sizing import CacheSize
from leadline.core.request import Request, SamplingParams, SnapshotKind

PAGE_SIZE = 256
_names = itertools.count()


def make_cache(
    num_pages: int = 16,
    *,
    exact: bool = False,
    num_snapshots: int = 4,
    hot_slots: int = 0,
    root: bytes = b"",
) -> CacheManager:
    return CacheManager(
        CacheSize(num_pages + 1, 5, PAGE_SIZE, num_snapshots if exact else 0),
        root=root,
        enable_prefix_caching=True,
        needs_snapshot=exact,
        hot_slots=hot_slots,
    )


def make_request(
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    session: str | None = None,
    extras: dict[int, bytes] | None = None,
) -> Request:
    return Request(
        f"r{next(_names)}",
        array("i", tokens),
        len(tokens),
        SamplingParams(),
        arrival=0.0,
        cache_salt=salt,
        session_key=session,
        page_extras=extras or {},
    )


def start(cache: CacheManager, request: Request, cap: int | None = None) -> Hit:
    """Look up, admit and take pages for the whole text."""
    hit = cache.lookup(request, len(request.tokens) if cap is None else cap)
    cache.admit(request, hit)
    request.cached = hit.num_tokens
    request.fed = request.prefill_end = len(request.tokens)
    assert cache.grow(request, request.fed)
    return hit


def end(cache: CacheManager, request: Request) -> None:
    """Confirm everything and let go."""
    cache.commit(request, request.fed)
    cache.release(request)
    cache.check_integrity([])


def serve(cache: CacheManager, tokens: Sequence[int], salt: str | None = None) -> Hit:
    """A request from lookup to release; in exact mode with a snapshot of its prompt's end."""
    request = make_request(tokens, salt=salt)
    hit = start(cache, request, cap_of(cache, len(tokens)))
    boundary = cap_of(cache, len(tokens)) // PAGE_SIZE * PAGE_SIZE
    if cache._needs_snapshot and boundary:
        cache.save_snapshot(request, boundary, SnapshotKind.PROMPT_END)
    end(cache, request)
    return hit


def found(cache: CacheManager, tokens: Sequence[int], salt: str | None = None) -> int:
    """Tokens that a lookup finds now."""
    request = make_request(tokens, salt=salt)
    return cache.lookup(request, cap_of(cache, len(tokens))).num_tokens


def cap_of(cache: CacheManager, num_tokens: int) -> int:
    """A restored slot cannot give the logits of its own last token again; a replay can (2.4)."""
    return num_tokens - 1 if cache._needs_snapshot else num_tokens


BOTH_MODES = pytest.mark.parametrize("exact", [False, True], ids=["replay", "exact"])


# Reports.


@BOTH_MODES
@pytest.mark.parametrize("over", [0, 1, 255], ids=["aligned", "one more", "one short"])
def test_vllm_54713_an_aligned_prompt_sent_again_hits_its_last_boundary(
    exact: bool, over: int
) -> None:
    cache = make_cache(exact=exact)
    tokens = range(2 * PAGE_SIZE + over)
    serve(cache, tokens)
    expected = cap_of(cache, len(tokens)) // PAGE_SIZE * PAGE_SIZE
    assert serve(cache, tokens).num_tokens == expected > 0


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 511, 512, 513, 1024], ids=str)
def test_vllm_51041_what_commit_keeps_is_what_lookup_looks_for(num_tokens: int) -> None:
    cache = make_cache()
    request = make_request(range(num_tokens))
    start(cache, request)
    cache.commit(request, num_tokens)
    assert found(cache, range(num_tokens)) == request.committed * PAGE_SIZE
    assert request.committed == num_tokens // PAGE_SIZE


def test_vllm_42948_private_state_never_evicts_a_page() -> None:
    cache = make_cache(num_pages=4, exact=True, num_snapshots=2)
    prompt = range(2 * PAGE_SIZE + 10)
    serve(cache, prompt)
    for n in range(20):  # slots come and go, snapshots are taken, one page each
        serve(cache, [n] * 10)
        request = make_request([n] * 20)
        start(cache, request)
        assert cache.num_free_pages >= 3
        cache.release(request)
    assert found(cache, prompt) == 2 * PAGE_SIZE
    assert cache.num_evicted_pages == 0


def test_vllm_43447_snapshots_take_no_pages_and_stay_within_their_share() -> None:
    cache = make_cache(num_pages=16, exact=True, num_snapshots=3)
    request = make_request(range(10 * PAGE_SIZE))
    start(cache, request)
    before = cache.num_free_pages
    for boundary in range(PAGE_SIZE, 10 * PAGE_SIZE, PAGE_SIZE):
        cache.save_snapshot(request, boundary, SnapshotKind.INTERVAL)
        cache.commit(request, boundary)
    assert cache.num_free_pages == before
    assert (cache.num_snapshots, cache.num_evicted_snapshots) == (3, 6)


@BOTH_MODES
@pytest.mark.parametrize("num_common", [1, 2, 3, 5], ids=str)
def test_vllm_ascend_16270_every_single_page_can_be_a_hit(exact: bool, num_common: int) -> None:
    cache = make_cache(exact=exact)
    common = range(num_common * PAGE_SIZE)
    serve(cache, [*common, 7])
    assert found(cache, [*common, 8, 9]) == num_common * PAGE_SIZE


def test_vllm_51163_sizes_are_reported_as_they_are() -> None:
    cache = make_cache(num_pages=16, exact=True, num_snapshots=4)
    assert (cache.page_size, cache.num_pages, cache.num_slots) == (256, 16, 4)
    serve(cache, range(3 * PAGE_SIZE + 1))
    assert (cache.num_free_pages, cache.num_cached_pages, cache.num_snapshots) == (16, 3, 1)


def test_atom_1417_exact_mode_hits_nothing_without_a_snapshot_of_the_boundary() -> None:
    cache = make_cache(exact=True)
    request = make_request(range(4 * PAGE_SIZE))
    start(cache, request)
    cache.save_snapshot(request, 2 * PAGE_SIZE, SnapshotKind.INTERVAL)
    end(cache, request)
    hit = cache.lookup(make_request(range(4 * PAGE_SIZE)), 4 * PAGE_SIZE - 1)
    assert hit.num_tokens == 2 * PAGE_SIZE
    assert hit.snapshot is not None
    assert hit.snapshot.boundary == hit.num_tokens
    assert hit.snapshot.slot > cache.num_slots
    assert hit.num_indexed_tokens == 3 * PAGE_SIZE  # where a junction's snapshot is worth taking


def test_sglang_35129_every_turn_of_a_long_session_hits_in_exact_mode() -> None:
    cache = make_cache(num_pages=64, exact=True, num_snapshots=3)
    tokens = list(range(300))
    for turn in range(20):
        request = make_request(tokens)
        hit = start(cache, request, len(tokens) - 1)
        if turn:
            # The last boundary that the turn before had reached when it ended.
            assert hit.num_tokens == (len(tokens) - 40) // PAGE_SIZE * PAGE_SIZE
        boundary = (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE
        cache.save_snapshot(request, boundary, SnapshotKind.PROMPT_END)
        cache.commit(request, request.fed)
        for _ in range(350):
            request.tokens.append(turn)
            request.fed += 1
            assert cache.grow(request, request.fed)
            if request.fed % PAGE_SIZE == 0:
                cache.save_snapshot(request, request.fed, SnapshotKind.TURN_END)
            cache.commit(request, request.fed)
        cache.release(request)
        cache.check_integrity([])
        tokens = [*request.tokens, *range(1000, 1040)]


def test_vllm_32802_a_released_chain_loses_its_deepest_page_first() -> None:
    cache = make_cache(num_pages=4)
    chain = range(4 * PAGE_SIZE)
    serve(cache, chain)
    for num_left in (3, 2, 1, 0):
        request = make_request([num_left])
        cache.admit(request, Hit())
        request.fed = (4 - num_left) * PAGE_SIZE
        assert cache.grow(request, request.fed)
        assert found(cache, chain) == num_left * PAGE_SIZE
        cache.release(request)
    assert cache.num_evicted_pages == 4


# Identity.


@BOTH_MODES
def test_salts_never_share(exact: bool) -> None:
    cache = make_cache(exact=exact)
    prompt = range(2 * PAGE_SIZE + 1)
    for salt in (None, "a", "b", ""):
        assert serve(cache, prompt, salt).num_tokens == 0
    for salt in (None, "a", "b", ""):
        assert serve(cache, prompt, salt).num_tokens == 2 * PAGE_SIZE


def test_images_part_texts_of_equal_ids_from_their_page_on() -> None:
    cache = make_cache()
    tokens = range(3 * PAGE_SIZE)
    request = make_request(tokens, extras={1: b"cat"})
    start(cache, request)
    end(cache, request)
    for extras, num_pages in (({1: b"cat"}, 3), ({1: b"dog"}, 1), ({}, 1), ({0: b"cat"}, 0)):
        other = make_request(tokens, extras=extras)
        assert cache.lookup(other, len(tokens)).num_tokens == num_pages * PAGE_SIZE


def test_engines_of_different_roots_name_pages_differently() -> None:
    digests = []
    for root in (b"exact", b"replay"):
        request = make_request(range(PAGE_SIZE))
        make_cache(root=root).lookup(request, PAGE_SIZE)
        digests += request.digests
    assert len(set(digests)) == 2


# Commit and eviction.


def test_only_confirmed_full_pages_are_found() -> None:
    cache = make_cache()
    request = make_request(range(3 * PAGE_SIZE))
    start(cache, request)
    for confirmed, num_found in ((255, 0), (256, 1), (700, 2), (768, 3)):
        cache.commit(request, confirmed)
        assert found(cache, range(3 * PAGE_SIZE)) == num_found * PAGE_SIZE
        cache.check_integrity([request])


def test_of_two_equal_prompts_the_first_is_indexed_and_both_keep_their_pages() -> None:
    cache = make_cache(num_pages=4)
    first, second = make_request(range(512)), make_request(range(512))
    start(cache, first)
    start(cache, second)
    pages = [list(first.pages), list(second.pages)]
    cache.commit(second, 512)
    cache.commit(first, 512)
    assert [list(first.pages), list(second.pages)] == pages
    hit = cache.lookup(make_request(range(512)), 512)
    assert list(hit.pages) == list(second.pages)
    cache.release(first)
    assert (cache.num_free_pages, cache.num_cached_pages) == (2, 0)
    cache.release(second)
    assert (cache.num_free_pages, cache.num_cached_pages) == (4, 2)


def test_pages_of_a_hit_are_pinned_and_not_counted_as_free_for_it() -> None:
    cache = make_cache(num_pages=4)
    serve(cache, range(2 * PAGE_SIZE))
    request = make_request(range(2 * PAGE_SIZE + 5))
    hit = cache.lookup(request, len(request.tokens))
    assert (cache.num_free_pages, cache.num_free_pages_beside(hit)) == (4, 2)
    cache.admit(request, hit)
    assert cache.num_free_pages == 2
    other = make_request([0])
    cache.admit(other, Hit())
    assert not cache.grow(other, 3 * PAGE_SIZE)
    assert cache.grow(other, 2 * PAGE_SIZE)
    assert cache.num_evicted_pages == 0


def test_a_hit_makes_its_pages_the_youngest() -> None:
    cache = make_cache(num_pages=4)
    old, new = [1] * 512, [2] * 512
    serve(cache, old)
    serve(cache, new)
    serve(cache, old)
    request = make_request([0])
    cache.admit(request, Hit())
    assert cache.grow(request, 2 * PAGE_SIZE)
    assert (found(cache, old), found(cache, new)) == (512, 0)


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    cache = make_cache()
    request = make_request(range(600))
    start(cache, request)
    cache.commit(request, 600)
    cache.release(request)
    assert cache.lookup(request, 600).num_tokens == 512


# Reset.


def test_a_reset_forgets_what_nobody_holds_and_what_somebody_holds() -> None:
    cache = make_cache(exact=True)
    serve(cache, range(600))
    assert cache.reset_prefix_cache()
    assert (found(cache, range(600)), cache.num_snapshots) == (0, 0)
    running = make_request(range(600))
    start(cache, running, 599)
    cache.commit(running, 512)
    assert not cache.reset_prefix_cache()
    assert found(cache, range(600)) == 0
    cache.check_integrity([running])


def test_what_an_older_request_adds_after_a_reset_is_not_found_by_newer_ones() -> None:
    cache = make_cache()
    running = make_request(range(1024))
    start(cache, running)
    cache.commit(running, 512)
    waiting = make_request(range(1024))
    assert cache.lookup(waiting, 1024).num_tokens == 512
    cache.reset_prefix_cache()
    newer = make_request(range(512))  # the start of the same text, computed anew
    start(cache, newer)
    cache.commit(newer, 512)
    cache.release(newer)
    end(cache, running)
    assert found(cache, range(1024)) == 512
    assert cache.lookup(waiting, 1024).num_tokens == 512


def test_a_cache_that_is_off_finds_and_keeps_nothing() -> None:
    cache = CacheManager(CacheSize(9, 3, PAGE_SIZE))
    serve(cache, range(600))
    assert (found(cache, range(600)), cache.num_cached_pages) == (0, 0)


# Snapshots.


def test_a_snapshot_dies_with_its_page_and_a_page_outlives_its_snapshot() -> None:
    cache = make_cache(num_pages=4, exact=True, num_snapshots=1)
    serve(cache, [1] * 300)
    serve(cache, [2] * 300)  # takes the one row
    hit = cache.lookup(make_request([1] * 300), 299)
    assert (hit.num_tokens, hit.num_indexed_tokens) == (0, 256)
    request = make_request([0])
    cache.admit(request, Hit())
    assert cache.grow(request, 4 * PAGE_SIZE)
    assert cache.num_snapshots == 0


def test_a_snapshot_waits_until_its_page_is_committed() -> None:
    cache = make_cache(exact=True)
    request = make_request(range(600))
    start(cache, request, 599)
    assert cache.save_snapshot(request, 512, SnapshotKind.PROMPT_END) is not None
    cache.commit(request, 511)
    assert cache.num_snapshots == 0
    cache.commit(request, 512)
    assert found(cache, range(600)) == 512


def test_a_snapshot_of_tokens_that_were_never_confirmed_is_given_back() -> None:
    cache = make_cache(exact=True, num_snapshots=1)
    request = make_request(range(600))
    start(cache, request, 599)
    cache.save_snapshot(request, 512, SnapshotKind.TURN_END)
    cache.commit(request, 300)
    cache.release(request)
    cache.check_integrity([])
    assert cache.num_snapshots == 0


def test_a_boundary_that_has_a_snapshot_gets_no_second_one() -> None:
    cache = make_cache(exact=True)
    serve(cache, range(300))
    request = make_request(range(300))
    start(cache, request, 299)
    assert cache.save_snapshot(request, 256, SnapshotKind.PROMPT_END) is None


@pytest.mark.parametrize("again", ["hit", "saved"])
def test_a_snapshot_that_is_wanted_again_outlives_newer_ones(again: str) -> None:
    cache = make_cache(exact=True, num_snapshots=2)
    serve(cache, [1] * 300)
    serve(cache, [2] * 300)
    request = make_request([1] * 300)
    hit = cache.lookup(request, 299)
    if again == "hit":
        cache.admit(request, hit)
    else:
        cache.save_snapshot(request, 256, SnapshotKind.PROMPT_END)
    cache.release(request)
    serve(cache, [3] * 300)
    assert [found(cache, [n] * 300) for n in (1, 2, 3)] == [256, 0, 256]


def test_a_long_answer_leaves_one_snapshot_behind() -> None:
    cache = make_cache(exact=True)
    request = make_request(range(4 * PAGE_SIZE))
    start(cache, request)
    for boundary in range(PAGE_SIZE, 4 * PAGE_SIZE, PAGE_SIZE):
        cache.save_snapshot(request, boundary, SnapshotKind.TURN_END)
        cache.commit(request, boundary + 1)
        assert cache.num_snapshots == 0
    cache.release(request)
    assert cache.num_snapshots == 1
    assert found(cache, range(4 * PAGE_SIZE)) == 3 * PAGE_SIZE


# Hot slots.


def keep(cache: CacheManager, tokens: Sequence[int], session: str) -> int:
    """A finished request whose slot stays hot; its last token was sampled and never fed."""
    request = make_request(tokens, session=session)
    start(cache, request)
    request.tokens.append(99)
    cache.commit(request, request.fed)
    slot = request.slot
    assert cache.keep_hot(request, request.fed)
    cache.check_integrity([])
    return slot


def test_the_next_turn_gets_the_slot_and_every_page_of_its_session() -> None:
    cache = make_cache(hot_slots=1)
    slot = keep(cache, range(300), "s")
    request = make_request([*range(300), 99, 5], session="s")
    hot = cache.lookup_hot(request)
    assert hot is not None
    assert hot.confirmed == 300
    cache.take_hot(request, hot)
    request.fed = 300
    assert (request.slot, len(request.pages), request.committed) == (slot, 2, 1)
    assert cache.num_hot_slots == 0
    cache.check_integrity([request])


@pytest.mark.parametrize(
    "request_",
    [
        make_request([*range(299), 0, 99, 5], session="s"),
        make_request(range(300), session="s"),
        make_request([*range(300), 99, 5], session="t"),
        make_request([*range(300), 99, 5]),
        make_request([*range(300), 99, 5], session="s", salt="tenant"),
        make_request([*range(300), 99, 5], session="s", extras={0: b"cat"}),
    ],
    ids=["other token", "nothing new", "other session", "no session", "other salt", "image"],
)
def test_another_text_or_session_gets_no_hot_slot(request_: Request) -> None:
    cache = make_cache(hot_slots=1)
    keep(cache, range(300), "s")
    assert cache.lookup_hot(request_) is None


def test_hot_slots_are_bounded_and_go_oldest_first() -> None:
    cache = make_cache(hot_slots=2)
    for session in "stu":
        keep(cache, [ord(session)] * 300, session)
    assert cache.num_hot_slots == 2
    hot = [
        cache.lookup_hot(make_request([ord(session)] * 301, session=session)) for session in "stu"
    ]
    assert [h is not None for h in hot] == [False, True, True]


def test_hot_slots_give_way_when_slots_or_pages_are_short() -> None:
    cache = make_cache(num_pages=8, hot_slots=4)
    for session in "stuv":
        keep(cache, [ord(session)] * 300, session)
    assert (cache.num_free_slots, cache.num_free_pages) == (4, 0)
    request = make_request([0])
    cache.admit(request, Hit())
    assert cache.num_hot_slots == 3
    request.fed = 3 * PAGE_SIZE
    assert cache.grow(request, request.fed)
    assert cache.num_hot_slots == 2
    cache.check_integrity([request])


def test_a_slot_from_before_a_reset_is_not_kept_hot() -> None:
    cache = make_cache(hot_slots=1)
    request = make_request(range(300), session="s")
    start(cache, request)
    cache.reset_prefix_cache()
    assert not cache.keep_hot(request, 300)
