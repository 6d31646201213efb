"""Export: one folder that the official package, vLLM and SGLang load; and loading such a folder, or a checkpoint.

Every size is written out, since the loaders' defaults differ from most models.  `is_causal`, `dflash_config.causal` and
`use_swa` are never written: each changes the mask of some loader.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from draftsmith import __version__
from draftsmith.config import Config
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, write_tensors, write_text
from draftsmith.records import DrafterSpec, read_json
from draftsmith.rundir import RunDir
from draftsmith.target.model import Target, check_layers, check_mask
from draftsmith.train.checkpoint import (
    WEIGHTS,
    default_checkpoint,
    load_weights,
    newest_checkpoint,
    newest_or,
    read_state,
    read_tensors,
)

LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}


def to_config(spec: DrafterSpec) -> dict[str, Any]:
    """config.json of the exported folder."""
    dflash: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.feature_layers),
    }
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if getattr(spec, key) is not None:
            dflash[key] = getattr(spec, key)
    sliding = "sliding" in spec.layer_types
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": dflash,
        "num_target_layers": spec.num_target_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "attention_bias": spec.attention_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "layer_types": [LAYER_TYPES[t] for t in spec.layer_types],
        "sliding_window": spec.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": 0 if sliding else spec.num_layers,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rope_scaling": None,
        "initializer_range": spec.initializer_range,
        "attention_dropout": 0.0,
        "use_cache": True,
        "draftsmith_version": __version__,
    }


def from_config(values: dict[str, Any], source: Path) -> DrafterSpec:
    """The spec of an exported folder.  Raises InputError naming a missing or contradictory key."""
    names = {long: short for short, long in LAYER_TYPES.items()}
    try:
        dflash = values["dflash_config"]
        if (wrong := _means_something_else(values)) is not None:
            raise InputError(f"{source}: {wrong}")
        return DrafterSpec(
            hidden_size=values["hidden_size"],
            vocab_size=values["vocab_size"],
            num_layers=values["num_hidden_layers"],
            intermediate_size=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=values["rope_theta"],
            max_position_embeddings=values["max_position_embeddings"],
            attention_bias=values["attention_bias"],
            block_size=values["block_size"],
            mask_token_id=dflash["mask_token_id"],
            feature_layers=tuple(dflash["target_layer_ids"]),
            num_target_layers=values["num_target_layers"],
            layer_types=tuple(names[t] for t in values["layer_types"]),
            sliding_window=values["sliding_window"],
            input_embedding_scale=dflash.get("input_embedding_scale"),
            output_multiplier=dflash.get("output_multiplier"),
            final_logit_softcapping=dflash.get("final_logit_softcapping"),
            initializer_range=values.get("initializer_range", 0.02),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{source} is not the config of a DFlash drafter: {error} is missing or wrong") from error


def _means_something_else(values: dict[str, Any]) -> str | None:
    """The first key by which a loader that honours it would compute something else than this code."""
    dflash, rope, types = values["dflash_config"], values["rope_parameters"], values["layer_types"]
    windowed = bool(values.get("use_sliding_window") and values["sliding_window"])
    plain = "only plain RoPE is supported"
    checks = {
        "rope_theta and rope_parameters.rope_theta differ": rope["rope_theta"] != values["rope_theta"],
        f"rope_parameters.rope_type is {rope.get('rope_type')}: {plain}": rope.get("rope_type")
        not in (None, "default"),
        f"rope_scaling is set: {plain}": values.get("rope_scaling") is not None,
        "block_size and dflash_config.block_size differ": dflash.get("block_size") not in (None, values["block_size"]),
        "layer_types does not list num_hidden_layers layers": len(types) != values["num_hidden_layers"],
        "sliding layers need use_sliding_window true and a sliding_window": "sliding_attention" in types
        and not windowed,
        "is_causal overrides the mask of every layer: remove it": values.get("is_causal") is not None,
        "dflash_config.causal changes the mask: remove it": dflash.get("causal") is not None,
        "dflash_config.use_swa changes the mask: remove it": dflash.get("use_swa") is not None,
        f"hidden_act is {values.get('hidden_act')}: only silu is supported": values.get("hidden_act", "silu") != "silu",
    }
    return next((what for what, wrong in checks.items() if wrong), None)


def read_drafter(path: Path) -> DFlashDrafter:
    """A drafter from a checkpoint or an exported folder, on the CPU, in the stored dtype."""
    if (path / "state.json").is_file():
        spec, file = read_state(path).spec, path / WEIGHTS
    elif (path / "config.json").is_file():
        source = path / "config.json"
        spec, file = from_config(read_json(source, "drafter config"), source), path / "model.safetensors"
    else:
        raise InputError(f"{path} is neither a checkpoint (state.json) nor an exported drafter (config.json)")
    tensors = read_tensors(file)
    drafter = DFlashDrafter(spec).requires_grad_(False)
    if "fc.weight" in tensors:
        drafter.to(tensors["fc.weight"].dtype)
    load_weights(drafter, tensors, file)
    return drafter


def load_drafter(path: Path, target: Target) -> DFlashDrafter:
    """`read_drafter`, checked against the target and moved to its device and dtype."""
    drafter = read_drafter(path)
    check_fits(drafter.spec, target, path)
    return drafter.to(target.device, target.dtype).eval()


def check_fits(spec: DrafterSpec, target: Target, source: Path) -> None:
    """Raises InputError if the drafter was made for another kind of target."""
    vocab, hidden = target.embedding.shape
    for key, mine, theirs in (
        ("hidden_size", spec.hidden_size, hidden),
        ("vocab_size", spec.vocab_size, vocab),
        ("num_target_layers", spec.num_target_layers, target.text_config.num_hidden_layers),
    ):
        if mine != theirs:
            raise InputError(f"{source}: {key} is {mine}, the target {target.name} has {theirs}")
    check_layers(spec.feature_layers, spec.num_target_layers, f"{source}: target_layer_ids")
    check_mask(spec.mask_token_id, target, f"{source}: mask_token_id")


def export(config: Config, run: RunDir | None = None) -> Path:
    """The export stage: the newest checkpoint, or `export.drafter`, into the run's folder, or `export.output`.

    With both set no run is needed.
    """
    source, output, place = config.export.drafter, config.export.output, (config.runs_dir, config.name)
    if source is None:
        run, source = (run, newest_checkpoint(run)) if run else default_checkpoint(*place, "export.drafter")
    if output is None:
        output = (run or newest_or(*place, "export.output")).export
    return export_folder(source, output, config.target.model)


def export_folder(source: Path, output: Path, target_name: str) -> Path:
    """A checkpoint's drafter as a folder."""
    return write_folder(read_drafter(source), output, target_name)


def write_folder(drafter: DFlashDrafter, output: Path, target_name: str) -> Path:
    """Write the folder, in bfloat16, reload it, compare, and only then give it its name.

    Raises InputError if there is such a folder."""
    if output.exists():
        raise InputError(f"{output} exists: set export.output to another folder")
    drafter = copy.deepcopy(drafter).to(torch.bfloat16)
    with folder_written_whole(output) as folder:
        weights = {k: v.contiguous() for k, v in drafter.state_dict().items()}
        write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
        write_text(folder / "config.json", json.dumps(to_config(drafter.spec), indent=2) + "\n")
        write_text(folder / "README.md", _readme(drafter.spec, target_name))
        _compare(drafter, read_drafter(folder), folder)
    return output


def _compare(written: DFlashDrafter, read: DFlashDrafter, folder: Path) -> None:
    """Spec, every weight and one forward pass must be the same, bit for bit."""
    if written.spec != read.spec:
        raise RuntimeError(f"{folder}: the config read back gives another drafter: {written.spec} != {read.spec}")
    for (key, a), b in zip(written.state_dict().items(), read.state_dict().values(), strict=True):
        if not torch.equal(a, b):
            raise RuntimeError(f"{folder}: {key} read back differs")
    spec = written.spec
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, len(spec.feature_layers) * spec.hidden_size, generator=generator)
    x = torch.randn(spec.block_size, spec.hidden_size, generator=generator)
    masks = [None] * spec.num_layers
    with torch.no_grad():
        outs = [
            d.float()(features, torch.arange(5), x, torch.arange(5, 5 + spec.block_size), masks)
            for d in (written, read)
        ]
    if not torch.equal(*outs):
        raise RuntimeError(f"{folder}: the drafter read back computes something else")


def _readme(spec: DrafterSpec, target: str) -> str:
    drafts = spec.block_size - 1
    speculative = json.dumps({"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": drafts})
    return f"""# DFlash drafter for {target}

{spec.num_layers} layers, block size {spec.block_size}, features of target layers
{list(spec.feature_layers)}, mask token {spec.mask_token_id}.  It shares the target's embedding and head and works
with that target only.

Serve it (THIS_FOLDER is where this file lies):

    vllm serve {target} --speculative-config '{speculative}'

    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path THIS_FOLDER

    python -c "from dflash import DFlashDraftModel; DFlashDraftModel.from_pretrained('THIS_FOLDER')"   # Transformers

vLLM ignores `block_size`: num_speculative_tokens must be {drafts}.  Transformers' AutoModel reads the folder as a plain
Qwen3 model with random embeddings, without a word: use the class above.
"""
