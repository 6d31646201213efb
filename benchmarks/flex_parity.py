"""flex_attention with our directly written BlockMask, and our own kernels, against SDPA with the dense mask: relative
errors on a GPU.

python benchmarks/flex_parity.py      writes results/flex_parity.json; tests/gpu/test_flex.py uses the same cases
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.drafter.attention import attend, build_masks
from draftsmith.drafter.loss import drafter_loss
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.records import DrafterSpec


@dataclass(frozen=True)
class Case:
    """Anchors of a packed row: blocks see [low, high) of the context."""

    low: np.ndarray
    high: np.ndarray
    context: int
    block_size: int
    window: int | None
    heads: int
    kv_heads: int
    size: int = 64

    def __str__(self) -> str:
        shape = f"T{self.context} A{len(self.low)} B{self.block_size} heads {self.heads}/{self.kv_heads}"
        return shape + (f" window {self.window}" if self.window else "")


def make_case(
    context: int, anchors: int, block_size: int, window: int | None, heads: int, kv_heads: int, size: int = 64
) -> Case:
    """Documents of random length, sorted anchors, the last three slots unused."""
    rng = np.random.default_rng([context, anchors, block_size])
    starts = np.sort(np.append(rng.choice(np.arange(1, context), 4, replace=False), 0))
    high = np.sort(rng.choice(np.arange(context), anchors, replace=False))
    low = starts[np.searchsorted(starts, high, side="right") - 1]
    low[-3:], high[-3:] = 0, 0
    return Case(low, high, context, block_size, window, heads, kv_heads, size)


CASES = [
    make_case(512, 32, 16, None, 8, 2),
    make_case(512, 32, 16, 64, 8, 2),
    make_case(768, 64, 10, None, 4, 4),
    make_case(1024, 48, 8, 20, 6, 2),
    make_case(777, 33, 10, None, 4, 4),  # from here on: queries or keys that do not fill their tiles of 128
    make_case(1000, 50, 8, 20, 6, 2),
    make_case(1000, 32, 16, None, 8, 2),
    make_case(1024, 33, 16, None, 8, 2),
    make_case(1024, 48, 16, None, 8, 2, 128),
]


def _masks(case: Case, *kinds: str) -> list:
    device = torch.device("cuda")
    return [
        build_masks(
            kind,
            case.low,
            case.high,
            case.context,
            case.block_size,
            [case.window],
            device,
            heads=case.heads // case.kv_heads,
        )[0]
        for kind in kinds
    ]


def attention_errors(case: Case, dtype: torch.dtype, fused: str = "flex") -> dict[str, float]:
    """Relative error of output and of the gradients of q, k, v; the reference is SDPA in float64."""
    torch._dynamo.reset()  # each case has shapes of its own
    generator = torch.Generator("cuda").manual_seed(0)
    queries, d = len(case.low) * case.block_size, case.size

    def draw(heads: int, n: int) -> torch.Tensor:
        return torch.randn(heads, n, d, device="cuda", generator=generator, dtype=torch.float64)

    q, k, v = draw(case.heads, queries), draw(case.kv_heads, case.context + queries), None
    v, out_grad = draw(case.kv_heads, case.context + queries), draw(case.heads, queries)
    mask, dense = _masks(case, fused, "dense")
    results = []
    for kind, used in ((torch.float64, dense), (dtype, mask)):
        leaves = [x.to(dtype).to(kind).detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, used)
        out.backward(out_grad.to(kind))
        results.append([out.detach(), *(x.grad for x in leaves)])
    names = ("output", "dq", "dk", "dv")
    return {n: _rel(b, a) for n, a, b in zip(names, *results, strict=True)}


def drafter_errors(window: int | None, fused: str = "flex") -> dict[str, float]:
    """A whole two-layer drafter in float32, loss and every gradient, against SDPA."""
    torch._dynamo.reset()
    case = make_case(512, 32, 16, window, 8, 2)
    spec = DrafterSpec(
        hidden_size=128, vocab_size=500, num_layers=2, intermediate_size=256, num_heads=8, num_kv_heads=2,
        head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=1024, attention_bias=False,
        block_size=16, mask_token_id=499, feature_layers=(1, 2), num_target_layers=6,
        layer_types=("sliding" if window else "full", "full"), sliding_window=window,
    )  # fmt: skip
    device = torch.device("cuda")
    drafter = DFlashDrafter(spec).initialize(0).to(device)
    generator = torch.Generator("cuda").manual_seed(1)
    features = torch.randn(512, 256, device=device, generator=generator)
    x = torch.randn(32 * 16, 128, device=device, generator=generator)
    head = torch.randn(500, 128, device=device, generator=generator) * 0.1
    positions = torch.arange(512, device=device)
    at = torch.from_numpy(case.high).to(device)[:, None] + torch.arange(16, device=device)
    labels = torch.randint(0, 500, (32, 15), device=device, generator=generator).reshape(-1)
    weights = torch.ones(32, 16, device=device)
    weights[:, 0] = 0
    where = weights.reshape(-1).nonzero()[:, 0]
    out = []
    for kind in ("dense", fused):
        drafter.zero_grad()
        masks = build_masks(kind, case.low, case.high, 512, 16, spec.windows(), device, heads=4)
        hidden = drafter(features, positions, x, at.reshape(-1), masks)
        loss = drafter_loss(hidden, labels, where, weights, head, spec, kind="decay", chunk_rows=100).weighted
        loss.backward()
        out.append(
            (float(loss.detach()), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None})
        )
    gradients = {n: _rel(g, out[0][1][n]) for n, g in out[1][1].items()}
    return {"loss": abs(out[1][0] / out[0][0] - 1), "worst_gradient": max(gradients.values())}


def _rel(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def main() -> None:
    from _common import write_result

    values = {
        fused: {
            "attention": {
                f"{case} {str(dtype).removeprefix('torch.')}": attention_errors(case, dtype, fused)
                for case in CASES
                for dtype in (torch.float32, torch.bfloat16)
            },
            "drafter": {"full": drafter_errors(None, fused), "sliding 40": drafter_errors(40, fused)},
        }
        for fused in ("flex", "triton")
    } | {"gpu": torch.cuda.get_device_name()}
    print(json.dumps(values, indent=2))
    print(write_result("flex_parity", values))


if __name__ == "__main__":
    main()
