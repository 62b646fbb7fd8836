from __future__ import annotations

from itertools import pairwise

from leadline.engine.row_budget import RowBudget


def test_half_of_what_did_not_fit_is_tried_next_down_to_one_row() -> None:
    budget, tried = RowBudget(100), []
    for _ in range(8):
        tried.append(budget.rows)
        budget.shrink(budget.rows)
    assert tried == [100, 50, 25, 12, 6, 3, 1, 1]


def test_a_late_shortage_of_a_larger_step_does_not_widen_the_budget() -> None:
    budget = RowBudget(100)
    budget.shrink(10)
    budget.shrink(90)
    assert budget.rows == 5


def test_it_grows_slowly_to_what_it_was_and_by_what_steps_have_shown() -> None:
    budget = RowBudget(100)
    budget.shrink(40)
    seen = []
    while budget.rows < 100:
        seen.append(budget.rows)
        budget.grow(budget.rows)
    assert seen[0] == 20
    assert seen == sorted(seen)
    assert 64 < len(seen) < 320
    small = RowBudget(100)
    small.shrink(40)
    for _ in seen:
        small.grow(1)
    assert small.rows < 25
    budget.grow(1000)
    assert budget.rows == 100


def test_where_memory_stays_narrow_shortages_become_rare() -> None:
    """So a prompt of any length gets through that begins anew after each."""
    budget, went_well = RowBudget(100), 0
    between: list[int] = []
    while len(between) < 6:
        if budget.rows <= 10:
            budget.grow(budget.rows)
            went_well += 1
            continue
        budget.shrink(budget.rows)
        if went_well:
            between.append(went_well)
        went_well = 0
    assert all(later > 1.5 * earlier for earlier, later in pairwise(between))
