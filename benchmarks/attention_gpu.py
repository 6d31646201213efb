"""Attention of one drafter layer on a GPU: flex_attention and our own kernels in turn, forward, and forward + backward.

    python benchmarks/attention_gpu.py      writes results/attention_gpu.json, or into $OUT where that is set

Qwen3-8B's heads, T = 3072, A = 512, B = 16, one document, bf16, as the compiled step runs it: keys and values are
repeated for their query heads where flex needs it.  results/attention_h200.json is older: there a script that is not
kept also tried other tile sizes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _common import write_result

from draftsmith.bench import timed
from draftsmith.drafter.attention import attend, build_masks, one_graph
from draftsmith.drafter.blocks import build_blocks
from draftsmith.geometry import GEOMETRIES, Shape, random_row

ROUNDS = 5


def main(name: str = "qwen3-8b", shape: Shape | None = None, device: str = "cuda") -> None:
    shape, geometry, place = shape or Shape(), GEOMETRIES[name], torch.device(device)
    row = random_row(shape, geometry.vocab, 0)
    blocks = build_blocks(row, shape.block_size, 0, 1.0, trim=False)
    queries = shape.anchors * shape.block_size
    keys = shape.row_tokens + queries
    generator = torch.Generator(place).manual_seed(0)

    def draw(heads: int, rows: int) -> torch.Tensor:
        values = torch.randn(rows, heads, geometry.head_dim, device=place, generator=generator)
        return values.to(torch.bfloat16 if device == "cuda" else torch.float32).transpose(0, 1)

    leaves = [draw(geometry.heads, queries), draw(geometry.kv_heads, keys), draw(geometry.kv_heads, keys)]
    grad = draw(geometry.heads, queries)
    calls: dict[str, Callable[[], Any]] = {}
    for kind in ("flex", "triton") if device == "cuda" else ("dense", "triton"):
        (mask,) = build_masks(
            kind, blocks.low, blocks.high, shape.row_tokens, shape.block_size, [None], place,
            heads=geometry.heads // geometry.kv_heads,
        )  # fmt: skip
        run = one_graph(attend) if kind == "flex" else attend
        inputs = [x.detach().requires_grad_() for x in leaves]

        def forward(run: Any = run, mask: Any = mask) -> Any:
            with torch.no_grad():
                return run(*leaves, mask)

        def both(run: Any = run, mask: Any = mask, inputs: Any = inputs) -> Any:
            return torch.autograd.grad(run(*inputs, mask), inputs, grad)

        calls |= {f"{kind} forward": forward, f"{kind} forward + backward": both}
    times: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(ROUNDS):
        for what, call in calls.items():
            times[what].append(timed(call, place))
    found = {what: statistics.median(values) for what, values in times.items()}
    print(json.dumps(found, indent=1))
    print(write_result("attention_gpu", {"geometry": name, "milliseconds": found, "each": times}))


if __name__ == "__main__":
    main()
