"""The frozen target: any Hugging Face causal LM.  Loading, what the drafter borrows from it, and feature capture.

Shapes: T tokens of a row, K feature layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from draftsmith.config import DrafterConfig, TargetConfig
from draftsmith.errors import InputError
from draftsmith.provenance.digests import sha256_cached
from draftsmith.records import DrafterSpec, read_json
from draftsmith.target.extract import keeps_documents_apart
from draftsmith.target.packed import register

MASK_TOKENS = {
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_moe": 248070,
    "gpt_oss": 200000,
    "gemma4": 4,
    "kimi_k25": 163838,
}
"""Mask token by model type where the field has settled on one (ids from the public drafters)."""


@dataclass
class Target:
    """The loaded model.  `embedding` and `head` are [V, H], frozen; `layers` are its decoder layers."""

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    forward: str
    """packed or per_document, see TargetConfig.forward; elsewhere where only embedding and head are loaded."""

    @property
    def trunk(self) -> Any:
        return self.model.get_decoder()

    @property
    def layers(self) -> Any:
        return self.trunk.layers

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight


def model_folder(config: TargetConfig) -> Path:
    """The local folder of the model.  Raises InputError if it is neither a folder nor a hub model within reach."""
    path = Path(config.model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"target.model {config.model}: the folder has no config.json")
        return path
    if path.is_absolute() or config.model.startswith(".") or config.model.count("/") != 1:
        raise InputError(f"target.model {config.model}: there is no such folder")
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(config.model, revision=config.revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: every one means "not to be had"
        raise InputError(
            f"target.model {config.model}: there is no such folder, and the hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def load_tokenizer(config: TargetConfig) -> Any:
    from transformers import AutoTokenizer

    folder = model_folder(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"target.model {config.model}: its tokenizer does not load: {_first_line(error)}") from error
    if not tokenizer.chat_template:
        raise InputError(f"target.model {config.model}: its tokenizer has no chat template, so it cannot be prompted")
    if not tokenizer.is_fast:
        raise InputError(f"target.model {config.model}: its tokenizer has no fast version, so offsets are not known")
    return tokenizer


def eos_token_ids(config: TargetConfig, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json, else config.json, else the tokenizer."""
    folder = model_folder(config)
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name, f"target.model {config.model}: {name}").get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (value,)
    if tokenizer.eos_token_id is None:
        raise InputError(f"target.model {config.model}: no eos_token_id in its configs or tokenizer")
    return (tokenizer.eos_token_id,)


def weights_fingerprint(config: TargetConfig) -> str:
    """sha256 over the names and contents of config.json and the weight files, each read once."""
    import hashlib

    folder = model_folder(config)
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    if len(files) == 1:
        raise InputError(f"target.model {config.model}: the folder has no *.safetensors (pickled weights are not read)")
    digests = sha256_cached(files, beside=True)
    return hashlib.sha256("".join(f"{f.name}:{digests[f]}\n" for f in files).encode()).hexdigest()


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch sees no GPU: set device=cpu or install a CUDA build of torch")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def load_target(config: TargetConfig, device_name: str) -> Target:
    """Load and freeze.  Raises InputError if anything would have been randomly initialised."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what its load report says is refused below, in one line
    device = pick_device(device_name)
    folder, tokenizer = model_folder(config), load_tokenizer(config)
    gpu = device.type == "cuda"
    dtype = {"auto": torch.bfloat16 if gpu else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
    forward = config.forward if config.forward != "auto" else ("packed" if gpu else "per_document")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_attention(folder, config, packed=forward == "packed"),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,  # no pickle
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"target.model {config.model}: it does not load: {_first_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            first = sorted(map(str, info[kind]))[0]
            raise InputError(
                f"target.model {config.model}: {len(info[kind])} weights are not in its files ({kind}: {first} ...): "
                f"they would be random"
            )
    model.requires_grad_(False).eval().to(device)
    _check_finite(model, folder)
    eos = eos_token_ids(config, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    target = Target(config.model, model, tokenizer, device, dtype, eos, pad, forward)
    if forward == "packed" and not keeps_documents_apart(target):
        kind = target.text_config.model_type
        if config.forward == "packed":
            raise InputError(
                f"target.forward=packed: {config.model} ({kind}) lets packed documents see each other: set "
                f"target.forward=per_document"
            )
        print(f"target: {kind} lets packed documents see each other in this transformers, so it runs one at a time")
        target.forward = "per_document"
    return target


def load_meta(config: TargetConfig, device_name: str = "cpu") -> Target:
    """The target's shapes on the meta device, no memory; its config and tokenizer.  `device` and `dtype` are what it
    would be loaded with."""
    import transformers

    device = pick_device(device_name)
    folder, tokenizer = model_folder(config), load_tokenizer(config)
    gpu = device.type == "cuda"
    dtype = {"auto": torch.bfloat16 if gpu else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
    auto = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(auto, trust_remote_code=config.trust_remote_code)
    model.requires_grad_(False).eval()
    if auto.get_text_config().tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    eos = eos_token_ids(config, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return Target(config.model, model, tokenizer, device, dtype, eos, pad, "elsewhere")


def load_borrowed(config: TargetConfig, device_name: str) -> Target:
    """What a drafter of a split placement needs of the target: its config, tokenizer, embedding and head.

    The rest of the model has shapes but no memory (meta device).  Raises InputError if the two are not in the files.
    """
    from safetensors import safe_open

    target = load_meta(config, device_name)
    folder, model = model_folder(config), target.model
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            files |= dict.fromkeys(handle.keys(), file)

    def read(module: Any, ending: str) -> nn.Parameter:
        own = next(n for n, m in model.named_modules() if m is module) + ".weight"
        keys = [own] if own in files else [k for k in files if k.endswith(ending)]
        if len(keys) != 1:
            raise InputError(f"{folder}: its files do not hold one {own}, which the drafter needs")
        with safe_open(files[keys[0]], "pt") as handle:
            return nn.Parameter(handle.get_tensor(keys[0]).to(target.device, target.dtype), requires_grad=False)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    embedding.weight = read(embedding, "embed_tokens.weight")
    head.weight = embedding.weight if tied else read(head, "lm_head.weight")
    if getattr(embedding, "embed_scale", None) is not None:  # Gemma keeps it as a buffer, here on the meta device
        scale = getattr(embedding, "scalar_embed_scale", None) or target.text_config.hidden_size**0.5
        embedding.embed_scale = torch.tensor(scale)
    return target


def _attention(folder: Path, config: TargetConfig, *, packed: bool) -> str:
    """sdpa where the model class has it, else eager (gpt-oss, whose attention has sinks).  packed: ours, which is sdpa
    as long as no packed row is given to it."""
    import transformers

    auto = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    kind = type(auto)
    known = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if known and not transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind]._supports_sdpa:
        return "eager"
    attends = known and transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind]._supports_flex_attn
    return register() if packed and attends else "sdpa"


def _check_finite(model: Any, folder: Path) -> None:
    """Raises InputError naming file and key if a weight holds NaN or Inf."""
    for key, value in model.named_parameters():
        if not torch.isfinite(value).all():
            index = folder / "model.safetensors.index.json"
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
            raise InputError(f"{folder / files.get(key, 'model.safetensors')}: {key} holds NaN or Inf")


def default_feature_layers(num_layers: int, num_features: int) -> tuple[int, ...]:
    """0-based layers spread from 1 to num_layers - 3.  Raises InputError if they would coincide."""
    if num_features == 1:
        return (num_layers // 2,)
    layers = tuple(round(1 + i * (num_layers - 4) / (num_features - 1)) for i in range(num_features))
    if len(set(layers)) != num_features or list(layers) != sorted(layers):
        raise InputError(
            f"drafter.num_features {num_features} is too many for a target of {num_layers} layers (default layers "
            f"{list(layers)} coincide): lower it or set drafter.feature_layers"
        )
    return layers


def drafter_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """Resolve the drafter's geometry against the target.  Raises InputError naming the key that does not fit."""
    t = target.text_config
    vocab, hidden = target.embedding.shape
    if config.hidden_size not in (None, hidden):
        raise InputError(f"drafter.hidden_size {config.hidden_size} is not the target's {hidden}: leave it out")
    layers = config.feature_layers or default_feature_layers(t.num_hidden_layers, config.num_features)
    check_layers(layers, t.num_hidden_layers, "drafter.feature_layers")
    heads = config.num_heads or _need(t, "num_attention_heads")
    kv_heads = config.num_kv_heads or getattr(t, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise InputError(f"drafter.num_heads {heads} is not a multiple of drafter.num_kv_heads {kv_heads}")
    head_dim = config.head_dim or getattr(t, "head_dim", None) or hidden // heads
    types = config.layer_types
    return DrafterSpec(
        hidden_size=hidden,
        vocab_size=vocab,
        num_layers=config.num_layers,
        intermediate_size=config.intermediate_size or _need(t, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps or float(getattr(t, "rms_norm_eps", 1e-6)),
        rope_theta=config.rope_theta or _rope_theta(t),
        max_position_embeddings=config.max_position_embeddings or _need(t, "max_position_embeddings"),
        attention_bias=config.attention_bias,
        block_size=config.block_size,
        mask_token_id=mask_token(config, target),
        feature_layers=tuple(layers),
        num_target_layers=t.num_hidden_layers,
        layer_types=(types,) * config.num_layers if isinstance(types, str) else types,
        sliding_window=config.sliding_window if "sliding" in types else None,
        input_embedding_scale=config.input_embedding_scale or _embedding_scale(target),
        output_multiplier=config.output_multiplier or _output_multiplier(t),
        final_logit_softcapping=config.final_logit_softcapping or getattr(t, "final_logit_softcapping", None),
        initializer_range=config.initializer_range,
    )


def mask_token(config: DrafterConfig, target: Target) -> int:
    """Explicit, else the field's id for this model type, else the tokenizer's mask token, else the first row of the
    embedding that the tokenizer does not use.  Raises InputError if it is pad, eos, or no row of the embedding."""
    tokenizer, vocab = target.tokenizer, target.embedding.shape[0]
    chosen = config.mask_token_id
    if chosen is None:
        chosen = MASK_TOKENS.get(target.text_config.model_type.removesuffix("_text"))
        if chosen is not None and chosen >= vocab:
            chosen = None
    if chosen is None:
        chosen = tokenizer.mask_token_id
    if chosen is None:
        past = max(tokenizer.get_vocab().values()) + 1  # not len(tokenizer): ids may have holes
        chosen = past if past < vocab else None
    if chosen is None:
        raise InputError(
            "drafter.mask_token_id: the tokenizer has no mask token and every row of the embedding is in use: set it "
            "to a special token that text does not contain"
        )
    check_mask(chosen, target, "drafter.mask_token_id")
    return chosen


def check_layers(layers: Sequence[int], num_layers: int, what: str) -> None:
    """Raises InputError unless feature layers ascend without repeats and leave the last layer out."""
    last = num_layers - 1
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= last:
        raise InputError(
            f"{what} {list(layers)} must ascend without repeats within 0..{last - 1} (the last layer, {last}, means "
            f"different things to different servers)"
        )


def check_mask(token: int, target: Target, what: str) -> None:
    """Raises InputError if the token is no row of the embedding, is pad or eos, or not the tokenizer's <|MASK|>."""
    rows = target.embedding.shape[0]
    if not 0 <= token < rows:
        raise InputError(f"{what} {token} is not a row of the target's embedding ({rows} rows)")
    pads = (target.tokenizer.pad_token_id, getattr(target.text_config, "pad_token_id", None))
    if token in pads or token in target.eos_token_ids:
        raise InputError(f"{what} {token} is the target's pad or eos token: choose another")
    named = target.tokenizer.get_vocab().get("<|MASK|>")
    if named is not None and named != token:
        raise InputError(f"{what} {token} is not the tokenizer's <|MASK|> ({named}): SGLang refuses that, set {named}")


def _need(text_config: Any, key: str) -> Any:
    value = getattr(text_config, key, None)
    if value is None:
        raise InputError(
            f"target: a {text_config.model_type} config has no {key}, so the drafter's cannot default to it: set it "
            f"under drafter, or choose another target"
        )
    return value


def _output_multiplier(text_config: Any) -> float | None:
    """What the target multiplies its logits by: Cohere's logit_scale, or one over Granite's logits_scaling."""
    if getattr(text_config, "logit_scale", None) is not None:
        return float(text_config.logit_scale)
    scaling = getattr(text_config, "logits_scaling", None)
    return None if scaling in (None, 1, 1.0) else 1.0 / float(scaling)


def _rope_theta(text_config: Any) -> float:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    theta = parameters.get("rope_theta") or getattr(text_config, "rope_theta", None)
    if theta is None:
        raise InputError("drafter.rope_theta: the target's config states none: set it")
    return float(theta)


def _embedding_scale(target: Target) -> float | None:
    """Gemma: sqrt(H), exactly, whatever dtype the model keeps it in. Granite: embedding_multiplier."""
    module = target.model.get_input_embeddings()
    if getattr(module, "embed_scale", None) is not None:
        return float(getattr(module, "scalar_embed_scale", None) or target.embedding.shape[1] ** 0.5)
    scale = getattr(target.text_config, "embedding_multiplier", None)
    return None if scale in (None, 1, 1.0) else float(scale)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
