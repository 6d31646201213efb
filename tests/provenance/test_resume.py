"""Resuming compares by itself: it refuses what would make the result wrong and warns of the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import make_config
from safetensors.torch import load_file, save_file

from draftsmith.data.store import Store
from draftsmith.data.tokenize import tokenize
from draftsmith.errors import InputError
from draftsmith.train.loop import train


@pytest.fixture
def begun(stored, tmp_path):
    """(make, work): a run with a checkpoint at step 3 of 6, on a model of its own that may be spoiled."""
    model = tmp_path / "model"
    shutil.copytree(stored.target.model, model)

    def make(*overrides: str):
        return make_config(model, tmp_path, "train.steps=6", *overrides)

    train(make())
    shutil.rmtree(tmp_path / "runs" / "tiny" / "attempt_1" / "checkpoints" / "step_00000006")
    return make, model


def refusal(config) -> str:
    with pytest.raises(InputError, match="cannot resume|was made with another tokenizer|shard") as error:
        train(config, resume="auto")
    assert not (config.runs_dir / "tiny" / "attempt_2").exists(), "refused before anything is written"
    return str(error.value)


def test_goes_on_where_nothing_changed(begun):
    make, _ = begun
    run = train(make(), resume="auto")
    said = run.log.read_text()
    assert "since tiny/attempt_1: nothing changed" in said and "resumed_from" not in said


def test_refuses_other_weights(begun):
    make, model = begun
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert "target_weights was" in refusal(make())


def test_refuses_another_chat_template(begun):
    make, model = begun
    path = model / "tokenizer_config.json"
    text = path.read_text()
    for before, now in (
        ("<|im_start|>' + m", "<|im_start|> ' + m"),
        ("<|im_start|>assistant", "<|im_start|> assistant"),
    ):
        assert before in text
        text = text.replace(before, now)
    path.write_text(text)
    assert "another tokenizer or chat template" in refusal(make())
    shutil.rmtree(make().store)
    tokenize(make())
    assert "tokenizer was" in refusal(make()), "also once the store has been made anew with it"


@pytest.mark.parametrize(
    ("override", "says"),
    [("drafter.feature_layers=[0, 2, 4]", "feature_layers was"), ("drafter.block_size=3", "block_size was")],
)
def test_refuses_another_geometry(begun, override, says):
    assert says in refusal(begun[0](override))


def test_refuses_another_store(begun):
    make, _ = begun
    lines = make().conversations.read_text().splitlines()
    make().conversations.write_text("\n".join(lines[:-1]) + "\n")
    shutil.rmtree(make().store)
    tokenize(make())
    assert "store was" in refusal(make())


def test_refuses_a_shard_altered_or_missing(begun):
    make, _ = begun
    shard = next(make().store.glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    where = content.find(Store(make().store).document(0).tokens.tobytes())
    content[where] ^= 1  # another token, still a readable file
    shard.write_bytes(content)
    assert "does not hold what was written to it" in refusal(make())
    shard.unlink()
    assert "missing" in refusal(make())


def test_warns_of_the_rest_with_the_diff(begun, monkeypatch):
    make, _ = begun
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    run = train(make("train.learning_rate=0.002"), resume="auto")
    said = run.log.read_text()
    assert "warning: since" in said and "schedule was" in said
    assert "since tiny/attempt_1: 2 changes can affect loss" in said
    assert "config.train.learning_rate: was 0.001, is 0.002" in said
    assert "environment.NVIDIA_TF32_OVERRIDE: was (not there), is 0" in said


def test_an_earlier_run_without_manifests_only_costs_the_diff(begun):
    make, _ = begun
    shutil.rmtree(Path(make().runs_dir) / "tiny" / "attempt_1" / "manifests")
    run = train(make(), resume="auto")
    assert "cannot be told" in run.log.read_text()
    assert json.loads(run.manifest("end").read_text())["outcome"]["how"] == "finished"
