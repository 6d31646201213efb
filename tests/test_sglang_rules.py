"""What SGLang 0.5.23 asks of a DFlash drafter's config and weights, as data, replayed on our exported folders.

SGLang does not install without a GPU, and it ignores unknown and missing tensors without a word, so its rules are written
down here (read from the wheel of that version) and every one of them is also broken once, to see that it would be noticed.
Where a rule is not checked by SGLang itself but ends in wrong drafts, it says "silent".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_train import make_spec
from safetensors.torch import load_file, save_file

from draftsmith.drafter.model import DFlashDrafter
from draftsmith.export import export_folder
from draftsmith.records import DrafterSpec
from draftsmith.rundir import create
from draftsmith.train import checkpoint

SGLANG = "0.5.23"
TARGET = {"layers": 6, "vocab": 40, "tokenizer": {"<|endoftext|>": 0, "a": 1}}
"""The target of helpers_train.SPEC, as a server would know it."""

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "all sliding": {"layer_types": "sliding", "sliding_window": 8},
    "mixed": {"layer_types": ("full", "sliding"), "sliding_window": 8},
    "grouped heads": {"num_heads": 6, "num_kv_heads": 1, "num_layers": 3},
    "as many key heads, B = 16": {"num_kv_heads": 4, "head_dim": 16, "block_size": 16},
    "more features than layers": {"num_layers": 1, "feature_layers": (0, 2, 4)},
    "bias": {"attention_bias": True, "layer_types": ("sliding", "full"), "sliding_window": 3},
    "gemma": {"input_embedding_scale": 32**0.5, "final_logit_softcapping": 30.0, "output_multiplier": 0.5},
}

# ---- the rules for config.json, which SGLang reads through transformers' Qwen3Config

Seen = dict[str, Any]


def own(seen: Seen, key: str) -> Any:
    """dflash_config first, then the top level."""
    return seen["dflash_config"].get(key, seen.get(key))


def is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def positive(value: Any) -> bool:
    return is_int(value, 1)


@dataclass(frozen=True)
class Rule:
    """`holds` says whether the server would start (or, if silent, draft as trained)."""

    holds: Callable[[Seen], bool]
    broken_by: tuple[dict[str, Any], ...]
    """Changes to config.json; a key `a.b` lies in section a; ... means that the key is gone."""


CLASSES = ("DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel", "DFlash2DraftModel")
TYPES = {"full_attention", "sliding_attention"}
RULES: dict[str, Rule] = {
    "architectures: plain DFlash": Rule(
        lambda s: [a for a in s["architectures"] or [] if a in CLASSES] == ["DFlashDraftModel"],
        ({"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["DFlash2DraftModel"]}),
    ),
    "num_hidden_layers: at least 1": Rule(lambda s: positive(s["num_hidden_layers"]), ({"num_hidden_layers": 0, "layer_types": []},)),
    "num_target_layers: the target's (else a warning)": Rule(
        lambda s: own(s, "num_target_layers") == TARGET["layers"],
        ({"num_target_layers": 7}, {"dflash_config.num_target_layers": 0}),
    ),
    "block_size: at least 1, and written (else 16)": Rule(
        lambda s: positive(own(s, "block_size")),
        ({"block_size": ..., "dflash_config.block_size": ...}, {"dflash_config.block_size": 0}),
    ),
    "block_size: both places agree (silent)": Rule(
        lambda s: s.get("block_size") == s["dflash_config"].get("block_size"), ({"dflash_config.block_size": 5},)
    ),
    "mask_token_id: a row of the target, written": Rule(
        lambda s: is_int(own(s, "mask_token_id"), 0) and own(s, "mask_token_id") < TARGET["vocab"],
        tuple({"dflash_config.mask_token_id": v} for v in (..., None, True, -1, 40, 41, "39", 3.5)),
    ),
    "mask_token: does not name another id in the tokenizer": Rule(
        lambda s: TARGET["tokenizer"].get(own(s, "mask_token") or "<|MASK|>", own(s, "mask_token_id"))
        == own(s, "mask_token_id"),
        ({"dflash_config.mask_token": "a"},),
    ),
    "target_layer_ids: a list, not empty, written": Rule(
        lambda s: isinstance(own(s, "target_layer_ids"), list)
        and bool(own(s, "target_layer_ids"))
        and all(is_int(i, -(10**9)) for i in own(s, "target_layer_ids")),
        tuple({"dflash_config.target_layer_ids": v} for v in (..., None, [], "1,3", ["x"])),
    ),
    "target_layer_ids: within the target": Rule(
        lambda s: all(0 <= i < TARGET["layers"] for i in numbers(s)),
        ({"dflash_config.target_layer_ids": [1, 6]}, {"dflash_config.target_layer_ids": [-1, 3]}),
    ),
    # captured in layer order, each once, the last layer's output never: else the first forward raises, or (order) silent
    "target_layer_ids: captured as listed": Rule(
        lambda s: numbers(s) == [i for i in range(TARGET["layers"] - 1) if i in numbers(s)],
        tuple({"dflash_config.target_layer_ids": v} for v in ([3, 1], [3, 3], [1, 5])),
    ),
    "layer_types: one known word for each layer": Rule(
        lambda s: isinstance(s["layer_types"], list)
        and set(s["layer_types"]) <= TYPES
        and len(s["layer_types"]) == s["num_hidden_layers"],
        ({"layer_types": ["full_attention"]}, {"layer_types": ["full_attention", "chunked_attention"]}),
    ),
    "sliding_window: there with a sliding layer": Rule(
        lambda s: "sliding_attention" not in (s["layer_types"] or []) or positive(s["sliding_window"]),
        ({"sliding_window": None}, {"use_sliding_window": False}, {"use_sliding_window": ...}),
    ),
    "is_causal: not set (silent, it overrides every layer)": Rule(
        lambda s: s.get("is_causal") is None, ({"is_causal": True}, {"is_causal": False})
    ),
    "hidden_act: silu": Rule(lambda s: s["hidden_act"] == "silu", ({"hidden_act": "gelu"},)),
    "intermediate_size: at least 1": Rule(lambda s: positive(s["intermediate_size"]), ({"intermediate_size": 0},)),
    "heads: groups of equal size": Rule(
        lambda s: s["num_attention_heads"] % s["num_key_value_heads"] == 0, ({"num_key_value_heads": 3},)
    ),
    "rope: plain, over the whole head (silent)": Rule(
        lambda s: s["rope_parameters"].get("rope_type") == "default"
        and set(s["rope_parameters"]) <= {"rope_type", "rope_theta"}
        and s.get("partial_rotary_factor", 1.0) == 1.0
        and s.get("is_neox_style", True)
        and s.get("rope_is_neox_style", True),
        (
            {"rope_parameters.rope_dim": 4}, {"partial_rotary_factor": 0.5}, {"is_neox_style": False},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        ),
    ),
    "rope: the theta of rope_theta (silent: rope_parameters wins)": Rule(
        lambda s: s["rope_parameters"]["rope_theta"] == s["written"].get("rope_theta"),
        ({"rope_parameters.rope_theta": 5e5}, {"rope_theta": ...}),
    ),
    "output_multiplier: positive": Rule(
        lambda s: s["dflash_config"].get("output_multiplier", 1.0) > 0, ({"dflash_config.output_multiplier": 0.0},)
    ),
    "other families: nothing of theirs (silent)": Rule(
        lambda s: not any(
            own(s, k)
            for k in (
                "projector_type", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
                "attention_sink_bias", "attention_value_scale", "use_gemma_norm", "has_embed_tokens",
            )
        ),
        (
            {"dflash_config.projector_type": "domino"}, {"dflash_config.conv_kernel_size": 2},
            {"dflash_config.selector_rank": 4}, {"use_gemma_norm": True},
            {"dflash_config.attention_value_scale": 0.5},
        ),
    ),
}  # fmt: skip


def numbers(seen: Seen) -> list[int]:
    """Layer ids, where they are numbers at all (that they are is a rule of its own)."""
    ids = own(seen, "target_layer_ids")
    return [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else []


def read(folder: Path) -> Seen:
    """config.json as the server sees it: transformers fills in defaults, and nulls an unused window."""
    from transformers import Qwen3Config

    seen = Qwen3Config.from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    extra = {k: v for k, v in written.items() if not hasattr(seen, k)}
    keys = {*written, "rope_parameters", "layer_types", "sliding_window", "architectures", "num_hidden_layers"}
    return {**extra, **{k: getattr(seen, k) for k in keys if hasattr(seen, k)}, "written": written}


def broken(folder: Path) -> list[str]:
    """Names of the rules that the folder breaks; "transformers" if its config is refused before SGLang sees it."""
    try:
        seen = read(folder)
    except Exception as error:  # whatever transformers raises: the server does not start
        return [f"transformers: {error}"]
    return [name for name, rule in RULES.items() if not rule.holds(seen)]


# ---- the rules for model.safetensors

SHARDS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameter -> the tensors of the file that are laid in it, one below the other."""
LAYER: dict[str, tuple[tuple[str, ...], ...]] = {
    "self_attn.qkv_proj.weight": (("Q", "KV", "KV"), ("H",)),
    "self_attn.o_proj.weight": (("H",), ("Q",)),
    "self_attn.q_norm.weight": (("D",),),
    "self_attn.k_norm.weight": (("D",),),
    "mlp.gate_up_proj.weight": (("I", "I"), ("H",)),
    "mlp.down_proj.weight": (("H",), ("I",)),
    "input_layernorm.weight": (("H",),),
    "post_attention_layernorm.weight": (("H",),),
}
BIASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "self_attn.qkv_proj.bias": (("Q", "KV", "KV"),),
    "self_attn.o_proj.bias": (("H",),),
}
OUTSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "norm.weight": (("H",),),
    "hidden_norm.weight": (("H",),),
    "fc.weight": (("H",), ("KH",)),
}
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass
class Loaded:
    parameters: dict[str, torch.Tensor]
    ignored: list[str]
    """Of the file, passed over silently."""
    uninitialised: list[str]
    """Of the server, left as they were, silently."""


def load(folder: Path) -> Loaded:
    """Build the server's parameters from the config and lay the file's tensors in them, as its loader does."""
    seen = read(folder)
    width, key_heads = seen["head_dim"], seen["num_key_value_heads"]
    sizes = {
        "H": seen["hidden_size"], "I": seen["intermediate_size"], "D": width, "Q": seen["num_attention_heads"] * width,
        "KV": key_heads * width, "KH": len(own(seen, "target_layer_ids")) * seen["hidden_size"],
    }  # fmt: skip
    layer = LAYER | (BIASES if seen["attention_bias"] else {})
    table = {f"layers.{i}.{k}": v for i in range(seen["num_hidden_layers"]) for k, v in layer.items()} | OUTSIDE
    parameters = {
        name: torch.full([sum(sizes[s] for s in dim) for dim in shape], torch.nan) for name, shape in table.items()
    }
    ignored = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.removeprefix("model.").startswith(("prefix_gru.", "embed_proj.")):
            raise ValueError(f"SGLang {SGLANG}: {name} belongs to Domino")
        place = name.removeprefix("model.")
        first, rows = 0, None
        for fused, parts in SHARDS.items():
            for number, part in enumerate(parts):
                if f".{part}." in place and (whole := place.replace(part, fused)) in table:
                    heights = [sizes[s] for s in table[whole][0]]
                    place, first, rows = whole, sum(heights[:number]), heights[number]
        place = ALIASES.get(place, place)
        if place not in parameters:
            ignored.append(name)
            continue
        slot = parameters[place] if rows is None else parameters[place][first : first + rows]
        if slot.shape != tensor.shape:
            raise ValueError(f"SGLang {SGLANG}: {name} is {list(tensor.shape)}, its place is {list(slot.shape)}")
        slot.copy_(tensor)
    return Loaded(parameters, ignored, [k for k, v in parameters.items() if v.isnan().any()])


# ---- our export


def exported(tmp_path: Path, **changes: Any) -> tuple[DrafterSpec, Path]:
    spec = make_spec(**changes)
    drafter = DFlashDrafter(spec).initialize(1)
    with torch.no_grad():
        for number, parameter in enumerate(drafter.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    run = create(tmp_path / "runs", "x", new_attempt=True)
    source = checkpoint.save(run, 1, 1, drafter, torch.optim.AdamW(drafter.parameters()), {"target_weights": "w"}, 1)
    return spec, export_folder(source, tmp_path / "out", "some/target")


@pytest.mark.parametrize("kind", KINDS)
def test_our_config_breaks_no_rule_of_sglang_0_5_23(tmp_path, kind):
    spec, folder = exported(tmp_path, **KINDS[kind])
    assert broken(folder) == [], f"SGLang {SGLANG}"
    seen = read(folder)
    assert (own(seen, "block_size"), own(seen, "mask_token_id")) == (spec.block_size, 39)
    assert own(seen, "target_layer_ids") == list(spec.feature_layers)
    assert seen["rope_parameters"]["rope_theta"] == spec.rope_theta and seen["rms_norm_eps"] == spec.rms_norm_eps
    assert seen["max_position_embeddings"] == spec.max_position_embeddings
    # it keeps the keys to the left, W - 1; with is_causal unset sliding layers are causal in the block and full ones not
    left = [seen["sliding_window"] - 1 if t == "sliding_attention" else -1 for t in seen["layer_types"]]
    assert left == [-1 if w is None else w - 1 for w in spec.windows()]
    assert not (folder / "mask_embedding.pt").exists()  # would overwrite a row of the target


@pytest.mark.parametrize("kind", KINDS)
def test_our_weights_fill_sglang_0_5_23_exactly(tmp_path, kind):
    spec, folder = exported(tmp_path, **KINDS[kind])
    found = load(folder)
    assert found.ignored == [] and found.uninitialised == [], f"SGLang {SGLANG}"
    file = load_file(folder / "model.safetensors")
    assert sum(p.numel() for p in found.parameters.values()) == sum(t.numel() for t in file.values())
    assert list(found.parameters["fc.weight"].shape) == [spec.hidden_size, len(spec.feature_layers) * spec.hidden_size]
    for i in range(spec.num_layers):
        at, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        for end in ("weight", "bias") if spec.attention_bias else ("weight",):
            qkv = [file[f"{at}.{x}_proj.{end}"].float() for x in "qkv"]
            assert torch.equal(found.parameters[f"{at}.qkv_proj.{end}"], torch.cat(qkv))
        gate_up = [file[f"{mlp}.{x}_proj.weight"].float() for x in ("gate", "up")]
        assert torch.equal(found.parameters[f"{mlp}.gate_up_proj.weight"], torch.cat(gate_up))
    for name in found.parameters.keys() & file.keys():
        assert torch.equal(found.parameters[name], file[name].float()), name


# ---- each rule broken once is noticed


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = values[sections[0]] if sections else values
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (folder / "config.json").write_text(json.dumps(values))


CASES = [(name, changes) for name, rule in RULES.items() for changes in rule.broken_by]


def test_every_rule_has_a_case_that_breaks_it():
    assert {name for name, _ in CASES} == set(RULES)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{n}: {c}" for n, c in CASES])
def test_a_broken_rule_is_noticed(tmp_path, name, changes):
    _, folder = exported(tmp_path, **KINDS["mixed"])
    assert broken(folder) == []
    change_config(folder, changes)
    found = broken(folder)
    assert name in found or found[0].startswith("transformers: "), found


def test_each_rule_is_noticed_here_and_not_by_transformers_alone(tmp_path):
    """Else the test above would say nothing about the rule."""
    _, folder = exported(tmp_path, **KINDS["mixed"])
    before, by_rule = (folder / "config.json").read_text(), set()
    for name, changes in CASES:
        change_config(folder, changes)
        by_rule |= {name} & set(broken(folder))
        (folder / "config.json").write_text(before)
    assert by_rule == set(RULES)


KEY = "layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "ignored", "uninitialised"),
    [
        (lambda t: t.pop(KEY), [], ["layers.1.self_attn.qkv_proj.weight"]),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), [], ["layers.0.mlp.gate_up_proj.weight"]),
        (lambda t: t.pop("fc.weight"), [], ["fc.weight"]),
        (lambda t: t.pop("norm.weight"), [], ["norm.weight"]),
        (lambda t: t.update({"lm_head.weight": torch.zeros(40, 32)}), ["lm_head.weight"], []),
        (lambda t: t.update({"rotary_emb.inv_freq": torch.zeros(4)}), ["rotary_emb.inv_freq"], []),
        (lambda t: t.update({"layers.2.input_layernorm.weight": torch.zeros(32)}), ["layers.2.input_layernorm.weight"], []),
        (lambda t: t.update({"fc.w": t.pop("fc.weight")}), ["fc.w"], ["fc.weight"]),
        (lambda t: t.update({"encoder.fc.weight": t.pop("fc.weight")}), [], []),  # its two other spellings
        (lambda t: t.update({f"model.{KEY}": t.pop(KEY)}), [], []),
    ],
)  # fmt: skip
def test_missing_and_unknown_tensors_are_noticed(tmp_path, change, ignored, uninitialised):
    _, folder = exported(tmp_path, **KINDS["mixed"])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = load(folder)
    assert (found.ignored, found.uninitialised) == (ignored, uninitialised)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (32, 96)), ("fc.weight", (64, 32)), (KEY, (32, 32)), (KEY, (16, 64)), ("norm.weight", (16,)),
        ("layers.0.self_attn.q_norm.weight", (32,)), ("layers.1.mlp.down_proj.weight", (48, 32)),
        ("layers.0.mlp.gate_proj.weight", (96, 32)), ("embed_proj.0.weight", (4, 4)),
    ],
)  # fmt: skip
def test_tensors_of_another_shape_or_family_are_refused(tmp_path, name, shape):
    _, folder = exported(tmp_path, **KINDS["mixed"])
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.zeros(shape)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"SGLang {SGLANG}: {name} "):
        load(folder)
    change_config(folder, {"dflash_config.target_layer_ids": [1]})  # and sizes come from the config
    with pytest.raises(ValueError, match="SGLang"):
        load(folder)
