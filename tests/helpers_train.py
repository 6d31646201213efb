"""Made-up rows and specs, and the rules of a block written as slowly and plainly as they can be.

The rules here read documents and positions token by token; the package computes intervals from anchors.  Neither is
derived from the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from draftsmith.records import DrafterSpec, PackedRow

SPEC = DrafterSpec(
    hidden_size=32,
    vocab_size=40,
    num_layers=2,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=512,
    attention_bias=False,
    block_size=4,
    mask_token_id=39,
    feature_layers=(1, 3),
    num_target_layers=6,
    layer_types=("full", "full"),
    sliding_window=None,
    initializer_range=0.3,
)


def make_spec(**changes: Any) -> DrafterSpec:
    """SPEC with changes; `layer_types` may be one word for all layers."""
    types = changes.get("layer_types")
    layers = changes.get("num_layers", SPEC.num_layers)
    if isinstance(types, str) or types is None:
        changes["layer_types"] = (types or "full",) * layers
    return dataclasses.replace(SPEC, **changes)


def may_be_anchor(document: np.ndarray, supervised: np.ndarray, a: int) -> bool:
    """The token and the next one were both written by the target, in one document."""
    if a + 1 >= len(document) or document[a] < 0 or document[a] != document[a + 1]:
        return False
    return bool(supervised[a] and supervised[a + 1])


def make_row(
    lengths: list[int],
    supervised: list[tuple[int, int]],
    row_tokens: int,
    anchors: list[int],
    slots: int,
    seed: int = 0,
) -> PackedRow:
    """A row of documents of the given lengths.  supervised: ranges of the row; anchors: those that count, ascending."""
    rng = np.random.default_rng(seed)
    starts = [0]
    document = np.full(row_tokens, -1, dtype=np.int32)
    positions = np.zeros(row_tokens, dtype=np.int64)
    for number, length in enumerate(lengths):
        for i in range(length):
            document[starts[-1] + i], positions[starts[-1] + i] = number, i
        starts.append(starts[-1] + length)
    for i in range(starts[-1], row_tokens):
        positions[i] = i - starts[-1]
    written = np.zeros(row_tokens, dtype=bool)
    for first, end in supervised:
        written[first:end] = True
    tokens = np.where(document >= 0, rng.integers(1, SPEC.vocab_size - 1, row_tokens), 0)
    padded = np.zeros(slots, dtype=np.int64)
    padded[: len(anchors)] = anchors
    return PackedRow(
        epoch=0,
        index=seed,
        tokens=tokens.astype(np.int64),
        positions=positions,
        document=document,
        supervised=written,
        samples=tuple(range(len(lengths))),
        starts=tuple(starts),
        anchors=padded,
        anchor_count=len(anchors),
    )


def random_row(seed: int, row_tokens: int = 96, slots: int = 12, most_anchors: int | None = None) -> PackedRow:
    """Random documents, each with one to three answers of two or more tokens; random anchors among those allowed."""
    rng = np.random.default_rng([77, seed])
    lengths: list[int] = []
    while sum(lengths) + 8 <= row_tokens and len(lengths) < 6:
        lengths.append(int(rng.integers(8, min(40, row_tokens - sum(lengths)) + 1)))
    supervised, start = [], 0
    for length in lengths:
        at = start + int(rng.integers(1, 5))
        for _ in range(int(rng.integers(1, 4))):
            end = at + int(rng.integers(2, 9))
            supervised.append((min(at, start + length), min(end, start + length)))
            at = end + int(rng.integers(1, 4))
        start += length
    row = make_row(lengths, supervised, row_tokens, [], slots, seed)
    allowed = [a for a in range(row_tokens) if may_be_anchor(row.document, row.supervised, a)]
    count = min(len(allowed), slots, slots if most_anchors is None else most_anchors)
    chosen = sorted(rng.choice(allowed, size=count, replace=False).tolist())
    return make_row(lengths, supervised, row_tokens, chosen, slots, seed)


def sees_context(row: PackedRow, block: int, slot: int, key: int, window: int | None) -> bool:
    """Rule 3: the same document, strictly before the anchor; sliding: at most W - 1 to the left of the query."""
    if block >= row.anchor_count:
        return False
    a = int(row.anchors[block])
    if row.document[key] != row.document[a] or key >= a:
        return False
    query_position = int(row.positions[a]) + slot
    return window is None or query_position - int(row.positions[key]) <= window - 1


def sees_block(block: int, slot: int, key_block: int, key_slot: int, window: int | None) -> bool:
    """Rule 3: the own block only; full: both directions; sliding: causal and within the window."""
    if block != key_block:
        return False
    return window is None or (key_slot <= slot and slot - key_slot <= window - 1)


def slow_mask(row: PackedRow, blocks: int, block_size: int, window: int | None) -> np.ndarray:
    """bool [blocks * B, T + blocks * B], the rule asked for every pair."""
    tokens = len(row.tokens)
    mask = np.zeros((blocks * block_size, tokens + blocks * block_size), dtype=bool)
    for q in range(blocks * block_size):
        block, slot = divmod(q, block_size)
        for key in range(tokens):
            mask[q, key] = sees_context(row, block, slot, key, window)
        for other in range(blocks * block_size):
            mask[q, tokens + other] = sees_block(block, slot, *divmod(other, block_size), window)
    return mask
