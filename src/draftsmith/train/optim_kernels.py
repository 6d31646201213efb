"""Triton kernels that take all tensors of a kind in one launch of an optimizer step: AdamW, the norm of gradients.

Where the tensors are is told by a table, int64 [tensors, columns]: for each how far it lies from the first of its
dtype, in numbers (Triton reads 16 bytes at once only off an argument that it knows to be aligned), then how many
numbers it has, then how many chunks come before.  A program takes one chunk, and finds in the last column whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.drafter.attention import put_all

UPDATE_TILE, UPDATE_CHUNK = 1024, 8192
"""Numbers that a program updates at a time, and in all."""
SQUARES_TILE, SQUARES_CHUNK = 4096, 65536
KINDS = (torch.float32, torch.bfloat16, torch.float16)


def adamw(
    parameters: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor],
    copies: Sequence[Tensor | None], numbers: np.ndarray, factor: Tensor,
) -> None:  # fmt: skip
    """A step of all tensors, in place.  Parameters and moments are float32; numbers: as `optim.adamw`'s scalars,
    float32 on the host; factor: 0-dim float32, what gradients are to be multiplied by."""
    _check(*parameters, *means, *squares, *gradients, *(c for c in copies if c is not None))
    assert all(x.dtype == torch.float32 for x in (*parameters, *means, *squares, factor))
    lines = list(zip(gradients, copies, parameters, means, squares, strict=True))
    for (_, _, whole), which in _kinds(lines):
        first, gradient, copy = parameters[which[0]], gradients[which[0]], copies[which[0]]
        columns = [(parameters, first), (means, first), (squares, first), (gradients, gradient)]
        columns += [] if copy is None else [(cast(Sequence[Tensor], copies), copy)]
        table, chunks = _table(columns, which, UPDATE_CHUNK)
        there, scalars = put_all([table, numbers], factor.device)
        _adamw_kernel[chunks,](
            there, len(table), scalars, factor, first, gradient, copy, ALIGNED=whole,
            N=triton.next_power_of_2(len(table)), CHUNK=UPDATE_CHUNK, B=UPDATE_TILE,
        )  # fmt: skip


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Root of the sum of squares of all elements, 0-dim float32."""
    _check(*tensors)
    sums = []
    for (_, _, whole), which in _kinds([(x, None) for x in tensors]):
        first = tensors[which[0]]
        table, chunks = _table([(tensors, first)], which, SQUARES_CHUNK)
        (there,) = put_all([table], tensors[0].device)
        sums.append(torch.empty(chunks, device=tensors[0].device))
        _squares_kernel[chunks,](
            there, len(table), first, sums[-1], ALIGNED=whole, N=triton.next_power_of_2(len(table)),
            CHUNK=SQUARES_CHUNK, B=SQUARES_TILE, num_warps=8,
        )  # fmt: skip
    return torch.cat(sums).sum().sqrt() if len(sums) > 1 else sums[0].sum().sqrt()


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.is_contiguous() and x.dtype in KINDS and 0 < x.numel() < 2**31 - UPDATE_CHUNK - SQUARES_CHUNK, x.shape


Kind = tuple[torch.dtype, torch.dtype | None, bool]
"""dtypes of gradient and copy, and whether 16 bytes can be read at once: one compiled kernel."""


def _kinds(lines: Sequence[tuple[Tensor | None, ...]]) -> Iterator[tuple[Kind, list[int]]]:
    """Places of the lines of each kind.  A line: gradient, copy, and what goes with them."""
    found: dict[Kind, list[int]] = {}
    for i, line in enumerate(lines):
        x, y = cast(Tensor, line[0]), line[1]
        key = x.dtype, None if y is None else y.dtype, aligned(*(t for t in line if t is not None))
        found.setdefault(key, []).append(i)
    yield from found.items()


def aligned(*tensors: Tensor) -> bool:
    """Whether the kernels can read and write them 16 bytes at a time: away from any other such tensor by a multiple of
    16 numbers, and with as many."""
    return all(x.numel() % 16 == 0 and x.data_ptr() % 64 == 0 for x in tensors)


def _table(
    columns: Sequence[tuple[Sequence[Tensor], Tensor]], which: Sequence[int], chunk: int
) -> tuple[np.ndarray, int]:
    """The table of the tensors at the places `which`, and how many chunks there are.  columns: tensors, and what they
    are counted from."""
    sizes = np.array([columns[0][0][i].numel() for i in which], dtype=np.int64)
    chunks = -(-sizes // chunk)
    away = [
        np.array([(tensors[i].data_ptr() - base.data_ptr()) // base.element_size() for i in which], dtype=np.int64)
        for tensors, base in columns
    ]
    return np.stack([*away, sizes, np.cumsum(chunks) - chunks], axis=1), int(chunks.sum())


@triton.jit
def _find(table_ptr, count, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr):
    """Of this program's chunk: its tensor's line of the table, its first number, and how many the tensor has."""
    chunk, at = tl.program_id(0), tl.arange(0, N)
    before = tl.load(table_ptr + at * COLUMNS + COLUMNS - 1, mask=at < count, other=2**40)
    line = table_ptr + (tl.sum((before <= chunk).to(tl.int32), 0) - 1) * COLUMNS
    first = (chunk - tl.load(line + COLUMNS - 1)).to(tl.int32) * CHUNK
    size = tl.load(line + COLUMNS - 2).to(tl.int32)
    if ALIGNED:
        size = size // 16 * 16  # so that the compiler sees it
    return line, first, size


@triton.jit
def _pointer(base_ptr, place, ALIGNED: tl.constexpr):
    away = tl.load(place)
    return base_ptr + tl.multiple_of(away, 16 if ALIGNED else 1)


@triton.jit
def _adamw_kernel(table_ptr, count, numbers_ptr, factor_ptr, first_ptr, gradients_ptr, copies_ptr,
                  ALIGNED: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr):  # fmt: skip
    columns: tl.constexpr = 6 if copies_ptr is None else 7
    line, first, size = _find(table_ptr, count, columns, ALIGNED, N, CHUNK)
    p_ptr, mean_ptr = _pointer(first_ptr, line, ALIGNED), _pointer(first_ptr, line + 1, ALIGNED)
    square_ptr, gradient_ptr = _pointer(first_ptr, line + 2, ALIGNED), _pointer(gradients_ptr, line + 3, ALIGNED)
    rate, decay = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    beta1, beta2, eps = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
    correct1, correct2, factor = tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6), tl.load(factor_ptr)
    if copies_ptr is not None:
        copy_ptr = _pointer(copies_ptr, line + 4, ALIGNED)
    for start in range(0, CHUNK, B):
        at = first + start + tl.arange(0, B)
        there = at < size
        g = tl.load(gradient_ptr + at, mask=there, other=0.0).to(tl.float32) * factor
        p = tl.load(p_ptr + at, mask=there, other=0.0)
        mean = tl.load(mean_ptr + at, mask=there, other=0.0)
        square = tl.load(square_ptr + at, mask=there, other=0.0)
        mean = mean + (g - mean) * (1 - beta1)
        square = square * beta2 + g * g * (1 - beta2)
        p = p * (1 - rate * decay) - rate / correct1 * mean / (tl.sqrt(square) / correct2 + eps)
        tl.store(mean_ptr + at, mean, mask=there)
        tl.store(square_ptr + at, square, mask=there)
        tl.store(p_ptr + at, p, mask=there)
        if copies_ptr is not None:
            tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=there)


@triton.jit
def _squares_kernel(table_ptr, count, first_ptr, out_ptr, ALIGNED: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
                    B: tl.constexpr):  # fmt: skip
    line, first, size = _find(table_ptr, count, 3, ALIGNED, N, CHUNK)
    x_ptr, total = _pointer(first_ptr, line, ALIGNED), tl.zeros([B], tl.float32)
    for start in range(0, CHUNK, B):
        at = first + start + tl.arange(0, B)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))
