"""Continuous batching answers as static batches do.

It is used on GPUs.  The same code of transformers runs on a CPU once it is told how much memory there is, so that the test
need not wait for a GPU.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import make_config, write_target
from transformers.generation.continuous_batching import cache

from draftsmith.config import TargetConfig
from draftsmith.data import engine
from draftsmith.data.generate import generate
from draftsmith.errors import InputError
from draftsmith.target.model import load_target

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """(make a config, target, its prompts' number) on a device; float32, more prompts than are answered at a time, one
    with a turn to write anew."""

    def place(device: str):
        folder = write_target(tmp_path / "target")
        prompts = [{"id": f"p{i}", "prompt": f"Question {i}: {'x' * (7 * i % 40)}?"} for i in range(15)]
        turns = [{"role": r, "content": c} for r, c in (("user", "A?"), ("assistant", "B"), ("user", "C?"))]
        prompts.append({"id": "two", "messages": turns})
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
        if device == "cpu":
            monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 1 << 28, 0, 0))
            monkeypatch.setattr(engine, "choose", lambda c: (c.generate.engine.replace("auto", "continuous"), ""))

        def config(kind: str):
            return make_config(folder, tmp_path, f"device={device}", "target.dtype=float32", f"data_dir={tmp_path}/{kind}",
                               "generate.batch_size=4", f"generate.engine={kind}")  # fmt: skip

        target = load_target(TargetConfig(model=str(folder), dtype="float32"), device)
        # a random target must end its answers by itself, some early and some late
        return config, dataclasses.replace(target, eos_token_ids=(2, *range(4, 20))), len(prompts)

    return place


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_same_answers_at_temperature_0(places, device):
    make, target, count = places(device)
    attention, found = target.model.config._attn_implementation, {}
    for kind, used in (("static", "static"), ("auto", "continuous")):
        config = make(kind)
        assert generate(config, target)["prompts"] == count
        lines = [json.loads(line) for line in config.conversations.read_text().splitlines()]
        found[kind] = {x["id"]: x for x in lines}
        assert len(lines) == len(found[kind]) == count
        assert json.loads((config.data / "conversations.settings.json").read_text())["engine"] == used
        assert generate(config, target) == {"prompts": count, "answered_before": count}
    assert found["static"] == found["auto"]
    assert {x["finish_reason"] for x in found["auto"].values()} == {"stop", "length"}
    assert len(found["auto"]["two"]["messages"]) == 4 and found["auto"]["two"]["messages"][1]["content"] != "B"
    assert len({x["messages"][-1]["content"] for x in found["auto"].values()}) > count // 2
    assert target.model.config._attn_implementation == attention


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_when_it_stops_the_answers_up_to_then_stay(places, device, monkeypatch):
    make, target, count = places(device)
    config, real, calls = make("auto"), target.model.forward, iter(range(10**6))

    def forward(*args, **kwargs):
        if next(calls) > 60:
            raise RuntimeError("no more")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", forward)
        with pytest.raises(InputError, match="continuous batching stopped .*no more.*generate.engine=static"):
            generate(config, target)
    kept = len(config.conversations.read_text().splitlines())
    assert 0 < kept < count
    assert generate(config, target)["answered_before"] == kept
    assert len({json.loads(x)["id"] for x in config.conversations.read_text().splitlines()}) == count
