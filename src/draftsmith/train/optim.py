"""AdamW and Muon on float32 masters, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.config import TrainConfig
from draftsmith.drafter.attention import put
from draftsmith.drafter.model import DFlashDrafter

MUON_ELEMENTS = 1 << 24
"""Numbers of the matrices that are made orthogonal together, or one larger matrix."""


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
    One state and one list of groups, so that it is saved and scheduled like one optimizer.

    The step is torch's, but matrices of one shape are made orthogonal together: a drafter has few shapes and many
    matrices, each of which takes some thirty small kernels."""

    def __init__(self, matrices: Sequence[nn.Parameter], adamw: torch.optim.AdamW, **settings: Any) -> None:
        super().__init__(matrices, adjust_lr_fn="match_rms_adamw", **settings)
        self.adamw, self.own = adamw, self.param_groups
        adamw.state = self.state
        self.param_groups = [*self.own, *adamw.param_groups]
        self.defaults["fused"] = adamw.defaults["fused"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.own:
            together: dict[tuple[int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    together.setdefault((min(p.shape), max(p.shape)), []).append(p)
            for (rows, columns), matrices in together.items():
                most = max(1, MUON_ELEMENTS // (rows * columns))
                for start in range(0, len(matrices), most):
                    self._update(matrices[start : start + most], group)
        self.adamw.step()

    def _update(self, matrices: list[Tensor], group: Mapping[str, Any]) -> None:
        gradients = [cast(Tensor, p.grad) for p in matrices]
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        wide = [u.T if len(u) > u.shape[1] else u for u in ahead]
        found = torch.stack(wide).bfloat16() if len(wide) > 1 else wide[0].bfloat16()[None]
        del ahead, wide
        found = orthogonal(found, group["ns_coefficients"], group["ns_steps"], group["eps"])
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * 0.2 * math.sqrt(found.shape[2])
        for p, update in zip(matrices, found, strict=True):
            p.add_(update.T if len(p) > p.shape[1] else update, alpha=-rate)


def orthogonal(x_nRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton and Schulz's iteration on every matrix, R <= C, as torch.optim.Muon has it: singular values near 1."""
    a, b, c = coefficients
    x_nRC = x_nRC / torch.linalg.vector_norm(x_nRC, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram_nRR = x_nRC @ x_nRC.mT
        x_nRC = torch.baddbmm(x_nRC, torch.baddbmm(gram_nRR, gram_nRR, gram_nRR, beta=b, alpha=c), x_nRC, beta=a)
    return x_nRC


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
            update(
                [p.detach() for p in parameters],
                [self.state[p]["exp_avg"] for p in parameters],
                [self.state[p]["exp_avg_sq"] for p in parameters],
                [gradients[p] for p in parameters],
                [copies[p].detach() if p in copies else None for p in parameters],
                numbers,
                factor,
            )


def update(
    parameters: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor],
    copies: Sequence[Tensor | None], numbers: np.ndarray, factor: Tensor,
) -> None:  # fmt: skip
    """One step of AdamW of all tensors, in place; numbers as in `adamw`.  On a GPU in a launch or two."""
    tensors = parameters, means, squares, gradients, copies
    if by_kernels(factor.device, parameters[0].dtype):
        from draftsmith.train import optim_kernels

        optim_kernels.adamw(*tensors, numbers, factor)
        return
    scalars = put(numbers, factor.device)
    for *line, copy in zip(*tensors, strict=True):
        _adamw(*(_flat(x) for x in line), None if copy is None else _flat(copy), factor, scalars)


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)


def by_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our Triton kernels do the optimizer's step for masters of such a dtype."""
    return device.type == "cuda" and dtype == torch.float32


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


def clip_factor(gradients: Sequence[Tensor], most: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(norm of all gradients, factor that brings it to at most `most`), both 0-dim, at least float32."""
    if not gradients:
        return torch.zeros((), device=device), torch.ones((), device=device)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    if by_kernels(device, wide):
        from draftsmith.train import optim_kernels

        norm = optim_kernels.norm(gradients)
    else:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2.0, wide)))
    return norm, (most / (norm + 1e-6)).clamp(max=1.0)


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
