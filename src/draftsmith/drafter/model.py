"""The DFlash drafter (arXiv 2602.06036): a few transformer layers whose block tokens read the target's features.

Suffixes: P block tokens, Q of them queried, T context tokens, S = T + P, H hidden size, K feature layers, N query
heads, M key/value heads, D head size.  One class serves training and serving; module names are the checkpoint's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafter.attention import Mask, attend
from draftsmith.drafter.intervals import Intervals
from draftsmith.records import DrafterSpec

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of the context, each [M, T, D]."""
Tables = tuple[Tensor, Tensor]
"""cos and sin of rotary positions, float32 [n, D]."""
Blocks = tuple[int, int]
"""How many blocks, and their size."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32 whatever the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotary_tables(positions_n: Tensor, head_dim: int, theta: float) -> Tables:
    """cos, sin [n, D], always float32, computed from the positions: nothing to save, nothing to cast by accident."""
    pair = torch.arange(0, head_dim, 2, device=positions_n.device, dtype=torch.float32)
    angles = positions_n.float()[:, None] * (1.0 / theta ** (pair / head_dim))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_hnD: Tensor, tables: Tables) -> Tensor:
    """Plain RoPE over the two halves of each head."""
    cos, sin = tables
    a, b = x_hnD.chunk(2, dim=-1)
    wide = torch.promote_types(x_hnD.dtype, torch.float32)
    return (x_hnD.to(wide) * cos + torch.cat([-b, a], dim=-1).to(wide) * sin).to(x_hnD.dtype)


class Linear(nn.Linear):
    """Without torch's first values, which take seconds for a billion weights: `initialize` or a checkpoint sets all."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    def __init__(self, spec: DrafterSpec, fused: bool = False) -> None:
        super().__init__()
        h, d, bias = spec.hidden_size, spec.head_dim, spec.attention_bias
        self.head_dim, self.fused = d, fused
        self.q_proj = Linear(h, spec.num_heads * d, bias=bias)
        if fused:
            self.kv_proj = Linear(h, 2 * spec.num_kv_heads * d, bias=bias)
        else:
            self.k_proj = Linear(h, spec.num_kv_heads * d, bias=bias)
            self.v_proj = Linear(h, spec.num_kv_heads * d, bias=bias)
        self.o_proj = Linear(spec.num_heads * d, h, bias=bias)
        self.q_norm = RMSNorm(d, spec.rms_norm_eps)
        self.k_norm = RMSNorm(d, spec.rms_norm_eps)

    def _heads(self, x_n: Tensor) -> Tensor:
        return x_n.unflatten(1, (x_n.shape[1] // self.head_dim, self.head_dim)).transpose(0, 1)

    def _turned(self, x_nC: Tensor, norm: RMSNorm, tables: Tables, ours: bool) -> Tensor:
        """Its heads, normed and rotated, [C / D, n, D].  ours: by our own kernel."""
        if ours:
            from draftsmith.drafter import row_kernels

            return row_kernels.norm_rotate(x_nC, norm.weight, *tables, norm.eps)
        return rotate(norm(self._heads(x_nC)), tables)

    def key_value(self, x_nH: Tensor, tables: Tables, compact: Blocks | None = None, ours: bool = False) -> KeyValue:
        """Keys and values of context tokens, and of block tokens: the same projections, k_norm and RoPE."""
        k, v = self.kv_proj(x_nH).chunk(2, dim=1) if self.fused else (self.k_proj(x_nH), self.v_proj(x_nH))
        return self._turned(spread(k, compact), self.k_norm, tables, ours), self._heads(spread(v, compact))

    def forward(
        self, x_nH: Tensor, context: KeyValue, tables: Tables, mask: Mask, compact: Blocks | None,
        last: Blocks | None,
    ) -> Tensor:  # fmt: skip
        ours = isinstance(mask, Intervals)
        if compact is None:
            q_QC = self.q_proj(trained(x_nH, last))
        else:
            q_QC = trained(spread(self.q_proj(x_nH), compact), last)
        q_NQD = self._turned(q_QC, self.q_norm, (trained(tables[0], last), trained(tables[1], last)), ours)
        k_MPD, v_MPD = self.key_value(x_nH, tables, compact, ours)
        k_MSD, v_MSD = torch.cat([context[0], k_MPD], dim=1), torch.cat([context[1], v_MPD], dim=1)
        out_NQD = attend(q_NQD, k_MSD, v_MSD, mask)
        return self.o_proj(out_NQD.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, spec: DrafterSpec, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up_proj = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=False)
        else:
            self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
            self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_QH: Tensor, ours: bool = False) -> Tensor:
        if ours and self.fused:
            from draftsmith.drafter import row_kernels

            return self.down_proj(row_kernels.silu_mul(self.gate_up_proj(x_QH)))
        gate, up = self.gate_up_proj(x_QH).chunk(2, dim=1) if self.fused else (self.gate_proj(x_QH), self.up_proj(x_QH))
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, spec: DrafterSpec, fused: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(spec, fused)
        self.mlp = MLP(spec, fused)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x_nH: Tensor, context: KeyValue, tables: Tables, mask: Mask,
        compact: Blocks | None = None, last: Blocks | None = None,
    ) -> Tensor:  # fmt: skip
        attended_QH = self.self_attn(self.input_layernorm(x_nH), context, tables, mask, compact, last)
        ours = isinstance(mask, Intervals)
        x_QH = plus(trained(spread(x_nH, compact), last), attended_QH, ours)
        return plus(x_QH, self.mlp(self.post_attention_layernorm(x_QH), ours), ours)

    def key_value(self, context_TH: Tensor, tables: Tables, ours: bool) -> KeyValue:
        """Context has no input norm of its own: hidden_norm has been applied once for all layers."""
        return self.self_attn.key_value(context_TH, tables, ours=ours)


class DFlashDrafter(nn.Module):
    """58 tensors for five layers.  The embedding and the head are the target's and are not in here.

    fused: as `working_copy` makes it, with the projections of FUSED as one.
    """

    def __init__(self, spec: DrafterSpec, fused: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(Layer(spec, fused) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.fc = Linear(len(spec.feature_layers) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def initialize(self, seed: int) -> DFlashDrafter:
        """Normal(0, initializer_range) for matrices, 1 for norms, 0 for biases; the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    value = torch.empty(parameter.shape).normal_(0, self.spec.initializer_range, generator=generator)
                    parameter.copy_(value)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return self

    def tables(self, positions_n: Tensor | Tables) -> Tables:
        """Of positions; tables stay as they are.  A compiled step is given tables: it would compute the cosines of
        positions anew for every head, in every kernel that turns one."""
        if isinstance(positions_n, tuple):
            return positions_n
        return rotary_tables(positions_n, self.spec.head_dim, self.spec.rope_theta)

    def context(self, features_TK: Tensor, positions_T: Tensor | Tables, ours: bool = False) -> list[KeyValue]:
        """Keys and values of context tokens for every layer.  features_TK: [T, K*H].  ours: by our own kernels."""
        context_TH = self.hidden_norm(self.fc(features_TK))
        tables = self.tables(positions_T)
        return [cast(Layer, layer).key_value(context_TH, tables, ours) for layer in self.layers]

    def blocks(
        self, x_nH: Tensor, positions_P: Tensor | Tables, context: Sequence[KeyValue], masks: Sequence[Mask],
        blocks: Blocks | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states of block tokens after the final norm, [Q, H]; the target's head makes logits of them.

        x_nH: embeddings of the P block tokens; Q = P.  With `blocks`, as in training, only those that differ: the A
        anchors, then MASK, which all other slots hold, so that the first layer projects A + 1 rows and not A * B; and
        of the last layer only what is trained is computed, slots 1 to B - 1: Q = A * (B - 1).
        """
        tables = self.tables(positions_P)
        compact, end = blocks, len(self.layers) - 1
        for number, (layer, key_value, mask) in enumerate(zip(self.layers, context, masks, strict=True)):
            x_nH = layer(x_nH, key_value, tables, mask, compact, blocks if number == end else None)
            compact = None
        return self.norm(x_nH)

    def forward(
        self,
        features_TK: Tensor,
        positions_T: Tensor | Tables,
        x_nH: Tensor,
        positions_P: Tensor | Tables,
        masks: Sequence[Mask],
        blocks: Blocks | None = None,
    ) -> Tensor:
        ours = isinstance(masks[0], Intervals)
        return self.blocks(x_nH, positions_P, self.context(features_TK, positions_T, ours), masks, blocks)


def spread(x_nC: Tensor, blocks: Blocks | None) -> Tensor:
    """Rows of A anchors and then MASK to all slots of all blocks, [A * B, C]; without `blocks` as it is."""
    if blocks is None:
        return x_nC
    anchors, size = blocks
    rest = x_nC[anchors].expand(anchors, size - 1, x_nC.shape[1])
    return torch.cat([x_nC[:anchors, None], rest], dim=1).flatten(0, 1)


def plus(x: Tensor, product: Tensor, ours: bool) -> Tensor:
    """Their sum.  ours: by way of float32, which rounds alike; inductor then adds in the norm that follows, and not in
    the matrix product, before which it would copy x."""
    return (x.float() + product.float()).to(x.dtype) if ours else x + product


def trained(x_PC: Tensor, blocks: Blocks | None) -> Tensor:
    """The slots that are trained, all but the first of each block, [A * (B - 1), C]; without `blocks` as it is."""
    return x_PC if blocks is None else x_PC.unflatten(0, blocks)[:, 1:].flatten(0, 1)


FUSED = {"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections of a working copy that hold the rows of two, which read the same input: one product instead of two."""

Parts = dict[nn.Parameter, tuple[nn.Parameter, slice]]
"""Master -> the parameter of the working copy that holds it, and in which rows."""


def working_copy(drafter: DFlashDrafter, dtype: torch.dtype) -> tuple[DFlashDrafter, Parts]:
    """The drafter that computes in `dtype` for float32 masters: matrices and biases are copies, those of FUSED joined;
    norms are shared, since they compute in float32 anyway, and are not among the parts.  In the masters' own dtype it
    is the drafter itself, without parts."""
    if next(drafter.parameters()).dtype == dtype:
        return drafter, {}
    with torch.device("meta"):
        working = DFlashDrafter(drafter.spec, fused=True)
    parts: Parts = {}
    for path, module in working.named_modules():
        parent, _, last = path.rpartition(".")
        for name in [n for n, p in module._parameters.items() if p is not None]:
            sources = [f"{parent}.{source}.{name}".lstrip(".") for source in FUSED.get(last, (last,))]
            masters = [drafter.get_parameter(source) for source in sources]
            if isinstance(module, RMSNorm):
                (module._parameters[name],) = masters
                continue
            copy = nn.Parameter(torch.cat([master.detach().to(dtype) for master in masters]))
            module._parameters[name] = copy
            end = 0
            for master in masters:
                begin, end = end, end + len(master)
                parts[master] = copy, slice(begin, end)
    return working, parts


def embed(tokens_n: Tensor, embedding_VH: Tensor, spec: DrafterSpec) -> Tensor:
    """The target's frozen embedding rows, scaled where the target scales them (Gemma: sqrt(H))."""
    rows = F.embedding(tokens_n, embedding_VH)
    return rows if spec.input_embedding_scale is None else rows * spec.input_embedding_scale


def to_logits(raw: Tensor, spec: DrafterSpec) -> Tensor:
    """What serving applies to the head's product: output multiplier, then soft capping."""
    if spec.output_multiplier is not None:
        raw = raw * spec.output_multiplier
    if spec.final_logit_softcapping is not None:
        raw = spec.final_logit_softcapping * torch.tanh(raw / spec.final_logit_softcapping)
    return raw
