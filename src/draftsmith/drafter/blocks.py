"""Blocks of a row: inputs, positions, labels, weights, and what each query may see.  Pure functions, no torch.

A anchor slots, B block size.  The block of anchor a is [token[a], MASK x (B - 1)] at positions pos[a] + 0..B-1; its
slot k predicts token[a + k] (no shift); slot 0 is never trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftsmith.records import PackedRow

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay by block size (paper, loss weighting); other sizes take the nearest."""


@dataclass(frozen=True)
class BlockBatch:
    """The blocks of one row.  Written by `build_blocks`; read by the drafter and the loss."""

    inputs: np.ndarray  # int64 [A, B]
    positions: np.ndarray  # int64 [A, B]
    labels: np.ndarray  # int64 [A, B], 0 where nothing counts
    counts: np.ndarray  # bool [A, B], slots that are trained
    weights: np.ndarray  # float32 [A, B], decay weights, 0 where nothing counts
    low: np.ndarray  # int64 [A], first visible context position of each block
    high: np.ndarray  # int64 [A], the anchor: context strictly before it is visible
    anchors: int
    """How many anchors count; they are the first ones."""


def default_gamma(block_size: int) -> float:
    return GAMMAS[min(GAMMAS, key=lambda b: (abs(b - block_size), b))]


def slot_weights(block_size: int, gamma: float) -> np.ndarray:
    """float64 [B]: 0 for slot 0, exp(-(k - 1) / gamma) for slot k."""
    k = np.arange(block_size)
    return np.where(k == 0, 0.0, np.exp(-(k - 1) / gamma))


def build_blocks(row: PackedRow, block_size: int, mask_token_id: int, gamma: float, *, trim: bool) -> BlockBatch:
    """Blocks of a row's anchors.  trim: leave unused slots out (an eager CPU run); else all A slots, fixed shape.

    An unused slot holds MASK tokens at positions from 0, sees its own block only and counts nowhere.
    """
    used = row.anchor_count
    anchors = row.anchors[:used] if trim else row.anchors
    slot = np.arange(block_size)
    valid = (np.arange(len(anchors)) < used)[:, None]
    at = anchors[:, None] + slot
    inside = at < len(row.tokens)
    at = np.where(inside, at, 0)
    same = row.document[at] == row.document[anchors][:, None]
    counts = valid & inside & same & row.supervised[at] & (slot > 0)
    inputs = np.full((len(anchors), block_size), mask_token_id, dtype=np.int64)
    inputs[:used, 0] = row.tokens[anchors[:used]]
    first = np.where(valid[:, 0], row.positions[anchors], 0)
    starts = np.array([*row.starts[:-1], 0])  # a row of padding alone has no document
    return BlockBatch(
        inputs=inputs,
        positions=first[:, None] + slot,
        labels=np.where(counts, row.tokens[at], 0),
        counts=counts,
        weights=np.where(counts, slot_weights(block_size, gamma), 0.0).astype(np.float32),
        low=np.where(valid[:, 0], starts[np.maximum(row.document[anchors], -1)], 0),
        high=np.where(valid[:, 0], anchors, 0),
        anchors=used,
    )


def context_interval(
    low: np.ndarray, high: np.ndarray, block_size: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Visible context [lo, hi) of every query, each int64 [A * B].

    Full layer: the block's document up to the anchor, exclusive.  Sliding layer: besides, at most window - 1 positions
    to the left of the query's own.
    """
    hi = np.repeat(high, block_size)
    lo = np.repeat(low, block_size)
    if window is not None:
        own = hi + np.tile(np.arange(block_size), len(high))
        lo = np.maximum(lo, own - (window - 1))
    return np.minimum(lo, hi), hi


def block_interval(
    blocks: int, block_size: int, window: int | None, sizes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Visible queries [lo, hi) of every query, counted over all blocks' slots, each int64 [A * B].

    Full layer: the whole own block, both directions.  Sliding layer: causal inside the block, within the window.
    sizes: int64 [blocks], slots that a block really has, as at the end of an answer; the others are seen by nobody, and
    see at least one slot: the softmax of nothing is NaN to some kernels.
    """
    slot = np.tile(np.arange(block_size), blocks)
    first = np.repeat(np.arange(blocks) * block_size, block_size)
    end = first + (block_size if sizes is None else np.repeat(sizes, block_size))
    if window is None:
        return first, end
    hi = np.minimum(first + slot + 1, end)
    return np.minimum(first + np.maximum(0, slot - (window - 1)), hi - 1), hi
