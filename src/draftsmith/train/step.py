"""One row through the drafter, and one optimizer step over several rows.

Suffixes as in drafter/: T row tokens, A anchors, B block size, P = A * B, Q = A * (B - 1), R trained slots,
H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter.attention import Mask, build_masks, one_graph, put_all
from draftsmith.drafter.blocks import BlockBatch, build_blocks, default_gamma
from draftsmith.drafter.fp8 import TrainedLinear, with_linear
from draftsmith.drafter.loss import LossSums, default_chunk_rows, drafter_loss, pick_chunk
from draftsmith.drafter.model import DFlashDrafter, embed, working_copy
from draftsmith.records import PackedRow
from draftsmith.target.features import FeatureSource
from draftsmith.train.dist import World
from draftsmith.train.graphed import GraphedRow
from draftsmith.train.optim import OnePassAdamW, clip_factor


@dataclass(frozen=True)
class Frozen:
    """The target's embedding and head [V, H] in the compute dtype, cast once."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class StepSums:
    """What a step leaves on the device, read by the host at log points only."""

    step: int
    rows: tuple[tuple[int, int], ...]
    """(epoch, row) of each row."""
    denominator: float
    weighted: Tensor  # scalar
    ce_B: Tensor
    correct_B: Tensor
    count_B: Tensor
    grad_norm: Tensor
    finite: Tensor  # bool [rows]: features hold neither NaN nor Inf
    finite_loss: Tensor  # bool [rows]
    tokens: int
    anchors: int
    rate: float


class RowStep:
    """Everything that does not change from row to row: drafter, frozen matrices, settings."""

    def __init__(
        self, drafter: DFlashDrafter, frozen: Frozen, source: FeatureSource, train: TrainConfig, loss: LossConfig,
        *, attention: str, compute_dtype: torch.dtype, world: World | None = None, compiled: bool = False,
        graphs: bool = False,
    ) -> None:  # fmt: skip
        self.drafter, self.frozen, self.source = drafter, frozen, source
        self.compiled = compiled
        self.working, self.parts = working_copy(drafter, compute_dtype)
        self.copies = {master: copy.detach()[rows] for master, (copy, rows) in self.parts.items()}
        trunk = with_linear(self.working, TrainedLinear) if train.fp8 in ("drafter", "both") else self.working
        self.trunk: Callable[..., Tensor] = one_graph(trunk) if compiled else trunk
        self.chunk = pick_chunk(loss.softmax, drafter.spec, frozen.head.device, compute_dtype, compiled)
        self.train, self.loss, self.compute_dtype = train, loss, compute_dtype
        # pieces have shapes of their own in every row
        self.attention = "dense" if compiled and attention == "sdpa" else attention
        self.world = world or World()
        self.sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        self.gamma = loss.gamma or default_gamma(drafter.spec.block_size)
        self.device = frozen.head.device
        # where functions are compiled every row has the same shape; an eager CPU run leaves unused anchor slots out
        self.trim = self.device.type == "cpu" and not compiled
        self.graph = GraphedRow(self) if graphs else None
        self.chunk_rows = loss.chunk_rows or default_chunk_rows(train.anchors, drafter.spec.block_size, compiled)

    def blocks(self, row: PackedRow) -> BlockBatch:
        spec = self.drafter.spec
        return build_blocks(row, spec.block_size, spec.mask_token_id, self.gamma, trim=self.trim)

    def denominator(self, blocks: BlockBatch) -> float:
        """What the row adds to the loss's denominator: known to the host without asking the device."""
        return float(blocks.anchors) if self.loss.kind == "dpace" else float(blocks.weights.sum(dtype=np.float64))

    @torch.no_grad()
    def refresh(self) -> None:
        """After the masters were changed by others: loaded from a checkpoint, or stepped by an optimizer of torch's."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.copies))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the working copy's gradients to those of the float32 masters."""
        for master, (copy, rows) in self.parts.items():
            if copy.grad is not None:
                wide = copy.grad[rows].to(master.dtype)
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                if rows.stop == len(copy):  # freed as soon as its last master has it
                    copy.grad = None

    def gradient(self, master: nn.Parameter) -> Tensor | None:
        """The sum that `collect` made, else what is in the working copy, a view in its dtype."""
        if master.grad is not None or master not in self.parts:
            return master.grad
        copy, rows = self.parts[master]
        return None if copy.grad is None else copy.grad[rows]

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in (*self.drafter.parameters(), *self.working.parameters()):
            parameter.grad = None

    def run(self, row: PackedRow, blocks: BlockBatch, features_TK: Tensor) -> LossSums:
        """Loss sums of one row with at least one anchor."""
        tensors = put_all(self._arrays(row, blocks), self.device)
        return self.compute(tensors, self._masks(row, blocks, self.device), features_TK.to(self.compute_dtype))

    def _arrays(self, row: PackedRow, blocks: BlockBatch) -> list[np.ndarray]:
        # slot 0 is never trained: what follows counts slots from 1
        counts, labels = blocks.counts[:, 1:], blocks.labels[:, 1:]
        where = np.flatnonzero(counts)
        # slot 0 holds the anchor, every other slot MASK; rows in a multiple of 16, as 8-bit products want them
        anchors = len(blocks.inputs)
        masked = np.full(16 - anchors % 16, self.drafter.spec.mask_token_id)
        return [np.append(blocks.inputs[:, 0], masked), row.positions, blocks.positions.reshape(-1), where,
                labels.reshape(-1)[where], blocks.weights[:, 1:]]  # fmt: skip

    def _masks(self, row: PackedRow, blocks: BlockBatch, device: torch.device) -> list[Mask]:
        spec = self.drafter.spec
        return build_masks(
            self.attention, blocks.low, blocks.high, len(row.tokens), spec.block_size, spec.windows(), device,
            trained=True, heads=spec.num_heads // spec.num_kv_heads,
        )  # fmt: skip

    def arrays(self, row: PackedRow, blocks: BlockBatch) -> tuple[list[np.ndarray], list[Mask]]:
        """What `compute` takes, on the host, of the same shapes for every row: all slots, those that count first, and
        which do."""
        *first, where, _, weights = self._arrays(row, blocks)
        counts = blocks.counts[:, 1:].reshape(-1)
        where = np.append(where, np.flatnonzero(~counts))
        masks = self._masks(row, blocks, torch.device("cpu"))
        return [*first, where, blocks.labels[:, 1:].reshape(-1)[where], weights, counts[where]], masks

    def compute(self, tensors: Sequence[Tensor], masks: Sequence[Mask], features_TK: Tensor) -> LossSums:
        """The device's part of `run`."""
        spec = self.drafter.spec
        distinct, positions_T, positions_P, where_R, labels_R, weights_AB, *known = tensors
        x_nH = embed(distinct, self.frozen.embedding, spec)
        hidden_QH = self.trunk(
            features_TK, self.drafter.tables(positions_T), x_nH, self.drafter.tables(positions_P), masks,
            (len(weights_AB), spec.block_size),
        )  # fmt: skip
        sums = drafter_loss(
            hidden_QH.to(self.compute_dtype),
            labels_R,
            where_R,
            weights_AB,
            self.frozen.head,
            spec,
            kind=self.loss.kind,
            alpha=self.loss.dpace_alpha,
            chunk_rows=self.chunk_rows,
            chunk=self.chunk,
            known_R=known[0] if known else None,
        )
        by_slot = (F.pad(values, (1, 0)) for values in (sums.ce_B, sums.correct_B, sums.count_B))
        return LossSums(sums.weighted, *by_slot)

    def step(self, number: int, rows: Sequence[PackedRow], optimizer: torch.optim.Optimizer, rate: float) -> StepSums:
        """Gradients of sum(numerators) / sum(denominators) over all rows of the step, those of the other drafters too,
        clipped, then one optimizer step.  rows: this process's share."""
        blocks = [self.blocks(row) for row in rows]
        total, used = self.world.sum_host([sum(self.denominator(b) for b in blocks), sum(b.anchors for b in blocks)])
        sums: list[LossSums] = []
        finite, finite_loss = [], []
        fine = torch.ones((), dtype=torch.bool, device=self.device)
        for row, batch in zip(rows, blocks, strict=True):
            if batch.anchors == 0:  # trains nothing
                finite.append(fine)
                finite_loss.append(fine)
                continue
            features = self.source.row(row)
            finite.append(torch.isfinite(torch.stack(torch.aminmax(features))).all())  # one pass
            if self.graph is not None:
                one = self.graph(row, batch, features, total)
            else:
                one = self.run(row, batch, features)
                (one.weighted / total).backward()
            finite_loss.append(torch.isfinite(one.weighted.detach()))
            sums.append(one)
            if len(rows) > 1 or self.world.drafters > 1:
                self.collect()  # sums in float32
        norm = self.apply(optimizer, used > 0)
        zero = torch.zeros(self.drafter.spec.block_size, device=self.device, dtype=self.sum_dtype)
        return StepSums(
            step=number,
            rows=tuple((r.epoch, r.index) for r in rows),
            denominator=total,
            weighted=sum((s.weighted.detach() for s in sums), zero[0]),
            ce_B=sum((s.ce_B for s in sums), zero),
            correct_B=sum((s.correct_B for s in sums), zero),
            count_B=sum((s.count_B for s in sums), zero),
            grad_norm=norm.detach(),
            finite=torch.stack(finite),
            finite_loss=torch.stack(finite_loss),
            tokens=sum(r.starts[-1] for r in rows),
            anchors=sum(b.anchors for b in blocks),
            rate=rate,
        )

    def apply(self, optimizer: torch.optim.Optimizer, used: bool) -> Tensor:
        """Sum gradients over the drafters, clip, step; returns their norm.  used: some row of the step had an anchor,
        the same answer everywhere: a process whose own rows are empty takes part like the others."""
        parameters = list(self.drafter.parameters())
        one_pass = optimizer if isinstance(optimizer, OnePassAdamW) else None
        if one_pass is None or self.world.drafters > 1:
            self.collect()
        if used:
            self.world.sum_gradients(parameters)
        if one_pass is not None:
            found = {p: grad for p in parameters if (grad := self.gradient(p)) is not None}
            norm, factor = clip_factor(list(found.values()), self.train.clip_norm, self.device)
            if used:
                one_pass.update(found, self.copies, factor)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.train.clip_norm)
            if used:
                optimizer.step()
                self.refresh()
        self.clear()
        return norm

    def heldout(self, rows: Sequence[PackedRow], source: FeatureSource) -> dict[str, Any]:
        """Loss and accuracy by slot on held-out rows, on this process alone."""
        total, weighted = 0.0, 0.0
        ce, correct, count = (torch.zeros(self.drafter.spec.block_size, device=self.device) for _ in range(3))
        for row in rows:
            blocks = self.blocks(row)
            if blocks.anchors == 0:
                continue
            with torch.set_grad_enabled(self.compiled):  # without gradients it would be another graph to compile
                one = self.run(row, blocks, source.row(row))
            total += self.denominator(blocks)
            weighted += float(one.weighted.detach())
            if not math.isfinite(weighted):
                raise FloatingPointError(
                    f"the held-out loss of epoch {row.epoch}, row {row.index} is NaN or Inf: check the target's "
                    f"features and the drafter"
                )
            ce, correct, count = ce + one.ce_B, correct + one.correct_B, count + one.count_B
        return {"loss": weighted / max(total, 1e-12), **by_slot(ce, correct, count)}


def by_slot(ce_B: Tensor, correct_B: Tensor, count_B: Tensor) -> dict[str, Any]:
    """Accuracy and cross entropy, overall and for slots 1..B-1 (None where no slot counted)."""
    ce, correct, count = ce_B.tolist()[1:], correct_B.tolist()[1:], count_B.tolist()[1:]
    return {
        "accuracy": sum(correct) / max(1.0, sum(count)),
        "cross_entropy": sum(ce) / max(1.0, sum(count)),
        "accuracy_by_slot": [c / n if n else None for c, n in zip(correct, count, strict=True)],
    }
