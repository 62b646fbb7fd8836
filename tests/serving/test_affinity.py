"""C58: turns of a conversation meet, and nobody is overloaded for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.serving.affinity import LOAD_FACTOR, place, prefix_key

IDLE = [0, 0, 0, 0]


def test_c58_all_turns_of_a_conversation_go_to_one_idle_rank() -> None:
    for session in range(50):
        assert len({place(f"session-{session}", IDLE) for _ in range(10)}) == 1


def test_c58_equal_prefixes_meet_without_a_key() -> None:
    head = list(range(256))
    first, second = (prefix_key([*head, *turn], 256) for turn in ([1], [2, 3]))
    assert place(first, IDLE) == place(second, IDLE)
    assert prefix_key([1, 23], 256) != prefix_key([12, 3], 256)


def test_keys_spread_evenly() -> None:
    counts = Counter(place(f"k{i}", IDLE) for i in range(4000))
    assert sorted(counts) == [0, 1, 2, 3]
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_a_replica_more_moves_its_own_keys_only() -> None:
    for i in range(500):
        before, after = place(f"k{i}", IDLE), place(f"k{i}", [*IDLE, 0])
        assert after in (before, 4)


@pytest.mark.parametrize("num_sessions", [1, 3, 40])
def test_a_popular_session_spills_and_its_overflow_meets_too(num_sessions: int) -> None:
    draw, loads = random.Random(1), [0] * 4
    for num_placed in range(1, 400):
        loads[place(f"s{draw.randrange(num_sessions)}", loads)] += 1
        assert max(loads) <= LOAD_FACTOR * num_placed / 4 + 1
    full = place("s0", IDLE)
    crowded = [100 if rank == full else 0 for rank in range(4)]
    assert len({place("s0", crowded) for _ in range(10)} - {full}) == 1


@given(st.text(), st.lists(st.integers(0, 1000), min_size=1, max_size=16))
def test_any_load_finds_a_place(key: str, loads: list[int]) -> None:
    assert 0 <= place(key, loads) < len(loads)
