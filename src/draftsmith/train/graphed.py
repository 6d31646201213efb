"""A row's forward and backward pass, and the target's forward, as one CUDA graph each.

A small model's step is about a thousand kernels, most of them shorter than the host takes to ask for them.  Where
functions are compiled every row has the same shape, so the same kernels run on the same memory row after row: what
differs is copied to where they read it.  On a CPU the same functions run without a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from draftsmith.cuda_graphs import one_launch
from draftsmith.drafter.attention import Mask, fill, places_of, views
from draftsmith.drafter.blocks import BlockBatch
from draftsmith.drafter.intervals import Intervals
from draftsmith.drafter.loss import LossSums
from draftsmith.errors import InputError
from draftsmith.records import PackedRow
from draftsmith.train.dist import out_of_memory

if TYPE_CHECKING:
    from draftsmith.config import Config
    from draftsmith.target.extract import FeatureExtractor
    from draftsmith.train.step import RowStep


def check(config: Config, device: torch.device, attention: str, compiled: bool) -> None:
    """Raises InputError where compile.graphs could not be done.  attention: as pick_attention has it."""
    if config.compile.graphs and not compiled:
        raise InputError("compile.graphs: nothing is compiled here: set it to false, or compile.enabled=true")
    if config.compile.graphs and device.type == "cuda" and attention != "triton":
        raise InputError(f"compile.graphs: it needs the masks of our kernels, this run has train.attention={attention}")


def capture_all(step: RowStep, extract: FeatureExtractor | None, row: PackedRow) -> GraphedFeatures | None:
    """Capture what rows like this one run; the features' graph, None if there is no target or it is not compiled with
    our kernels.  Raises InputError for a target that cannot be captured."""
    assert step.graph is not None
    spec = step.drafter.spec
    width = len(spec.feature_layers) * spec.hidden_size
    with _told("drafter"):
        step.graph(row, step.blocks(row), torch.zeros(len(row.tokens), width, device=step.device), 1.0)
    step.clear()
    if extract is None or extract.compiled is None or extract.intervals is None:
        return None
    source = GraphedFeatures(extract)
    with _told("target"):
        source.row(row)
    return source


@contextlib.contextmanager
def _told(who: str) -> Iterator[None]:
    """Whatever a model's code does that a capture does not allow, as one line."""
    try:
        yield
    except Exception as error:
        cause = error.__context__ or error  # the capture's own end fails too
        if out_of_memory(cause):
            raise cause from None
        what = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:200]
        raise InputError(f"compile.graphs: the {who} does not run as a CUDA graph ({what}): set it to false") from error


class Inputs:
    """Arrays of always the same shapes, on the device at always the same place.  `tensors` are views of it."""

    def __init__(self, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        self.kinds = [(a.dtype, a.shape) for a in arrays]
        self.places, total = places_of(arrays)
        self.there = torch.empty(total, dtype=torch.uint8, device=device)
        self.tensors = views(self.there, self.places, arrays)
        self.fill(arrays)

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """In one transfer, which is not waited for."""
        assert [(a.dtype, a.shape) for a in arrays] == self.kinds, "a graph's rows are of one shape"
        host = torch.empty(len(self.there), dtype=torch.uint8, pin_memory=self.there.is_cuda)
        fill(host, self.places, arrays)
        self.there.copy_(host, non_blocking=True)


def _flat(masks: Sequence[Mask]) -> list[np.ndarray]:
    """The arrays of masks on the CPU; of a mask that layers share, once."""
    distinct = {id(mask): mask for mask in masks}.values()
    return [a.numpy() for m in distinct for a in (m if isinstance(m, Intervals) else (cast(Tensor, m),))]


def _made(masks: Sequence[Mask], tensors: Sequence[Tensor]) -> list[Mask]:
    """Such masks, of tensors in the order of `_flat`."""
    rest, made = iter(tensors), dict[int, Mask]()
    for mask in masks:
        if id(mask) not in made:
            made[id(mask)] = Intervals(*(next(rest) for _ in mask)) if isinstance(mask, Intervals) else next(rest)
    return [made[id(mask)] for mask in masks]


def captured(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """(what runs it again, its results, which the running overwrites).  It reads and writes memory that stays."""
    if device.type == "cuda":
        return one_launch(function, device, kept=True)
    held = function()

    def again() -> None:
        for there, new in zip(_tensors(held), _tensors(function()), strict=True):
            there.copy_(new)

    return again, held


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for t in results if t is not None]


class GraphedRow:
    """`RowStep.run` and its backward pass.  Leaves gradients where `backward` would."""

    def __init__(self, step: RowStep) -> None:
        self.step = step
        self.again: Callable[[], None] | None = None

    def __call__(self, row: PackedRow, blocks: BlockBatch, features_TK: Tensor, total: float) -> LossSums:
        arrays, masks = self.step.arrays(row, blocks)
        if self.again is None:
            self._capture(arrays, masks, features_TK)
            assert self.again is not None
        self.inputs.fill([*arrays, *_flat(masks)])
        self.features_TK.copy_(features_TK)
        self.total.fill_(total)
        self.again()
        for parameter, gradient, own in self.gradients:
            if own:  # `collect` takes it before the next row
                parameter.grad = gradient
            else:
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
        return LossSums(*(x.clone() for x in self.sums))

    def _capture(self, arrays: list[np.ndarray], masks: list[Mask], features_TK: Tensor) -> None:
        step, device = self.step, self.step.device
        self.inputs = Inputs([*arrays, *_flat(masks)], device)
        self.features_TK = features_TK.to(step.compute_dtype, copy=True)
        self.total = torch.ones((), device=device, dtype=step.sum_dtype)
        tensors, kinds = self.inputs.tensors[: len(arrays)], _made(masks, self.inputs.tensors[len(arrays) :])
        parameters = [p for p in step.working.parameters() if p.requires_grad]

        def once() -> tuple[Tensor | None, ...]:
            sums = step.compute(tensors, kinds, self.features_TK)
            gradients = torch.autograd.grad(sums.weighted / self.total, parameters, allow_unused=True)
            return (sums.weighted.detach(), sums.ce_B, sums.correct_B, sums.count_B, *gradients)

        self.again, results = captured(once, device)
        self.sums, gradients = results[:4], results[4:]
        copies = {copy for copy, _ in step.parts.values()}
        self.gradients = [(p, g, p in copies) for p, g in zip(parameters, gradients, strict=True) if g is not None]


class GraphedFeatures:
    """`FeatureExtractor.row` of packed rows, compiled, by our kernels.  The next row's features take the place of a
    row's."""

    def __init__(self, extract: FeatureExtractor) -> None:
        self.extract = extract
        self.again: Callable[[], None] | None = None

    @torch.no_grad()
    def row(self, row: PackedRow) -> Tensor:
        arrays, masks = self.extract.arrays(row)
        given = [*arrays, *_flat([*masks.values()])]
        if self.again is None:
            self.extract.row(row)  # makes the stand-in
            self.inputs = Inputs(given, self.extract.target.device)
            made = _made([*masks.values()], self.inputs.tensors[len(arrays) :])
            kinds: Any = dict(zip(masks, made, strict=True))
            tokens_T, positions_T = self.inputs.tensors[: len(arrays)]
            self.again, self.features_TK = captured(
                lambda: self.extract.forward(tokens_T, positions_T, kinds), self.extract.target.device
            )
        self.inputs.fill(given)
        self.again()
        return self.features_TK
