"""Packed documents kept apart inside the target's attention: flex_attention with a BlockMask, or our own kernels.

transformers lets a model's attention be chosen by name.  Ours runs flex_attention where it is given a BlockMask, our
kernels where it is given Intervals, and SDPA everywhere else, so that the same loaded model serves all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafter.attention import interval_block_mask, put, put_all
from draftsmith.drafter.intervals import Intervals, intervals
from draftsmith.records import PackedRow

NAME = "draftsmith"
KINDS = {"full_attention", "sliding_attention"}


def register() -> str:
    """Make our attention known to transformers; its name there."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [1, N, T, D], key and value [1, M, T, D] -> [1, T, N, D].

    Raises NotImplementedError for what flex_attention would leave out: attention sinks, capped scores, position bias.
    """
    if not isinstance(attention_mask, (BlockMask, Intervals)):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    for name in ("s_aux", "softcap", "position_bias"):
        if settings.get(name) is not None:
            raise NotImplementedError(f"{name} in packed attention")
    if isinstance(attention_mask, Intervals):
        from draftsmith.drafter import kernels

        return kernels.attend(query[0], key[0], value[0], attention_mask, scaling).transpose(0, 1)[None], None
    gqa = query.shape[1] != key.shape[1]
    out = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=gqa)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def unsupported(text_config: Any) -> str | None:
    """Why the model's layers cannot be given such masks, as far as its config says; None: they can."""
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if not kinds <= KINDS:
        return f"layers of kind {', '.join(sorted(kinds - KINDS))}"
    if text_config._attn_implementation != NAME:
        return f"its attention is {text_config._attn_implementation}"
    return None


def packed_masks(row: PackedRow, text_config: Any, device: torch.device) -> Any:
    """Causal within each document: a BlockMask, or one a kind of layer where the model has two kinds."""
    masks = {
        kind: interval_block_mask(put(low, device), put(high, device), context=len(low))
        for kind, (low, high) in _seen(row, text_config).items()
    }
    return masks if len(masks) > 1 else masks.popitem()[1]


def packed_intervals(row: PackedRow, text_config: Any, device: torch.device) -> dict[str, Intervals]:
    """The same for our kernels, by kind of layer."""
    groups = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    heads = text_config.num_attention_heads // groups
    made = {}
    for kind, (low, high) in _seen(row, text_config).items():
        none = np.zeros_like(low)
        made[kind] = Intervals(*put_all(intervals((low, high, none, none), len(low), 0, heads), device))
    return made


def _seen(row: PackedRow, text_config: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By kind of layer, the keys [low, high) of each token, int64 [T]."""
    at = np.arange(len(row.tokens))
    start = np.array([*row.starts[:-1], row.starts[-1]])[row.document]  # -1, the padding, starts at the end
    kinds = set(getattr(text_config, "layer_types", None) or ())
    window = int(getattr(text_config, "sliding_window", None) or 0)
    if not kinds:
        kinds = {"sliding_attention" if window else "full_attention"}
    return {k: (start if k == "full_attention" else np.maximum(start, at - (window - 1)), at + 1) for k in kinds}
