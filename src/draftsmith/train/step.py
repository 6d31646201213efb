"""One row through the drafter, and one optimizer step over several rows.

Suffixes as in drafter/: T row tokens, A anchors, B block size, Q = A * B, R trained slots, H hidden size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter.attention import build_masks
from draftsmith.drafter.blocks import BlockBatch, build_blocks, default_gamma
from draftsmith.drafter.loss import LossSums, drafter_loss
from draftsmith.drafter.model import DFlashDrafter, embed
from draftsmith.records import PackedRow
from draftsmith.target.features import FeatureSource
from draftsmith.train.dist import World


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
        *, attention: str, compute_dtype: torch.dtype, world: World | None = None,
    ) -> None:  # fmt: skip
        self.drafter, self.frozen, self.source = drafter, frozen, source
        self.train, self.loss, self.attention, self.compute_dtype = train, loss, attention, compute_dtype
        self.world = world or World()
        self.sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        self.gamma = loss.gamma or default_gamma(drafter.spec.block_size)
        self.device = frozen.head.device
        # on a GPU every row has the same shape; an eager CPU run leaves unused anchor slots out
        self.trim = self.device.type == "cpu"

    def blocks(self, row: PackedRow) -> BlockBatch:
        spec = self.drafter.spec
        return build_blocks(row, spec.block_size, spec.mask_token_id, self.gamma, trim=self.trim)

    def denominator(self, blocks: BlockBatch) -> float:
        """What the row adds to the loss's denominator: known to the host without asking the device."""
        return float(blocks.anchors) if self.loss.kind == "dpace" else float(blocks.weights.sum(dtype=np.float64))

    def precision(self) -> Any:
        if self.compute_dtype == torch.bfloat16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def run(self, row: PackedRow, blocks: BlockBatch, features_TK: Tensor) -> LossSums:
        """Loss sums of one row with at least one anchor."""
        spec, device = self.drafter.spec, self.device

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        where = np.flatnonzero(blocks.counts)
        masks = build_masks(
            self.attention, blocks.low, blocks.high, len(row.tokens), spec.block_size, spec.windows(), device
        )
        x_QH = embed(put(blocks.inputs.reshape(-1)), self.frozen.embedding, spec)
        with self.precision():
            hidden_QH = self.drafter(
                features_TK.to(self.compute_dtype), put(row.positions), x_QH, put(blocks.positions.reshape(-1)), masks
            )
        where_R = put(where)
        return drafter_loss(
            hidden_QH.to(self.compute_dtype)[where_R],
            put(blocks.labels.reshape(-1)[where]),
            where_R,
            put(blocks.weights),
            self.frozen.head,
            spec,
            kind=self.loss.kind,
            alpha=self.loss.dpace_alpha,
            chunk_rows=self.loss.chunk_rows,
        )

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
            finite.append(torch.isfinite(features).all())
            one = self.run(row, batch, features)
            finite_loss.append(torch.isfinite(one.weighted.detach()))
            (one.weighted / total).backward()
            sums.append(one)
        parameters = list(self.drafter.parameters())
        if used:  # the same answer everywhere: a process whose own rows are empty takes part like the others
            self.world.sum_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.train.clip_norm)
        if used:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
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

    @torch.no_grad()
    def heldout(self, rows: Sequence[PackedRow], source: FeatureSource) -> dict[str, Any]:
        """Loss and accuracy by slot on held-out rows, on this process alone."""
        total, weighted = 0.0, 0.0
        ce, correct, count = (torch.zeros(self.drafter.spec.block_size, device=self.device) for _ in range(3))
        for row in rows:
            blocks = self.blocks(row)
            if blocks.anchors == 0:
                continue
            one = self.run(row, blocks, source.row(row))
            total += self.denominator(blocks)
            weighted += float(one.weighted)
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
