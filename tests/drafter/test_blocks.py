"""Blocks against a version that asks every question of every slot, and each known fault on a row made for it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from helpers_train import make_row, random_row, sees_block, sees_context

from draftsmith.drafter.blocks import block_interval, build_blocks, context_interval, default_gamma, slot_weights
from draftsmith.records import PackedRow

MASK = 39


def slow_blocks(row: PackedRow, block_size: int, gamma: float, blocks: int) -> dict[str, list]:
    out: dict[str, list] = {"inputs": [], "positions": [], "labels": [], "counts": [], "weights": []}
    for i in range(blocks):
        a, used = int(row.anchors[i]), i < row.anchor_count
        lines: dict[str, list] = {key: [] for key in out}
        for k in range(block_size):
            lines["inputs"].append(int(row.tokens[a]) if used and k == 0 else MASK)
            lines["positions"].append((int(row.positions[a]) if used else 0) + k)
            trained = (
                used
                and k >= 1
                and a + k < len(row.tokens)
                and bool(row.document[a + k] == row.document[a])
                and bool(row.supervised[a + k])
            )
            lines["counts"].append(trained)
            lines["labels"].append(int(row.tokens[a + k]) if trained else 0)
            lines["weights"].append(math.exp(-(k - 1) / gamma) if trained else 0.0)
        for key, line in lines.items():
            out[key].append(line)
    return out


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("block_size", [2, 4, 7, 8, 16])
def test_blocks_equal_the_slow_version(block_size, trim):
    for seed in range(12):
        row = random_row(seed, slots=12, most_anchors=(None, 5, 0)[seed % 3])
        made = build_blocks(row, block_size, MASK, 4.0, trim=trim)
        blocks = row.anchor_count if trim else len(row.anchors)
        slow = slow_blocks(row, block_size, 4.0, blocks)
        assert made.anchors == row.anchor_count
        for key, values in slow.items():
            ours = getattr(made, key)
            assert ours.shape == (blocks, block_size)
            if key == "weights":
                np.testing.assert_allclose(ours, np.array(values).reshape(ours.shape), rtol=1e-6)
            else:
                assert ours.tolist() == values, (key, seed)


def test_a_block_predicts_the_tokens_that_follow_its_anchor_without_a_shift():
    row = make_row([20], [(5, 20)], 24, [8], 1)
    made = build_blocks(row, 4, MASK, 4.0, trim=True)
    assert made.inputs[0].tolist() == [row.tokens[8], MASK, MASK, MASK]
    assert made.labels[0].tolist() == [0, row.tokens[9], row.tokens[10], row.tokens[11]]
    assert made.counts[0].tolist() == [False, True, True, True]


def test_labels_do_not_run_into_the_next_document():
    row = make_row([10, 10], [(4, 10), (10, 20)], 24, [8], 1)
    made = build_blocks(row, 4, MASK, 4.0, trim=True)
    assert made.counts[0].tolist() == [False, True, False, False]
    assert made.labels[0].tolist() == [0, row.tokens[9], 0, 0] and made.weights[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("tail", [0, 2])
def test_labels_end_with_the_row(tail):
    row = make_row([12], [(4, 12)], 12 + tail, [10], 1)
    made = build_blocks(row, 8, MASK, 4.0, trim=True)
    assert made.counts[0].tolist() == [False, True] + [False] * 6


def test_slot_0_is_never_trained():
    for seed in range(6):
        made = build_blocks(random_row(seed), 4, MASK, 4.0, trim=False)
        assert not made.counts[:, 0].any() and not made.weights[:, 0].any() and not made.labels[:, 0].any()


def test_positions_are_those_of_the_document():
    row = make_row([10, 12], [(2, 10), (12, 22)], 24, [6, 15], 2)
    made = build_blocks(row, 4, MASK, 4.0, trim=True)
    assert made.positions.tolist() == [[6, 7, 8, 9], [5, 6, 7, 8]]
    assert made.low.tolist() == [0, 10] and made.high.tolist() == [6, 15]


def test_a_gap_between_two_answers_does_not_count_but_what_follows_does():
    row = make_row([20], [(4, 8), (10, 16)], 20, [6], 1)
    made = build_blocks(row, 8, MASK, 4.0, trim=True)  # a + k: 7 | 8 9 | 10 11 12 13
    assert made.counts[0].tolist() == [False, True, False, False, True, True, True, True]
    assert made.labels[0, 4] == row.tokens[10]
    assert made.weights[0, 4] == pytest.approx(
        math.exp(-3 / 4), rel=1e-6
    )  # by slot, not by rank among those that count


def test_weights_and_gammas_of_the_paper():
    assert [default_gamma(b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert [default_gamma(b) for b in (2, 4, 32)] == [4.0, 4.0, 7.0]
    assert slot_weights(4, 4.0).tolist() == pytest.approx([0, 1, math.exp(-1 / 4), math.exp(-2 / 4)])
    assert slot_weights(16, 7.0)[15] == pytest.approx(math.exp(-2))


def test_unused_slots_hold_masks_count_nowhere_and_see_themselves_only():
    row = make_row([10, 10], [(4, 10), (13, 20)], 24, [5, 14], 4)
    made = build_blocks(row, 4, MASK, 4.0, trim=False)
    assert made.inputs[2:].tolist() == [[MASK] * 4] * 2 and made.positions[2:].tolist() == [[0, 1, 2, 3]] * 2
    assert not made.counts[2:].any() and not made.weights[2:].any() and not made.labels[2:].any()
    for window in (None, 3):
        lo, hi = context_interval(made.low, made.high, 4, window)
        assert (lo[8:] == hi[8:]).all()
    trimmed = build_blocks(row, 4, MASK, 4.0, trim=True)
    for field in dataclasses.fields(made):
        if field.name != "anchors":
            assert (getattr(made, field.name)[:2] == getattr(trimmed, field.name)).all()


def test_a_row_of_padding_alone_has_blocks_that_count_nowhere():
    row = make_row([], [], 16, [], 3)
    assert build_blocks(row, 4, MASK, 4.0, trim=True).inputs.shape == (0, 4)
    made = build_blocks(row, 4, MASK, 4.0, trim=False)
    assert made.anchors == 0 and not made.counts.any() and (made.high == 0).all() and (made.low == 0).all()


@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 1000])
@pytest.mark.parametrize("block_size", [4, 7])
def test_context_interval_is_the_rule(block_size, window):
    for seed in range(6):
        row = random_row(seed, most_anchors=8)
        made = build_blocks(row, block_size, MASK, 4.0, trim=False)
        lo, hi = context_interval(made.low, made.high, block_size, window)
        for q in range(len(lo)):
            block, slot = divmod(q, block_size)
            seen = [j for j in range(len(row.tokens)) if sees_context(row, block, slot, j, window)]
            assert seen == list(range(lo[q], hi[q])), (seed, block, slot)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 1000])
def test_block_interval_is_the_rule(window):
    lo, hi = block_interval(3, 7, window)
    for q in range(21):
        seen = [o for o in range(21) if sees_block(*divmod(q, 7), *divmod(o, 7), window)]
        assert seen == list(range(lo[q], hi[q]))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_of_a_shorter_block_nobody_sees_the_other_slots_and_all_see_something(window):
    lo, hi = block_interval(3, 7, window, sizes=np.array([7, 2, 4]))
    whole_lo, whole_hi = block_interval(3, 7, window)
    for q in range(21):
        first, real = q // 7 * 7, (7, 2, 4)[q // 7]
        assert first <= lo[q] < hi[q] <= first + real
        if q - first < real:
            assert (lo[q], hi[q]) == (whole_lo[q], min(whole_hi[q], first + real))


def test_overlapping_blocks_see_by_anchor_not_by_block_index():
    row = make_row([20], [(2, 20)], 20, [4, 5, 6, 12], 4)
    made = build_blocks(row, 8, MASK, 4.0, trim=True)
    lo, hi = context_interval(made.low, made.high, 8, None)
    assert hi.reshape(4, 8)[:, 0].tolist() == [4, 5, 6, 12] and (lo == 0).all()
