"""Continuous batching answers as static batches do."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_config, write_target

from draftsmith.config import TargetConfig
from draftsmith.data.generate import generate
from draftsmith.target.model import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_same_answers_at_temperature_0(tmp_path):
    """In float32, more prompts than are answered at a time, one of them with a turn to write anew."""
    folder = write_target(tmp_path / "target")
    prompts = [{"id": f"p{i}", "prompt": f"Question {i}: {'x' * (7 * i % 40)}?"} for i in range(21)]
    turns = [{"role": r, "content": c} for r, c in (("user", "A?"), ("assistant", "B"), ("user", "C?"))]
    prompts.append({"id": "two", "messages": turns})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    target = load_target(TargetConfig(model=str(folder), dtype="float32"), "cuda")
    attention, found = target.model.config._attn_implementation, {}
    for engine in ("static", "auto"):
        config = make_config(folder, tmp_path, "device=cuda", "target.dtype=float32", f"generate.engine={engine}",
                             f"data_dir={tmp_path}/{engine}", "generate.batch_size=4")  # fmt: skip
        counts = generate(config, target)
        lines = [json.loads(line) for line in config.conversations.read_text().splitlines()]
        found[engine] = {x["id"]: x for x in lines}
        assert len(lines) == len(found[engine]) == counts["prompts"] == 22
        recorded = json.loads((config.data / "conversations.settings.json").read_text())
        assert recorded["engine"] == ("static" if engine == "static" else "continuous")
        assert generate(config, target) == {"prompts": 22, "answered_before": 22}
    assert found["static"] == found["auto"]
    assert target.model.config._attn_implementation == attention
    assert len({x["messages"][-1]["content"] for x in found["auto"].values()}) > 10
