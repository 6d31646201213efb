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


@pytest.mark.parametrize(
    ("rows", "vocab", "shift"), [(5, 100, 0), (33, 8192, 0), (64, 20001, 0), (64, 20001, -60), (64, 20001, 60)]
)
def test_softmax_and_its_gradient(rows, vocab, shift):
    """Against the eager chunk; some labels are the first of equal maxima, some a later one."""
    from draftsmith.drafter.loss import head_chunk, triton_chunk
    from draftsmith.drafter.row_kernels import SOFTMAX_TILE, hidden_gradient

    generator = torch.Generator("cuda").manual_seed(vocab)
    hidden = torch.randn(rows, 64, device="cuda", generator=generator)
    head = torch.randn(vocab, 64, device="cuda", generator=generator)
    head[vocab // 2] = head[vocab // 3]
    labels = torch.randint(vocab, (rows,), device="cuda", generator=generator)
    best = (hidden @ head.T).argmax(-1)
    labels[::2] = best[::2]
    hidden[:4] = head[vocab // 3]
    labels[:4] = torch.tensor([vocab // 3, vocab // 2, vocab // 3, 0])
    if shift:  # the first tile far below or above the rest, and a label in the lower part
        head[:SOFTMAX_TILE, 0] += shift
        hidden[:, 0] = 1.0
    ce, correct, sums, share = triton_chunk(hidden, labels, head, PLAIN)
    grad = hidden_gradient(sums, share, torch.arange(rows, device="cuda"), rows + 1)
    assert not grad[rows:].any()
    for ours, plain in zip((ce, correct, grad[:rows]), head_chunk(hidden, labels, head, PLAIN), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("confidence", [0.02, 0.04, 0.06])
def test_the_gradient_of_a_confident_row_is_as_good_in_bfloat16_as_without_our_kernel(confidence):
    """Median error of a row's gradient against that of the same logits in float64."""
    from draftsmith.drafter.loss import head_chunk, triton_chunk
    from draftsmith.drafter.row_kernels import hidden_gradient

    generator = torch.Generator("cuda").manual_seed(3)
    head = torch.randn(20000, 256, device="cuda", generator=generator).to(torch.bfloat16)
    labels = torch.randint(20000, (64,), device="cuda", generator=generator)
    noise = 0.02 * torch.randn(64, 256, device="cuda", generator=generator)
    hidden = (confidence * head[labels].float() + noise).to(torch.bfloat16)
    shares = (hidden @ head.T).double().softmax(-1)
    shares[torch.arange(64), labels] -= 1
    right = shares @ head.double()
    _, _, sums, share = triton_chunk(hidden, labels, head, PLAIN)
    ours = hidden_gradient(sums, share, torch.arange(64, device="cuda"), 64)
    plain = head_chunk(hidden, labels, head, PLAIN)[2]
    a, b = (((x.double() - right).norm(dim=1) / right.norm(dim=1)).median() for x in (ours, plain))
    assert a < 1.5 * b + 1e-3, (float(a), float(b))


def test_silu_times_the_other_half_and_its_gradient():
    from draftsmith.drafter.row_kernels import silu_mul

    generator = torch.Generator("cuda").manual_seed(4)
    for rows, width, dtype in ((7, 40, torch.float32), (33, 2050, torch.float32), (64, 4096, torch.bfloat16)):
        x = torch.randn(rows, 2 * width, device="cuda", generator=generator).to(dtype).requires_grad_()
        grad = torch.randn(rows, width, device="cuda", generator=generator).to(dtype)
        wide = x.detach().double().requires_grad_()
        plain = torch.nn.functional.silu(wide[:, :width]) * wide[:, width:]
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        ours = silu_mul(x)
        torch.testing.assert_close(ours.double(), plain, **close)
        both = torch.autograd.grad(ours, x, grad)[0], torch.autograd.grad(plain, wide, grad.double())[0]
        torch.testing.assert_close(both[0].double(), both[1], **close)


def test_a_logit_out_of_reach_is_not_finite():
    from draftsmith.drafter.row_kernels import SOFTMAX_TILE, softmax_rows

    logits = torch.zeros(2, SOFTMAX_TILE + 100, device="cuda")
    logits[0, -1], logits[1, -1] = 119.0, 121.0
    ce, correct, share = softmax_rows(logits.clone(), torch.zeros(2, device="cuda", dtype=torch.long))
    assert torch.isfinite(ce).tolist() == [True, False] and share[0] > 0 and not correct.any()
    ce, correct, _ = softmax_rows(logits, torch.full((2,), SOFTMAX_TILE + 99, device="cuda"))
    assert (ce.abs() < 1e-4).all() and correct.all()


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "dtype"),
    [(37, 4, 16, "float32"), (300, 32, 128, "float32"), (5, 1, 64, "float32"), (300, 32, 128, "bfloat16")],
)
def test_norm_and_rotation_of_heads_and_their_gradients(tokens, heads, head_dim, dtype):
    from draftsmith.drafter.model import RMSNorm, rotary_tables, rotate
    from draftsmith.drafter.row_kernels import norm_rotate

    generator = torch.Generator("cuda").manual_seed(tokens)

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    norm = RMSNorm(head_dim, 1e-6).cuda()
    norm.weight.data.add_(0.3 * draw(head_dim))
    every = rotary_tables(torch.arange(2 * tokens, device="cuda") * 7, head_dim, 1e4)
    tables = every[0][1::2], every[1][1::2]  # with gaps, as of the trained slots of blocks of two
    x = draw(tokens, heads * head_dim + 8).to(getattr(torch, dtype))[:, :-8].requires_grad_()
    grad = draw(tokens, heads, head_dim).to(x.dtype).transpose(0, 1)
    plain = rotate(norm(x.unflatten(1, (heads, head_dim)).transpose(0, 1)), tables)
    ours = norm_rotate(x, norm.weight, *tables, norm.eps)
    rough = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(ours, plain, **rough)
    (grad_x, grad_weight), (plain_x, plain_weight) = (
        torch.autograd.grad(out, (x, norm.weight), grad) for out in (ours, plain)
    )
    torch.testing.assert_close(grad_x, plain_x, **rough)
    assert (grad_weight - plain_weight).norm() < 1e-2 * plain_weight.norm()
