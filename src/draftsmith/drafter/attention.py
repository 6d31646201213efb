"""Attention of blocks over context and their own block: SDPA piece by piece, flex_attention with a BlockMask, or
our own Triton kernels (kernels.py).

Suffixes: Q queries, P block tokens (A * B; Q = P but for the last layer in training), T context tokens, S = T + P keys
(context first), D head size, N heads, M key/value heads.  All paths take the same intervals (drafter/blocks.py), so
they cannot disagree about the rule.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
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
from draftsmith.drafter.intervals import Intervals, intervals
from draftsmith.errors import InputError

TILE = 128
"""Side of a BlockMask's tiles, and by default the most queries of a piece (but for a single longer block)."""


@dataclass(frozen=True)
class Piece:
    """Some neighbouring blocks of one document, and the context they see between them."""

    queries: slice
    context: slice
    own: slice  # their keys among the block tokens
    mask: Tensor  # bool [queries, context + own]


Mask = Tensor | BlockMask | Intervals | tuple[Piece, ...] | None


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for it: from pageable memory a copy would first wait for all queued work."""
    return put_all([array], device)[0]


def put_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """As `put`, all in one transfer."""
    if device.type != "cuda":
        return [torch.from_numpy(a).to(device) for a in arrays]
    places, total = places_of(arrays)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    fill(host, places, arrays)
    return views(host.to(device, non_blocking=True), places, arrays)


def places_of(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each begins in bytes that hold them one after the other, aligned to 64; and how many bytes those are."""
    sizes = [-(-a.nbytes // 64) * 64 for a in arrays]
    return [0, *itertools.accumulate(sizes[:-1])], sum(sizes)


def fill(host: Tensor, places: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
    into = host.numpy()
    for at, a in zip(places, arrays, strict=True):
        into[at : at + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def views(there: Tensor, places: Sequence[int], arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Tensors of the arrays' kinds and shapes in such bytes."""
    kinds = [torch.from_numpy(np.empty(0, a.dtype)).dtype for a in arrays]
    return [
        there[at : at + a.nbytes].view(kind).view(a.shape) for at, a, kind in zip(places, arrays, kinds, strict=True)
    ]


def pick_attention(name: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    """auto: on a GPU our kernels where they do such heads, else flex; SDPA on a CPU, where neither has a backward.
    Raises InputError for what cannot be done."""
    if name in ("flex", "triton") and device.type == "cpu":
        raise InputError(f"train.attention={name}: it has no backward on a CPU: use sdpa or auto")
    if name == "triton" and not triton_does(head_dim, dtype):
        raise InputError(
            f"train.attention=triton: heads of {head_dim} in {str(dtype).removeprefix('torch.')}: it needs Triton, a "
            f"power of two from 16 to 128, and 16-bit numbers: use flex or auto"
        )
    if name != "auto":
        return name
    if device.type == "cpu":
        return "sdpa"
    return "triton" if triton_does(head_dim, dtype) else "flex"


def triton_does(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether our kernels do such heads, and Triton is here."""
    return heads_fit(head_dim, dtype) and importlib.util.find_spec("triton") is not None


def heads_fit(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether our kernels do such heads.  Larger ones want more shared memory than many cards have; float32 they would
    do without tensor cores, and compile for a minute."""
    return 16 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0 and dtype.itemsize == 2


def build_masks(
    kind: str,
    low: np.ndarray,
    high: np.ndarray,
    context: int,
    block_size: int,
    windows: Sequence[int | None],
    device: torch.device,
    *,
    trained: bool = False,
    sizes: np.ndarray | None = None,
    most: int = TILE,
    heads: int = 1,
) -> list[Mask]:
    """One mask a layer; layers of the same window share theirs.  low, high: int64 [A] as in BlockBatch.

    kind: flex; triton; sdpa, in pieces of at most `most` block tokens; dense, the plain twin of all, one mask of every
    query and key.  trained: the last layer's queries are without slot 0 of each block.  sizes: as in block_interval.
    heads: query heads of a key/value head, which triton's mask depends on.
    """
    made: dict[tuple[int | None, int], Mask] = {}
    first = [0] * (len(windows) - 1) + [int(trained)]
    for window, skip in zip(windows, first, strict=True):
        if (window, skip) not in made:
            every = (
                *context_interval(low, high, block_size, window),
                *block_interval(len(low), block_size, window, sizes),
            )
            seen = [i.reshape(-1, block_size)[:, skip:].reshape(-1) for i in every]
            if kind == "sdpa":
                made[window, skip] = piece_masks(low, block_size, skip, seen, device, most)
            elif kind == "triton":
                arrays = intervals(seen, context, len(every[0]), heads)
                made[window, skip] = Intervals(*put_all(arrays, device))
            else:
                build = dense_mask if kind == "dense" else interval_block_mask
                made[window, skip] = build(*put_all(seen, device), context=context, own=len(every[0]))
    return [made[key] for key in zip(windows, first, strict=True)]


def piece_masks(
    low: np.ndarray,
    block_size: int,
    skip: int,
    intervals: Sequence[np.ndarray],
    device: torch.device,
    most_tokens: int,
) -> tuple[Piece, ...]:
    """Pieces of at most `most_tokens` block tokens; each holds only the keys that some query of it sees.

    intervals: lo, hi in the context and lo, hi among the block tokens, each int64 [Q], without the first `skip` slots.
    """
    most = max(1, most_tokens // block_size)
    cuts = [0]
    for block in range(1, len(low)):
        if low[block] != low[cuts[-1]] or block - cuts[-1] == most:
            cuts.append(block)
    pieces = []
    for begin, end in zip(cuts, [*cuts[1:], len(low)], strict=True):
        queries = slice(begin * (block_size - skip), end * (block_size - skip))
        own = slice(begin * block_size, end * block_size)
        lo, hi, own_lo, own_hi = (i[queries] for i in intervals)
        seen = slice(int(lo.min()), int(hi.max()))
        shifted = (lo - seen.start, hi - seen.start, own_lo - own.start, own_hi - own.start)
        mask = dense_mask(*put_all(shifted, device), context=seen.stop - seen.start, own=own.stop - own.start)
        pieces.append(Piece(queries, seen, own, mask))
    return tuple(pieces)


def dense_mask(lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor, own_hi_Q: Tensor, *, context: int, own: int) -> Tensor:
    """bool [Q, S]: True where the query sees the key.  own: how many keys are block tokens."""
    t = torch.arange(context, device=lo_Q.device)
    k = torch.arange(own, device=lo_Q.device)
    seen = (t >= lo_Q[:, None]) & (t < hi_Q[:, None])
    return torch.cat([seen, (k >= own_lo_Q[:, None]) & (k < own_hi_Q[:, None])], dim=1)


def interval_block_mask(
    lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor | None = None, own_hi_Q: Tensor | None = None, *, context: int,
    own: int = 0,
) -> BlockMask:  # fmt: skip
    """The same mask for flex_attention, written down from interval overlaps with the tiles of keys.

    Costs O(Q * S / TILE) additions; the rule itself is never evaluated on Q x S elements.  Without own intervals there
    are context keys only (the target's packed documents).
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if own_lo_Q is None or own_hi_Q is None:
            return (k >= lo_Q[q]) & (k < hi_Q[q])
        at = k - context
        return ((k >= lo_Q[q]) & (k < hi_Q[q])) | ((at >= own_lo_Q[q]) & (at < own_hi_Q[q]))

    what = ("num_blocks", "indices")
    names = [f"{full}{side}_{w}" for full in ("", "full_") for side in ("kv", "q") for w in what]
    tiles = _tiles(lo_Q, hi_Q, own_lo_Q, own_hi_Q, context, own)
    lists: dict[str, Any] = dict(zip(names, tiles, strict=True))
    return BlockMask(
        seq_lengths=(len(lo_Q), context + own),
        **lists,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def _tiles(
    lo_Q: Tensor, hi_Q: Tensor, own_lo_Q: Tensor | None, own_hi_Q: Tensor | None, context: int, own: int
) -> tuple[Tensor, ...]:
    """Of partly visible tiles, then of wholly visible ones: number and list by tile of queries, and by tile of keys."""
    queries = len(lo_Q)
    q_tiles, k_tiles = -(-queries // TILE), -(-(context + own) // TILE)
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
    """Softmax attention, [N, Q, D].  The kind of mask chooses the kernel: BlockMask flex, Intervals ours, else SDPA."""
    if isinstance(mask, Intervals):
        from draftsmith.drafter import kernels  # needs Triton, which comes with torch for GPUs

        return kernels.attend(q_NQD, k_MSD, v_MSD, mask)
    # keys repeated for their query heads, also for flex: its backward gives one program a tile of keys and all heads of
    # the group, and the first tiles, which nearly all blocks see, would be what every step waits for
    groups = q_NQD.shape[0] // k_MSD.shape[0]
    k_NSD, v_NSD = k_MSD.repeat_interleave(groups, 0), v_MSD.repeat_interleave(groups, 0)
    if isinstance(mask, BlockMask):
        flex: Any = flex_attention if torch.compiler.is_compiling() else _flex
        return flex(q_NQD[None], k_NSD[None], v_NSD[None], block_mask=mask)[0]
    if mask is None or isinstance(mask, Tensor):
        return _sdpa(q_NQD, k_NSD, v_NSD, mask)
    (k_NTD, k_NPD), (v_NTD, v_NPD) = (x.tensor_split((x.shape[1] - mask[-1].own.stop,), dim=1) for x in (k_NSD, v_NSD))
    outs = []
    for piece in mask:
        k, v = (torch.cat([a[:, piece.context], b[:, piece.own]], dim=1) for a, b in ((k_NTD, k_NPD), (v_NTD, v_NPD)))
        outs.append(_sdpa(q_NQD[:, piece.queries], k, v, piece.mask))
    return torch.cat(outs, dim=1)


def _sdpa(q_NQD: Tensor, k_NSD: Tensor, v_NSD: Tensor, mask_QS: Tensor | None) -> Tensor:
    bias = None if mask_QS is None else mask_QS[None, None]
    return F.scaled_dot_product_attention(q_NQD[None], k_NSD[None], v_NSD[None], attn_mask=bias)[0]
