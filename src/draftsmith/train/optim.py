"""AdamW on float32 masters, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.config import TrainConfig
from draftsmith.drafter.model import DFlashDrafter


def rate(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of 0-based `step`: linear warm-up; then cosine, or (wsd) constant with a linear fall at the end."""
    warmup = max(1, round(total * config.warmup_fraction)) if config.warmup_fraction > 0 else 0
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, total - warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        decay = max(1, round(total * config.decay_fraction))
        share = min(1.0, (total - step) / decay)
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def make_optimizer(drafter: DFlashDrafter, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, or Muon for matrices and AdamW for the rest.  Weight decay on matrices only."""
    matrices = [p for p in drafter.parameters() if p.dim() >= 2]
    vectors = [p for p in drafter.parameters() if p.dim() < 2]
    decayed = [{"params": matrices, "weight_decay": config.weight_decay}]
    muon = config.optimizer == "muon"
    adamw = torch.optim.AdamW(
        [*([] if muon else decayed), {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=config.betas,
        fused=matrices[0].device.type == "cuda",
    )
    if not muon:
        return adamw
    return MuonAdamW(matrices, adamw, lr=config.learning_rate, weight_decay=config.weight_decay)


class MuonAdamW(torch.optim.Muon):
    """Muon for matrices, with updates of AdamW's size so that one learning rate serves both; AdamW for the rest.
    One state and one list of groups, so that it is saved and scheduled like one optimizer."""

    def __init__(self, matrices: Sequence[nn.Parameter], adamw: torch.optim.AdamW, **settings: Any) -> None:
        super().__init__(matrices, adjust_lr_fn="match_rms_adamw", **settings)
        self.adamw, self.own = adamw, self.param_groups
        adamw.state = self.state
        self.param_groups = [*self.own, *adamw.param_groups]
        self.defaults["fused"] = adamw.defaults["fused"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every, self.param_groups = self.param_groups, self.own
        super().step(closure)
        self.param_groups = every
        self.adamw.step()


def clip(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, most: float) -> Tensor:
    """The gradients' norm; they are scaled so that it is at most `most`.  A fused AdamW does so as it reads them."""
    if not (isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]):
        return nn.utils.clip_grad_norm_(parameters, most)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = (norm / most).clamp(min=1.0)  # type: ignore[attr-defined]
    return norm


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
