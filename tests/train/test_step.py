"""One optimizer step over several rows: sums, never means of means; rows without anchors; unused slots."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers_train import make_row, make_spec, random_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter.loss import plain_loss
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.records import PackedRow
from draftsmith.train import optim
from draftsmith.train.dist import World
from draftsmith.train.optim import OnePassAdamW, make_optimizer
from draftsmith.train.step import Frozen, RowStep, by_slot

ROWS = [random_row(1, most_anchors=2), random_row(2), random_row(3, most_anchors=5)]
EMPTY = make_row([20], [(5, 6)], 96, [], 12, seed=9)


class RandomFeatures:
    """Features made from the row's number: any function of the row will do."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def row(self, row: PackedRow) -> Tensor:
        self.asked.append(row.index)
        generator = torch.Generator().manual_seed(row.index)
        return torch.randn(len(row.tokens), 64, generator=generator)


def make_drafter(**changes) -> DFlashDrafter:
    drafter = DFlashDrafter(make_spec(layer_types=("full", "sliding"), sliding_window=9, **changes)).initialize(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return drafter


def make_step(
    kind: str = "decay", compute: torch.dtype = torch.float32, drafter: DFlashDrafter | None = None,
    world: World | None = None, **train,
) -> RowStep:  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    drafter = drafter or make_drafter()
    if compute == torch.float64:
        drafter.double()
    frozen = Frozen(*(torch.randn(40, 32, generator=generator).to(compute) for _ in range(2)))
    return RowStep(
        drafter, frozen, RandomFeatures(), TrainConfig(steps=1, **train), LossConfig(kind=kind, chunk_rows=5),
        attention="sdpa", compute_dtype=compute, world=world,
    )  # fmt: skip


class Watch(torch.optim.SGD):
    """Keeps the gradients it is given."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        super().__init__(drafter.parameters(), lr=0.0)
        self.seen: dict[str, Tensor] = {}
        self.names = {p: n for n, p in drafter.named_parameters()}

    def step(self, closure=None):
        self.seen = {self.names[p]: p.grad.clone() for p in self.param_groups[0]["params"]}


def gradients(step: RowStep, rows: list[PackedRow]) -> tuple[dict[str, Tensor], object]:
    watch = Watch(step.drafter)
    sums = step.step(0, rows, watch, 0.0)
    return watch.seen, sums


def plain_sums(step: RowStep, row: PackedRow, kind: str) -> tuple[Tensor, float]:
    """Numerator by the loss's plain twin, on all slots at once, and the denominator counted in a loop."""
    blocks, hidden = step.blocks(row), []
    hook = step.drafter.register_forward_hook(lambda module, args, out: hidden.append(out))
    step.run(row, blocks, step.source.row(row))
    hook.remove()
    shape = (blocks.anchors, step.drafter.spec.block_size - 1)
    labels, weights = (torch.from_numpy(x[:, 1:]) for x in (blocks.labels, blocks.weights))
    numerator = plain_loss(
        hidden[0].view(*shape, -1), labels, weights.to(hidden[0].dtype), step.frozen.head, step.drafter.spec, kind=kind
    )
    if kind == "dpace":
        return numerator, float(blocks.anchors)
    denominator = 0.0
    for a in row.anchors[: row.anchor_count]:
        for k in range(1, step.drafter.spec.block_size):
            if a + k < len(row.tokens) and row.document[a + k] == row.document[a] and row.supervised[a + k]:
                denominator += math.exp(-(k - 1) / 4)
    return numerator, denominator


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_rows_of_a_step_add_up_as_sums_over_sums(kind):
    """Three rows of unequal counts: gradient and loss are sum(numerators) / sum(denominators)."""
    step = make_step(kind, torch.float64, clip_norm=1e9)
    parts = [plain_sums(step, row, kind) for row in ROWS]
    assert len({round(d, 6) for _, d in parts}) == 3
    total = sum(d for _, d in parts)
    loss = sum(n for n, _ in parts) / total
    expected = torch.autograd.grad(loss, list(step.drafter.parameters()))
    loss, parts = float(loss.detach()), [(float(n.detach()), d) for n, d in parts]
    found, sums = gradients(step, ROWS)
    for (name, _), gradient in zip(step.drafter.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)
    assert sums.denominator == pytest.approx(total, rel=1e-6)
    assert float(sums.weighted) / sums.denominator == pytest.approx(loss, rel=1e-6)
    assert float(sums.grad_norm) == pytest.approx(float(torch.cat([g.flatten() for g in expected]).norm()), rel=1e-6)
    mean_of_means = sum(n / d for n, d in parts) / 3
    assert abs(mean_of_means - loss) > 1e-3 * loss


def test_step_counts_rows_tokens_anchors_and_slots():
    step = make_step()
    _, sums = gradients(step, ROWS)
    assert sums.rows == ((0, 1), (0, 2), (0, 3))
    assert sums.tokens == sum(r.starts[-1] for r in ROWS) and sums.anchors == sum(r.anchor_count for r in ROWS)
    counted = sum(step.blocks(row).counts.sum(0) for row in ROWS)
    assert sums.count_B.tolist() == counted.tolist() and sums.count_B[0] == 0
    assert sums.finite.tolist() == [True] * 3


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_row_without_anchors_trains_nothing_and_breaks_nothing(place):
    with_it, without = make_step(), make_step()
    optimizers = [make_optimizer(s.drafter, s.train) for s in (with_it, without)]
    rows = [*ROWS[:place], EMPTY, *ROWS[place:]]
    sums = with_it.step(0, rows, optimizers[0], 1.0)
    reference = without.step(0, ROWS, optimizers[1], 1.0)
    for a, b in zip(with_it.drafter.parameters(), without.drafter.parameters(), strict=True):
        assert torch.equal(a, b)
    assert sums.denominator == reference.denominator and torch.equal(sums.weighted, reference.weighted)
    assert sums.finite.tolist() == [True] * 4 and len(sums.rows) == 4
    assert EMPTY.index not in with_it.source.asked  # not even the target runs


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_a_step_of_rows_without_anchors_leaves_weights_and_moments_alone(kind):
    step = make_step(kind)
    optimizer = make_optimizer(step.drafter, step.train.model_copy(update={"weight_decay": 0.1}))
    step.step(0, ROWS, optimizer, 1.0)
    weights = copy.deepcopy(step.drafter.state_dict())
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    sums = step.step(1, [EMPTY, EMPTY], optimizer, 1.0)
    assert sums.denominator == 0 and float(sums.weighted) == 0 and float(sums.grad_norm) == 0
    for name, value in step.drafter.state_dict().items():
        assert torch.equal(value, weights[name])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, moments[number][k]) for k, v in state.items())
    assert step.heldout([EMPTY], step.source)["loss"] == 0


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_unused_slots_change_nothing(kind):
    """Fixed shapes, as on a GPU, against slots left out, as on a CPU."""
    trimmed, fixed = make_step(kind, torch.float64, clip_norm=1e9), make_step(kind, torch.float64, clip_norm=1e9)
    fixed.trim = False
    assert trimmed.trim and all(r.anchor_count < len(r.anchors) for r in ROWS[::2])
    rows = [*ROWS, EMPTY]
    (a, sums), (b, others) = gradients(trimmed, rows), gradients(fixed, rows)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sums.weighted, others.weighted, rtol=1e-12, atol=0)
    assert sums.denominator == others.denominator and torch.equal(sums.count_B, others.count_B)


def test_gradients_are_clipped_to_the_norm_asked_for():
    step = make_step(clip_norm=1e-3)
    found, sums = gradients(step, ROWS)
    assert float(sums.grad_norm) > 1e-2
    assert float(torch.cat([g.flatten() for g in found.values()]).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_gradients_do_not_carry_over_to_the_next_step():
    step = make_step(clip_norm=1e9)
    first, _ = gradients(step, ROWS)
    again, _ = gradients(step, ROWS)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_features_that_are_not_finite_are_noticed_by_row():
    step = make_step()
    good = step.source.row
    step.source.row = lambda row: good(row).index_fill_(0, torch.tensor([0]), math.nan) if row.index == 2 else good(row)
    _, sums = gradients(step, ROWS)
    assert sums.finite.tolist() == [True, False, True]


def test_bfloat16_compute_keeps_float32_masters_and_comes_close():
    wide, narrow = make_step(clip_norm=1e9), make_step(compute=torch.bfloat16, clip_norm=1e9)
    (a, sums), (b, others) = gradients(wide, ROWS), gradients(narrow, ROWS)
    assert {p.dtype for p in narrow.drafter.parameters()} == {torch.float32}
    assert float(others.weighted) == pytest.approx(float(sums.weighted), rel=0.02)
    flat = [torch.cat([g.flatten() for g in found.values()]) for found in (a, b)]
    assert float((flat[0] - flat[1]).norm() / flat[0].norm()) < 0.1


@pytest.mark.parametrize("bias", [False, True])
def test_a_working_copy_with_joined_projections_is_the_drafter_with_separate_ones(bias):
    """Loss and masters' gradients over three rows, against a drafter whose own weights are bfloat16."""
    step = make_step(compute=torch.bfloat16, drafter=make_drafter(attention_bias=bias), clip_norm=1e9)
    separate = make_drafter(attention_bias=bias)
    for name, parameter in separate.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.bfloat16()
    plain = make_step(compute=torch.bfloat16, drafter=separate, clip_norm=1e9)
    assert plain.working is separate and not any("k_proj" in name for name, _ in step.working.named_parameters())
    (a, sums), (b, others) = gradients(step, ROWS), gradients(plain, ROWS)
    assert float(sums.weighted) == pytest.approx(float(others.weighted), rel=2e-3)
    assert a.keys() == b.keys() and any(name.endswith("bias") for name in a) == bias
    for name in a:
        assert a[name].dtype == torch.float32
        assert float((a[name] - b[name]).norm() / b[name].float().norm()) < 0.02, name


def test_one_pass_adamw_gets_the_working_copys_gradients_or_their_sums(monkeypatch):
    """One row: as they are.  Several drafters: collected.  Both are what torch's optimizers get."""
    expected, _ = gradients(make_step(compute=torch.bfloat16, clip_norm=1e9), ROWS[:1])
    for world, dtype in ((World(), torch.bfloat16), (World(drafters=2), torch.float32)):
        step = make_step(compute=torch.bfloat16, world=world)
        seen: dict[Tensor, Tensor] = {}
        monkeypatch.setattr(OnePassAdamW, "update", lambda self, found, copies, factor, seen=seen: seen.update(found))
        step.step(0, ROWS[:1], make_optimizer(step.drafter, step.train, one_pass=True), 1.0)
        assert len(seen) == len(expected)
        for name, master in step.drafter.named_parameters():
            assert torch.equal(seen[master].float(), expected[name]), name
            assert seen[master].dtype == (dtype if master in step.copies else torch.float32)
        assert all(p.grad is None for p in (*step.drafter.parameters(), *step.working.parameters()))


@pytest.mark.parametrize("one_pass", [True, False])
def test_every_row_of_the_working_copy_is_its_rounded_master(monkeypatch, one_pass):
    """After optimizer steps of one row and of several, and after a refresh."""
    monkeypatch.setattr(optim, "_adamw", optim.adamw)  # the formula; compiled it is the same function
    step = make_step(compute=torch.bfloat16, drafter=make_drafter(attention_bias=True))
    optimizer = make_optimizer(step.drafter, step.train, one_pass=one_pass)
    joined = {"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def check() -> None:
        for name, value in step.working.named_parameters():
            *path, module, kind = name.split(".")
            masters = [step.drafter.get_parameter(".".join([*path, m, kind])) for m in joined.get(module, (module,))]
            assert torch.equal(value, torch.cat(masters).to(value.dtype)), name

    check()
    for number, rows in enumerate((ROWS[:1], ROWS)):
        before = [p.detach().clone() for p in step.working.parameters()]
        step.step(number, rows, optimizer, 1e-2)
        check()
        assert not any(torch.equal(p, q) for p, q in zip(step.working.parameters(), before, strict=True))
    step.drafter.load_state_dict(make_drafter(attention_bias=True).state_dict())
    step.refresh()
    check()


def test_heldout_is_the_loss_of_the_rows_together():
    step = make_step()
    held = step.heldout(ROWS, step.source)
    _, sums = gradients(step, ROWS)
    assert held["loss"] == pytest.approx(float(sums.weighted) / sums.denominator, rel=1e-6)
    assert held["accuracy_by_slot"] == by_slot(sums.ce_B, sums.correct_B, sums.count_B)["accuracy_by_slot"]
    assert all(p.grad is None for p in step.drafter.parameters())


def test_accuracy_by_slot_of_made_up_sums():
    out = by_slot(torch.tensor([0.0, 6.0, 2.0, 0.0]), torch.tensor([0.0, 3.0, 1.0, 0.0]), torch.tensor([0.0, 4, 2, 0]))
    assert out == {"accuracy": 4 / 6, "cross_entropy": 8 / 6, "accuracy_by_slot": [0.75, 0.5, None]}


class Waits(TorchDispatchMode):
    """Collects what the host would wait for on a GPU: numbers read back, and numbers copied there by an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero") or ("index_put" in name and args[2].dim() == 0):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "optimizer"), [("decay", "adamw"), ("dpace", "muon")])
def test_a_step_asks_the_device_for_nothing(kind, optimizer, compute):
    """tests/gpu has the compiled step and the device's own word."""
    step = make_step(kind, compute, optimizer=optimizer)
    optimizer = make_optimizer(step.drafter, step.train)
    with Waits() as waits:
        for number, rows in enumerate((ROWS, ROWS[:1], ROWS)):
            sums = step.step(number, rows, optimizer, 1e-3)
        assert not waits.found
        float(sums.weighted)
    assert waits.found  # it does notice
