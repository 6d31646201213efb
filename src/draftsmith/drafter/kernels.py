"""Triton kernels for a GPU: attention where every query sees two intervals of keys, forward and backward; and the
softmax of the loss together with its gradient.

Suffixes: N query heads, M key/value heads, Q queries, S keys, D head size, C rows of a chunk, V vocabulary; in the
kernels B rows of a tile.
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

from draftsmith.drafter.intervals import TILE, Intervals

WARPS, STAGES, GRADIENT_STAGES = 4, 3, 2
SOFTMAX_TILE, SOFTMAX_WARPS = 8192, 16
LOG2_E = 1.4426950408889634


def attend(q_NQD: Tensor, k_MSD: Tensor, v_MSD: Tensor, mask: Intervals) -> Tensor:
    """Softmax attention, [N, Q, D], differentiable.  D: a power of two, at least 16."""
    return torch.ops.draftsmith.attend(q_NQD, k_MSD, v_MSD, *mask)[0]


@torch.library.custom_op("draftsmith::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, query_tiles: Tensor, key_tiles: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D], of the layout [Q, N, D], and log2 of the sums of exponentials, float32 [N, Q]."""
    (heads, queries, size), (groups, keys, _) = q.shape, k.shape
    out, sums = _empty_out(q), q.new_empty(heads, queries, dtype=torch.float32)
    _forward_kernel[heads, len(query_tiles)](
        q, k, v, out, sums, sees, query_tiles, queries, keys, size**-0.5 * LOG2_E, *_strides(q, k, v, out),
        HEADS=heads // groups, B=TILE, D=size, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out, sums


@torch.library.custom_op("draftsmith::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Tensor, inner: Tensor, sees: Tensor, query_tiles: Tensor,
    key_tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, and of k and v by query head, [N, S, D].  inner: sum of output * grad, float32 [N, Q]."""
    (heads, queries, size), (groups, keys, _) = q.shape, k.shape
    grad_q = _empty_out(q)
    grad_k, grad_v = (q.new_empty(heads, keys, size) for _ in range(2))
    numbers = queries, keys, size**-0.5 * LOG2_E, size**-0.5
    settings: dict[str, Any] = {
        "HEADS": heads // groups, "B": TILE, "D": size, "num_warps": WARPS, "num_stages": GRADIENT_STAGES,
    }  # fmt: skip
    _query_gradient_kernel[heads, len(query_tiles)](
        q, k, v, grad, sums, inner, grad_q, sees, query_tiles, *numbers, *_strides(q, k, v, grad, grad_q), **settings
    )
    _key_gradient_kernel[heads, len(key_tiles)](
        q, k, v, grad, sums, inner, grad_k, grad_v, sees, key_tiles, *numbers, *_strides(q, k, v, grad, grad_k),
        **settings,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _empty_out(q: Tensor) -> Tensor:
    heads, queries, size = q.shape
    return q.new_empty(queries, heads, size).transpose(0, 1)


def _strides(*tensors: Tensor) -> list[int]:
    """Of heads and rows."""
    for x in tensors:
        assert x.stride(2) == 1, x.stride()
    return [x.stride(i) for x in tensors for i in (0, 1)]


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, query_tiles: Tensor, key_tiles: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_out(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@_attend_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Tensor, inner: Tensor, sees: Tensor, query_tiles: Tensor,
    key_tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = q.shape[0], k.shape[1], q.shape[2]
    return _empty_out(q), q.new_empty(shape), q.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, unused: None) -> tuple[Tensor | None, ...]:
    q, k, v, *mask, out, sums = ctx.saved_tensors
    inner = (out.float() * grad.float()).sum(-1)
    if grad.stride(2) != 1:
        grad = grad.contiguous()
    grad_q, by_head_k, by_head_v = torch.ops.draftsmith.attend_backward(q, k, v, grad, sums, inner, *mask)
    groups = k.shape[0], q.shape[0] // k.shape[0]
    return grad_q, by_head_k.unflatten(0, groups).sum(1), by_head_v.unflatten(0, groups).sum(1), None, None, None


_attend.register_autograd(_differentiate, setup_context=_remember)


def softmax_gradient(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and argmax == label (first of equals), float32 [C]; the logits become the gradient, in place."""
    logits_CV, labels_C = logits_CV.contiguous(), labels_C.contiguous()
    ce, correct = (torch.empty(len(labels_C), device=logits_CV.device) for _ in range(2))
    _softmax_gradient_kernel[len(labels_C),](
        logits_CV, labels_C, ce, correct, logits_CV.shape[1], LOG2_E, B=SOFTMAX_TILE, num_warps=SOFTMAX_WARPS
    )
    return ce, correct


@triton.jit
def _softmax_gradient_kernel(logits_ptr, labels_ptr, ce_ptr, correct_ptr, vocab, log2_e, B: tl.constexpr):
    """One row a program: read from memory once and, its neighbours being few, from the cache once more."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab
    label = tl.load(labels_ptr + row)
    picked = tl.load(logits_ptr + label).to(tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total, earlier = tl.zeros([B], tl.float32), tl.zeros([B], tl.int32)
    for first in range(0, vocab, B):
        v = first + tl.arange(0, B)
        x = tl.load(logits_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - higher) * log2_e) + tl.exp2((x - higher) * log2_e)
        top = higher
    whole = tl.sum(total, 0)
    for first in range(0, vocab, B):
        v = first + tl.arange(0, B)
        x = tl.load(logits_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        earlier += ((x == top) & (v < label)).to(tl.int32)
        p = tl.exp2((x - top) * log2_e) / whole
        p = tl.where(v == label, p - 1.0, p)
        tl.store(logits_ptr + v, p.to(logits_ptr.dtype.element_ty), mask=v < vocab)
    tl.store(ce_ptr + row, tl.log(whole) - (picked - top))
    first_of_equals = tl.sum(earlier, 0) == 0
    tl.store(correct_ptr + row, ((picked == top) & first_of_equals).to(tl.float32))


@triton.jit
def _visit(acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale,
           MASKED: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    n, d = first + tl.arange(0, B), tl.arange(0, D)
    there = n < keys if MASKED else tl.full([B], True, tl.int1)
    kT = tl.load(k_ptr + n[None, :] * k_row + d[:, None], mask=there[None, :], other=0.0)
    scores = tl.dot(q, kT, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where((n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None]), scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = tl.load(v_ptr + n[:, None] * v_row + d[None, :], mask=there[:, None], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total * shrink + tl.sum(p, 1)


@triton.jit
def _forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, sees_ptr, tiles_ptr, queries, keys, scale,
                    q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row,
                    HEADS: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    m, d = tile * B + tl.arange(0, B), tl.arange(0, D)
    there = m < queries
    q = tl.load(q_ptr + head * q_head + m[:, None] * q_row + d[None, :], mask=there[:, None], other=0.0)
    k_ptr += head // HEADS * k_head
    v_ptr += head // HEADS * v_head
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
    for first in range(tl.load(tiles_ptr + 4), tl.load(tiles_ptr + 5), B):
        acc, top, total = _visit(acc, top, total, q, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, B, D)
    total = tl.where(total == 0.0, 1.0, total)
    out_ptr += head * out_head + m[:, None] * out_row + d[None, :]
    tl.store(out_ptr, (acc / total[:, None]).to(q.dtype), mask=there[:, None])
    tl.store(sums_ptr + head * queries + m, top + tl.log2(total), mask=there)


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
def _query_gradient_kernel(q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, inner_ptr, grad_q_ptr, sees_ptr, tiles_ptr,
                           queries, keys, scale, plain_scale,
                           q_head, q_row, k_head, k_row, v_head, v_row, grad_head, grad_row, grad_q_head, grad_q_row,
                           HEADS: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    m, d = tile * B + tl.arange(0, B), tl.arange(0, D)
    there = m < queries
    q = tl.load(q_ptr + head * q_head + m[:, None] * q_row + d[None, :], mask=there[:, None], other=0.0)
    grad = tl.load(grad_ptr + head * grad_head + m[:, None] * grad_row + d[None, :], mask=there[:, None], other=0.0)
    sums = tl.load(sums_ptr + head * queries + m, mask=there, other=0.0)
    inner = tl.load(inner_ptr + head * queries + m, mask=there, other=0.0)
    k_ptr += head // HEADS * k_head
    v_ptr += head // HEADS * v_head
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
    for first in range(tl.load(tiles_ptr + 4), tl.load(tiles_ptr + 5), B):
        acc = _query_gradient(
            acc, q, grad, sums, inner, k_ptr, v_ptr, first, keys, lo, hi, k_row, v_row, scale, True, B, D
        )
    grad_q_ptr += head * grad_q_head + m[:, None] * grad_q_row + d[None, :]
    tl.store(grad_q_ptr, (acc * plain_scale).to(q.dtype), mask=there[:, None])


@triton.jit
def _key_gradient(grad_k, grad_v, k, v, q_ptr, grad_ptr, sums_ptr, inner_ptr, lo_ptr, hi_ptr, first, n, queries,
                  q_row, grad_row, scale, MASKED: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    m, d = first + tl.arange(0, B), tl.arange(0, D)
    there = m < queries
    q = tl.load(q_ptr + m[:, None] * q_row + d[None, :], mask=there[:, None], other=0.0)
    sums = tl.load(sums_ptr + m, mask=there, other=0.0)
    pT = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - sums[None, :])
    if MASKED:
        lo = tl.load(lo_ptr + m, mask=there, other=0)
        hi = tl.load(hi_ptr + m, mask=there, other=0)
        pT = tl.where((n[:, None] >= lo[None, :]) & (n[:, None] < hi[None, :]), pT, 0.0)
    grad = tl.load(grad_ptr + m[:, None] * grad_row + d[None, :], mask=there[:, None], other=0.0)
    grad_v = tl.dot(pT.to(grad.dtype), grad, grad_v, input_precision="ieee")
    inner = tl.load(inner_ptr + m, mask=there, other=0.0)
    grad_scoresT = pT * (tl.dot(v, tl.trans(grad), input_precision="ieee") - inner[None, :])
    return tl.dot(grad_scoresT.to(q.dtype), q, grad_k, input_precision="ieee"), grad_v


@triton.jit
def _key_gradient_kernel(q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, inner_ptr, grad_k_ptr, grad_v_ptr, sees_ptr,
                         tiles_ptr, queries, keys, scale, plain_scale,
                         q_head, q_row, k_head, k_row, v_head, v_row, grad_head, grad_row, out_head, out_row,
                         HEADS: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)  # the first keys are seen by most queries
    n, d = tile * B + tl.arange(0, B), tl.arange(0, D)
    there = n < keys
    group = head // HEADS
    k = tl.load(k_ptr + group * k_head + n[:, None] * k_row + d[None, :], mask=there[:, None], other=0.0)
    v = tl.load(v_ptr + group * v_head + n[:, None] * v_row + d[None, :], mask=there[:, None], other=0.0)
    q_ptr += head * q_head
    grad_ptr += head * grad_head
    sums_ptr += head * queries
    inner_ptr += head * queries
    tiles_ptr += tile * 6
    c0, f0, f1, c1 = tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)
    lo_ptr, hi_ptr = sees_ptr, sees_ptr + queries
    gk, gv = tl.zeros([B, D], tl.float32), tl.zeros([B, D], tl.float32)
    for first in range(c0, f0, B):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, sums_ptr, inner_ptr, lo_ptr, hi_ptr, first, n, queries,
                               q_row, grad_row, scale, True, B, D)  # fmt: skip
    for first in range(f0, f1, B):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, sums_ptr, inner_ptr, lo_ptr, hi_ptr, first, n, queries,
                               q_row, grad_row, scale, False, B, D)  # fmt: skip
    for first in range(f1, c1, B):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, sums_ptr, inner_ptr, lo_ptr, hi_ptr, first, n, queries,
                               q_row, grad_row, scale, True, B, D)  # fmt: skip
    lo_ptr, hi_ptr = sees_ptr + 2 * queries, sees_ptr + 3 * queries
    for first in range(tl.load(tiles_ptr + 4), tl.load(tiles_ptr + 5), B):
        gk, gv = _key_gradient(gk, gv, k, v, q_ptr, grad_ptr, sums_ptr, inner_ptr, lo_ptr, hi_ptr, first, n, queries,
                               q_row, grad_row, scale, True, B, D)  # fmt: skip
    grad_k_ptr += head * out_head + n[:, None] * out_row + d[None, :]
    grad_v_ptr += head * out_head + n[:, None] * out_row + d[None, :]
    tl.store(grad_k_ptr, (gk * plain_scale).to(k.dtype), mask=there[:, None])
    tl.store(grad_v_ptr, gv.to(k.dtype), mask=there[:, None])
