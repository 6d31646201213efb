"""The target: loading refuses what would be random, features are the layers' outputs, and the drafter's spec fits it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCAB, make_config, write_target, write_tokenizer
from helpers_train import make_row
from safetensors.torch import load_file, save_file

from draftsmith.config import DrafterConfig, TargetConfig
from draftsmith.errors import InputError
from draftsmith.target.extract import FeatureExtractor, capture, keeps_documents_apart
from draftsmith.target.model import (
    Target,
    default_feature_layers,
    drafter_spec,
    eos_token_ids,
    load_target,
    load_tokenizer,
    mask_token,
    pick_device,
    weights_fingerprint,
)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 260, (count,), generator=torch.Generator().manual_seed(seed))


def load(folder: Path, **settings) -> Target:
    return load_target(TargetConfig(model=str(folder), **settings), "cpu")


@pytest.fixture
def damaged(target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target, to be spoilt."""
    return Path(shutil.copytree(target_folder, tmp_path / "damaged"))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# features


@pytest.mark.parametrize("layers", [(1,), (0, 2, 5), (1, 3, 6)])
def test_features_are_the_hidden_states_one_further_on(target, layers):
    """The feature of layer i is its output, hidden_states[i + 1]: exactly, and in the order of the layers."""
    ids = tokens(17)
    hidden = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    assert len(hidden) == 9
    features = FeatureExtractor(target, layers, torch.float32).document(ids)
    assert torch.equal(features, torch.cat([hidden[i + 1][0] for i in layers], dim=-1))
    assert not torch.equal(features[:, :64], hidden[layers[0]][0])


def test_the_cut_target_runs_no_further_than_it_must_and_gives_the_same(target):
    extract = FeatureExtractor(target, (1, 3, 4), torch.float32)
    assert len(extract.trunk.layers) == 5 and len(target.layers) == 8
    ran = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(target.layers)]
    hooks.append(target.trunk.norm.register_forward_hook(lambda *_: ran.append("norm")))
    hooks.append(target.model.get_output_embeddings().register_forward_hook(lambda *_: ran.append("head")))
    ids = tokens(9)
    cut = extract.document(ids)
    assert ran == [0, 1, 2, 3, 4]
    with capture(target.layers, (1, 3, 4)) as found:
        logits = target.model(input_ids=ids[None], use_cache=False).logits
    assert ran[5:] == [*range(8), "norm", "head"]  # the target itself is as it was
    assert torch.equal(cut, torch.cat([f[0] for f in found], dim=-1)) and logits.shape == (1, 9, VOCAB)
    for hook in hooks:
        hook.remove()
    assert extract.trunk.layers[2].mlp.up_proj.weight is target.layers[2].mlp.up_proj.weight  # shared, not copied


def test_capture_holds_the_last_pass_and_leaves_no_hook(target):
    hooks = [len(layer._forward_hooks) for layer in target.layers]
    with capture(target.layers, (2, 5)) as found:
        for n in (4, 6):
            target.model(input_ids=tokens(n)[None], use_cache=False)
    assert [f.shape for f in found] == [(1, 6, 64)] * 2
    assert [len(layer._forward_hooks) for layer in target.layers] == hooks


def packed_row(seed: int = 0):
    return make_row([9, 14, 6], [(2, 9), (12, 23), (25, 29)], 33, [3], 1, seed)


def test_rows_of_both_forwards_agree_and_the_tail_is_nobodys(target_folder):
    row = packed_row()
    one, packed = (load(target_folder, forward=f) for f in ("per_document", "packed"))
    ours = FeatureExtractor(one, (1, 3, 5), torch.float32).row(row)
    theirs = FeatureExtractor(packed, (1, 3, 5), torch.float32).row(row)
    assert ours.shape == theirs.shape == (33, 192)
    torch.testing.assert_close(ours[:29], theirs[:29], rtol=1e-4, atol=1e-5)
    assert not ours[29:].any()
    for start, end in ((0, 9), (9, 23), (23, 29)):
        alone = FeatureExtractor(one, (1, 3, 5), torch.float32).document(torch.from_numpy(row.tokens[start:end]))
        assert torch.equal(ours[start:end], alone)


@pytest.mark.parametrize("forward", ["per_document", "packed"])
def test_a_document_does_not_change_by_a_bit_with_what_shares_its_row(target_folder, forward):
    target, row = load(target_folder, forward=forward), packed_row()
    extract = FeatureExtractor(target, (1, 3, 6), torch.float32)
    before = extract.row(row)
    for start, end in ((0, 9), (9, 23), (23, 29), (29, 33)):
        other = packed_row()
        other.tokens[start:end] = np.random.default_rng(1).integers(4, 260, end - start)
        after = extract.row(other)
        same = torch.ones(33, dtype=torch.bool)
        same[start:end] = False
        assert torch.equal(after[same], before[same])
        if end <= 29:
            assert not torch.equal(after[start:end], before[start:end])


def test_features_are_causal_and_of_the_dtype_asked_for(target):
    ids = tokens(12)
    extract = FeatureExtractor(target, (1, 6), torch.bfloat16)
    before = extract.document(ids)
    ids[7] = 5
    after = extract.document(ids)
    assert before.dtype == torch.bfloat16
    assert torch.equal(before[:7], after[:7]) and not torch.equal(before[7], after[7])


def test_a_target_whose_documents_see_each_other_is_refused(target_folder, monkeypatch):
    """With any explicit mask transformers no longer derives the documents from the positions: a real leak."""
    from transformers import Qwen3Model

    good = load(target_folder, forward="packed")
    assert keeps_documents_apart(good)
    real = Qwen3Model.forward

    @functools.wraps(real)
    def leaking(self, input_ids, **rest):
        return real(self, input_ids, **{**rest, "attention_mask": torch.ones_like(input_ids)})

    monkeypatch.setattr(Qwen3Model, "forward", leaking)
    assert not keeps_documents_apart(good)
    with pytest.raises(InputError, match=r"target\.forward=packed.*per_document"):
        load(target_folder, forward="packed")
    assert load(target_folder, forward="per_document").forward == "per_document"


# loading


def test_the_target_is_frozen_and_lends_its_embedding_and_head(target):
    assert not any(p.requires_grad for p in target.model.parameters()) and not target.model.training
    assert target.embedding.shape == target.head.shape == (VOCAB, 64)
    assert target.head is target.model.lm_head.weight and target.embedding is target.model.model.embed_tokens.weight
    assert target.forward == "per_document" and target.dtype == torch.float32 and target.eos_token_ids == (2,)


def test_a_tied_head_is_the_embedding(tmp_path):
    target = load(write_target(tmp_path / "tied", tie_word_embeddings=True))
    assert target.head is target.embedding
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")


@pytest.mark.parametrize("key", ["model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_missing_weights_are_refused_by_name(damaged, key):
    rewrite(damaged, lambda tensors: tensors.pop(key))
    with pytest.raises(InputError, match=rf"1 weights are not in its files.*{key}.*random"):
        load(damaged)


def test_misshapen_weights_are_refused(damaged):
    key = "model.layers.0.self_attn.q_proj.weight"
    rewrite(damaged, lambda tensors: tensors.update({key: torch.zeros(3, 64)}))
    with pytest.raises(InputError, match=r"target\.model"):
        load(damaged)


def test_weights_cut_short_are_refused(damaged):
    data = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"target\.model .*does not load"):
        load(damaged)


def test_folders_that_are_no_model_are_refused(tmp_path, target_folder):
    with pytest.raises(InputError, match="no such folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        load(tmp_path / "empty")
    bare = Path(shutil.copytree(target_folder, tmp_path / "bare"))
    write_tokenizer(bare, template=None)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InputError, match="no chat template"):
        load(bare)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device=cuda"):
            pick_device("cuda")


def test_stop_tokens_come_from_the_generation_config_first(damaged):
    config = TargetConfig(model=str(damaged))
    tokenizer = load_tokenizer(config)
    (damaged / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert eos_token_ids(config, tokenizer) == (2, 7)
    (damaged / "generation_config.json").write_text("{}")
    assert eos_token_ids(config, tokenizer) == (2,)
    values = json.loads((damaged / "config.json").read_text())
    del values["eos_token_id"]
    (damaged / "config.json").write_text(json.dumps(values))
    assert eos_token_ids(config, tokenizer) == (tokenizer.eos_token_id,)


def test_the_fingerprint_changes_with_any_weight_and_not_with_the_place(target_folder, damaged):
    before = weights_fingerprint(TargetConfig(model=str(target_folder)))
    assert weights_fingerprint(TargetConfig(model=str(damaged))) == before
    rewrite(damaged, lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    assert weights_fingerprint(TargetConfig(model=str(damaged))) != before


# the drafter's spec


@pytest.mark.parametrize(
    ("layers", "features", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (36, 1, (18,)),
        (8, 3, (1, 3, 5)),
    ],
)
def test_default_feature_layers(layers, features, expected):
    assert default_feature_layers(layers, features) == expected


@pytest.mark.parametrize(("layers", "features"), [(6, 5), (4, 2), (3, 2), (8, 6)])
def test_default_feature_layers_that_coincide_are_refused(layers, features):
    with pytest.raises(InputError, match=r"drafter\.num_features"):
        default_feature_layers(layers, features)


def spec_of(target: Target, tmp_path: Path, *overrides: str):
    return drafter_spec(make_config(Path(target.name), tmp_path, *overrides).drafter, target)


def test_the_spec_takes_the_targets_geometry_and_what_is_set(target, tmp_path):
    spec = spec_of(target, tmp_path)
    assert (spec.hidden_size, spec.vocab_size, spec.intermediate_size) == (64, VOCAB, 96)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope_theta) == (4, 2, 16, 10000.0)
    assert spec.feature_layers == (1, 3, 5) and spec.num_target_layers == 8 and spec.layer_types == ("full", "full")
    assert spec.input_embedding_scale is spec.output_multiplier is spec.final_logit_softcapping is None
    own = spec_of(target, tmp_path, "drafter.num_heads=2", "drafter.num_kv_heads=1", "drafter.head_dim=32",
                  "drafter.intermediate_size=40", "drafter.rope_theta=5e5", "drafter.layer_types=[full, sliding]",
                  "drafter.sliding_window=9", "drafter.final_logit_softcapping=20")  # fmt: skip
    assert (own.num_heads, own.num_kv_heads, own.head_dim, own.intermediate_size) == (2, 1, 32, 40)
    assert own.rope_theta == 5e5 and own.windows() == (None, 9) and own.final_logit_softcapping == 20


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.feature_layers=[1, 3, 3]", "ascend without repeats"),
        ("drafter.feature_layers=[3, 1, 5]", "ascend without repeats"),
        ("drafter.feature_layers=[1, 3, 7]", "the last layer, 7"),
        ("drafter.feature_layers=[1, 3, 8]", r"drafter\.feature_layers"),
        ("drafter.feature_layers=[-1, 3, 5]", r"drafter\.feature_layers"),
        ("drafter.hidden_size=65", r"drafter\.hidden_size 65 is not the target's 64"),
        ("drafter.num_kv_heads=3", r"drafter\.num_heads 4 is not a multiple of drafter\.num_kv_heads 3"),
        ("drafter.mask_token_id=0", "pad or eos"),
        ("drafter.mask_token_id=2", "pad or eos"),
        ("drafter.mask_token_id=272", r"not a row of the target's embedding \(272 rows\)"),
    ],
)
def test_specs_that_do_not_fit_the_target_are_refused(target, tmp_path, override, message):
    with pytest.raises(InputError, match=message):
        spec_of(target, tmp_path, override)


# the mask token


class FakeTokenizer:
    def __init__(self, ids: list[int], mask: int | None) -> None:
        self.ids, self.mask_token_id, self.pad_token_id = ids, mask, 0

    def __len__(self) -> int:
        return len(self.ids)

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in self.ids}


def chosen(kind: str, rows: int, ids: list[int], mask: int | None = None, explicit: int | None = None) -> int:
    fake = SimpleNamespace(
        tokenizer=FakeTokenizer(ids, mask),
        embedding=torch.empty(rows, 1),
        text_config=SimpleNamespace(model_type=kind),
        eos_token_ids=(2,),
    )
    return mask_token(DrafterConfig(mask_token_id=explicit), fake)


def test_mask_token_rules():
    assert chosen("qwen3", 151936, list(range(151669))) == 151669
    assert chosen("qwen3", 151936, list(range(151669)), mask=7, explicit=9) == 9
    assert chosen("qwen3_5_text", 248320, list(range(248077))) == 248070
    assert chosen("qwen3", 300, list(range(260)), mask=7) == 7  # too small for the field's choice
    assert chosen("llama", 300, list(range(260))) == 260
    with pytest.raises(InputError, match=r"drafter\.mask_token_id: .*set it"):
        chosen("llama", 260, list(range(260)))
    with pytest.raises(InputError, match="pad or eos"):
        chosen("llama", 260, list(range(260)), mask=2)


def test_the_first_unused_row_lies_past_the_tokenizers_highest_id():
    """A tokenizer with holes has fewer entries than its highest id: that row is in use."""
    holes = [*range(100), *range(110, 120)]
    assert chosen("llama", 130, holes) == 120
    with pytest.raises(InputError, match=r"drafter\.mask_token_id"):
        chosen("llama", 120, holes)


def test_mask_token_of_the_tiny_target_is_its_first_spare_row(target, tmp_path):
    config = make_config(Path(target.name), tmp_path).drafter.model_copy(update={"mask_token_id": None})
    assert drafter_spec(config, target).mask_token_id == 260
