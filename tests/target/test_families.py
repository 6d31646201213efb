"""Targets beyond Llama: tiny random models of each family, built from transformers' own configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import VOCAB, make_config, write_tokenizer

from draftsmith.config import TargetConfig
from draftsmith.drafter.model import DFlashDrafter, embed
from draftsmith.errors import InputError
from draftsmith.evaluate.speculate import Sampler, decode_plain, decode_speculative
from draftsmith.plan import prepare
from draftsmith.rates import target_layers
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.model import Target, drafter_spec, load_target

LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {}),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, EXPERTS),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": True}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"sliding_window": 6}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {"sliding_window": 6}),
    "gpt_oss": (hf.GptOssForCausalLM, hf.GptOssConfig,
                {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen3_next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig,
                   {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, LINEAR),
}  # fmt: skip
HYBRID = ("qwen3_next", "qwen3_5")
"""Linear attention: transformers' torch fallback takes packing arguments and ignores them."""
UNPACKED = (*HYBRID, "gpt_oss")
"""gpt-oss builds its masks without looking at the positions."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    out = {}
    for name, (model, config, extra) in FAMILIES.items():
        settings = {
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "initializer_range": 0.1, **extra,
        }  # fmt: skip
        out[name] = root / name
        out[name].mkdir()
        torch.manual_seed(0)
        model(config(**settings)).save_pretrained(out[name])
        write_tokenizer(out[name])
    return out


def load(folders: dict[str, Path], name: str, forward: str) -> Target:
    return load_target(TargetConfig(model=str(folders[name]), forward=forward), "cpu")


def tokens(n: int) -> torch.Tensor:
    return torch.randint(4, 260, (n,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_the_layers_outputs_and_the_cut_changes_nothing(folders, name):
    target = load(folders, name, "per_document")
    ids = tokens(20)
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
    extract = FeatureExtractor(target, [1, 3, 5], torch.float32)
    assert len(extract.trunk.layers) == 6 and not hasattr(extract.trunk, "lm_head")
    wanted = torch.cat([states[i + 1][0] for i in (1, 3, 5)], dim=-1)
    assert torch.equal(extract.document(ids), wanted)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in UNPACKED])
def test_packed_documents_do_not_see_each_other(folders, name):
    target = load(folders, name, "packed")
    ids = tokens(25)
    positions = torch.cat([torch.arange(9), torch.arange(16)])
    extract = FeatureExtractor(target, [1, 3, 5], torch.float32)
    packed = extract._forward(ids, positions)
    alone = torch.cat([extract.document(ids[:9]), extract.document(ids[9:])])
    assert (packed - alone).norm() / alone.norm() < 1e-5
    together = extract.document(ids)
    assert (together - alone).norm() / alone.norm() > 1e-2, "the comparison could not have noticed a leak"


@pytest.mark.parametrize("name", UNPACKED)
def test_targets_that_leak_are_refused_when_packed(folders, name):
    with pytest.raises(InputError, match=r"target\.forward=per_document"):
        load(folders, name, "packed")


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_targets_are_refused_by_the_serving_loop(folders, name):
    target = load(folders, name, "per_document")
    with pytest.raises(InputError, match="recurrent state"):
        decode_plain(target, tokens(8), 4, Sampler())


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in HYBRID])
def test_serving_loop_is_lossless(folders, tmp_path, name):
    """Also where the target's sliding window (6) is shorter than what is rolled back."""
    target = load(folders, name, "per_document")
    spec = drafter_spec(make_config(folders[name], tmp_path).drafter, target)
    drafter = DFlashDrafter(spec).initialize(3)
    for seed in range(3):
        prompt = torch.randint(4, 260, (12,), generator=torch.Generator().manual_seed(seed))
        plain = decode_plain(target, prompt, 24, Sampler())
        assert decode_speculative(target, drafter, prompt, 24, Sampler()).tokens == plain.tokens


def test_gemma_scale_is_exact_in_every_dtype_and_without_the_weights(tmp_path):
    """sqrt(96) is no bf16 number: what the model keeps depends on its dtype, what is exported must not."""
    from draftsmith.target.model import load_borrowed

    folder = tmp_path / "gemma"
    folder.mkdir()
    hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            vocab_size=VOCAB, hidden_size=96, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=6, pad_token_id=0, eos_token_id=2, bos_token_id=1,
        )
    ).save_pretrained(folder)  # fmt: skip
    write_tokenizer(folder)
    config = make_config(folder, tmp_path).drafter
    scales = {
        drafter_spec(config, load(TargetConfig(model=str(folder), dtype=dtype), "cpu")).input_embedding_scale
        for load in (load_target, load_borrowed)
        for dtype in ("float32", "bfloat16")
    }
    assert len(scales) == 1 and abs(scales.pop() - 96**0.5) < 1e-6


def test_granite_multipliers_reach_the_spec(tmp_path):
    folder = tmp_path / "granite"
    folder.mkdir()
    hf.GraniteForCausalLM(
        hf.GraniteConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, logits_scaling=8.0, embedding_multiplier=12.0, pad_token_id=0, eos_token_id=2,
        )
    ).save_pretrained(folder)  # fmt: skip
    write_tokenizer(folder)
    spec = drafter_spec(make_config(folder, tmp_path).drafter, load_target(TargetConfig(model=str(folder)), "cpu"))
    assert spec.output_multiplier == 1 / 8 and spec.input_embedding_scale == 12.0


def test_a_family_whose_config_lacks_a_size_is_refused_by_name(tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=8, n_head=2)).save_pretrained(folder)
    write_tokenizer(folder)
    with pytest.raises(InputError, match="gpt2"):
        target = load_target(TargetConfig(model=str(folder)), "cpu")
        drafter_spec(make_config(folder, tmp_path).drafter, target)


def test_pickled_weights_are_not_read(folders, tmp_path):
    from safetensors.torch import load_file

    from draftsmith.target.model import weights_fingerprint

    folder = tmp_path / "pickled"
    folder.mkdir()
    for file in folders["qwen3"].iterdir():
        if file.suffix == ".safetensors":
            torch.save(load_file(file), folder / "pytorch_model.bin")
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    config = TargetConfig(model=str(folder))
    with pytest.raises(InputError, match="does not load"):
        load_target(config, "cpu")
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        weights_fingerprint(config)


def test_gemma_embedding_scale_and_softcapping_reach_the_spec(folders, tmp_path):
    target = load(folders, "gemma2", "per_document")
    spec = drafter_spec(make_config(folders["gemma2"], tmp_path).drafter, target)
    assert spec.input_embedding_scale == 8.0  # sqrt(64)
    assert spec.final_logit_softcapping == 30.0
    ids = tokens(5)
    assert torch.equal(embed(ids, target.embedding, spec), target.model.get_input_embeddings()(ids))


def test_a_target_without_scale_has_none(folders, tmp_path):
    spec = drafter_spec(make_config(folders["llama"], tmp_path).drafter, load(folders, "llama", "per_document"))
    assert spec.input_embedding_scale is None and spec.final_logit_softcapping is None


def test_weights_with_nan_are_refused_by_file_and_key(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "nan"
    folder.mkdir()
    for file in folders["qwen3"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.safetensors: model\.layers\.2\.mlp\.up_proj\.weight holds NaN"):
        load_target(TargetConfig(model=str(folder)), "cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_counts_the_target_and_runs_layers_of_every_kind(folders, tmp_path, name):
    work = prepare(make_config(folders[name], tmp_path))
    target = load(folders, name, "per_document")
    assert work.geometry.parameters == sum(p.numel() for p in target.model.parameters())
    needed = target.layers[: work.geometry.layers]
    assert work.geometry.needed_parameters == sum(p.numel() for p in needed.parameters())
    assert (work.geometry.active_parameters < work.geometry.needed_parameters) == hasattr(
        target.layers[3].mlp, "experts"
    )
    extractors, depth = target_layers(work, torch.device("cpu"))
    assert [len(e.trunk.layers) for e in extractors] == [depth, 2 * depth]
    kinds = getattr(target.text_config, "layer_types", None) or ["all"]
    assert depth == len(kinds) or set(kinds) == set(kinds[:depth])
    assert extractors[1].row(work.rows[0]).shape == (128, 64)
