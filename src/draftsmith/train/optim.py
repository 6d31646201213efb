"""AdamW on float32 masters, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math

import torch

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


def make_optimizer(drafter: DFlashDrafter, config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices only."""
    matrices = [p for p in drafter.parameters() if p.dim() >= 2]
    vectors = [p for p in drafter.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
