"""Cross entropy through the target's frozen head, without ever holding all logits.

Suffixes: R rows (trained slots), A anchors, B block size, H hidden size, V vocabulary, C rows of a chunk.
The head is frozen, so the gradient with respect to the hidden states is formed in the forward pass: two matrix
products a row, nothing recomputed.  `plain_loss` is the slow twin; a test holds the two together.

Numerators and denominators are returned apart: the loss of a step is sum(numerators) / sum(denominators) over all its
rows and ranks, never a mean of means.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafter.attention import one_graph
from draftsmith.drafter.model import to_logits
from draftsmith.errors import InputError
from draftsmith.records import DrafterSpec


@dataclass(frozen=True)
class LossSums:
    """Sums over one row.  The denominators are known to the host beforehand (BlockBatch), so they are not here."""

    weighted: Tensor  # scalar, differentiable: sum(w * CE)
    ce_B: Tensor  # sum of CE by slot
    correct_B: Tensor  # argmax == label by slot
    count_B: Tensor  # trained rows by slot


Chunk = Callable[[Tensor, Tensor, Tensor, DrafterSpec], tuple[Tensor, ...]]


def drafter_loss(
    hidden_QH: Tensor,
    labels_R: Tensor,
    where_R: Tensor,
    weights_AB: Tensor,
    head_VH: Tensor,
    spec: DrafterSpec,
    *,
    kind: str,
    alpha: float = 0.5,
    chunk_rows: int = 512,
    chunk: Chunk | None = None,
    known_R: Tensor | None = None,
) -> LossSums:
    """Loss of the trained slots of one row.

    hidden_QH: hidden states of all slots; where_R: flat index in weights_AB of those that count; labels_R:
    their tokens.
    weights_AB: decay weights; `dpace` takes only their shape.
    kind: decay, sum(w * CE) with the given weights, denominator sum(w); or dpace (arXiv 2605.18810), whose weights
    follow from the CE of the block itself, denominator: the number of anchors that count.
    chunk: a compiled `head_chunk`, or `triton_chunk`; the last is then filled up, so that its shape never changes.
    known_R: bool, where_R is every slot once and only these count: shapes are then the same for all rows.
    """
    weighted, ce_R, correct_R = _FrozenHead.apply(
        hidden_QH, labels_R, where_R, weights_AB, head_VH, spec, kind, alpha, chunk_rows, chunk, known_R
    )
    slot_R = where_R % weights_AB.shape[1]
    sums = [torch.zeros(weights_AB.shape[1], device=ce_R.device, dtype=ce_R.dtype) for _ in range(3)]
    for total, values in zip(sums, (ce_R, correct_R, torch.ones_like(ce_R)), strict=True):
        total.index_add_(0, slot_R, values if known_R is None else torch.where(known_R, values, 0.0))
    return LossSums(weighted, *sums)


def default_chunk_rows(anchors: int, block_size: int, compiled: bool) -> int:
    """Rows of logits at a time: large products where a GPU does them, little memory elsewhere.  Compiled chunks are
    always full, so a row whose slots all count is cut into equal ones; 2,560 of them by 4,096 fill two rounds of
    an H200's 132 processors in tiles of 320 by 128 to 97%, where 1,920 filled two in tiles of 256 by 128 to 91%."""
    trained = anchors * (block_size - 1)
    if not compiled:
        return min(trained, 512)
    chunks = -(-trained // 2560)
    return -(-trained // chunks)


def dpace_weights(ce_AB: Tensor, counts_AB: Tensor, alpha: float) -> Tensor:
    """w_j = sum over m >= j of prod over i <= m of q_i, q = (1 - alpha) * exp(-CE) + alpha, counting slots only."""
    q = torch.where(counts_AB, (1 - alpha) * torch.exp(-ce_AB) + alpha, 1.0)
    survive = torch.where(counts_AB, q.cumprod(dim=1), 0.0)
    return torch.where(counts_AB, survive.flip(1).cumsum(1).flip(1), 0.0)


def _row_weights(
    ce_R: Tensor, where_R: Tensor, weights_AB: Tensor, kind: str, alpha: float, known_R: Tensor | None
) -> Tensor:
    if kind == "decay":
        return weights_AB.reshape(-1)[where_R].to(ce_R.dtype)
    ce_AB = torch.zeros(weights_AB.numel(), device=ce_R.device, dtype=ce_R.dtype)
    ce_AB[where_R] = ce_R
    counts_AB = torch.zeros(weights_AB.numel(), device=ce_R.device, dtype=torch.bool)
    if known_R is None:
        counts_AB.index_fill_(0, where_R, True)  # an assigned number is copied to the device, and waited for
    else:
        counts_AB.index_copy_(0, where_R, known_R)
    return dpace_weights(ce_AB.view_as(weights_AB), counts_AB.view_as(weights_AB), alpha).reshape(-1)[where_R]


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_QH: Tensor,
        labels_R: Tensor,
        where_R: Tensor,
        weights_AB: Tensor,
        head_VH: Tensor,
        spec: DrafterSpec,
        kind: str,
        alpha: float,
        chunk_rows: int,
        chunk: Chunk | None,
        known_R: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(labels_R)
        fill = -rows % chunk_rows if chunk is not None else 0
        filled_R, labels_filled_R = F.pad(where_R, (0, fill)), F.pad(labels_R, (0, fill))
        wide = torch.promote_types(hidden_QH.dtype, torch.float32)
        grad_RH = torch.empty(rows + fill, hidden_QH.shape[1], dtype=hidden_QH.dtype, device=hidden_QH.device)
        ce_R = torch.empty(rows + fill, dtype=wide, device=hidden_QH.device)
        correct_R, share_R = torch.empty_like(ce_R), torch.empty_like(ce_R)
        for start in range(0, rows + fill, chunk_rows):
            piece = slice(start, start + chunk_rows)
            found = (chunk or head_chunk)(
                hidden_QH.index_select(0, filled_R[piece]), labels_filled_R[piece], head_VH, spec
            )
            for every, part in zip((ce_R, correct_R, grad_RH, share_R), found, strict=False):
                every[piece] = part
        ce_R, correct_R, grad_RH, share_R = ce_R[:rows], correct_R[:rows], grad_RH[:rows], share_R[:rows]
        if known_R is not None:  # the others' labels are no text: their loss may be Inf
            ce_R, share_R = (torch.where(known_R, x, 0.0) for x in (ce_R, share_R))
            grad_RH = grad_RH.masked_fill_(~known_R[:, None], 0.0)
        weights_R = _row_weights(ce_R, where_R, weights_AB, kind, alpha, known_R)
        ctx.save_for_backward(grad_RH, share_R, weights_R, where_R)
        ctx.queries, ctx.ours = len(hidden_QH), chunk is triton_chunk
        ctx.mark_non_differentiable(ce_R, correct_R)
        return (weights_R * ce_R).sum(), ce_R, correct_R

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        grad_RH, share_R, weights_R, where_R = ctx.saved_tensors
        if ctx.ours:
            from draftsmith.drafter import row_kernels

            grad_QH = row_kernels.hidden_gradient(grad_RH, share_R * weights_R * grad, where_R, ctx.queries)
            return (grad_QH, *(None,) * 10)
        grad_QH = grad_RH.new_zeros(ctx.queries, grad_RH.shape[1])
        grad_QH.index_copy_(0, where_R, grad_RH * (weights_R * grad)[:, None].to(grad_RH.dtype))
        return (grad_QH, *(None,) * 10)


def head_chunk(
    hidden_CH: Tensor, labels_C: Tensor, head_VH: Tensor, spec: DrafterSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """CE, argmax == label, and dCE/dhidden of some rows: all that ever exists of the logits is [C, V]."""
    raw_CV = (hidden_CH @ head_VH.T).to(torch.promote_types(hidden_CH.dtype, torch.float32))
    logits_CV = to_logits(raw_CV, spec)
    slope_CV = None
    if spec.final_logit_softcapping is not None:
        slope_CV = 1 - (logits_CV / spec.final_logit_softcapping).square()
    picked_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    if torch.compiler.is_compiling():  # fused around the two products: one pass for top and sum, one for the gradient
        top_C = logits_CV.amax(-1)
        sum_C = (logits_CV - top_C[:, None]).exp().sum(-1)
        at_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        grad_CV = (logits_CV - top_C[:, None]).exp() / sum_C[:, None] - (at_V == labels_C[:, None]).to(logits_CV.dtype)
        earlier_C = ((logits_CV == top_C[:, None]) & (at_V < labels_C[:, None])).sum(-1)  # argmax takes the first
        correct_C = ((picked_C == top_C) & (earlier_C == 0)).to(logits_CV.dtype)
    else:  # one exponential serves both the loss and its gradient, in the memory of the logits
        top_C, best_C = logits_CV.max(-1)
        correct_C = (best_C == labels_C).to(logits_CV.dtype)
        grad_CV = logits_CV.sub_(top_C[:, None]).exp_()
        sum_C = grad_CV.sum(-1)
        grad_CV.div_(sum_C[:, None])
        grad_CV.scatter_add_(1, labels_C[:, None], torch.full_like(top_C, -1.0)[:, None])
    ce_C = sum_C.log() - (picked_C - top_C)
    if slope_CV is not None:
        grad_CV = grad_CV.mul_(slope_CV)
    if spec.output_multiplier is not None:
        grad_CV = grad_CV.mul_(spec.output_multiplier)
    return ce_C, correct_C, grad_CV.to(hidden_CH.dtype) @ head_VH


def our_softmax(softmax: str, compiled: bool) -> bool:
    """Whether the config wants our kernel, which writes the gradient of a chunk's logits into their memory."""
    return softmax == "triton" or (softmax == "auto" and compiled)


def why_not_ours(spec: DrafterSpec) -> str | None:
    if spec.final_logit_softcapping is not None or spec.output_multiplier is not None:
        return "this target caps or scales its logits"
    return None


def pick_chunk(
    softmax: str, spec: DrafterSpec, device: torch.device, dtype: torch.dtype, compiled: bool
) -> Chunk | None:
    """softmax: as in the config.  Raises InputError for what our kernel does not do."""
    why = None
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float32) or not importlib.util.find_spec("triton"):
        why = "it needs a GPU, Triton, and bfloat16 or float32"
    else:
        why = why_not_ours(spec)
    if softmax == "triton" and why is not None:
        raise InputError(f"loss.softmax=triton: {why}: use torch or auto")
    if why is None and our_softmax(softmax, compiled):
        return triton_chunk
    return one_graph(head_chunk) if compiled else None


def triton_chunk(
    hidden_CH: Tensor, labels_C: Tensor, head_VH: Tensor, spec: DrafterSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With our own kernel between the two products: CE, argmax == label, and two whose product is dCE/dhidden, [C, H]
    and [C].  For logits as the head gives them."""
    from draftsmith.drafter import row_kernels

    logits_CV = hidden_CH @ head_VH.T
    ce_C, correct_C, share_C = row_kernels.softmax_rows(logits_CV, labels_C)
    return ce_C, correct_C, logits_CV @ head_VH, share_C


def plain_loss(
    hidden_ABH: Tensor,
    labels_AB: Tensor,
    weights_AB: Tensor,
    head_VH: Tensor,
    spec: DrafterSpec,
    *,
    kind: str,
    alpha: float = 0.5,
) -> Tensor:
    """The obvious version of `drafter_loss(...).weighted`: every logit at once, autograd does the rest."""
    logits_ABV = to_logits(hidden_ABH @ head_VH.T, spec)
    ce_AB = F.cross_entropy(logits_ABV.flatten(0, 1), labels_AB.flatten(), reduction="none").view_as(labels_AB)
    if kind == "dpace":
        weights_AB = dpace_weights(ce_AB.detach(), weights_AB > 0, alpha)
    return (weights_AB * ce_AB).sum()
