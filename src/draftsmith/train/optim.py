"""AdamW on float32 masters, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.config import TrainConfig
from draftsmith.drafter.attention import put
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


def make_optimizer(drafter: DFlashDrafter, config: TrainConfig, *, one_pass: bool = False) -> torch.optim.Optimizer:
    """AdamW, or Muon for matrices and AdamW for the rest.  Weight decay on matrices only.

    one_pass: AdamW as `OnePassAdamW`, for a compiled run.
    """
    matrices = [p for p in drafter.parameters() if p.dim() >= 2]
    vectors = [p for p in drafter.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas}
    if config.optimizer == "muon":
        adamw = torch.optim.AdamW(groups[1:], fused=True, **settings)
        return MuonAdamW(matrices, adamw, lr=config.learning_rate, weight_decay=config.weight_decay)
    if one_pass:
        return OnePassAdamW(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


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


class OnePassAdamW(torch.optim.AdamW):
    """AdamW in one pass over memory: reads master, moments and gradient in whatever dtype it comes, writes master,
    moments and the working copy, with the clipping factor folded in.  Its state is that of torch's AdamW."""

    @torch.no_grad()
    def update(self, gradients: Mapping[Any, Tensor], copies: Mapping[Any, Any], factor: Tensor) -> None:
        """factor: 0-dim, what gradients are to be multiplied by."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p in gradients]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
                    }  # fmt: skip
                self.state[p]["step"] += 1  # on the CPU
            if not parameters:
                continue
            (beta1, beta2), t = group["betas"], float(self.state[parameters[0]]["step"])
            numbers = np.array(
                [group["lr"], group["weight_decay"], beta1, beta2, group["eps"], 1 - beta1**t, (1 - beta2**t) ** 0.5],
                dtype=np.float32,
            )
            scalars = put(numbers, factor.device)
            for p in parameters:
                state = self.state[p]
                flat = (x.view(-1) for x in (p.detach(), state["exp_avg"], state["exp_avg_sq"], gradients[p]))
                copy = copies[p].detach().view(-1) if p in copies else None
                _adamw(*flat, copy, factor, scalars)


def adamw(
    p: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, copy: Tensor | None, factor: Tensor, scalars: Tensor
) -> None:
    """One tensor's step, in place.  All flat; scalars: rate, decay, betas, eps, and the two bias corrections."""
    rate, decay, beta1, beta2, eps, correct1, correct2 = scalars.unbind()
    g = gradient.to(p.dtype) * factor
    mean.copy_(mean + (g - mean) * (1 - beta1))
    square.copy_(square * beta2 + g * g * (1 - beta2))
    p.copy_(p * (1 - rate * decay) - rate / correct1 * mean / (square.sqrt() / correct2 + eps))
    if copy is not None:
        copy.copy_(p)


_adamw: Any = torch.compile(adamw, fullgraph=True, dynamic=True)


def clip_factor(
    gradients: Sequence[Tensor], most: float, device: torch.device, attention: str = "sdpa"
) -> tuple[Tensor, Tensor]:
    """(norm of all gradients, factor that brings it to at most `most`), both 0-dim, at least float32.

    attention: where the drafter's is triton, our kernel sums the squares too.
    """
    if not gradients:
        return torch.zeros((), device=device), torch.ones((), device=device)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    if attention == "triton" and wide == torch.float32:
        from draftsmith.drafter import row_kernels

        norm = row_kernels.norm(gradients)
    else:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2.0, wide)))
    return norm, (most / (norm + 1e-6)).clamp(max=1.0)


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
