"""A llama-architecture GGUF file to a plain Hugging Face folder (bf16 weights, tokenizer, chat template).

Only what the demo's target needs: the `llama` architecture with the `smollm` tokenizer.  transformers' own GGUF loader
takes tens of seconds a load and splits digits wrongly for this tokenizer, so the conversion is done once, here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, write_tensors

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL, USER_DEFINED = 3, 4
"""GGUF token types that are matched as whole tokens."""


def convert(source: Path, output: Path) -> None:
    """Write `output` whole or not at all.  Raises InputError for another architecture or tokenizer."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[key].contents() if key in reader.fields else None

    if value("general.architecture") != "llama" or value("tokenizer.ggml.pre") != "smollm":
        raise InputError(f"{source}: only the llama architecture with the smollm tokenizer is converted")
    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, suffix = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                array = _rotary_halves(array, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
        weights[name] = torch.from_numpy(np.ascontiguousarray(array)).to(torch.bfloat16)

    hidden = value("llama.embedding_length")
    theta = float(value("llama.rope.freq_base"))
    special = {k: value(f"tokenizer.ggml.{v}_token_id") for k, v in _SPECIAL.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": float(value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "dtype": "bfloat16",
        **special,
    }
    with folder_written_whole(output) as folder:
        write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
        _dump(folder / "config.json", config)
        _dump(folder / "generation_config.json", special)
        _write_tokenizer(folder, value)


_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of the rotary pairs: [heads, d/2, 2, in] -> [heads, 2, d/2, in]."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _write_tokenizer(folder: Path, value: Any) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    whole = [AddedToken(tokens[i], special=t == CONTROL, normalized=False)
             for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)]  # fmt: skip
    tokenizer.add_special_tokens([t for t in whole if t.special])
    tokenizer.add_tokens([t for t in whole if not t.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{k}_token": tokens[value(f"tokenizer.ggml.{v}_token_id")]
             for k, v in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}  # fmt: skip
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": value("llama.context_length"),
            "chat_template": value("tokenizer.chat_template"),
            **names,
        },
    )


def _dump(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
