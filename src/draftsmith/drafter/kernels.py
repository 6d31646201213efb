"""Triton kernels for a GPU: attention where every query sees two intervals of keys, forward and backward.

Suffixes: N query heads, M key/value heads, Q queries, S keys, D head size; in the kernels B rows of a tile.
A tile of queries holds all heads of a group, so that few queries, with nearly the same keys, share a tile.
Tiles that all queries of a tile see wholly need no mask; tiles that none sees are not visited (intervals.py).  The
softmax is the streaming one of FlashAttention-2 (arXiv 2307.08691), its backward pass without atomics: one kernel for
the gradient of queries, one for that of keys and values.  There is no other path that it could fall back to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.drafter.intervals import OWN, TILE, Intervals

WARPS, STAGES = 4, 3
PARTS = 2
"""Programs that share the queries of a tile of keys: with one, the first keys would be what all wait for."""
QUERY_GRADIENT_STAGES, KEY_GRADIENT_STAGES = 2, 2
KEY_GRADIENT_QUERIES = 64
"""How many queries the gradient of a tile of keys takes at a time."""
MOST_TILES = 65535
"""What a grid's second axis takes."""
LOG2_E = 1.4426950408889634


def attend(q_NQD: Tensor, k_MSD: Tensor, v_MSD: Tensor, mask: Intervals, scale: float | None = None) -> Tensor:
    """Softmax attention, [N, Q, D], differentiable.  D: a power of two, at least 16.  scale: default D^-1/2."""
    scale = q_NQD.shape[2] ** -0.5 if scale is None else scale
    return torch.ops.draftsmith.attend(q_NQD, k_MSD, v_MSD, *mask, scale)[0]


@torch.library.custom_op("draftsmith::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, query_tiles: Tensor, key_tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D], of the layout [Q, N, D], and log2 of the sums of exponentials, float32 [M, Q * heads of M]."""
    (heads, queries, size), (groups, keys, _) = q.shape, k.shape
    rows = queries * heads // groups
    if k.shape != v.shape or size != k.shape[2]:
        raise ValueError(f"queries of {size} numbers, keys {list(k.shape)}, values {list(v.shape)}")
    fits = sees.shape[1] == queries and len(query_tiles) == triton.cdiv(rows, TILE)
    if not fits or len(key_tiles) != triton.cdiv(keys, TILE) or max(len(query_tiles), len(key_tiles)) > MOST_TILES:
        raise ValueError(
            f"a mask of {sees.shape[1]} queries, {len(query_tiles)} and {len(key_tiles)} tiles for {queries} queries "
            f"of {heads} heads in {groups} groups and {keys} keys; at most {MOST_TILES} tiles"
        )
    out, sums = _empty_out(q), q.new_empty(groups, rows, dtype=torch.float32)
    _forward_kernel[groups, len(query_tiles)](
        q, k, v, out, sums, sees, query_tiles, queries, keys, scale * LOG2_E, *strides(q, k, v, out),
        HEADS=heads // groups, B=TILE, OWN=OWN, D=size, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out, sums


@torch.library.custom_op("draftsmith::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, sums: Tensor, sees: Tensor, query_tiles: Tensor,
    key_tiles: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, and of k and v in parts, [M * parts, S, D]."""
    (heads, queries, size), (groups, keys, _) = q.shape, k.shape
    assert grad.stride() == q.stride()  # the gradient of keys is told one of them
    parts = _parts(heads // groups)
    grad_q, of_query = _empty_out(q), q.new_empty(*sums.shape, 2, dtype=torch.float32)
    grad_k, grad_v = (q.new_empty(groups * parts, keys, size) for _ in range(2))
    numbers = queries, keys, scale * LOG2_E, scale
    settings: dict[str, Any] = {"HEADS": heads // groups, "B": TILE, "D": size, "num_warps": WARPS}
    _query_gradient_kernel[groups, len(query_tiles)](
        q, k, v, out, grad, sums, of_query, grad_q, sees, query_tiles, *numbers, *strides(q, k, v, out, grad, grad_q),
        OWN=OWN, num_stages=QUERY_GRADIENT_STAGES, **settings,
    )  # fmt: skip
    _key_gradient_kernel[groups * parts, len(key_tiles)](
        q, k, v, grad, of_query, grad_k, grad_v, sees, key_tiles, *numbers, *strides(q, k, v, grad_k),
        PARTS=parts, STEP=min(KEY_GRADIENT_QUERIES, TILE), num_stages=KEY_GRADIENT_STAGES, **settings,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _parts(group: int) -> int:
    return min(PARTS, group)


def _empty_out(q: Tensor) -> Tensor:
    heads, queries, size = q.shape
    return q.new_empty(queries, heads, size).transpose(0, 1)


def strides(*tensors: Tensor) -> list[int]:
    """Of heads and rows."""
    for x in tensors:
        assert x.stride(2) == 1, x.stride()
    return [x.stride(i) for x in tensors for i in (0, 1)]


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, query_tiles: Tensor, key_tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = q.shape[1] * q.shape[0] // k.shape[0]
    return _empty_out(q), q.new_empty(k.shape[0], rows, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, sums: Tensor, sees: Tensor, query_tiles: Tensor,
    key_tiles: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = k.shape[0] * _parts(q.shape[0] // k.shape[0]), k.shape[1], q.shape[2]
    return _empty_out(q), q.new_empty(shape), q.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, unused: None) -> tuple[Tensor | None, ...]:
    q, k, v, *mask, out, sums = ctx.saved_tensors
    if grad.stride() != q.stride():
        grad = torch.empty_strided(q.shape, q.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
    grad_q, *parts = torch.ops.draftsmith.attend_backward(q, k, v, out, grad, sums, *mask, ctx.scale)
    grad_k, grad_v = (x.unflatten(0, (k.shape[0], -1)).sum(1) for x in parts)
    return grad_q, grad_k, grad_v, *(None,) * 4


_attend.register_autograd(_differentiate, setup_context=_remember)


@triton.jit
def _visit(acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale,
           MASKED: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    n, d = first + tl.arange(0, B), tl.arange(0, D)
    there = n < keys if MASKED else tl.full([B], True, tl.int1)
    kT = tl.load(k_ptr + n[None, :] * k_row + d[:, None], mask=there[None, :], other=0.0)
    scores = tl.dot(q, kT, input_precision="ieee")
    if MASKED:
        scores = tl.where((n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None]), scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = (tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher) * scale
    p = tl.exp2(scores * scale - base[:, None])  # one instruction before the exponential
    shrink = tl.exp2(top * scale - base)
    v = tl.load(v_ptr + n[:, None] * v_row + d[None, :], mask=there[:, None], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total * shrink + tl.sum(p, 1)


@triton.jit
def _rows(group, first, queries, head_size, row, HEADS: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """Of B rows of a group, the heads of each query after one another: its query, whether it is there, where it is."""
    r = first + tl.arange(0, B)
    m, head = r // HEADS, group * HEADS + r % HEADS
    return m, r < queries * HEADS, (head * head_size + m * row)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, sees_ptr, tiles_ptr, queries, keys, scale,
                    q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row,
                    HEADS: tl.constexpr, B: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr):  # fmt: skip
    group, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    m, there, at = _rows(group, tile * B, queries, q_head, q_row, HEADS, B, D)
    q = tl.load(q_ptr + at, mask=there[:, None], other=0.0)
    k_ptr += group * k_head
    v_ptr += group * v_head
    lo = tl.load(sees_ptr + m, mask=there, other=0)
    hi = tl.load(sees_ptr + queries + m, mask=there, other=0)
    tiles_ptr += tile * 6
    c0, f0, f1, c1 = tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)
    acc = tl.zeros([B, D], tl.float32)
    top, total = tl.full([B], float("-inf"), tl.float32), tl.zeros([B], tl.float32)
    for first in range(c0, f0, B):
        acc, top, total = _visit(acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, B, D)
    for first in range(f0, f1, B):
        acc, top, total = _visit(
            acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, False, B, D
        )
    for first in range(f1, c1, B):
        acc, top, total = _visit(acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, B, D)
    lo = tl.load(sees_ptr + 2 * queries + m, mask=there, other=0)
    hi = tl.load(sees_ptr + 3 * queries + m, mask=there, other=0)
    for first in range(tl.load(tiles_ptr + 4), tl.load(tiles_ptr + 5), OWN):
        acc, top, total = _visit(
            acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, OWN, D
        )
    total = tl.where(total == 0.0, 1.0, total)
    m, there, at = _rows(group, tile * B, queries, out_head, out_row, HEADS, B, D)
    tl.store(out_ptr + at, (acc / total[:, None]).to(q.dtype), mask=there[:, None])
    sums_ptr += group * queries * HEADS + tile * B + tl.arange(0, B)
    tl.store(sums_ptr, top * scale + tl.log2(total), mask=there)


@triton.jit
def _query_gradient(acc, q, grad, sums, inner, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale,
                    MASKED: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    n, d = first + tl.arange(0, B), tl.arange(0, D)
    there = n < keys if MASKED else tl.full([B], True, tl.int1)
    kT = tl.load(k_ptr + n[None, :] * k_row + d[:, None], mask=there[None, :], other=0.0)
    vT = tl.load(v_ptr + n[None, :] * v_row + d[:, None], mask=there[None, :], other=0.0)
    p = tl.exp2(tl.dot(q, kT, input_precision="ieee") * scale - sums[:, None])
    if MASKED:
        p = tl.where((n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None]), p, 0.0)
    grad_scores = p * (tl.dot(grad, vT, input_precision="ieee") - inner[:, None])
    return tl.dot(grad_scores.to(q.dtype), tl.trans(kT), acc, input_precision="ieee")


@triton.jit
def _query_gradient_kernel(q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, sums_ptr, of_query_ptr, grad_q_ptr, sees_ptr,
                           tiles_ptr, queries, keys, scale, plain_scale, q_head, q_row, k_head, k_row, v_head, v_row,
                           out_head, out_row, grad_head, grad_row, grad_q_head, grad_q_row,
                           HEADS: tl.constexpr, B: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Leaves in of_query, float32 [M, Q * HEADS, 2], what the gradient of keys needs of a row: log2 of its sum of
    exponentials, and its sum of output * gradient."""
    group, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    m, there, at = _rows(group, tile * B, queries, q_head, q_row, HEADS, B, D)
    q = tl.load(q_ptr + at, mask=there[:, None], other=0.0)
    m, there, at = _rows(group, tile * B, queries, grad_head, grad_row, HEADS, B, D)
    grad = tl.load(grad_ptr + at, mask=there[:, None], other=0.0)
    m, there, at = _rows(group, tile * B, queries, out_head, out_row, HEADS, B, D)
    out = tl.load(out_ptr + at, mask=there[:, None], other=0.0)
    r = group * queries * HEADS + tile * B + tl.arange(0, B)
    sums = tl.load(sums_ptr + r, mask=there, other=0.0)
    inner = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(of_query_ptr + 2 * r, sums, mask=there)
    tl.store(of_query_ptr + 2 * r + 1, inner, mask=there)
    k_ptr += group * k_head
    v_ptr += group * v_head
    lo = tl.load(sees_ptr + m, mask=there, other=0)
    hi = tl.load(sees_ptr + queries + m, mask=there, other=0)
    tiles_ptr += tile * 6
    c0, f0, f1, c1 = tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)
    acc = tl.zeros([B, D], tl.float32)
    for first in range(c0, f0, B):
        acc = _query_gradient(
            acc, q, grad, sums, inner, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, B, D
        )
    for first in range(f0, f1, B):
        acc = _query_gradient(
            acc, q, grad, sums, inner, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, False, B, D
        )
    for first in range(f1, c1, B):
        acc = _query_gradient(
            acc, q, grad, sums, inner, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, B, D
        )
    lo = tl.load(sees_ptr + 2 * queries + m, mask=there, other=0)
    hi = tl.load(sees_ptr + 3 * queries + m, mask=there, other=0)
    for first in range(tl.load(tiles_ptr + 4), tl.load(tiles_ptr + 5), OWN):
        acc = _query_gradient(
            acc, q, grad, sums, inner, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, OWN, D
        )
    m, there, at = _rows(group, tile * B, queries, grad_q_head, grad_q_row, HEADS, B, D)
    tl.store(grad_q_ptr + at, (acc * plain_scale).to(q.dtype), mask=there[:, None])


@triton.jit
def _key_gradient(grad_k, grad_v, k, v, q_ptr, grad_ptr, of_query_ptr, lo_ptr, hi_ptr, first, n, queries, head_size,
                  row, scale, MASKED: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr,
                  D: tl.constexpr):  # fmt: skip
    m, there, at = _rows(0, first, queries, head_size, row, HEADS, STEP, D)
    pair = 2 * first + tl.arange(0, 2 * STEP)
    pair_there = pair < 2 * queries * HEADS
    if not MASKED:
        there, pair_there = tl.full([STEP], True, tl.int1), tl.full([2 * STEP], True, tl.int1)
    # two numbers a row in one load: as many as a program has threads, and so copied once; a shorter load is laid out
    # for its use, where each thread copies 16 of the 64 numbers by itself
    pairs = tl.load(of_query_ptr + pair, mask=pair_there, other=0.0)
    sums, inner = tl.split(tl.reshape(pairs, (STEP, 2)))
    q = tl.load(q_ptr + at, mask=there[:, None], other=0.0)
    pT = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - sums[None, :])
    if MASKED:
        lo = tl.load(lo_ptr + m, mask=there, other=0)
        hi = tl.load(hi_ptr + m, mask=there, other=0)
        pT = tl.where((n[:, None] >= lo[None, :]) & (n[:, None] < hi[None, :]), pT, 0.0)
    grad = tl.load(grad_ptr + at, mask=there[:, None], other=0.0)
    grad_v = tl.dot(pT.to(grad.dtype), grad, grad_v, input_precision="ieee")
    grad_scoresT = pT * (tl.dot(v, tl.trans(grad), input_precision="ieee") - inner[None, :])
    return tl.dot(grad_scoresT.to(q.dtype), q, grad_k, input_precision="ieee"), grad_v


@triton.jit
def _key_gradient_kernel(q_ptr, k_ptr, v_ptr, grad_ptr, of_query_ptr, grad_k_ptr, grad_v_ptr, sees_ptr, tiles_ptr,
                         queries, keys, scale, plain_scale, head_size, row, k_head, k_row, v_head, v_row, out_head,
                         out_row, HEADS: tl.constexpr, PARTS: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr,
                         D: tl.constexpr):  # fmt: skip
    """The rows that see all of the keys are shared out among the parts; the first takes those before and the keys' own,
    the last those behind.  Where none sees all, those that see some are shared out."""
    group, part, tile = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    n, d = tile * B + tl.arange(0, B), tl.arange(0, D)
    there = n < keys
    k = tl.load(k_ptr + group * k_head + n[:, None] * k_row + d[None, :], mask=there[:, None], other=0.0)
    v = tl.load(v_ptr + group * v_head + n[:, None] * v_row + d[None, :], mask=there[:, None], other=0.0)
    q_ptr += group * HEADS * head_size  # both have the same strides
    grad_ptr += group * HEADS * head_size
    of_query_ptr += group * HEADS * queries * 2
    tiles_ptr += tile * 6
    c0, f0, f1, c1 = tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)
    o0, o1 = tl.load(tiles_ptr + 4), tl.load(tiles_ptr + 5)
    some = f1 > f0
    low, high = tl.where(some, f0, c0), tl.where(some, f1, c1)
    share = tl.cdiv(high - low, PARTS * STEP) * STEP
    begin, end = low + part * share, tl.minimum(low + (part + 1) * share, high)
    c0 = tl.where(some, tl.where(part > 0, f0, c0), begin)
    f0 = tl.where(some, f0, end)
    begin = tl.where(some, begin, end)
    f1 = tl.where(some & (part == PARTS - 1), f1, c1)
    o1 = tl.where(part == 0, o1, o0)
    lo_ptr, hi_ptr = sees_ptr, sees_ptr + queries
    gk, gv = tl.zeros([B, D], tl.float32), tl.zeros([B, D], tl.float32)
    for first in range(c0, f0, STEP):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, of_query_ptr, lo_ptr, hi_ptr, first, n, queries,
                               head_size, row, scale, True, HEADS, STEP, D)  # fmt: skip
    for first in range(begin, end, STEP):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, of_query_ptr, lo_ptr, hi_ptr, first, n, queries,
                               head_size, row, scale, False, HEADS, STEP, D)  # fmt: skip
    for first in range(f1, c1, STEP):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, of_query_ptr, lo_ptr, hi_ptr, first, n, queries,
                               head_size, row, scale, True, HEADS, STEP, D)  # fmt: skip
    lo_ptr, hi_ptr = sees_ptr + 2 * queries, sees_ptr + 3 * queries
    for first in range(o0, o1, STEP):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, of_query_ptr, lo_ptr, hi_ptr, first, n, queries,
                               head_size, row, scale, True, HEADS, STEP, D)  # fmt: skip
    at = tl.program_id(0) * out_head + n[:, None] * out_row + d[None, :]
    tl.store(grad_k_ptr + at, (gk * plain_scale).to(k.dtype), mask=there[:, None])
    tl.store(grad_v_ptr + at, gv.to(k.dtype), mask=there[:, None])
