"""Train, evaluate and export the tiny target on a GPU: flex attention, bf16, packed target forward."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_config, write_conversations, write_target

from draftsmith.data.tokenize import tokenize
from draftsmith.evaluate.acceptance import evaluate
from draftsmith.export import export
from draftsmith.train.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles for its own shapes: without this the limit on recompiles is reached across tests."""
    torch._dynamo.reset()


def run(tmp_path, *overrides):
    folder = write_target(tmp_path / "target")
    config = make_config(
        folder, tmp_path, "device=cuda", "train.steps=8", "train.checkpoint_every=8", "train.anchors=32", *overrides
    )
    write_conversations(config.conversations)
    tokenize(config)
    return config, train(config)


def losses(attempt):
    lines = [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_train_evaluate_export(tmp_path):
    config, attempt = run(tmp_path)
    manifest = json.loads(attempt.manifest("built").read_text())
    assert "flex" in json.dumps(manifest)
    assert losses(attempt)[-1] < losses(attempt)[0]
    evaluate(config)
    export(config)


def test_flex_trains_like_sdpa_in_float32(tmp_path):
    same = ("train.compute_dtype=float32", "target.dtype=float32", "train.feature_dtype=float32")
    curves = [losses(run(tmp_path / kind, *same, f"train.attention={kind}")[1]) for kind in ("flex", "sdpa")]
    assert max(abs(a / b - 1) for a, b in zip(*curves, strict=True)) < 1e-4
