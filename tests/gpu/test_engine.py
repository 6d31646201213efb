"""Continuous batching answers as transformers' own generation does, on a CPU step by step, on a GPU by CUDA graphs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import make_config, write_target
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.config import GenerateConfig, TargetConfig
from draftsmith.data import engine
from draftsmith.data import slots as slots_module
from draftsmith.data.generate import generate
from draftsmith.data.slots import Slots, attending
from draftsmith.errors import InputError
from draftsmith.target.model import load_target

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"] * 4, "use_sliding_window": True, "sliding_window": 24,
}  # fmt: skip


@pytest.fixture
def places(tmp_path, monkeypatch):
    """(make a config, target, its prompts' number) on a device; float32, more prompts than are answered at a time, one
    with a turn to write anew.  Slots grow on the way, and prompts are taken a few at a time."""
    monkeypatch.setattr(slots_module, "BUCKET", 8)
    monkeypatch.setattr(slots_module, "PREFILL_TOKENS", 100)

    def place(device: str, **changes):
        folder = write_target(tmp_path / "target", **changes)
        prompts = [{"id": f"p{i}", "prompt": f"Question {i}: {'x' * (7 * i % 40)}?"} for i in range(15)]
        turns = [{"role": r, "content": c} for r, c in (("user", "A?"), ("assistant", "B"), ("user", "C?"))]
        prompts.append({"id": "two", "messages": turns})
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))

        def config(kind: str, name: str = "", *overrides: str):
            return make_config(folder, tmp_path, f"device={device}", "target.dtype=float32",
                               f"data_dir={tmp_path}/{kind}{name}", "generate.batch_size=4",
                               f"generate.engine={kind}", *overrides)  # fmt: skip

        target = load_target(TargetConfig(model=str(folder), dtype="float32"), device)
        # a random target must end its answers by itself, some early and some late
        return config, dataclasses.replace(target, eos_token_ids=(2, *range(4, 20))), len(prompts)

    return place


def answers(config) -> dict[str, dict]:
    lines = [json.loads(line) for line in config.conversations.read_text().splitlines()]
    assert len({x["id"] for x in lines}) == len(lines)
    return {x["id"]: x for x in lines}


@pytest.mark.parametrize("layers", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_same_answers_at_temperature_0(places, device, layers):
    """static is transformers' generate(do_sample=False)."""
    make, target, count = places(device, **layers)
    attention, found = target.model.config._attn_implementation, {}
    for kind in ("static", "continuous"):
        config = make(kind)
        assert generate(config, target)["prompts"] == count
        found[kind] = answers(config)
        assert json.loads((config.data / "conversations.settings.json").read_text())["engine"] == kind
        assert generate(config, target) == {"prompts": count, "answered_before": count}
    assert found["static"] == found["continuous"]
    assert len(found["static"]) == count
    assert {x["finish_reason"] for x in found["static"].values()} == {"stop", "length"}
    assert len(found["static"]["two"]["messages"]) == 4 and found["static"]["two"]["messages"][1]["content"] != "B"
    assert len({x["messages"][-1]["content"] for x in found["static"].values()}) > count // 2
    assert target.model.config._attn_implementation == attention
    (speed,) = [json.loads(x) for x in (config.data / "conversations.speed.jsonl").read_text().splitlines()]
    assert speed["tokens"] == sum(x["completion_tokens"] for x in found["static"].values()) and speed["slots"] == 4
    assert speed["tokens"] <= speed["steps"] * 4 and 0 < speed["share"] < 1
    # each weight once for four tokens, at least
    assert speed["traffic_bytes"] > speed["tokens"] / 4 * sum(p.numel() * 4 for p in target.model.parameters())


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_sampling_follows_seed_and_temperature(places, device):
    make, target, _ = places(device)

    def told(name: str, *overrides: str):
        config = make("continuous", name, *overrides)
        generate(config, target)
        return {k: x["messages"] for k, x in answers(config).items()}

    hot = told("a", "generate.temperature=1.5")
    assert hot == told("b", "generate.temperature=1.5")
    assert hot != told("c", "generate.temperature=1.5", "generate.seed=1")
    assert told("d", "generate.temperature=1.5", "generate.top_p=1e-6") == told("e"), "only the best token is left"


def test_tokens_are_drawn_as_often_as_they_are_likely(target):
    settings = GenerateConfig(temperature=2.0, top_p=0.9, batch_size=4)
    slots = Slots(target, settings, stream=0)
    weights = torch.tensor([0.5, 0.25, 0.16, 0.06, 0.03])  # of which the last two are beyond 0.9
    drawn = slots._choose(weights.log().mul(2.0).expand(20_000, -1))
    shares = drawn.bincount(minlength=5) / 20_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.25, 0.16, 0, 0]) / 0.91, atol=0.015)  # 4 standard deviations


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_step_reads_nothing_back(target, temperature):
    """Or it would not go into a CUDA graph: no number for the host, no shape that depends on values."""
    called = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    slots = Slots(target, GenerateConfig(temperature=temperature, batch_size=2), stream=0)
    with attending(target):
        slots.fill([[1, 5, 6]])
        with Names():
            slots._step()
    assert "index_put_" in called, "keys and values are kept"
    assert not called & {"_local_scalar_dense", "nonzero", "masked_select", "unique", "multinomial", "lift_fresh"}
    with Names():
        int(slots.count[0])
    assert "_local_scalar_dense" in called, "as it would be noticed"


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_when_it_stops_the_answers_up_to_then_stay(places, device, monkeypatch):
    make, target, count = places(device)
    config, real, calls = make("continuous"), Slots.take, iter(range(10**6))

    def take(self):
        if next(calls) > 6:
            raise torch.OutOfMemoryError("no more")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "take", take)
        with pytest.raises(InputError, match=r"memory does not hold .*lower generate\.batch_size"):
            generate(config, target)
    kept = config.conversations.read_text()
    assert 0 < kept.count("\n") < count
    assert generate(config, target)["answered_before"] == kept.count("\n")
    assert config.conversations.read_text().startswith(kept)
    assert len(answers(config)) == count


def test_what_it_cannot_do_is_said(places):
    make, _, _ = places("cpu", layer_types=["chunked_attention"] * 8)
    with pytest.raises(InputError, match=r"engine is continuous, but .* cannot do chunked_attention layers: .*static"):
        generate(make("continuous"))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_attention_that_slots_cannot_do_is_left_to_static_batches(tmp_path, kind, monkeypatch):
    """Capped scores, attention sinks."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    monkeypatch.setattr(engine, "pick_device", lambda name: torch.device("cuda"))
    said = engine.choose(make_config(tmp_path, tmp_path))
    assert said == ("static", f"continuous batching cannot do a {kind} model's attention (capped scores, sinks)")
    with pytest.raises(InputError, match=r"sinks\): set generate\.engine=static"):
        engine.choose(make_config(tmp_path, tmp_path, "generate.engine=continuous"))


def test_attention_that_is_found_out_late_is_one_line_too(target):
    states = torch.zeros(1, 1, 1, 4)
    with (
        pytest.raises(InputError, match=r"softcap in attention over slots: set generate\.engine=static"),
        attending(target),
    ):
        slots_module.slot_attention(None, states, states, states, None, softcap=50.0)
