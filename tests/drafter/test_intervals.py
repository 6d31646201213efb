"""Which tiles the kernels visit, and with which rule, against the dense mask."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from helpers_train import make_row, make_spec, random_row

from drafter.test_attention import long_row, masks_of
from draftsmith.drafter.attention import pick_attention
from draftsmith.drafter.intervals import OWN, TILE
from draftsmith.drafter.loss import pick_chunk, triton_chunk
from draftsmith.errors import InputError

ROWS = {
    "unused slots": (random_row(2, row_tokens=150, slots=9, most_anchors=7), 4),
    "no anchor": (random_row(5, slots=6, most_anchors=0), 4),
    "three documents": (long_row(1, 700, 60, 50), 7),
    "one document": (make_row([890], [(200, 890)], 900, list(range(200, 889, 9)), 80), 16),
    "first tokens of documents": (make_row([5, 90, 6, 100], [(0, 201)], 201, [0, 1, 5, 6, 95, 96, 101, 150], 9), 16),
    "all slots in use": (make_row([300], [(200, 300)], 300, list(range(200, 299, 9)), 11), 10),
}


def visits(mask, by: str, heads: int) -> np.ndarray:
    """How often the kernels look at each row and key, int [Q * heads, S]: as their loops do, written out."""
    lo, hi, own_lo, own_hi = mask.sees_4Q.numpy().astype(int).repeat(heads, 1)
    rows, keys = len(lo), int(own_hi.max())
    k = np.arange(keys)
    context, own = (k >= lo[:, None]) & (k < hi[:, None]), (k >= own_lo[:, None]) & (k < own_hi[:, None])
    seen = np.zeros((rows, keys), dtype=int)
    for tile, (c0, f0, f1, c1, o0, o1) in enumerate((mask.query_tiles if by == "queries" else mask.key_tiles).tolist()):
        mine, own_step = slice(tile * TILE, (tile + 1) * TILE), OWN if by == "queries" else TILE
        for begin, end, rule, step in (
            (c0, f0, context, TILE), (f0, f1, None, TILE), (f1, c1, context, TILE), (o0, o1, own, own_step)
        ):  # fmt: skip
            stop = begin + -(-(end - begin) // step) * step  # whole steps
            if begin >= end:
                continue
            assert begin >= 0
            if rule is None:  # the kernels ask for no bounds there
                assert stop == end <= (rows if by == "keys" else keys)
            here = (mine, slice(begin, stop)) if by == "queries" else (slice(begin, stop), mine)
            seen[here] += True if rule is None else rule[here]
    return seen


CASES = [(*row, *case) for row in ROWS.values() for case in ((None, 1), (None, 4), (1, 3), (20, 2), (300, 7))]
# tiles are parts of a block here, and the window of its end begins behind that of the next block's first slots
CASES.append((make_row([229], [(0, 229)], 229, list(range(95, 114)), 19), 16, 40, 7))


@pytest.mark.parametrize("by", ["queries", "keys"])
@pytest.mark.parametrize(("row", "block_size", "window", "heads"), CASES)
def test_kernels_look_once_at_what_the_rule_shows_and_at_nothing_else(row, block_size, window, heads, by):
    made = masks_of("triton", row, block_size, [window, window], trained=True, heads=heads)
    for mask, dense in zip(made, masks_of("dense", row, block_size, [window, window], trained=True), strict=True):
        assert np.array_equal(visits(mask, by, heads), dense.numpy().repeat(heads, 0))


def test_most_tiles_of_one_long_document_need_no_rule():
    """And few are visited that nobody sees."""
    row, block_size = ROWS["one document"]
    (mask,) = masks_of("triton", row, block_size, [None])
    c0, f0, f1, c1, _, _ = mask.query_tiles.numpy().T
    assert (f1 - f0).sum() > 0.75 * (c1 - c0).sum()
    lo, hi = mask.sees_4Q[0], mask.sees_4Q[1]
    assert (c1 - c0).sum() * TILE < 1.2 * int((hi - lo).sum())
    c0, f0, f1, c1, _, _ = mask.key_tiles.numpy().T
    assert (f1 - f0).sum() > 0.75 * (c1 - c0).sum()


def test_bad_input(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    for head_dim in (16, 64, 128):
        assert pick_attention("triton", torch.device("cuda"), head_dim, torch.bfloat16) == "triton"
    with pytest.raises(InputError, match="no backward on a CPU"):
        pick_attention("triton", torch.device("cpu"), 64, torch.float32)
    for head_dim, dtype in (
        (80, torch.bfloat16),
        (256, torch.bfloat16),
        (8, torch.float16),
        (64, torch.float32),
        (64, torch.float64),
    ):
        with pytest.raises(InputError, match="power of two"):
            pick_attention("triton", torch.device("cuda"), head_dim, dtype)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs Triton"):
        pick_attention("triton", torch.device("cuda"), 64, torch.bfloat16)


def test_whose_softmax_the_loss_uses(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    gpu, half, plain = torch.device("cuda"), torch.bfloat16, make_spec()
    capped = dataclasses.replace(plain, output_multiplier=2.0)

    def pick(softmax, spec=plain, device=gpu, dtype=half, compiled=True):
        return pick_chunk(softmax, spec, device, dtype, compiled)

    assert pick("auto") is pick("triton") is pick("triton", compiled=False) is triton_chunk
    for other in (pick("torch"), pick("auto", capped), pick("auto", device=torch.device("cpu"))):
        assert other not in (None, triton_chunk)
    assert pick("auto", compiled=False) is pick("torch", compiled=False) is None
    with pytest.raises(InputError, match=r"loss\.softmax=triton: it needs a GPU, Triton"):
        pick("triton", device=torch.device("cpu"))
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(InputError, match="bfloat16 or float32"):
            pick("triton", dtype=dtype)
    with pytest.raises(InputError, match="caps or scales its logits"):
        pick("triton", capped)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="it needs a GPU, Triton"):
        pick("triton")
    assert pick("auto") is not triton_chunk
