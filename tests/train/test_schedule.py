"""Every row has one giver and one taker, whichever side is asked."""

from __future__ import annotations

import pytest

from draftsmith.train.schedule import drafter_of, rows_of_drafter, rows_of_target, target_of


@pytest.mark.parametrize("first", [0, 7, 30])
@pytest.mark.parametrize("targets", [1, 2, 3, 5])
@pytest.mark.parametrize("drafters", [1, 2, 3, 6])
def test_both_sides_name_the_same_rows_as_dealing_them_out_one_by_one(targets, drafters, first):
    per_step, steps = 6, 4
    given: list[list[int]] = [[] for _ in range(targets)]
    taken: list[list[list[int]]] = [[[] for _ in range(drafters)] for _ in range(steps)]
    target = drafter = 0  # whose turn it is
    for g in range(first + steps * per_step):
        assert (target_of(g, targets), drafter_of(g, drafters)) == (target, drafter)
        if g >= first:
            given[target].append(g)
            taken[(g - first) // per_step][drafter].append(g)
        target, drafter = (target + 1) % targets, (drafter + 1) % drafters
    last = first + steps * per_step
    assert [list(rows_of_target(first, last, targets, i)) for i in range(targets)] == given
    for step, shares in enumerate(taken):
        begin = first + step * per_step
        assert [rows_of_drafter(begin, per_step, drafters, i) for i in range(drafters)] == shares
        assert {len(share) for share in shares} == {per_step // drafters}
