"""Drafters of a tiny target that know part of its answers, for the loop and for its replay."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from conftest import make_config
from helpers_train import make_row
from torch import Tensor

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.evaluate.speculate import Sampler, decode_plain
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.model import Target, drafter_spec
from draftsmith.train.optim import make_optimizer, rate, set_rate
from draftsmith.train.step import Frozen, RowStep

KINDS = {
    "full": ("drafter.layer_types=full",),
    "sliding": ("drafter.layer_types=sliding", "drafter.sliding_window=6"),
    "mixed": ("drafter.layer_types=[full, sliding]", "drafter.sliding_window=9"),
}
GREEDY = Sampler()


@pytest.fixture(scope="session")
def prompts() -> list[Tensor]:
    return [torch.randint(4, 260, (8 + i,), generator=torch.Generator().manual_seed(i)) for i in range(4)]


class KnownFeatures:
    def __init__(self, features: Tensor) -> None:
        self.features = features

    def row(self, row) -> Tensor:
        return self.features


@pytest.fixture(scope="session")
def half_trained(target, prompts, tmp_path_factory) -> dict[str, DFlashDrafter]:
    """Drafters that know part of the target's answers to the prompts: rounds accept none, some, and all drafts."""
    who = without_stop(target)
    documents = [torch.cat([p, torch.tensor(decode_plain(who, p, 44, GREEDY).tokens)]) for p in prompts]
    starts = [0, *itertools.accumulate(len(d) for d in documents)]
    spans = [(s + len(p), e) for s, e, p in zip(starts, starts[1:], prompts, strict=False)]
    anchors = [a for s, e in spans for a in range(s, e - 1)]
    row = make_row([len(d) for d in documents], spans, starts[-1], anchors, len(anchors))
    row.tokens[:] = torch.cat(documents).numpy()
    out = {}
    for kind in KINDS:
        out[kind] = fresh(target, tmp_path_factory.mktemp(kind), kind, "drafter.initializer_range=0.05")
        features = KnownFeatures(FeatureExtractor(who, out[kind].spec.feature_layers, torch.float32).row(row))
        settings = TrainConfig(steps=36, learning_rate=5e-3, warmup_fraction=0.1)
        step = RowStep(
            out[kind].requires_grad_(True), Frozen(target.embedding, target.head), features, settings, LossConfig(),
            attention="sdpa", compute_dtype=torch.float32,
        )  # fmt: skip
        optimizer = make_optimizer(out[kind], settings)
        for number in range(settings.steps):
            set_rate(optimizer, rate(number, settings.steps, settings))
            step.step(number, [row], optimizer, 0.0)
        out[kind].requires_grad_(False)
    return out


def fresh(target: Target, tmp_path: Path, kind: str, *overrides: str) -> DFlashDrafter:
    config = make_config(Path(target.name), tmp_path, *KINDS[kind], *overrides)
    drafter = DFlashDrafter(drafter_spec(config.drafter, target)).initialize(3)
    return drafter.requires_grad_(False).eval()


def without_stop(target: Target) -> Target:
    return dataclasses.replace(target, eos_token_ids=(-1,))
