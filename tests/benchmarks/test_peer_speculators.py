"""The peer's model and ours, made of the same weights, have the same hidden states (make .peers/speculators/installed)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_train import make_spec, random_row

from draftsmith.drafter.attention import build_masks
from draftsmith.drafter.model import embed

sys.path.append(str(Path(__file__).parents[2] / ".peers" / "speculators"))  # at the end: our own packages win
pytest.importorskip("speculators")

import peer_speculators as peer

T, A = 96, 10


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_converted_peer_has_the_same_hidden_states(kind):
    spec = make_spec(layer_types=kind, sliding_window=2048 if kind == "sliding" else None, rope_theta=5000.0)
    torch.manual_seed(0)
    model = peer.build(spec, "sdpa").eval()
    embedding, head = torch.randn(spec.vocab_size, spec.hidden_size), torch.randn(spec.vocab_size, spec.hidden_size)
    peer.give_target(model, embedding, head, torch.ones(spec.hidden_size))
    with torch.no_grad():
        for name, value in model.named_parameters():  # norms other than 1, matrices large enough to matter
            if value.requires_grad:
                value.copy_(1 + 0.3 * torch.randn(value.shape) if "norm" in name else 0.3 * torch.randn(value.shape))
    row = random_row(5, T)
    features = torch.randn(T, len(spec.feature_layers) * spec.hidden_size)
    with torch.no_grad():
        hidden, logits, targets, _, where = model._backbone_forward(
            **peer.batch(row, features, torch.randn(T, spec.hidden_size)), max_anchors=A
        )
        anchors = where.view(A, spec.block_size)[:, 0].numpy()
        used = np.flatnonzero(row.supervised[anchors])
        anchors = anchors[used]
        drafter = peer.convert(model, spec)
        starts = np.array(row.starts)[row.document[anchors]]
        masks = build_masks("dense", starts, anchors, T, spec.block_size, spec.windows(), torch.device("cpu"))
        blocks = np.full((len(anchors), spec.block_size), spec.mask_token_id)
        blocks[:, 0] = row.tokens[anchors]
        positions = row.positions[anchors][:, None] + np.arange(spec.block_size)
        ours = drafter(
            features, torch.from_numpy(row.positions), embed(torch.from_numpy(blocks.ravel()), embedding, spec),
            torch.from_numpy(positions.ravel()), masks,
        )  # fmt: skip
    assert len(used) >= 6
    theirs = hidden[0].view(A, spec.block_size, -1)[used].flatten(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours @ head.T, logits[0].view(A, spec.block_size, -1)[used].flatten(0, 1), rtol=1e-3, atol=1e-3
    )
    assert targets.shape == logits.shape


def test_the_recipe_named_own_is_the_defaults_of_its_command_line():
    from conftest import make_config
    from speculators.train.config import TrainConfig, resolution

    config = make_config(Path("target"), Path("work"))
    settings, loss, kind = peer.recipe("own", config)
    assert (settings.optimizer, settings.lr, settings.muon_lr, settings.scheduler) == ("muon", 1e-3, 1e-3, "linear")
    assert loss == {
        "per_position_loss_weight": "dpace", "dflash_decay_gamma": 4.0, "dpace_alpha": 0.5, "loss_fn": "ce",
    } and kind == "sliding"  # fmt: skip
    argv = ["--verifier-name-or-path", "x", "--speculator-type", "dflash"]
    resolved = resolution.resolve(TrainConfig, argv)  # as its command line reads them
    for name in ("optimizer", "lr", "weight_decay", "muon_lr", "muon_momentum", "muon_weight_decay"):
        assert getattr(settings, name) == getattr(resolved.optimizer, name), name
    assert settings.scheduler == resolved.scheduler.scheduler_type
    assert loss.pop("loss_fn") == resolved.loss.loss_fn
    assert loss == {name: getattr(resolved.dflash, name) for name in loss}
    ours, weights, layers = peer.recipe("ours", config)
    assert (ours.optimizer, ours.lr, ours.scheduler, ours.warmup) == ("adamw", 1e-3, "cosine", 0.04)
    assert weights["per_position_loss_weight"] == "fixed-exp-decay" and layers == "full"
