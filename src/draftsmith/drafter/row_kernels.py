"""Triton kernels for a GPU that work row by row, as fast as memory gives the rows: norm and rotation of heads, silu of
one half times the other, the softmax of the loss and its gradient.

Suffixes: P tokens, C columns of all heads, D head size, R rows of a chunk, V vocabulary; in the kernels B rows or
elements of a tile, H half of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.drafter.kernels import LOG2_E, strides

ROTATE_TILE, ROTATE_PROGRAMS = 32, 528
"""Heads that are normed and rotated at a time; programs of the backward pass, each with a sum of its own."""
SILU_TILE = 2048
SOFTMAX_TILE, SOFTMAX_WARPS = 2048, 8


def norm_rotate(x_PC: Tensor, weight_D: Tensor, cos_PD: Tensor, sin_PD: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of every head and plain RoPE over its halves, [C / D, P, D].

    Differentiable in x and weight.  cos, sin: as `model.rotary_tables` makes them, both halves alike.
    """
    # tables of trained slots of blocks of two are a view with gaps
    return torch.ops.draftsmith.norm_rotate(x_PC, weight_D, cos_PD.contiguous(), sin_PD.contiguous(), eps)


@torch.library.custom_op("draftsmith::norm_rotate", mutates_args=())
def _norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    size, (rows, width) = len(weight), x.shape
    assert x.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous() and weight.is_contiguous()
    out = x.new_empty(rows, width // size, size)
    _norm_rotate_kernel[triton.cdiv(out.numel(), ROTATE_TILE * size),](
        x, weight, cos, sin, out, rows, eps, x.stride(0), HEADS=width // size, B=ROTATE_TILE, H=size // 2,
    )  # fmt: skip
    return out.transpose(0, 1)


@torch.library.custom_op("draftsmith::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, by program, of the weight: float32 [programs, D]."""
    size, (rows, width) = len(weight), x.shape
    grad_x, parts = x.new_empty(rows, width), weight.new_empty(ROTATE_PROGRAMS, size)
    _norm_rotate_gradient_kernel[ROTATE_PROGRAMS,](
        grad, x, weight, cos, sin, grad_x, parts, rows, eps, x.stride(0), *strides(grad),
        HEADS=width // size, B=ROTATE_TILE, H=size // 2,
    )  # fmt: skip
    return grad_x, parts


@_norm_rotate.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // len(weight), len(weight)).transpose(0, 1)


@_norm_rotate_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(ROTATE_PROGRAMS, len(weight))


def _remember_norm_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_norm_rotate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if grad.stride(2) != 1:
        grad = grad.contiguous()
    grad_x, parts = torch.ops.draftsmith.norm_rotate_backward(grad, *ctx.saved_tensors, ctx.eps)
    return grad_x, parts.sum(0), None, None, None


_norm_rotate.register_autograd(_differentiate_norm_rotate, setup_context=_remember_norm_rotate)


def silu_mul(gate_up_P2I: Tensor) -> Tensor:
    """silu of the first half of each row times the second, [P, I], differentiable: its gradient is one tensor too."""
    return torch.ops.draftsmith.silu_mul(gate_up_P2I)


@torch.library.custom_op("draftsmith::silu_mul", mutates_args=())
def _silu_mul(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _silu_mul_kernel[len(x), triton.cdiv(out.shape[1], SILU_TILE)](x, out, out.shape[1], B=SILU_TILE)
    return out


@torch.library.custom_op("draftsmith::silu_mul_backward", mutates_args=())
def _silu_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    assert x.is_contiguous() and grad.is_contiguous()
    out, width = torch.empty_like(x), grad.shape[1]
    _silu_mul_gradient_kernel[len(x), triton.cdiv(width, SILU_TILE)](grad, x, out, width, B=SILU_TILE)
    return out


@_silu_mul.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@_silu_mul_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _differentiate_silu_mul(ctx: Any, grad: Tensor) -> Tensor:
    result: Tensor = torch.ops.draftsmith.silu_mul_backward(grad.contiguous(), *ctx.saved_tensors)
    return result


_silu_mul.register_autograd(
    _differentiate_silu_mul, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def softmax_rows(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, argmax == label (first of equals) and share, float32 [R]; of the logits becomes, in place, what
    times share is the gradient of CE.  CE is Inf where a logit is 120 above label and first SOFTMAX_TILE."""
    logits_RV, labels_R = logits_RV.contiguous(), labels_R.contiguous()
    ce, correct, share = (torch.empty(len(labels_R), device=logits_RV.device) for _ in range(3))
    _softmax_rows_kernel[len(labels_R),](
        logits_RV, labels_R, ce, correct, share, logits_RV.shape[1], LOG2_E, B=SOFTMAX_TILE, num_warps=SOFTMAX_WARPS
    )
    return ce, correct, share


def hidden_gradient(sums_RH: Tensor, factor_R: Tensor, where_R: Tensor, queries: int) -> Tensor:
    """factor * sums at rows `where`, [Q, H], zeros where no row goes."""
    assert all(x.is_contiguous() for x in (sums_RH, factor_R, where_R))
    out = sums_RH.new_zeros(queries, sums_RH.shape[1])
    width = sums_RH.shape[1]
    _hidden_gradient_kernel[len(where_R), triton.cdiv(width, SILU_TILE)](
        sums_RH, factor_R, where_R, out, width, B=SILU_TILE
    )
    return out


@triton.jit
def _normed_halves(x_ptr, weight_ptr, x_row, row, head, there, eps, H: tl.constexpr):
    """Of B heads: both halves over their root mean square, its inverse, and the two halves of the weight."""
    at = tl.arange(0, H)
    x_ptr += row.to(tl.int64)[:, None] * x_row + (head * 2 * H)[:, None] + at[None, :]
    a = tl.load(x_ptr, mask=there[:, None], other=0.0).to(tl.float32)
    b = tl.load(x_ptr + H, mask=there[:, None], other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * H) + eps)[:, None]
    return a * inverse, b * inverse, inverse, tl.load(weight_ptr + at)[None, :], tl.load(weight_ptr + H + at)[None, :]


@triton.jit
def _norm_rotate_kernel(x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, rows, eps, x_row,
                        HEADS: tl.constexpr, B: tl.constexpr, H: tl.constexpr):  # fmt: skip
    which, at = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, H)
    row, head, there = which // HEADS, which % HEADS, which < rows * HEADS
    a, b, _, weight_a, weight_b = _normed_halves(x_ptr, weight_ptr, x_row, row, head, there, eps, H)
    a, b = a * weight_a, b * weight_b
    cos = tl.load(cos_ptr + row[:, None] * 2 * H + at[None, :], mask=there[:, None], other=0.0)
    sin = tl.load(sin_ptr + row[:, None] * 2 * H + at[None, :], mask=there[:, None], other=0.0)
    out_ptr += which.to(tl.int64)[:, None] * 2 * H + at[None, :]
    tl.store(out_ptr, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(out_ptr + H, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit
def _norm_rotate_gradient_kernel(grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, grad_x_ptr, parts_ptr, rows, eps,
                                 x_row, grad_head, grad_row,
                                 HEADS: tl.constexpr, B: tl.constexpr, H: tl.constexpr):  # fmt: skip
    at = tl.arange(0, H)
    part_a, part_b = tl.zeros([H], tl.float32), tl.zeros([H], tl.float32)
    for first in range(tl.program_id(0) * B, rows * HEADS, tl.num_programs(0) * B):
        which = first + tl.arange(0, B)
        row, head, there = which // HEADS, which % HEADS, which < rows * HEADS
        a, b, inverse, weight_a, weight_b = _normed_halves(x_ptr, weight_ptr, x_row, row, head, there, eps, H)
        cos = tl.load(cos_ptr + row[:, None] * 2 * H + at[None, :], mask=there[:, None], other=0.0)
        sin = tl.load(sin_ptr + row[:, None] * 2 * H + at[None, :], mask=there[:, None], other=0.0)
        from_ptr = grad_ptr + (head * grad_head + row.to(tl.int64) * grad_row)[:, None] + at[None, :]
        out_a = tl.load(from_ptr, mask=there[:, None], other=0.0).to(tl.float32)
        out_b = tl.load(from_ptr + H, mask=there[:, None], other=0.0).to(tl.float32)
        grad_a, grad_b = out_a * cos + out_b * sin, out_b * cos - out_a * sin
        part_a += tl.sum(grad_a * a, 0)
        part_b += tl.sum(grad_b * b, 0)
        grad_a, grad_b = grad_a * weight_a, grad_b * weight_b
        along = ((tl.sum(grad_a * a, 1) + tl.sum(grad_b * b, 1)) / (2 * H))[:, None]
        to_ptr = grad_x_ptr + which.to(tl.int64)[:, None] * 2 * H + at[None, :]
        tl.store(to_ptr, ((grad_a - a * along) * inverse).to(grad_x_ptr.dtype.element_ty), mask=there[:, None])
        tl.store(to_ptr + H, ((grad_b - b * along) * inverse).to(grad_x_ptr.dtype.element_ty), mask=there[:, None])
    parts_ptr += tl.program_id(0) * 2 * H
    tl.store(parts_ptr + at, part_a)
    tl.store(parts_ptr + H + at, part_b)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, width, B: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    x_ptr += row * 2 * width + at
    gate = tl.load(x_ptr, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + width, mask=at < width, other=0.0).to(tl.float32)
    out_ptr += row * width + at
    tl.store(out_ptr, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _silu_mul_gradient_kernel(grad_ptr, x_ptr, out_ptr, width, B: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    x_ptr += row * 2 * width + at
    out_ptr += row * 2 * width + at
    gate = tl.load(x_ptr, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + width, mask=at < width, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out_ptr, grad_gate.to(out_ptr.dtype.element_ty), mask=at < width)
    tl.store(out_ptr + width, (grad * gate * share).to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _softmax_rows_kernel(logits_ptr, labels_ptr, ce_ptr, correct_ptr, share_ptr, vocab, log2_e, B: tl.constexpr):
    """One row a program, read and written once: exponentials count from 40 above the largest of label and first tile,
    not of the row, so that they can be written as they are read; nothing is lost from 47 below that to 120 above.
    Every lane keeps the first place of its own maximum.  Two tiles at a time: enough is on its way from memory."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab
    label = tl.load(labels_ptr + row)
    picked = tl.load(logits_ptr + label).to(tl.float32)
    at = tl.arange(0, B)
    top = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    base = tl.maximum(tl.max(top, 0), picked) + 40.0
    total = tl.exp2(top * log2_e - base * log2_e)
    tl.store(logits_ptr + at, total.to(logits_ptr.dtype.element_ty), mask=at < vocab)
    for first in range(B, vocab, 2 * B):
        v, w = first + tl.arange(0, B), first + B + tl.arange(0, B)
        x = tl.load(logits_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        y = tl.load(logits_ptr + w, mask=w < vocab, other=float("-inf")).to(tl.float32)
        p, r = tl.exp2(x * log2_e - base * log2_e), tl.exp2(y * log2_e - base * log2_e)
        tl.store(logits_ptr + v, p.to(logits_ptr.dtype.element_ty), mask=v < vocab)
        tl.store(logits_ptr + w, r.to(logits_ptr.dtype.element_ty), mask=w < vocab)
        total += p + r
        at = tl.where(x > top, v, at)
        top = tl.maximum(top, x)
        at = tl.where(y > top, w, at)
        top = tl.maximum(top, y)
    whole, best = tl.sum(total, 0), tl.max(top, 0)
    whole = tl.where(best - base > 80.0, float("inf"), whole)
    tl.debug_barrier()  # the label's is written once more, by one thread: its difference from 1 before it is rounded
    own = tl.exp2(picked * log2_e - base * log2_e) - whole
    own = tl.where(whole == float("inf"), 0.0, own)  # such a row only makes the loss Inf
    tl.store(logits_ptr + label, own.to(logits_ptr.dtype.element_ty))
    tl.store(share_ptr + row, 1.0 / whole)
    tl.store(ce_ptr + row, tl.log(whole) - (picked - base))
    first_of_equals = tl.min(tl.where(top == best, at, vocab), 0)
    tl.store(correct_ptr + row, (first_of_equals == label).to(tl.float32))


@triton.jit
def _hidden_gradient_kernel(sums_ptr, factor_ptr, where_ptr, out_ptr, width, B: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    sums = tl.load(sums_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    out_ptr += tl.load(where_ptr + row) * width + at
    tl.store(out_ptr, (sums * tl.load(factor_ptr + row)).to(out_ptr.dtype.element_ty), mask=at < width)
