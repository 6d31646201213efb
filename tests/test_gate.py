"""Both gates at small size, on real code: our serving loop, and the official package in its own environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_config

from draftsmith import gate
from draftsmith.cli import main
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.target.model import drafter_spec, load_target
from draftsmith.train import checkpoint
from draftsmith.train.optim import make_optimizer

OFFICIAL = Path(__file__).parent.parent / ".peers" / "official" / "bin" / "python"
needs_official = pytest.mark.skipif(not OFFICIAL.is_file(), reason="no .peers/official: make peers")


def test_overfit_reaches_the_block_size(target_folder, tmp_path, target):
    config = make_config(target_folder, tmp_path)
    result = gate.overfit(config, answer_tokens=24, steps=300, learning_rate=5e-3, target=target)
    assert result["passed"], result
    assert result["accepted_length"] == result["block_size"] == 4
    assert result["full_rounds"] >= 4


def test_overfit_does_not_pass_with_shifted_labels(target_folder, tmp_path, target, monkeypatch):
    """The gate can fail: with labels one to the right training looks fine and serving accepts nothing."""
    real = gate.RowStep.blocks

    def shifted(self, row):
        import dataclasses

        import numpy as np

        blocks = real(self, row)
        return dataclasses.replace(blocks, labels=np.roll(blocks.labels, -1, axis=1))

    monkeypatch.setattr(gate.RowStep, "blocks", shifted)
    config = make_config(target_folder, tmp_path)
    result = gate.overfit(config, answer_tokens=24, steps=120, learning_rate=5e-3, target=target)
    assert not result["passed"]
    assert result["accepted_length"] < 3


CONFIGS = {
    "full": (),
    "sliding": ("drafter.layer_types=sliding", "drafter.sliding_window=6"),
    "mixed": ("drafter.layer_types=[full, sliding, full]", "drafter.num_layers=3", "drafter.sliding_window=9"),
    "block16": ("drafter.block_size=16", "drafter.num_layers=1", "drafter.num_features=4"),
    "grouped": ("drafter.block_size=8", "drafter.num_heads=8", "drafter.num_kv_heads=1", "drafter.head_dim=8",
                "drafter.intermediate_size=40", "drafter.rope_theta=5000.0"),
    "scaled": ("drafter.input_embedding_scale=2.5", "drafter.final_logit_softcapping=3.0",
               "drafter.output_multiplier=0.5"),
}  # fmt: skip


@needs_official
@pytest.mark.parametrize("name", CONFIGS)
def test_parity_with_the_official_package(name, target_folder, tmp_path, target):
    """A drafter that accepts some tokens and rejects some, so that both loops take every branch."""
    config = make_config(target_folder, tmp_path, *CONFIGS[name])
    partly_trained(config, target, steps=25)
    result = gate.parity(config, OFFICIAL, max_new_tokens=40, target=target)
    assert result["logits_rel_err"] < 1e-5 and result["hidden_rel_err"] < 1e-5, result
    assert result["tokens_equal"] and result["accepted_equal"], result
    assert result["passed"]


@needs_official
def test_parity_fails_for_a_wrong_rotary_base(target_folder, tmp_path, target, monkeypatch):
    """The gate can fail: rope lost on save is one of the faults seen in public trainers."""
    from draftsmith import export

    real = export.to_config
    monkeypatch.setattr(export, "_compare", lambda *a: None)
    monkeypatch.setattr(
        export,
        "to_config",
        lambda spec: real(spec) | {"rope_theta": 77.0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    )
    monkeypatch.setattr(gate, "load_drafter", lambda path, t: trained.to(t.dtype))
    config = make_config(target_folder, tmp_path)
    trained = partly_trained(config, target, steps=5).eval()
    assert not gate.parity(config, OFFICIAL, max_new_tokens=8, target=target)["passed"]


def test_parity_without_the_official_package(target_folder, tmp_path, capsys):
    config = make_config(target_folder, tmp_path)
    with pytest.raises(InputError, match="make peers"):
        gate.parity(config, tmp_path / "no-python")


def test_gate_command_prints_one_json_line_last(target_folder, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    config = make_config(target_folder, tmp_path)
    path.write_text(json.dumps(json.loads(config.dump())))
    code = main(["gate", "overfit", str(path), "--steps", "3", "--answer-tokens", "16"])
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert code == 1 and last["passed"] is False
    assert {"accepted_length", "block_size"} <= last.keys()


def partly_trained(config, target, steps: int) -> DFlashDrafter:
    """Train a little on the first question's answer and leave a checkpoint where `parity` looks for it."""
    from draftsmith import rundir
    from draftsmith.evaluate.speculate import Sampler, decode_plain

    spec = drafter_spec(config.drafter, target)
    prompt = gate.prompt_ids(target, gate.QUESTIONS[0])
    answer = decode_plain(target, prompt, 40, Sampler())
    row = gate.one_row([*prompt.tolist(), *answer.tokens], len(prompt))
    features = gate.FeatureExtractor(target, spec.feature_layers, torch.float32).row(row)
    drafter = DFlashDrafter(spec).initialize(0)
    settings = config.train.model_copy(update={"learning_rate": 3e-3})
    optimizer = make_optimizer(drafter, settings)
    step = gate.RowStep(
        drafter, gate.Frozen(target.embedding, target.head), gate.KnownFeatures(features), settings, config.loss,
        attention="sdpa", compute_dtype=torch.float32,
    )  # fmt: skip
    for number in range(steps):
        step.step(number, [row], optimizer, 3e-3)
    run = rundir.create(config.runs_dir, config.name, new_attempt=True)
    checkpoint.save(run, steps, steps, drafter, optimizer, {}, 1)
    return drafter


@needs_official
def test_parity_on_a_tied_llama_target(tmp_path):
    """Another family, head tied to the embedding."""
    from conftest import VOCAB, write_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "llama"
    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=7, num_attention_heads=6,
            num_key_value_heads=3, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=2,
            pad_token_id=0, initializer_range=0.1,
        )
    ).save_pretrained(folder)  # fmt: skip
    write_tokenizer(folder)
    config = make_config(folder, tmp_path)
    target = load_target(config.target, "cpu")
    partly_trained(config, target, steps=25)
    assert gate.parity(config, OFFICIAL, max_new_tokens=24, target=target)["passed"]
