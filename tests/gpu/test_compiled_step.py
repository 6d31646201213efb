"""The compiled step on a GPU: same numbers as uncompiled, no synchronisation, fused kernels, 8-bit products.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import pytest
import torch

from draftsmith.bench import Bench
from draftsmith.drafter.fp8 import available
from draftsmith.geometry import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = Shape(1024, 64, 16, layers=2, documents=3)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.config.error_on_recompile = False


def built(tmp_path, *fields: str, **kinds: bool) -> Bench:
    bench = Bench("small", SHAPE, "cuda", fields=[f"compile.cache_dir={tmp_path}", *fields])
    bench.build(**kinds)
    return bench


def train(bench: Bench, steps: int, rows: int = 1) -> list[float]:
    assert bench.step is not None
    losses = []
    for number in range(steps):
        batch = [bench.rows[(number * rows + i) % 4] for i in range(rows)]
        sums = bench.step.step(number, batch, bench.optimizer, 1e-3)
        losses.append(float(sums.weighted) / sums.denominator)
    return losses


@pytest.mark.parametrize("rows", [1, 2])
def test_compiled_steps_are_the_uncompiled_ones_within_rounding(tmp_path, rows):
    compiled = train(built(tmp_path), 6, rows)
    torch._dynamo.reset()
    plain = train(built(tmp_path, "compile.enabled=false"), 6, rows)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=5e-3, atol=0)
    assert compiled[-1] < compiled[0]


def test_nothing_waits_for_the_device_between_log_points(tmp_path):
    bench = built(tmp_path)
    train(bench, 1)
    assert bench.step is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            bench.step.step(number, bench.rows[:2], bench.optimizer, 1e-4)
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(bench.step.frozen.head[0, 0])  # the mode does notice
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_fused_attention_kernels_ran(tmp_path):
    kernels = built(tmp_path).compiler.facts["kernels"]
    names = [name for name in kernels if "flex_attention" in name]
    assert any("backward" in n for n in names) and any("backward" not in n for n in names), kernels
    assert not any("softmax" in name for name in kernels), kernels


@pytest.mark.skipif(not torch.cuda.is_available() or not available(torch.device("cuda")), reason="no 8-bit products")
def test_8_bit_products_train_nearly_the_same(tmp_path):
    wide = train(built(tmp_path), 6)
    torch._dynamo.reset()
    eight = built(tmp_path, "train.fp8=both")
    assert eight.compiler.facts["target"] == "compiled", eight.said
    torch.testing.assert_close(torch.tensor(train(eight, 6)), torch.tensor(wide), rtol=5e-2, atol=0)
