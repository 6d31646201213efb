"""Random models and rows of a named size, made on the device: what can be timed without a download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftsmith.errors import InputError
from draftsmith.records import DrafterSpec, PackedRow
from draftsmith.target.model import Target, default_feature_layers
from draftsmith.target.packed import register

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Geometry:
    """A dense target's widths."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate


GEOMETRIES = {
    "tiny": Geometry(64, 128, 12, 4, 2, 16, 512),
    "smollm2-135m": Geometry(576, 1536, 30, 9, 3, 64, 49152),
    "small": Geometry(512, 1536, 12, 8, 2, 64, 32000),
    "qwen3-4b": Geometry(2560, 9728, 36, 32, 8, 128, 151936),
    "qwen3-8b": Geometry(4096, 12288, 36, 32, 8, 128, 151936),
    "dense-27b": Geometry(5120, 20480, 64, 48, 8, 128, 248320),
}
"""Widths of public models; dense-27b is a stand-in of that size."""


@dataclass(frozen=True)
class Shape:
    """What is trained on the geometry."""

    row_tokens: int = 3072
    anchors: int = 512
    block_size: int = 16
    layers: int = 5
    features: int = 5
    documents: int = 1
    """Documents a row: one is the hardest case, since every block then sees all that lies before it."""


def drafter_spec(geometry: Geometry, shape: Shape) -> DrafterSpec:
    return DrafterSpec(
        hidden_size=geometry.hidden,
        vocab_size=geometry.vocab,
        num_layers=shape.layers,
        intermediate_size=geometry.intermediate,
        num_heads=geometry.heads,
        num_kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=131072,
        attention_bias=False,
        block_size=shape.block_size,
        mask_token_id=geometry.vocab - 1,
        feature_layers=default_feature_layers(geometry.layers, shape.features),
        num_target_layers=geometry.layers,
        layer_types=("full",) * shape.layers,
        sliding_window=None,
    )


def model_config(geometry: Geometry, layers: int) -> PretrainedConfig:
    """Of a Qwen3 model of the geometry with so many layers."""
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=geometry.hidden, intermediate_size=geometry.intermediate, num_hidden_layers=layers,
        num_attention_heads=geometry.heads, num_key_value_heads=geometry.kv_heads, head_dim=geometry.head_dim,
        vocab_size=geometry.vocab, max_position_embeddings=131072, rms_norm_eps=1e-6, tie_word_embeddings=False,
        use_cache=False, attn_implementation=register(),
    )  # fmt: skip


def random_target(geometry: Geometry, layers: int, device: torch.device, dtype: torch.dtype) -> Target:
    """A Qwen3 model of the geometry cut to `layers`, random weights made on the device."""
    from transformers import Qwen3ForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = Qwen3ForCausalLM(model_config(geometry, layers))
    finally:
        torch.set_default_dtype(before)
    for matrix, seed in ((model.get_input_embeddings(), 1), (model.get_output_embeddings(), 2)):  # however many layers
        with torch.no_grad():
            matrix.weight.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(seed))
    return Target("random", model.eval().requires_grad_(False), None, device, dtype, (0,), 0, "packed")


def random_row(shape: Shape, vocab: int, seed: int) -> PackedRow:
    """A full row, everything supervised, all anchors in use."""
    rng = np.random.default_rng(seed)
    bounds = np.linspace(0, shape.row_tokens, shape.documents + 1).astype(np.int64)
    document = np.repeat(np.arange(shape.documents, dtype=np.int32), np.diff(bounds))
    inside = np.flatnonzero(document[:-1] == document[1:])
    if len(inside) < shape.anchors:
        raise InputError(f"a row of {shape.row_tokens} tokens has {len(inside)} places for {shape.anchors} anchors")
    return PackedRow(
        epoch=0,
        index=seed,
        tokens=rng.integers(0, vocab - 1, shape.row_tokens),
        positions=np.arange(shape.row_tokens) - bounds[document],
        document=document,
        supervised=np.ones(shape.row_tokens, dtype=bool),
        samples=tuple(range(shape.documents)),
        starts=tuple(bounds.tolist()),
        anchors=np.sort(rng.choice(inside, shape.anchors, replace=False)),
        anchor_count=shape.anchors,
    )


@dataclass(frozen=True)
class Work:
    """Floating-point operations of the matrix products of a row, and bytes of the optimizer's pass."""

    target: float
    drafter: float
    optimizer_bytes: float


def work(geometry: Geometry, spec: DrafterSpec, shape: Shape, trained: float) -> Work:
    """trained: slots that reach the head.  Attention's own products are left out: they depend on where the anchors lie;
    so is what nobody needs: the gradient of the features, the first layer's projections of equal MASK tokens, and of
    the last layer all of slot 0 but its keys and values."""
    t, q, h = shape.row_tokens, shape.anchors * shape.block_size, geometry.hidden
    layer = geometry.layer_parameters
    context = 2 * h * geometry.kv_heads * geometry.head_dim
    same = (h * geometry.heads * geometry.head_dim + context) * (q - shape.anchors - 1)
    unused = (layer - context) * shape.anchors
    fc = shape.features * h * h
    drafter = (
        6 * (shape.layers * (layer * q + context * t) - same - unused) + 4 * fc * t + 4 * trained * h * geometry.vocab
    )
    parameters = shape.layers * layer + fc
    return Work(2.0 * (spec.feature_layers[-1] + 1) * layer * t, float(drafter), 28.0 * parameters)


@dataclass(frozen=True)
class RandomRows:
    """Row g of a run, for any g."""

    shape: Shape
    vocab: int

    def row(self, g: int) -> PackedRow:
        return random_row(self.shape, self.vocab, g)
