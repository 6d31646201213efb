"""Attention of blocks over context and their own block: SDPA piece by piece, or flex_attention with a BlockMask.

Suffixes: Q queries (A * B block tokens), T context tokens, S = T + Q keys (context first), D head size, N heads,
M key/value heads.  All paths take the same intervals (drafter/blocks.py), so they cannot disagree about the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafter.blocks import block_interval, context_interval
from draftsmith.errors import InputError

TILE = 128
"""Side of a BlockMask's tiles, and the most queries of a piece (but for a single longer block)."""


@dataclass(frozen=True)
class Piece:
    """Some neighbouring blocks of one document, and the context they see between them."""

    queries: slice
    context: slice
    mask: Tensor  # bool [queries, context + queries]


Mask = Tensor | BlockMask | tuple[Piece, ...] | None


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
) -> list[Mask]:
    """One mask a layer; layers of the same window share theirs.  low, high: int64 [A] as in BlockBatch.

    kind: flex; sdpa, in pieces; dense, the plain twin of both, one mask of every query and key.
    """
    made: dict[int | None, Mask] = {}
    for window in windows:
        if window not in made:
            intervals = (
                *context_interval(low, high, block_size, window),
                *block_interval(len(low), block_size, window),
            )
            if kind == "sdpa":
                made[window] = piece_masks(low, block_size, intervals, device)
            else:
                build = dense_mask if kind == "dense" else interval_block_mask
                tensors = [torch.from_numpy(i).to(device, non_blocking=True) for i in intervals]
                made[window] = build(*tensors, context=context)
    return [made[w] for w in windows]


def piece_masks(
    low: np.ndarray, block_size: int, intervals: tuple[np.ndarray, ...], device: torch.device
) -> tuple[Piece, ...]:
    """Pieces of at most TILE queries; each holds only the keys that some query of it sees.

    intervals: lo, hi in the context and lo, hi among the queries, each int64 [Q].
    """
    most = max(1, TILE // block_size)
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
        tensors = [torch.from_numpy(i).to(device, non_blocking=True) for i in shifted]
        pieces.append(Piece(queries, seen, dense_mask(*tensors, context=seen.stop - seen.start)))
    return tuple(pieces)


def dense_mask(lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor, own_hi_Q: Tensor, *, context: int) -> Tensor:
    """bool [Q, S]: True where the query sees the key."""
    t = torch.arange(context, device=lo_Q.device)
    q = torch.arange(len(lo_Q), device=lo_Q.device)
    seen = (t >= lo_Q[:, None]) & (t < hi_Q[:, None])
    own = (q >= own_lo_Q[:, None]) & (q < own_hi_Q[:, None])
    return torch.cat([seen, own], dim=1)


def interval_block_mask(lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor, own_hi_Q: Tensor, *, context: int) -> BlockMask:
    """The same mask for flex_attention, written down from interval overlaps with the tiles of keys.

    Costs O(Q * S / TILE) additions; the rule itself is never evaluated on Q x S elements.
    """
    queries, keys = len(lo_Q), context + len(lo_Q)
    q_tiles, k_tiles = -(-queries // TILE), -(-keys // TILE)
    begin = torch.arange(k_tiles, device=lo_Q.device) * TILE
    end = begin + TILE

    def overlap(lo: Tensor, hi: Tensor) -> Tensor:
        return (torch.minimum(hi[:, None], end) - torch.maximum(lo[:, None], begin)).clamp_(min=0)

    seen = overlap(lo_Q, hi_Q) + overlap(own_lo_Q + context, own_hi_Q + context)  # [Q, k_tiles]
    seen = F.pad(seen, (0, 0, 0, q_tiles * TILE - queries)).view(q_tiles, TILE, k_tiles)
    some, full = (seen > 0).any(1), (seen == TILE).all(1)
    partial = some & ~full

    def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
        # contiguous: sorting a transposed tensor can give a transposed result, whose rows the backward kernel would
        # read with the wrong stride (gradients of keys and values off by half, and no error)
        order = torch.argsort(tiles.to(torch.int32).contiguous(), dim=-1, descending=True, stable=True).to(torch.int32)
        return tiles.sum(-1).to(torch.int32)[None, None], order.contiguous()[None, None]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = k - context
        return ((k >= lo_Q[q]) & (k < hi_Q[q])) | ((own >= own_lo_Q[q]) & (own < own_hi_Q[q]))

    kv_num, kv = listed(partial)
    full_kv_num, full_kv = listed(full)
    q_num, q = listed(partial.T)
    full_q_num, full_q = listed(full.T)
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=kv_num,
        kv_indices=kv,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv,
        q_num_blocks=q_num,
        q_indices=q,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


_flex: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=False)


def attend(q_NQD: Tensor, k_MSD: Tensor, v_MSD: Tensor, mask: Mask) -> Tensor:
    """Softmax attention, [N, Q, D].  The kind of mask chooses the kernel: BlockMask flex, else SDPA."""
    if isinstance(mask, BlockMask):
        gqa = q_NQD.shape[0] != k_MSD.shape[0]
        return _flex(q_NQD[None], k_MSD[None], v_MSD[None], block_mask=mask, enable_gqa=gqa)[0]
    if not isinstance(mask, tuple):
        return _sdpa(q_NQD, k_MSD, v_MSD, mask)
    (k_MTD, k_MQD), (v_MTD, v_MQD) = (x.tensor_split((x.shape[1] - q_NQD.shape[1],), dim=1) for x in (k_MSD, v_MSD))
    outs = []
    for piece in mask:
        q, c = piece.queries, piece.context
        k, v = (torch.cat([a[:, c], b[:, q]], dim=1) for a, b in ((k_MTD, k_MQD), (v_MTD, v_MQD)))
        outs.append(_sdpa(q_NQD[:, q], k, v, piece.mask))
    return torch.cat(outs, dim=1)


def _sdpa(q_NQD: Tensor, k_MSD: Tensor, v_MSD: Tensor, mask_QS: Tensor | None) -> Tensor:
    groups = q_NQD.shape[0] // k_MSD.shape[0]
    k_NSD, v_NSD = k_MSD.repeat_interleave(groups, 0), v_MSD.repeat_interleave(groups, 0)
    bias = None if mask_QS is None else mask_QS[None, None]
    return F.scaled_dot_product_attention(q_NQD[None], k_NSD[None], v_NSD[None], attn_mask=bias)[0]
