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
    begin = np.arange(0, keys, TILE)[:, None]
    c0, c1 = _hull((t.least < begin + TILE) & (t.most > begin))
    full = (t.latest <= begin) & (t.soonest >= begin + TILE)
    f0, f1 = _hull(full)
    none = (f0 == f1) | (full.sum(1) != f1 - f0)  # several runs: all of it with the mask
    f0, f1 = np.where(none, c1, f0), np.where(none, c1, f1)
    return np.stack([c0, f0, f1, c1, *_hull((t.own_lo < begin + TILE) & (t.own_hi > begin))], 1) * TILE


def _hull(shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and one behind the last of each row that is shown; 0, 0 if none is."""
    some = shown.any(1)
    return np.where(some, shown.argmax(1), 0), np.where(some, shown.shape[1] - shown[:, ::-1].argmax(1), 0)
