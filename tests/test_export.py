"""The exported folder: its config key by key, its weights, that it comes back the same, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_config, write_target
from helpers_train import make_spec
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith import export as export_module
from draftsmith.config import TargetConfig
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.export import export, export_folder, from_config, load_drafter, read_drafter, to_config
from draftsmith.records import DrafterSpec
from draftsmith.rundir import create, newest
from draftsmith.target.model import drafter_spec, load_target
from draftsmith.train import checkpoint
from draftsmith.train.loop import train

KINDS = {
    "full": {},
    "sliding": {"layer_types": "sliding", "sliding_window": 8},
    "mixed": {"layer_types": ("full", "sliding"), "sliding_window": 8, "attention_bias": True},
    "gemma": {"input_embedding_scale": 32**0.5, "final_logit_softcapping": 30.0, "output_multiplier": 0.5},
    "numbers": {"rope_theta": 1e7, "rms_norm_eps": 1e-5, "initializer_range": 0.01, "block_size": 16, "head_dim": 6},
}
KEYS = {
    "architectures", "model_type", "block_size", "dflash_config", "num_target_layers", "hidden_size", "vocab_size",
    "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "attention_bias", "hidden_act", "tie_word_embeddings", "dtype", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "rope_theta", "rope_parameters", "rope_scaling",
    "initializer_range", "attention_dropout", "use_cache", "draftsmith_version",
}  # fmt: skip


def saved(tmp_path: Path, spec: DrafterSpec) -> Path:
    """A float32 checkpoint of a drafter with random weights."""
    drafter = DFlashDrafter(spec).initialize(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())), alpha=0.1
            )
    run = create(tmp_path / "runs", "x", new_attempt=True)
    optimizer = torch.optim.AdamW(drafter.parameters())
    return checkpoint.save(run, 1, 1, drafter, optimizer, {"target_weights": "w"}, keep=1)


@pytest.fixture
def folder(tmp_path) -> Path:
    """An exported folder with mixed layers, to be spoilt."""
    return export_folder(saved(tmp_path, make_spec(**KINDS["mixed"])), tmp_path / "out", "some/target")


@pytest.mark.parametrize("kind", KINDS)
def test_config_keys_are_exactly_those_of_the_format(kind):
    spec = make_spec(**KINDS[kind])
    values = to_config(spec)
    assert set(values) == KEYS
    extra = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"} if kind == "gemma" else set()
    assert set(values["dflash_config"]) == {"block_size", "mask_token_id", "target_layer_ids"} | extra
    text = json.dumps(values)
    for word in ("is_causal", "use_swa", "causal"):  # each changes the mask of some loader
        assert f'"{word}"' not in text


def test_config_values_are_written_out():
    spec = make_spec(**KINDS["mixed"])
    values = to_config(spec)
    expected = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4, "num_target_layers": 6,
        "hidden_size": 32, "vocab_size": 40, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "attention_bias": True, "hidden_act": "silu", "tie_word_embeddings": False,
        "dtype": "bfloat16", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8,
        "use_sliding_window": True, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": None,
        "dflash_config": {"block_size": 4, "mask_token_id": 39, "target_layer_ids": [1, 3]},
    }  # fmt: skip
    assert {k: values[k] for k in expected} == expected
    full = to_config(make_spec())
    assert full["sliding_window"] is None and full["use_sliding_window"] is False
    assert full["layer_types"] == ["full_attention"] * 2
    gemma = to_config(make_spec(**KINDS["gemma"]))["dflash_config"]
    assert (gemma["input_embedding_scale"], gemma["final_logit_softcapping"], gemma["output_multiplier"]) == (
        32**0.5,
        30.0,
        0.5,
    )


def test_transformers_reads_the_same_geometry_windows_and_rope(tmp_path):
    """What the loaders see through Qwen3Config: it nulls the window and drops rope_theta when keys are missing."""
    from transformers import Qwen3Config

    for kind in KINDS:
        spec = make_spec(**KINDS[kind])
        (tmp_path / "config.json").write_text(json.dumps(to_config(spec)))
        read = Qwen3Config.from_pretrained(tmp_path)
        assert read.rope_parameters["rope_theta"] == spec.rope_theta and read.rope_parameters["rope_type"] == "default"
        assert read.sliding_window == spec.sliding_window
        assert [t == "sliding_attention" for t in read.layer_types] == [t == "sliding" for t in spec.layer_types]
        assert (read.head_dim, read.num_key_value_heads, read.intermediate_size) == (spec.head_dim, 2, 48)
        assert read.block_size == spec.block_size and read.num_target_layers == 6 and read.tie_word_embeddings is False


@pytest.mark.parametrize("kind", KINDS)
def test_spec_and_weights_come_back(tmp_path, kind):
    spec = make_spec(**KINDS[kind])
    source = saved(tmp_path, spec)
    out = export_folder(source, tmp_path / "deep" / "out", "some/target")
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert from_config(json.loads((out / "config.json").read_text()), out) == spec
    before, after = load_file(source / checkpoint.WEIGHTS), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() == set(DFlashDrafter(spec).state_dict())
    for key, value in after.items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, before[key].bfloat16()), key
    with safe_open(out / "model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}  # transformers refuses files without it
    again = read_drafter(out)
    assert again.spec == spec and {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in again.parameters())
    assert read_drafter(source).fc.weight.dtype == torch.float32


def test_the_readme_of_the_folder_has_the_commands_with_the_right_numbers(folder):
    text = (folder / "README.md").read_text()
    assert "vllm serve some/target" in text and '"num_speculative_tokens": 3' in text and '"method": "dflash"' in text
    assert "--speculative-algorithm DFLASH" in text and "DFlashDraftModel.from_pretrained" in text


def spoil_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


KEY = "layers.1.self_attn.k_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(KEY), f"1 missing keys, the first is {KEY}"),
        (lambda t: t.pop("fc.weight"), "1 missing keys, the first is fc.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(40, 32)}), "1 unknown keys, the first is embed_tokens"),
        (lambda t: t.update({KEY: torch.zeros(9)}), rf"{KEY} is \[9\], must be \[8\]"),
        (lambda t: t[KEY].fill_(math.nan), f"{KEY} holds NaN or Inf"),
        (lambda t: t[KEY].fill_(-math.inf), f"{KEY} holds NaN or Inf"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_file_and_key(folder, change, message):
    spoil_weights(folder, change)
    with pytest.raises(InputError, match=rf"model\.safetensors: {message}"):
        read_drafter(folder)


def spoil_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize("key", sorted(KEYS - {"architectures", "model_type", "hidden_act", "tie_word_embeddings", "dtype",
                                               "use_sliding_window", "max_window_layers", "rope_scaling",
                                               "initializer_range", "attention_dropout", "use_cache",
                                               "draftsmith_version"}))  # fmt: skip
def test_a_config_without_a_key_is_refused_by_name(folder, key):
    values = json.loads((folder / "config.json").read_text())
    del values[key]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=rf"config\.json is not the config of a DFlash drafter: '{key}'"):
        read_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 5e5}, r"rope_theta and rope_parameters\.rope_theta differ"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
            r"rope_parameters\.rope_type",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"block_size": 8}, r"block_size and dflash_config\.block_size differ"),
        ({"is_causal": True}, "is_causal"),
        ({"is_causal": False}, "is_causal"),
        ({"use_sliding_window": False}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_configs_that_mean_something_else_are_refused(folder, changes, message):
    """What this code would compute differently from the other loaders must not load in silence."""
    spoil_config(folder, **changes)
    with pytest.raises(InputError, match=message):
        read_drafter(folder)


def test_masks_that_vllm_alone_would_change_are_refused(folder):
    values = json.loads((folder / "config.json").read_text())
    for key in ("causal", "use_swa"):
        spoil_config(folder, dflash_config={**values["dflash_config"], key: True})
        with pytest.raises(InputError, match=key):
            read_drafter(folder)


def test_folders_that_are_no_drafter_are_refused(tmp_path, folder):
    with pytest.raises(InputError, match=r"neither a checkpoint .* nor an exported drafter"):
        read_drafter(tmp_path)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json is not the config of a DFlash drafter"):
        read_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="drafter config cannot be read"):
        read_drafter(folder)


def test_weights_cut_short_are_refused(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        read_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        read_drafter(folder)


def test_a_drafter_of_another_target_is_refused(target, target_folder, tmp_path):
    spec = drafter_spec(make_config(target_folder, tmp_path).drafter, target)
    out = export_folder(saved(tmp_path, spec), tmp_path / "out", "tiny")
    drafter = load_drafter(out, target)
    assert drafter.spec == spec and drafter.fc.weight.dtype == target.dtype and not drafter.training
    for name, changes, message in (
        ("wide", {"hidden_size": 32}, "hidden_size is 64, the target .* has 32"),
        ("words", {"vocab_size": 280}, "vocab_size is 272, the target .* has 280"),
        ("deep", {"num_hidden_layers": 9}, "num_target_layers is 8, the target .* has 9"),
    ):
        other = load_target(TargetConfig(model=str(write_target(tmp_path / name, **changes))), "cpu")
        with pytest.raises(InputError, match=message):
            load_drafter(out, other)


# the stage


def test_export_takes_the_newest_checkpoint_into_the_runs_folder(stored):
    run = train(stored)
    assert export(stored) == run.export == newest(stored.runs_dir, "tiny").export
    weights = load_file(run.checkpoint(6) / checkpoint.WEIGHTS)
    assert torch.equal(load_file(run.export / "model.safetensors")["fc.weight"], weights["fc.weight"].bfloat16())
    with pytest.raises(InputError, match=r"exists: set export\.output to another folder"):
        export(stored)


def test_export_takes_the_checkpoint_and_the_folder_it_is_told(stored, target_folder, tmp_path):
    run = train(stored)
    out = tmp_path / "there" / "out"
    config = make_config(target_folder, tmp_path, f"export.drafter={run.checkpoint(3)}", f"export.output={out}")
    assert export(config) == out and not run.export.exists()
    weights = load_file(run.checkpoint(3) / checkpoint.WEIGHTS)
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], weights["fc.weight"].bfloat16())


def test_with_drafter_and_folder_named_no_run_is_needed(target_folder, tmp_path):
    source, out = saved(tmp_path, make_spec()), tmp_path / "out"

    def config(*overrides: str):
        return make_config(target_folder, tmp_path / "elsewhere", *overrides)

    assert export(config(f"export.drafter={source}", f"export.output={out}")) == out
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InputError, match=r"no run in .*or set export\.output$"):
        export(config(f"export.drafter={source}"))
    with pytest.raises(InputError, match=r"no run in .*or set export\.drafter$"):
        export(config(f"export.output={tmp_path / 'other'}"))


def test_the_newest_attempt_that_has_a_checkpoint_is_taken_and_named(target_folder, tmp_path, capsys):
    config = make_config(target_folder, tmp_path)
    empty = create(config.runs_dir, "tiny")
    with pytest.raises(InputError, match=r"attempt_1 has no checkpoint yet: .*export\.drafter"):
        export(config)
    drafter = DFlashDrafter(make_spec()).initialize(0)
    run = create(config.runs_dir, "tiny", new_attempt=True)
    source = checkpoint.save(run, 3, 1, drafter, torch.optim.AdamW(drafter.parameters()), {}, keep=1)
    create(config.runs_dir, "tiny", new_attempt=True)
    create(config.runs_dir, "tiny", new_attempt=True)
    assert export(config) == run.export  # beside the checkpoint it is made of
    assert f"attempt_4 has no checkpoint: taking {source}\n" in capsys.readouterr().out
    assert checkpoint.newest_checkpoint(run) == source and capsys.readouterr().out == ""
    with pytest.raises(InputError, match="attempt_1 has no checkpoint yet: train on"):  # never of a later one
        checkpoint.newest_checkpoint(empty)
    shutil.rmtree(source)
    with pytest.raises(InputError, match=r"attempt_4 has no checkpoint yet, nor has an earlier attempt: .*evaluate\."):
        export(config)


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    source, out = saved(tmp_path, make_spec()), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists: set export"):
        export_folder(source, out, "t")
    assert [p.name for p in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("at", ["write_tensors", "_readme", "_compare", "to_config"])
def test_an_export_that_fails_leaves_nothing_half_written(tmp_path, monkeypatch, at):
    source = saved(tmp_path, make_spec())

    def failing(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(export_module, at, failing)
    with pytest.raises(OSError, match="No space"):
        export_folder(source, tmp_path / "place" / "out", "t")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_checkpoint_that_is_damaged_is_not_exported(tmp_path):
    source = saved(tmp_path, make_spec())
    data = (source / checkpoint.WEIGHTS).read_bytes()
    (source / checkpoint.WEIGHTS).write_bytes(data[:-4])
    with pytest.raises(InputError, match=r"damaged: drafter\.safetensors"):
        export_folder(source, tmp_path / "out", "t")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["weights", "spec", "forward"])
def test_what_comes_back_different_is_not_given_its_name(tmp_path, monkeypatch, what):
    """The reload is a real comparison: a spec, a weight or a computation that differs stops the export."""
    source = saved(tmp_path, make_spec())
    real = export_module.read_drafter

    def other(path: Path) -> DFlashDrafter:
        drafter = real(path)
        if (path / "config.json").is_file():
            if what == "weights":
                drafter.norm.weight[0] += 1
            elif what == "spec":
                drafter.spec = make_spec(rope_theta=5.0)
            else:
                drafter.register_forward_hook(lambda module, args, out: out + 1e-3)
        return drafter

    monkeypatch.setattr(export_module, "read_drafter", other)
    with pytest.raises(RuntimeError, match=r"norm\.weight read back differs|another drafter|something else"):
        export_folder(source, tmp_path / "place" / "out", "t")
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("target_layer_ids", [1, 3, 7], "target_layer_ids"),
        ("target_layer_ids", [1, 3, 3], "target_layer_ids"),
        ("target_layer_ids", [1, 3, 9], "target_layer_ids"),
        ("target_layer_ids", [3, 1, 5], "target_layer_ids"),
        ("mask_token_id", 0, "pad or eos"),
        ("mask_token_id", 2, "pad or eos"),
        ("mask_token_id", 272, "not a row"),
    ],
)
def test_layers_and_mask_token_of_a_folder_are_checked_against_the_target(stored, target, tmp_path, key, value, said):
    train(stored)
    folder = export(stored)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=said) as error:
        load_drafter(folder, target)
    assert str(folder) in str(error.value)


def test_a_window_without_sliding_layers_is_no_part_of_the_drafter(stored, target_folder, tmp_path):
    config = make_config(target_folder, tmp_path, "drafter.sliding_window=9", "name=windowless")
    train(config)
    assert read_drafter(export(config)).spec.sliding_window is None
