"""The chunked loss against cross entropy written out in float64: values, gradients, and sums that add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers_train import make_spec
from torch import Tensor

from draftsmith.drafter import loss as loss_module
from draftsmith.drafter.loss import LossSums, default_chunk_rows, dpace_weights, drafter_loss, plain_loss
from draftsmith.records import DrafterSpec

SPECS = {
    "plain": make_spec(),
    "softcap": make_spec(final_logit_softcapping=3.0),
    "multiplier": make_spec(output_multiplier=0.3),
    "both": make_spec(output_multiplier=2.0, final_logit_softcapping=5.0),
}


def case(seed: int, anchors: int = 6, block_size: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Hidden states [A * B, H], labels, which slots count (gaps and short blocks among them), decay weights, head."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.rand(anchors, block_size, generator=generator) > 0.3
    counts[:, 0] = False
    counts[:, 1] = True
    if anchors > 2:
        counts[2, 2:] = False
    decay = torch.tensor([math.exp(-(k - 1) / 4) for k in range(block_size)])
    return {
        "hidden": (2 * torch.randn(anchors * block_size, 32, generator=generator)).to(dtype),
        "labels": torch.randint(0, 40, (anchors * block_size,), generator=generator),
        "counts": counts,
        "weights": torch.where(counts, decay, 0.0).float(),
        "head": torch.randn(40, 32, generator=generator).to(dtype),
    }


def ours(c: dict[str, Tensor], spec: DrafterSpec, kind: str, chunk: int, alpha: float = 0.5) -> tuple[LossSums, Tensor]:
    """Loss sums and d weighted / d hidden [A * B, H]; only the slots that count are handed over, as training does."""
    hidden = c["hidden"].clone().requires_grad_()
    where = c["counts"].flatten().nonzero()[:, 0]
    sums = drafter_loss(
        hidden,
        c["labels"][where],
        where,
        c["weights"],
        c["head"],
        spec,
        kind=kind,
        alpha=alpha,
        chunk_rows=chunk,
    )
    sums.weighted.backward()
    return sums, hidden.grad


def plain(c: dict[str, Tensor], spec: DrafterSpec, kind: str, alpha: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum, its gradient, and CE [A * B] in float64: one slot after the other, no chunk, no trick."""
    hidden = c["hidden"].double().requires_grad_()
    anchors, block_size = c["counts"].shape
    losses = []
    for i in range(anchors * block_size):
        logits = c["head"].double() @ hidden[i]
        logits = logits * (spec.output_multiplier or 1.0)
        if spec.final_logit_softcapping:
            logits = spec.final_logit_softcapping * torch.tanh(logits / spec.final_logit_softcapping)
        losses.append(logits.exp().sum().log() - logits[c["labels"][i]])
    ce = torch.stack(losses)
    weights = c["weights"].double()
    if kind == "dpace":
        weights = torch.from_numpy(loop_dpace(ce.detach().view_as(weights).numpy(), c["counts"].numpy(), alpha))
    total = (weights.flatten() * ce).sum()
    total.backward()
    return total.detach(), hidden.grad, ce.detach()


def loop_dpace(ce: np.ndarray, counts: np.ndarray, alpha: float) -> np.ndarray:
    """w_j = sum_{m >= j} prod_{i <= m} q_i over the slots that count (arXiv 2605.18810), in loops."""
    weights = np.zeros_like(ce)
    for a in range(len(ce)):
        slots = [k for k in range(ce.shape[1]) if counts[a, k]]
        q = {k: (1 - alpha) * math.exp(-ce[a, k]) + alpha for k in slots}
        for j in slots:
            for m in slots:
                if m >= j:
                    weights[a, j] += math.prod(q[i] for i in slots if i <= m)
    return weights


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("name", SPECS)
def test_chunked_loss_equals_plain_cross_entropy_in_float64(name, kind, chunk):
    c, spec = case(1), SPECS[name]
    (sums, grad), (total, slow_grad, ce) = ours(c, spec, kind, chunk), plain(c, spec, kind)
    torch.testing.assert_close(sums.weighted, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, slow_grad, rtol=1e-9, atol=1e-12)
    counted = torch.where(c["counts"], ce.view_as(c["counts"]), 0.0)
    torch.testing.assert_close(sums.ce_B, counted.sum(0), rtol=1e-12, atol=0)
    assert grad[~c["counts"].flatten()].abs().max() == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("name", SPECS)
def test_chunked_loss_in_training_precision(name, kind, dtype, tolerance):
    c, spec = case(2, dtype=dtype), SPECS[name]
    (sums, grad), (total, slow_grad, _) = ours(c, spec, kind, 7), plain(c, spec, kind)
    assert sums.weighted.dtype == torch.float32 and grad.dtype == dtype
    assert float(sums.weighted.detach()) == pytest.approx(float(total), rel=tolerance)
    assert float((grad.double() - slow_grad).norm() / slow_grad.norm()) < tolerance


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("name", SPECS)
def test_the_plain_twin_agrees(name, kind):
    c, spec = case(3), SPECS[name]
    hidden = c["hidden"].clone().requires_grad_()
    weights = c["weights"].double()
    twin = plain_loss(
        hidden.view(*c["counts"].shape, -1), c["labels"].view_as(c["counts"]), weights, c["head"], spec, kind=kind
    )
    twin.backward()
    sums, grad = ours(c, spec, kind, 4)
    torch.testing.assert_close(twin.detach(), sums.weighted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(hidden.grad, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_dpace_weights_equal_the_loops(alpha):
    c = case(4, anchors=9, block_size=8)
    ce = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)).double() * 5
    made = dpace_weights(ce, c["counts"], alpha).numpy()
    np.testing.assert_allclose(made, loop_dpace(ce.numpy(), c["counts"].numpy(), alpha), rtol=1e-12)
    (sums, grad), (total, slow_grad, _) = (
        ours(c, SPECS["plain"], "dpace", 5, alpha),
        plain(c, SPECS["plain"], "dpace", alpha),
    )
    torch.testing.assert_close(sums.weighted, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, slow_grad, rtol=1e-9, atol=1e-12)


def test_dpace_weights_by_hand():
    ce, counts = torch.tensor([[9.0, 0.0, 9.0, math.log(2)]]), torch.tensor([[False, True, False, True]])
    # q = 1 and 0.75 for the two slots that count: w_1 = 1 + 0.75, w_3 = 0.75
    torch.testing.assert_close(dpace_weights(ce, counts, 0.5), torch.tensor([[0, 1.75, 0, 0.75]]))


def test_sums_by_slot_count_what_was_trained_and_what_was_right():
    c = case(5)
    c["head"] = torch.eye(40, 32).double()
    c["hidden"] = torch.zeros(30, 32).double()
    c["labels"] %= 32
    for i in range(0, 30, 2):
        c["hidden"][i, c["labels"][i]] = 5.0
    for i in range(1, 30, 2):
        c["hidden"][i, (c["labels"][i] + 1) % 32] = 5.0
    sums, _ = ours(c, SPECS["plain"], "decay", 4)
    right = (torch.arange(30).view(6, 5) % 2 == 0) & c["counts"]
    assert sums.count_B.tolist() == c["counts"].sum(0).tolist() and sums.count_B[0] == 0
    assert sums.correct_B.tolist() == right.sum(0).tolist() and sums.correct_B.sum() > 0


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_rows_of_unequal_counts_add_up_to_one_big_row(kind):
    """Numerators and denominators are sums: two rows apart give what they give together; a mean of means does not."""
    small, large = case(6, anchors=1), case(7, anchors=8)
    large["head"] = small["head"]
    together = {k: torch.cat([small[k], large[k]]) if k != "head" else small[k] for k in small}
    parts = [ours(c, SPECS["plain"], kind, 4) for c in (small, large)]
    whole, grad = ours(together, SPECS["plain"], kind, 4)
    numerators = [p.weighted.detach() for p, _ in parts]
    torch.testing.assert_close(sum(numerators), whole.weighted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), grad, rtol=1e-12, atol=1e-14)
    denominators = [float(c["weights"].sum()) if kind == "decay" else len(c["counts"]) for c in (small, large)]
    right = float(whole.weighted.detach()) / sum(denominators)
    mean_of_means = sum(float(n) / d for n, d in zip(numerators, denominators, strict=True)) / 2
    assert sum(map(float, numerators)) / sum(denominators) == pytest.approx(right, rel=1e-12)
    assert abs(mean_of_means - right) > 0.01 * right


def test_the_gradient_follows_the_factor_of_the_step():
    c = case(8)
    hidden = c["hidden"].clone().requires_grad_()
    where = c["counts"].flatten().nonzero()[:, 0]
    sums = drafter_loss(hidden, c["labels"][where], where, c["weights"], c["head"], SPECS["plain"], kind="decay")
    (sums.weighted / 7).backward()
    torch.testing.assert_close(hidden.grad, ours(c, SPECS["plain"], "decay", 512)[1] / 7, rtol=1e-12, atol=1e-15)


def test_logits_exist_a_chunk_at_a_time(monkeypatch):
    sizes = []
    real = loss_module.head_chunk
    monkeypatch.setattr(loss_module, "head_chunk", lambda h, *rest: sizes.append(len(h)) or real(h, *rest))
    c = case(9)
    ours(c, SPECS["plain"], "decay", 4)
    rows = int(c["counts"].sum())
    assert sizes == [4] * (rows // 4) + ([rows % 4] if rows % 4 else [])


@pytest.mark.parametrize(
    ("anchors", "block_size", "compiled", "rows"),
    [(512, 16, True, 2560), (1536, 16, True, 2560), (1024, 8, True, 2390), (16, 16, True, 240), (512, 16, False, 512),
     (4, 8, False, 28)],
)  # fmt: skip
def test_chunks_are_equal_and_as_large_as_allowed(anchors, block_size, compiled, rows):
    assert default_chunk_rows(anchors, block_size, compiled) == rows
