"""Attention of blocks over context and their own block: SDPA piece by piece, or flex_attention with a BlockMask.

Suffixes: Q queries (A * B block tokens), T context tokens, S = T + Q keys (context first), D head size, N heads,
M key/value heads.  All paths take the same intervals (drafter/blocks.py), so they cannot disagree about the rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafter.blocks import block_interval, context_interval
from draftsmith.errors import InputError

TILE = 128
"""Side of a BlockMask's tiles, and by default the most queries of a piece (but for a single longer block)."""


@dataclass(frozen=True)
class Piece:
    """Some neighbouring blocks of one document, and the context they see between them."""

    queries: slice
    context: slice
    mask: Tensor  # bool [queries, context + queries]


Mask = Tensor | BlockMask | tuple[Piece, ...] | None


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for it: from pageable memory a copy would first wait for all queued work."""
    return put_all([array], device)[0]


def put_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """As `put`, all in one transfer."""
    if device.type != "cuda":
        return [torch.from_numpy(a).to(device) for a in arrays]
    ends = np.cumsum([-(-a.nbytes // 64) * 64 for a in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    places = [(int(end) - -(-a.nbytes // 64) * 64, a) for end, a in zip(ends, arrays, strict=True)]
    for at, a in places:
        host.numpy()[at : at + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    kinds = [torch.from_numpy(np.empty(0, a.dtype)).dtype for a in arrays]
    return [there[at : at + a.nbytes].view(kind).view(a.shape) for (at, a), kind in zip(places, kinds, strict=True)]


def pick_attention(name: str, device: torch.device) -> str:
    """auto: flex on a GPU, SDPA on a CPU, where flex has no backward.  Raises InputError for flex on a CPU."""
    if name == "flex" and device.type == "cpu":
        raise InputError("train.attention=flex: flex_attention has no backward on a CPU: use sdpa or auto")
    return name if name != "auto" else ("flex" if device.type == "cuda" else "sdpa")


def build_masks(
    kind: str,
    low: np.ndarray,
    high: np.ndarray,
    context: int,
    block_size: int,
    windows: Sequence[int | None],
    device: torch.device,
    *,
    sizes: np.ndarray | None = None,
    most: int = TILE,
) -> list[Mask]:
    """One mask a layer; layers of the same window share theirs.  low, high: int64 [A] as in BlockBatch.

    kind: flex; sdpa, in pieces of at most `most` queries; dense, the plain twin of both, one mask of every query and
    key.  sizes: as in block_interval.
    """
    made: dict[int | None, Mask] = {}
    for window in windows:
        if window not in made:
            intervals = (
                *context_interval(low, high, block_size, window),
                *block_interval(len(low), block_size, window, sizes),
            )
            if kind == "sdpa":
                made[window] = piece_masks(low, block_size, intervals, device, most)
            else:
                build = dense_mask if kind == "dense" else interval_block_mask
                made[window] = build(*put_all(intervals, device), context=context)
    return [made[w] for w in windows]


def piece_masks(
    low: np.ndarray, block_size: int, intervals: tuple[np.ndarray, ...], device: torch.device, most_queries: int
) -> tuple[Piece, ...]:
    """Pieces of at most `most_queries` queries; each holds only the keys that some query of it sees.

    intervals: lo, hi in the context and lo, hi among the queries, each int64 [Q].
    """
    most = max(1, most_queries // block_size)
    cuts = [0]
    for block in range(1, len(low)):
        if low[block] != low[cuts[-1]] or block - cuts[-1] == most:
            cuts.append(block)
    pieces = []
    for begin, end in zip(cuts, [*cuts[1:], len(low)], strict=True):
        queries = slice(begin * block_size, end * block_size)
        lo, hi, own_lo, own_hi = (i[queries] for i in intervals)
        seen = slice(int(lo.min()), int(hi.max()))
        shifted = (lo - seen.start, hi - seen.start, own_lo - queries.start, own_hi - queries.start)
        tensors = put_all(shifted, device)
        pieces.append(Piece(queries, seen, dense_mask(*tensors, context=seen.stop - seen.start)))
    return tuple(pieces)


def dense_mask(lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor, own_hi_Q: Tensor, *, context: int) -> Tensor:
    """bool [Q, S]: True where the query sees the key."""
    t = torch.arange(context, device=lo_Q.device)
    q = torch.arange(len(lo_Q), device=lo_Q.device)
    seen = (t >= lo_Q[:, None]) & (t < hi_Q[:, None])
    own = (q >= own_lo_Q[:, None]) & (q < own_hi_Q[:, None])
    return torch.cat([seen, own], dim=1)


def interval_block_mask(
    lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor | None = None, own_hi_Q: Tensor | None = None, *, context: int
) -> BlockMask:
    """The same mask for flex_attention, written down from interval overlaps with the tiles of keys.

    Costs O(Q * S / TILE) additions; the rule itself is never evaluated on Q x S elements.  Without own intervals there
    are context keys only (the target's packed documents).
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if own_lo_Q is None or own_hi_Q is None:
            return (k >= lo_Q[q]) & (k < hi_Q[q])
        own = k - context
        return ((k >= lo_Q[q]) & (k < hi_Q[q])) | ((own >= own_lo_Q[q]) & (own < own_hi_Q[q]))

    what = ("num_blocks", "indices")
    names = [f"{full}{side}_{w}" for full in ("", "full_") for side in ("kv", "q") for w in what]
    lists: dict[str, Any] = dict(zip(names, _tiles(lo_Q, hi_Q, own_lo_Q, own_hi_Q, context), strict=True))
    queries, keys = len(lo_Q), context + (0 if own_lo_Q is None else len(lo_Q))
    return BlockMask(
        seq_lengths=(queries, keys),
        **lists,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def _tiles(
    lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor | None, own_hi_Q: Tensor | None, context: int
) -> tuple[Tensor, ...]:
    """Of partly visible tiles, then of wholly visible ones: number and list by tile of queries, and by tile of keys."""
    own = own_lo_Q is not None and own_hi_Q is not None
    queries, keys = len(lo_Q), context + (len(lo_Q) if own else 0)
    q_tiles, k_tiles = -(-queries // TILE), -(-keys // TILE)
    begin = torch.arange(k_tiles, device=lo_Q.device) * TILE
    end = begin + TILE

    def overlap(lo: Tensor, hi: Tensor) -> Tensor:
        return (torch.minimum(hi[:, None], end) - torch.maximum(lo[:, None], begin)).clamp(min=0)

    seen = overlap(lo_Q, hi_Q)  # [Q, k_tiles]
    if own_lo_Q is not None and own_hi_Q is not None:
        seen = seen + overlap(own_lo_Q + context, own_hi_Q + context)
    seen = F.pad(seen, (0, 0, 0, q_tiles * TILE - queries)).view(q_tiles, TILE, k_tiles)
    some, full = (seen > 0).any(1), (seen == TILE).all(1)

    def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
        # made contiguous: the backward kernel would read the rows of a transposed list with the wrong stride (gradients
        # of keys and values off by half, and no error)
        tiles = tiles.contiguous()
        count = tiles.sum(-1, keepdim=True)
        place = torch.where(tiles, tiles.cumsum(-1), count + (~tiles).cumsum(-1)) - 1
        numbers = torch.arange(tiles.shape[-1], device=tiles.device, dtype=torch.int32).expand_as(place)
        order = torch.empty_like(place, dtype=torch.int32).scatter_(-1, place, numbers)
        return count[:, 0].to(torch.int32)[None, None], order[None, None]

    partial = some & ~full
    return (*listed(partial), *listed(partial.T), *listed(full), *listed(full.T))


def any_shape(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, SDPA without cuDNN, which may be preferred on a GPU and plans anew for every length that it meets:
    decoding and replay meet a new one each time."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def one_graph(function: Any) -> Any:
    """Compiled as one graph for one shape: a graph break is an error, another shape another graph."""
    return torch.compile(function, fullgraph=True, dynamic=False)


_flex: Callable[..., Any] = one_graph(flex_attention)


def attend(q_NQD: Tensor, k_MSD: Tensor, v_MSD: Tensor, mask: Mask) -> Tensor:
    """Softmax attention, [N, Q, D].  The kind of mask chooses the kernel: BlockMask flex, else SDPA."""
    # keys repeated for their query heads, also for flex: its backward gives one program a tile of keys and all heads of
    # the group, and the first tiles, which nearly all blocks see, would be what every step waits for
    groups = q_NQD.shape[0] // k_MSD.shape[0]
    k_NSD, v_NSD = k_MSD.repeat_interleave(groups, 0), v_MSD.repeat_interleave(groups, 0)
    if isinstance(mask, BlockMask):
        flex: Any = flex_attention if torch.compiler.is_compiling() else _flex
        return flex(q_NQD[None], k_NSD[None], v_NSD[None], block_mask=mask)[0]
    if not isinstance(mask, tuple):
        return _sdpa(q_NQD, k_NSD, v_NSD, mask)
    (k_NTD, k_NQD), (v_NTD, v_NQD) = (x.tensor_split((x.shape[1] - q_NQD.shape[1],), dim=1) for x in (k_NSD, v_NSD))
    outs = []
    for piece in mask:
        q, c = piece.queries, piece.context
        k, v = (torch.cat([a[:, c], b[:, q]], dim=1) for a, b in ((k_NTD, k_NQD), (v_NTD, v_NQD)))
        outs.append(_sdpa(q_NQD[:, q], k, v, piece.mask))
    return torch.cat(outs, dim=1)


def _sdpa(q_NQD: Tensor, k_NSD: Tensor, v_NSD: Tensor, mask_QS: Tensor | None) -> Tensor:
    bias = None if mask_QS is None else mask_QS[None, None]
    return F.scaled_dot_product_attention(q_NQD[None], k_NSD[None], v_NSD[None], attn_mask=bias)[0]
