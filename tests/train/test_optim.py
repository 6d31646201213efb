"""The learning-rate schedules as functions of the step, and what AdamW is told."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_train import make_spec

from draftsmith.config import TrainConfig
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.train import optim
from draftsmith.train.optim import make_optimizer, rate, set_rate


def rates(total: int, **settings) -> list[float]:
    config = TrainConfig(steps=total, learning_rate=2.0, **settings)
    return [rate(step, total, config) for step in range(total)]


def test_cosine_after_a_linear_warm_up():
    values = rates(100, warmup_fraction=0.1)
    assert values[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    for step in range(10, 100):
        assert values[step] == pytest.approx(1 + math.cos(math.pi * (step - 10) / 90))
    assert values[10] == 2.0 and values[55] == pytest.approx(1.0) and 0 < values[99] < 0.01
    assert all(a > b for a, b in zip(values[10:], values[11:], strict=False))


def test_cosine_ends_above_the_smallest_share():
    values = rates(50, warmup_fraction=0.0, min_lr_ratio=0.25)
    assert values[0] == 2.0 and values[25] == pytest.approx(2 * (0.25 + 0.75 / 2)) and values[-1] > 0.5
    assert values[-1] == pytest.approx(0.5, rel=0.01)


def test_wsd_is_flat_then_falls_in_a_straight_line():
    values = rates(100, schedule="wsd", warmup_fraction=0.05, decay_fraction=0.2)
    assert values[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert values[5:81] == [2.0] * 76
    assert values[81:] == pytest.approx([2.0 * (100 - step) / 20 for step in range(81, 100)])
    assert values[-1] == pytest.approx(0.1)
    assert rates(100, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.5)[-1] == pytest.approx(1.05)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_short_runs_have_a_rate_above_zero_at_every_step(schedule, total):
    for warmup in (0.0, 0.04, 0.9):
        values = rates(total, schedule=schedule, warmup_fraction=warmup)
        assert all(0 < v <= 2.0 for v in values), (warmup, values)


def test_weight_decay_is_for_matrices_and_the_rate_for_all():
    drafter = DFlashDrafter(make_spec(attention_bias=True)).initialize(0)
    optimizer = make_optimizer(drafter, TrainConfig(steps=1, weight_decay=0.1, betas=(0.8, 0.9)))
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert all(p.dim() == 2 for p in decayed) and all(p.dim() == 1 for p in kept)
    assert {id(p) for p in (*decayed, *kept)} == {id(p) for p in drafter.parameters()}
    assert len(decayed) + len(kept) == len(list(drafter.parameters()))
    assert all(g["betas"] == (0.8, 0.9) for g in optimizer.param_groups)
    set_rate(optimizer, 0.125)
    assert [g["lr"] for g in optimizer.param_groups] == [0.125, 0.125]


def test_masters_are_float32_so_norms_of_one_still_move():
    """A step of 1e-4 on a bfloat16 norm weight of 1 is lost; on a float32 master it is not."""
    drafter = DFlashDrafter(make_spec()).initialize(0)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    optimizer = make_optimizer(drafter, TrainConfig(steps=1, learning_rate=1e-4))
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(drafter.norm.weight.detach(), torch.full((32,), 1 - 1e-4), rtol=0, atol=1e-7)


def test_one_pass_adamw_is_torchs_with_clipping_and_working_copies(monkeypatch):
    """Twenty steps, weight decay on matrices only, gradients in float32 and in bfloat16; the state goes either way."""
    monkeypatch.setattr(optim, "_adamw", optim.adamw)  # the formula; compiled it is the same function
    spec = make_spec()
    config = TrainConfig(steps=20, weight_decay=0.1, learning_rate=1e-2)
    plain, ours = DFlashDrafter(spec).initialize(0), DFlashDrafter(spec).initialize(0)
    copies = {p: p.detach().bfloat16() for p in ours.parameters() if p.dim() == 2}
    first, second = make_optimizer(plain, config), make_optimizer(ours, config, one_pass=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        gradients = {}
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            drawn = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad, gradients[q] = drawn.float(), drawn if q in copies else drawn.float()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        first.step()
        own, factor = optim.clip_factor(list(gradients.values()), 0.5, torch.device("cpu"))
        second.update(gradients, copies, factor)
        torch.testing.assert_close(own, norm, rtol=1e-5, atol=0)
        if step == 9:  # as a resumed run would: the moments change hands
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                first.state[p], second.state[q] = (
                    {k: v.clone() for k, v in second.state[q].items()},
                    {k: v.clone() for k, v in first.state[p].items()},
                )
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(copy, p.bfloat16()) for p, copy in copies.items())


def test_muon_moves_matrices_and_adamw_the_rest_with_one_rate_and_one_state():
    drafter = DFlashDrafter(make_spec(attention_bias=True)).initialize(0)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    optimizer = make_optimizer(drafter, TrainConfig(steps=1, optimizer="muon"))
    set_rate(optimizer, 1e-3)
    for p in drafter.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in drafter.named_parameters():
        assert not torch.equal(p, before[name]), name
        kinds = set(optimizer.state[p])
        assert kinds == ({"momentum_buffer"} if p.dim() == 2 else {"step", "exp_avg", "exp_avg_sq"}), name


def test_muon_is_torchs_though_matrices_of_one_shape_go_together(monkeypatch):
    """Three steps; wide, tall and square matrices, some alone, some more than go together at once."""
    monkeypatch.setattr(optim, "MUON_ELEMENTS", 3 * 32 * 48)
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 48), (48, 32), (32, 48), (48, 32), (32, 32), (16, 64)]
    ours = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 1.0, "weight_decay": 0.1}
    first = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    vector = torch.nn.Parameter(torch.zeros(3))
    second = optim.MuonAdamW(ours, torch.optim.AdamW([vector], lr=1.0), **settings)
    for step in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        ours[2].grad, theirs[2].grad = (torch.zeros(32, 48) for _ in range(2))  # its norm is zero
        if step == 2:
            ours[0].grad = theirs[0].grad = None
        first.step()
        second.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.02)  # bfloat16 inside; a step moves a number by 0.25
        torch.testing.assert_close(second.state[p]["momentum_buffer"], first.state[q]["momentum_buffer"])
