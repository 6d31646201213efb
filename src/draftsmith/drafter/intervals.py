"""A mask by intervals, as the kernels read it: which tiles of queries and keys meet, and where they need the rule.

Suffixes: Q queries, S keys.  A query sees keys [lo, hi) of the context and [own_lo, own_hi) of the block tokens behind
it.  Computed on the host, which knows all of them; the rule itself is evaluated only in tiles that some queries see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

TILE = 64
"""Rows of a tile, of queries and of keys: for head size 128 on an H200 within 6% of the best that was tried."""
OWN = 16
"""Keys of block tokens that queries visit at a time: few of a tile's are a query's own."""
FAR = 2**30


class Intervals(NamedTuple):
    """A mask.  Made by `intervals`; all int32, on the device.  Rows: the heads of a group of each query after one
    another, R = Q * heads."""

    sees_4Q: Tensor  # lo, hi, own_lo, own_hi, counted over all keys
    query_tiles: (
        Tensor  # [R / TILE, 6]: keys from c0 partly, from f0 wholly, from f1 to c1 partly seen; own from o0 to o1
    )
    key_tiles: Tensor  # [S / TILE, 6]: rows, in the same way


def intervals(seen: Sequence[np.ndarray], context: int, own: int, heads: int) -> list[np.ndarray]:
    """The arrays of an Intervals.  seen: lo, hi, own_lo, own_hi, each int64 [Q]; the last two count the `own` block
    tokens behind the `context` ones from 0.  heads: query heads of a group."""
    lo, hi, own_lo, own_hi = seen
    sees = lo, hi, own_lo + context, own_hi + context
    tiles = _by_tile(*(np.repeat(s, heads) for s in sees))
    made = [np.stack(sees), _query_tiles(tiles), _key_tiles(tiles, context + own)]
    return [np.ascontiguousarray(a, dtype=np.int32) for a in made]


class _Tiles(NamedTuple):
    """By tile of rows: what some of them see [least, most), what all see [latest, soonest), own [own_lo, own_hi)."""

    least: np.ndarray
    most: np.ndarray
    latest: np.ndarray
    soonest: np.ndarray
    own_lo: np.ndarray
    own_hi: np.ndarray


def _by_tile(lo: np.ndarray, hi: np.ndarray, own_lo: np.ndarray, own_hi: np.ndarray) -> _Tiles:
    def reduced(values: np.ndarray, how: Any, fill: int) -> np.ndarray:
        padded = np.full(-(-len(values) // TILE) * TILE, fill)
        padded[: len(values)] = values
        return np.asarray(how(padded.reshape(-1, TILE), axis=1))

    low, high = np.where(hi > lo, lo, FAR), np.where(hi > lo, hi, 0)  # a query may see no context
    # a tile that is not full of queries sees nothing wholly: without the rule the kernels do not ask who is there
    return _Tiles(
        reduced(low, np.min, FAR), reduced(high, np.max, 0), reduced(low, np.max, FAR), reduced(high, np.min, 0),
        reduced(own_lo, np.min, FAR), reduced(own_hi, np.max, 0),
    )  # fmt: skip


def _query_tiles(t: _Tiles) -> np.ndarray:
    begin, end = t.least // TILE * TILE, -(-t.most // TILE) * TILE
    begin = np.minimum(begin, end)  # sees no context
    whole, part = -(-t.latest // TILE) * TILE, t.soonest // TILE * TILE
    none = part <= whole
    return np.stack([begin, np.where(none, end, whole), np.where(none, end, part), end, t.own_lo, t.own_hi], 1)


def _key_tiles(t: _Tiles, keys: int) -> np.ndarray:
    begin = np.arange(0, keys, TILE)
    c0, c1, _ = _hull(t.least, t.most, begin + TILE, begin)
    f0, f1, unbroken = _hull(t.latest, t.soonest, begin + 1, begin + TILE - 1)
    none = (f0 == f1) | ~unbroken  # several runs: all of it with the mask
    f0, f1 = np.where(none, c1, f0), np.where(none, c1, f1)
    return np.stack([c0, f0, f1, c1, *_hull(t.own_lo, t.own_hi, begin + TILE, begin)[:2]], 1) * TILE


def _hull(
    low: np.ndarray, high: np.ndarray, below: np.ndarray, above: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and one behind the last tile with low < below[i] and high > above[i], and whether all between them are so;
    0, 0 if none is.  Tiles whose low is FAR never are."""
    known = np.flatnonzero(low < FAR)
    low, high = low[known], high[known]
    if (np.diff(low) >= 0).all() and (np.diff(high) >= 0).all():
        first, behind = np.searchsorted(high, above, "right"), np.searchsorted(low, below, "left")
        many = behind - first
    else:  # with a window the last slots of a block see from behind the first ones of the next
        shown = (low < below[:, None]) & (high > above[:, None])
        first, behind, many = shown.argmax(1), len(low) - shown[:, ::-1].argmax(1), shown.sum(1)
    some, place = many > 0, np.append(known, 0)
    begin, end = np.where(some, place[first], 0), np.where(some, place[behind - 1] + 1, 0)
    return begin, end, end - begin == np.where(some, many, 0)
