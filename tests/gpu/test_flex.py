"""flex_attention and our own kernels against their SDPA twin on a GPU: values and gradients, full and sliding layers, fp32 and bf16.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import pytest
import torch
from flex_parity import CASES, attention_errors, drafter_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles for its own shapes: without this the limit on recompiles is reached across tests."""
    torch._dynamo.reset()


BOUNDS = {"float32": 2e-5, "bfloat16": 1.5e-2}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fused", ["flex", "triton"])
def test_attention_values_and_gradients(case, dtype, fused):
    errors = attention_errors(case, getattr(torch, dtype), fused)
    assert max(errors.values()) < BOUNDS[dtype], errors


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("fused", ["flex", "triton"])
def test_drafter_loss_and_gradients(window, fused):
    errors = drafter_errors(window, fused)
    assert errors["loss"] < 1e-5 and errors["worst_gradient"] < 1e-4, errors


def test_mask_is_built_on_the_device():
    from draftsmith.drafter.attention import build_masks

    case = CASES[0]
    masks = build_masks("flex", case.low, case.high, case.context, case.block_size, [None, 16], torch.device("cuda"))
    assert all(m.kv_indices.is_cuda for m in masks)
