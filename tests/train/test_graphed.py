"""Rows that run as one graph of fixed memory train as rows one after the other do.  On a CPU the same functions run
without a graph; tests/gpu/test_compiled_step.py has them as CUDA graphs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers_train import make_row, make_spec, random_row

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter.intervals import Intervals
from draftsmith.drafter.loss import drafter_loss, head_chunk
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.target.packed import packed_intervals
from draftsmith.train.graphed import GraphedFeatures, GraphedRow, Inputs, capture_all
from draftsmith.train.optim import make_optimizer
from draftsmith.train.step import Frozen, RowStep

ROWS = [random_row(1, most_anchors=2), random_row(2), make_row([20], [(5, 6)], 96, [], 12, seed=9), random_row(3)]
"""The third has no anchor: the step leaves it out."""


class Features:
    """Of the row's number, in memory that the next row's take."""

    def __init__(self) -> None:
        self.held = torch.empty(96, 64)

    def row(self, row):
        return self.held.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(row.index)))


def make_step(
    kind: str, dtype: torch.dtype, optimizer: str, one_pass: bool = False
) -> tuple[RowStep, torch.optim.Optimizer]:
    drafter = DFlashDrafter(make_spec(layer_types=("full", "sliding"), sliding_window=9)).initialize(0)
    generator = torch.Generator().manual_seed(4)
    frozen = Frozen(*(torch.randn(40, 32, generator=generator).to(dtype) for _ in range(2)))
    train = TrainConfig(steps=1, optimizer=optimizer)
    step = RowStep(
        drafter, frozen, Features(), train, LossConfig(kind=kind, chunk_rows=5), attention="dense", compute_dtype=dtype
    )
    step.trim = False  # as where functions are compiled
    return step, make_optimizer(drafter, train, one_pass=one_pass)


@pytest.mark.parametrize(("rows", "optimizer"), [(1, "adamw"), (3, "adamw"), (3, "muon")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_steps_of_graphed_rows_are_those_of_rows_as_they_come(kind, dtype, rows, optimizer):
    # AdamW in one pass takes a single row's gradients as they come
    (one, first), (other, second) = (make_step(kind, dtype, optimizer, one_pass=True) for _ in range(2))
    other.graph = GraphedRow(other)
    for number in range(4):
        batch = [ROWS[(number * rows + i) % 4] for i in range(rows)]
        plain, graphed = one.step(number, batch, first, 1e-2), other.step(number, batch, second, 1e-2)
        assert plain.count_B.tolist() == graphed.count_B.tolist() and plain.denominator == graphed.denominator
        assert plain.rows == graphed.rows and plain.finite.tolist() == graphed.finite.tolist()
        assert plain.finite_loss.tolist() == graphed.finite_loss.tolist()
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 1e-2}
        for value in ("weighted", "ce_B", "grad_norm"):
            torch.testing.assert_close(getattr(plain, value), getattr(graphed, value), **close)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2e-2}
    before = dict(DFlashDrafter(one.drafter.spec).initialize(0).named_parameters())
    for (name, mine), theirs in zip(one.drafter.named_parameters(), other.drafter.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close, msg=name)
        assert not torch.equal(theirs, before[name]), name


def test_slots_that_do_not_count_add_nothing_whatever_their_logits():
    step, _ = make_step("dpace", torch.float32, "adamw")
    row = ROWS[0]
    blocks = step.blocks(row)
    counted = int(blocks.counts[:, 1:].sum())
    arrays, _ = step.arrays(row, blocks)
    assert len(arrays[3]) == len(arrays[4]) == blocks.counts[:, 1:].size > counted
    assert sorted(arrays[3].tolist()) == list(range(len(arrays[3]))) and arrays[-1].tolist() == [
        i < counted for i in range(len(arrays[3]))
    ]
    found = GraphedRow(step)(row, blocks, step.source.row(row), 1.0)
    assert float(found.count_B.sum()) == counted
    expected = step.run(row, blocks, step.source.row(row))
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_a_loss_that_is_infinite_where_nothing_counts_is_not_seen(kind):
    """Labels there are no text; our softmax gives Inf where a label is far behind, and what it leaves of that row."""
    generator = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(n, 8, generator=generator) for n in (6, 11))
    labels, where, weights = torch.arange(6), torch.tensor([4, 1, 3, 0, 2, 5]), torch.rand(2, 3, generator=generator)
    known = torch.tensor([True, True, True, False, False, False])

    def broken(hidden_CH, labels_C, head_VH, spec):
        ce, correct, grad = head_chunk(hidden_CH, labels_C, head_VH, spec)
        bad = labels_C >= 3
        return ce.masked_fill(bad, math.inf), correct, grad.masked_fill(bad[:, None], math.nan)

    def gradient(*loss, **more):
        leaf = hidden.clone().requires_grad_()
        sums = drafter_loss(leaf, *loss, kind=kind, chunk_rows=6, **more)
        (sums.weighted * 2).backward()
        return sums, leaf.grad

    every, mine = gradient(labels, where, weights, head, make_spec(), chunk=broken, known_R=known)
    some, theirs = gradient(labels[:3], where[:3], weights, head, make_spec())
    torch.testing.assert_close(mine, theirs)
    for name, value in vars(some).items():
        torch.testing.assert_close(getattr(every, name), value)


def test_a_row_that_is_not_finite_says_so():
    step, optimizer = make_step("decay", torch.float32, "adamw")
    step.graph = GraphedRow(step)
    assert step.step(0, ROWS[1:2], optimizer, 1e-3).finite_loss.all()
    step.source = SimpleNamespace(row=lambda row: torch.full((96, 64), float("nan")))
    sums = step.step(1, ROWS[1:2], optimizer, 1e-3)
    assert not sums.finite_loss.any() and not sums.finite.any()


def test_inputs_stay_where_they_are_and_refuse_other_shapes():
    arrays = [np.arange(3), np.array([True, False]), np.ones((2, 2), np.float32), np.arange(5, dtype=np.int32)]
    inputs = Inputs(arrays, torch.device("cpu"))
    places = [t.data_ptr() for t in inputs.tensors]
    assert [t.dtype for t in inputs.tensors] == [torch.int64, torch.bool, torch.float32, torch.int32]
    assert all(place % 64 == places[0] % 64 for place in places)
    inputs.fill([a[::-1] for a in arrays])
    assert places == [t.data_ptr() for t in inputs.tensors]
    assert all(np.array_equal(t.numpy(), a[::-1]) for t, a in zip(inputs.tensors, arrays, strict=True))
    for other in (np.arange(4), np.arange(3, dtype=np.int32)):
        with pytest.raises(AssertionError, match="of one shape"):
            inputs.fill([other, *arrays[1:]])


class Extract:
    """A target's features as sums of what it is given; `row` the plain way, `forward` the graph's."""

    def __init__(self) -> None:
        self.intervals: dict | None = {}
        self.compiled: object = "layers"
        self.target = SimpleNamespace(device=torch.device("cpu"))
        self.plain = 0

    def arrays(self, row):
        masks = Intervals(*(torch.from_numpy(row.positions + i) for i in range(len(Intervals._fields))))
        return [row.tokens, row.positions], {"full": masks, "sliding": masks}

    def forward(self, tokens_T, positions_T, masks):
        assert masks["full"][0].data_ptr() == masks["sliding"][0].data_ptr()  # shared, so sent once
        return (tokens_T + sum(masks["sliding"]) * positions_T)[:, None].float()

    def row(self, row):
        self.plain += 1
        (tokens, positions), masks = self.arrays(row)
        return self.forward(torch.from_numpy(tokens), torch.from_numpy(positions), masks)


def test_features_of_the_next_row_take_the_place_of_a_rows():
    plain, extract = Extract(), Extract()
    source = GraphedFeatures(extract)
    seen = [source.row(row) for row in ROWS]
    assert len({t.data_ptr() for t in seen}) == 1 and extract.plain == 1
    for row in (*ROWS, ROWS[0]):
        assert torch.equal(source.row(row), plain.row(row))


def ended_badly(*given, text="the cause\nand more"):
    try:
        raise RuntimeError(text)
    finally:
        raise RuntimeError("the capture's end fails too")


def test_a_target_is_captured_only_where_it_is_compiled_with_our_kernels():
    step, _ = make_step("decay", torch.float32, "adamw")
    step.graph = GraphedRow(step)
    compiled, uncompiled, flex = Extract(), Extract(), Extract()
    uncompiled.compiled, flex.intervals = None, None
    source = capture_all(step, compiled, ROWS[0])
    assert isinstance(source, GraphedFeatures) and source.again is not None and step.graph.again is not None
    assert all(p.grad is None for p in step.drafter.parameters())
    assert [capture_all(step, other, ROWS[0]) for other in (None, uncompiled, flex)] == [None] * 3
    compiled.forward = lambda *given: 1 / 0
    with pytest.raises(InputError, match=r"compile\.graphs: the target .* \(division by zero\): set it to false"):
        capture_all(step, compiled, ROWS[0])
    with pytest.raises(InputError, match=r"compile\.graphs: the drafter .* \(the cause\): set it to false"):
        capture_all(SimpleNamespace(**vars(step) | {"graph": ended_badly, "blocks": step.blocks}), None, ROWS[0])
    full = lambda *given: ended_badly(text="CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):  # for what explains such errors
        capture_all(SimpleNamespace(**vars(step) | {"graph": full, "blocks": step.blocks}), None, ROWS[0])


def test_the_masks_of_a_target_have_one_shape_whatever_its_documents_are(target):
    rows = [make_row(lengths, [], 96, [], 4) for lengths in ([96], [40, 30], [8] * 12, [])]
    for text in (
        target.text_config,
        SimpleNamespace(layer_types=["sliding_attention"], sliding_window=9, num_attention_heads=4),
    ):
        shapes = [
            {kind: [x.shape for x in mask] for kind, mask in packed_intervals(row, text, torch.device("cpu")).items()}
            for row in rows
        ]
        assert shapes[1:] == shapes[:-1] and shapes[0]


def test_copies_of_the_sums_outlive_the_next_row():
    step, _ = make_step("decay", torch.float32, "adamw")
    graph = GraphedRow(step)
    first = graph(ROWS[0], step.blocks(ROWS[0]), step.source.row(ROWS[0]), 1.0)
    kept = {name: value.clone() for name, value in vars(first).items()}
    graph(ROWS[1], step.blocks(ROWS[1]), step.source.row(ROWS[1]), 1.0)
    assert all(torch.equal(getattr(first, name), value) for name, value in kept.items())
    assert not torch.equal(graph.sums[0], kept["weighted"])
