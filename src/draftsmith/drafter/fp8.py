"""Linear layers whose products run in 8-bit floating point (Hopper and later).  An experiment, off by default.

Every operand, joined projections as one, is scaled by its own largest magnitude, anew at each product: e4m3 for inputs
and weights, e5m2 for gradients.  Frozen layers have a scale for each row of inputs and each output.
Suffixes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def available(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantized(x: Tensor, kind: torch.dtype, *, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """(x / scale in `kind`, scale float32: [] or one for each row, [M, 1])."""
    most = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    scale = most.float().clamp(min=1e-12) / torch.finfo(kind).max
    return (x.float() / scale).to(kind), scale


def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] row-major times b [N, K] row-major, transposed: [M, N]."""
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        x, scale_x = quantized(x_MK, INPUT)
        w, scale_w = quantized(weight_NK, INPUT)
        ctx.save_for_backward(x, w, scale_x, scale_w)
        ctx.dtype = x_MK.dtype
        return _product(x, w, scale_x, scale_w, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor]:
        x, w, scale_x, scale_w = ctx.saved_tensors
        g, scale_g = quantized(grad_MN, GRADIENT)
        grad_x = _product(g, w.t().contiguous(), scale_g, scale_w, ctx.dtype)
        grad_w = _product(g.t().contiguous(), x.t().contiguous(), scale_g, scale_x, ctx.dtype)
        return grad_x, grad_w


class TrainedLinear(nn.Module):
    """Shares the weight of a linear layer without bias; forward and both backward products in 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x_MK: Tensor) -> Tensor:
        return _Linear.apply(x_MK, self.weight)


class FrozenLinear(nn.Module):
    """A frozen linear layer, its weight quantized once."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor
        self.scale: Tensor
        weight, scale = quantized(linear.weight.detach(), INPUT, by_row=True)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale.t().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        q, scale = quantized(rows, INPUT, by_row=True)
        return _product(q, self.weight, scale, self.scale, x.dtype).unflatten(0, x.shape[:-1])


def with_linear(module: nn.Module, replacement: type[nn.Module]) -> nn.Module:
    """A copy of a module tree, sharing its parameters, whose linear layers without bias are replaced."""
    if isinstance(module, nn.Linear):
        fits = module.bias is None and module.in_features % 16 == 0 and module.out_features % 16 == 0
        return replacement(module) if fits else module
    out = copy.copy(module)
    out._modules = {
        name: child if child is None else with_linear(child, replacement) for name, child in module._modules.items()
    }
    return out
