"""flex_attention and our own kernels against their SDPA twin on a GPU: values and gradients, full and sliding layers, fp32 and bf16.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flex_parity import CASES, attention_errors, drafter_errors

PLAIN = SimpleNamespace(final_logit_softcapping=None, output_multiplier=None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles for its own shapes: without this the limit on recompiles is reached across tests."""
    torch._dynamo.reset()


BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("fused", "dtype"), [("flex", "float32"), ("flex", "bfloat16"), ("triton", "float16"), ("triton", "bfloat16")]
)
def test_attention_values_and_gradients(case, dtype, fused):
    errors = attention_errors(case, getattr(torch, dtype), fused)
    assert max(errors.values()) < BOUNDS[dtype], errors


@pytest.mark.parametrize(("fused", "window"), [("flex", None), ("flex", 40), ("triton", 40)])
def test_drafter_loss_and_gradients(window, fused):
    errors = drafter_errors(window, fused)
    assert errors["loss"] < 1e-5 and errors["worst_gradient"] < 1e-4, errors


def test_mask_is_built_on_the_device():
    from draftsmith.drafter.attention import build_masks

    case = CASES[0]
    masks = build_masks("flex", case.low, case.high, case.context, case.block_size, [None, 16], torch.device("cuda"))
    assert all(m.kv_indices.is_cuda for m in masks)


@pytest.mark.parametrize(("rows", "vocab"), [(5, 100), (33, 8192), (64, 20001)])
def test_softmax_and_its_gradient(rows, vocab):
    """Against the eager chunk; some labels are the first of equal maxima, some a later one."""
    from draftsmith.drafter.loss import head_chunk, triton_chunk

    generator = torch.Generator("cuda").manual_seed(vocab)
    hidden = torch.randn(rows, 64, device="cuda", generator=generator)
    head = torch.randn(vocab, 64, device="cuda", generator=generator)
    head[vocab // 2] = head[vocab // 3]
    labels = torch.randint(vocab, (rows,), device="cuda", generator=generator)
    best = (hidden @ head.T).argmax(-1)
    labels[::2] = best[::2]
    hidden[:4] = 9 * head[vocab // 3]
    labels[:4] = torch.tensor([vocab // 3, vocab // 2, vocab // 3, 0])
    for ours, plain in zip(
        triton_chunk(hidden, labels, head, None), head_chunk(hidden, labels, head, PLAIN), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
