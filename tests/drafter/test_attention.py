"""Masks against the plain rule asked for every pair, and flex_attention against SDPA."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from helpers_train import make_row, random_row, slow_mask
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from draftsmith.drafter.attention import attend, build_masks, pick_attention
from draftsmith.drafter.blocks import build_blocks
from draftsmith.errors import InputError
from draftsmith.records import PackedRow

CPU = torch.device("cpu")
TENSORS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def masks_of(kind: str, row: PackedRow, block_size: int, windows: list[int | None], **how: Any) -> list:
    blocks = build_blocks(row, block_size, 39, 4.0, trim=False)
    return build_masks(kind, blocks.low, blocks.high, len(row.tokens), block_size, windows, CPU, **how)


def plain_block_mask(row: PackedRow, block_size: int, window: int | None, skip: int = 0) -> BlockMask:
    """create_block_mask of the rule, which reads documents and positions and knows no intervals.  skip: slots of each
    block that are no queries."""
    tokens, slots = len(row.tokens), len(row.anchors)
    document, positions = torch.from_numpy(row.document), torch.from_numpy(row.positions)
    anchors, used = torch.from_numpy(row.anchors), row.anchor_count

    def rule(b, h, q, k):
        block, slot = q // (block_size - skip), q % (block_size - skip) + skip
        a, key = anchors[block], k.clamp(max=tokens - 1)
        seen = (k < tokens) & (block < used) & (document[key] == document[a]) & (key < a)
        other = (k - tokens).clamp(min=0)
        own = (k >= tokens) & (other // block_size == block)
        if window is not None:
            seen = seen & (positions[a] + slot - positions[key] <= window - 1)
            behind = slot - other % block_size
            own = own & (behind >= 0) & (behind <= window - 1)
        return seen | own

    queries, keys = slots * (block_size - skip), tokens + slots * block_size
    return create_block_mask(rule, None, None, queries, keys, device="cpu")


def assert_same_tensors(ours: BlockMask, theirs: BlockMask) -> None:
    for name in TENSORS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), name
        assert a.is_contiguous(), name  # the backward kernel reads rows without asking for their stride


def long_row(seed: int, row_tokens: int, slots: int, used: int | None) -> PackedRow:
    """Three long documents, answers nearly everywhere: whole tiles are visible."""
    rng = np.random.default_rng(seed)
    cuts = sorted(rng.choice(np.arange(20, row_tokens - 20), 2, replace=False).tolist())
    lengths = [cuts[0], cuts[1] - cuts[0], row_tokens - cuts[1] - int(rng.integers(0, 15))]
    starts = np.cumsum([0, *lengths])
    spans = [(int(s) + 4, int(e)) for s, e in zip(starts, starts[1:], strict=False)]
    allowed = np.concatenate([np.arange(s, e - 1) for s, e in spans])
    count = min(slots if used is None else used, len(allowed))
    return make_row(lengths, spans, row_tokens, sorted(rng.choice(allowed, count, replace=False).tolist()), slots, seed)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 40])
@pytest.mark.parametrize("block_size", [4, 7])
def test_dense_mask_is_the_rule(block_size, window):
    for seed in range(3):
        row = random_row(seed, row_tokens=64, slots=7, most_anchors=5)
        rule = slow_mask(row, 7, block_size, window)
        mask, last = masks_of("dense", row, block_size, [window, window], trained=True)
        assert mask.dtype == torch.bool
        assert np.array_equal(mask.numpy(), rule)
        assert np.array_equal(last.numpy(), rule.reshape(7, block_size, -1)[:, 1:].reshape(last.shape))


@pytest.mark.parametrize("window", [None, 1, 5, 64, 300])
@pytest.mark.parametrize("block_size", [4, 7, 8, 16])
@pytest.mark.parametrize(
    ("row_tokens", "slots", "used"), [(512, 16, None), (700, 45, None), (515, 33, 9), (130, 3, 0), (384, 64, 60)]
)
@pytest.mark.parametrize("skip", [0, 1])
def test_block_mask_equals_torchs_of_the_plain_rule(row_tokens, slots, used, block_size, window, skip):
    row = long_row(row_tokens + block_size, row_tokens, slots, used)
    (ours,) = masks_of("flex", row, block_size, [window], trained=skip == 1)
    theirs = plain_block_mask(row, block_size, window, skip)
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape
    assert_same_tensors(ours, theirs)


@pytest.mark.parametrize("first", [639, 640, 641])
@pytest.mark.parametrize("window", [None, 500, 20])
@pytest.mark.parametrize("block_size", [4, 7, 8, 16])
def test_block_mask_with_whole_tiles(block_size, window, first):
    """One long document, anchors late in it: tiles that every query sees need no rule inside.

    The first anchor is one short of a tile's end, at it, and behind it."""
    row = make_row([890], [(600, 890)], 900, list(range(first, 889, 5)), 50)
    (ours,) = masks_of("flex", row, block_size, [window])
    theirs = plain_block_mask(row, block_size, window)
    assert_same_tensors(ours, theirs)
    assert ours.kv_num_blocks.sum() > 0
    assert (ours.full_kv_num_blocks.sum() > 0) == (window != 20)


def test_the_rule_inside_the_tiles_is_the_dense_mask():
    row = long_row(3, 900, 32, None)
    q, k = torch.meshgrid(torch.arange(256), torch.arange(1156), indexing="ij")
    zero = torch.zeros_like(q)
    for window in (None, 20):
        for mask, dense in zip(
            *(masks_of(kind, row, 8, [window] * 2, trained=True) for kind in ("flex", "dense")), strict=True
        ):
            rows = slice(len(dense))
            assert torch.equal(mask.mask_mod(zero[rows], zero[rows], q[rows], k[rows]), dense)


def test_layers_of_one_window_share_a_mask_and_keep_their_order():
    row = random_row(1)
    made = masks_of("dense", row, 4, [None, 6, None, 3])
    assert made[0] is made[2]
    for mask, window in zip(made, [None, 6, None, 3], strict=True):
        assert torch.equal(mask, masks_of("dense", row, 4, [window])[0])
    assert not torch.equal(made[1], made[3])


def test_attention_is_softmax_over_what_the_mask_shows():
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 6, 8).double(), torch.randn(2, 9, 8).double(), torch.randn(2, 9, 8).double()
    mask = torch.rand(6, 9) > 0.4
    mask[:, 0] = True
    out = attend(q, k, v, mask)
    for n in range(4):
        for i in range(6):
            keys = [j for j in range(9) if mask[i, j]]
            scores = torch.stack([q[n, i] @ k[n // 2, j] / 8**0.5 for j in keys]).softmax(0)
            expected = sum(s * v[n // 2, j] for s, j in zip(scores, keys, strict=True))
            torch.testing.assert_close(out[n, i], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("row, block_size", [
    (random_row(2, row_tokens=150, slots=9, most_anchors=7), 4),
    (random_row(5, slots=6, most_anchors=0), 4),
    (long_row(1, 300, 60, 50), 7),
    (long_row(2, 300, 4, None), 130),
], ids=["unused slots", "no anchor", "several pieces a document", "a block longer than a piece"])  # fmt: skip
@pytest.mark.parametrize("skip", [0, 1])
def test_pieces_are_the_dense_mask(row, block_size, window, skip):
    """Values and gradients; every query once, no key that no query of the piece sees."""
    (pieces,), (dense,) = (masks_of(kind, row, block_size, [window], trained=skip == 1) for kind in ("sdpa", "dense"))
    tokens, queries = len(row.tokens), len(row.anchors) * (block_size - skip)
    keys = tokens + len(row.anchors) * block_size
    assert [i for p in pieces for i in range(queries)[p.queries]] == list(range(queries))
    for piece in pieces:
        assert len(piece.mask) <= max(128, block_size)
        shown = piece.mask[:, : piece.context.stop - piece.context.start].any(0)
        assert shown.all() or row.anchor_count < len(row.anchors)
    torch.manual_seed(0)
    shapes = [(4, queries), (2, keys), (2, keys)]
    leaves = [torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True) for shape in shapes]
    slope = torch.randn(4, queries, 8, dtype=torch.float64)
    found = [
        (out := attend(*leaves, mask), *torch.autograd.grad((out * slope).sum(), leaves)) for mask in (pieces, dense)
    ]
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_flex_equals_sdpa():
    """Compiled, forward only: flex has no backward on a CPU.  Values and gradients on a GPU: tests/gpu."""
    row = random_row(2, row_tokens=150, slots=9, most_anchors=7)
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 36, 16), torch.randn(2, 186, 16), torch.randn(2, 186, 16)
    with torch.no_grad():
        (flex,), (dense,) = masks_of("flex", row, 4, [6]), masks_of("sdpa", row, 4, [6])
        torch.testing.assert_close(attend(q, k, v, flex), attend(q, k, v, dense), rtol=1e-5, atol=1e-6)


def test_the_kernel_is_chosen_by_device_heads_and_dtype_and_flex_on_a_cpu_is_refused(monkeypatch):
    def pick(name, device, head_dim=64, dtype=torch.bfloat16):
        return pick_attention(name, device, head_dim, dtype)

    gpu = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    assert pick("auto", CPU) == "sdpa" and pick("auto", gpu) == "triton"
    assert pick("auto", gpu, 80) == pick("auto", gpu, dtype=torch.float32) == "flex"
    assert pick("sdpa", gpu) == "sdpa" and pick("flex", gpu) == "flex"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert pick("auto", gpu) == "flex"
    with pytest.raises(InputError, match=r"train\.attention=flex"):
        pick("flex", CPU)
