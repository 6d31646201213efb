"""Features out of the frozen target: outputs of its layers, caught on the way.  Shapes as in model.py."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.drafter.attention import one_graph, put, triton_does
from draftsmith.drafter.fp8 import FrozenLinear, with_linear
from draftsmith.drafter.intervals import Intervals
from draftsmith.records import PackedRow
from draftsmith.target.packed import packed_intervals, packed_masks, unsupported

if TYPE_CHECKING:
    from draftsmith.target.model import Target

CHECKED = 1024
"""First tokens of a document that `deviation` looks at; causal, they stand by themselves.  What only later ones would
show, as a window longer than this, it does not see."""


def _states(output: Any) -> Tensor:
    """A decoder layer's output, [1, n, H]."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


@contextlib.contextmanager
def capture(layers: Any, wanted: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect the outputs of decoder layers during the forward passes inside the block, in the order of `wanted`.

    The list is cleared when layer wanted[0] runs again, so it always holds the last pass: K tensors [1, n, H].
    """
    found: list[Tensor] = []

    def keep(first: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if first:
                found.clear()
            found.append(_states(output))

        return hook

    handles = [layers[i].register_forward_hook(keep(n == 0)) for n, i in enumerate(wanted)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _Seeing(nn.Module):
    """A layer that is given Intervals for the mask that transformers hands on, which must be one of its own kinds."""

    def __init__(self, layer: Any, kind: str | None, intervals: dict[str, Intervals]) -> None:
        super().__init__()
        self.layer, self.kind, self.intervals = layer, kind, intervals

    def forward(self, *args: Any, **settings: Any) -> Any:
        kind = self.kind or next(iter(self.intervals))
        return self.layer(*args, **{**settings, "attention_mask": self.intervals[kind]})


def _given(states_nH: Tensor) -> Callable[..., Any]:
    """A hook before a layer: these are its input, whatever the trunk hands it."""

    def hook(layer: nn.Module, args: Any, settings: dict[str, Any]) -> Any:
        if "hidden_states" in settings:
            return args, {**settings, "hidden_states": states_nH[None]}
        return (states_nH[None], *args[1:]), settings

    return hook


def _compared(other_nH: Tensor, apart: list[Tensor]) -> Callable[..., None]:
    """A hook behind a layer that appends the mean relative difference of its output, [], to `apart`."""

    def hook(layer: nn.Module, args: Any, output: Any) -> None:
        own = _states(output)[0].float()
        apart.append(((other_nH.float() - own).norm(dim=-1) / own.norm(dim=-1)).mean())

    return hook


def check_finite(target: Target, features: Sequence[Tensor]) -> None:
    """Raises FloatingPointError where a feature is NaN or Inf; waits for the device."""
    if not all(bool(torch.isfinite(f).all()) for f in features):
        raise FloatingPointError(f"the features of {target.name} hold NaN or Inf: check its weights, or target.dtype")


class FeatureExtractor:
    """The target cut after the last needed layer, its final norm taken out.

    Shares the target's weights.  `row` gives the features of a packed row, [T, K*H], documents kept apart.
    """

    def __init__(self, target: Target, feature_layers: Sequence[int], dtype: torch.dtype) -> None:
        self.target, self.wanted, self.dtype = target, tuple(feature_layers), dtype
        self.trunk = self._cut(target.layers[: self.wanted[-1] + 1])
        self.compiled: Any = None
        """The trunk with its layers compiled, one graph for all layers of a kind: see `compile`."""
        self.intervals: dict[str, Intervals] | None = None
        self.stand_in: Any = None

    def _cut(self, layers: nn.ModuleList) -> Any:
        trunk = copy.copy(self.target.trunk)
        trunk._modules = dict(self.target.trunk._modules)
        trunk.layers, trunk.norm = layers, nn.Identity()
        return trunk

    def compile(self, *, fp8: bool = False, attention: str = "auto") -> str | None:
        """From now on packed rows run through compiled layers.  None, or why they cannot.

        attention: flex, flex_attention; else our kernels where they do such heads on a GPU.
        """
        if self.target.forward != "packed":
            return "it runs one document at a time"
        why = unsupported(self.target.text_config)
        self.intervals = self.compiled = None
        if why is None:
            layers = [with_linear(layer, FrozenLinear) if fp8 else layer for layer in self.trunk.layers]
            compiled = [one_graph(layer) for layer in layers]
            text = self.target.text_config
            heads = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            if attention != "flex" and self.target.device.type == "cuda" and triton_does(heads, self.target.dtype):
                self.intervals = {}
                kinds = getattr(text, "layer_types", None) or [None] * len(layers)
                compiled = [_Seeing(layer, kind, self.intervals) for layer, kind in zip(compiled, kinds, strict=False)]
            self.compiled = self._cut(nn.ModuleList(compiled))
        return why

    @torch.no_grad()
    def deviation(self, row: PackedRow) -> float:
        """By how much a compiled layer differs on a packed row from the uncompiled one on single documents, both given
        the same input: the mean over a document's tokens of |difference| / |output|, of the worst layer and document;
        NaN if any is.  How many layers there are does not count.

        Measured on a CPU, small random models and SmolLM2-135M: at most 7e-7 in float32, 9e-3 in bfloat16, 0.12 with
        8-bit products; 0.26 to 1.3 where documents see each other (SmolLM2 0.33, its first two layers
        0.16).  Raises RuntimeError for a row without documents.
        """
        parts = [slice(start, min(end, start + CHECKED)) for start, end in itertools.pairwise(row.starts)]
        kept: list[list[Tensor]] = []  # by layer, of each document [n, H]
        with contextlib.ExitStack() as hooks:
            for layer in self.compiled.layers:
                keep = lambda _, args, output: kept.append([_states(output)[0, part].clone() for part in parts])
                hooks.enter_context(layer.register_forward_hook(keep))
            self.row(row)
        tokens_T, apart = put(row.tokens, self.target.device), list[Tensor]()
        for part, *outputs in zip(parts, *kept, strict=True):
            with contextlib.ExitStack() as hooks:
                for layer, before, output in zip(self.trunk.layers, [None, *outputs], outputs, strict=False):
                    if before is not None:
                        hooks.enter_context(layer.register_forward_pre_hook(_given(before), with_kwargs=True))
                    hooks.enter_context(layer.register_forward_hook(_compared(output, apart)))
                self.document(tokens_T[part])
        return float(torch.stack(apart).max())

    @torch.no_grad()
    def document(self, tokens_T: Tensor) -> Tensor:
        """Features of one document, [T, K*H]."""
        return self._forward(tokens_T, torch.arange(len(tokens_T), device=tokens_T.device))

    @torch.no_grad()
    def row(self, row: PackedRow) -> Tensor:
        """Features of a row, [T, K*H]; zeros in the tail when the documents run one by one."""
        tokens_T = put(row.tokens, self.target.device)
        if self.target.forward == "packed":
            masks = self._masks(row) if self.compiled else None
            return self._forward(tokens_T, put(row.positions, self.target.device), self.compiled, masks)
        width = len(self.wanted) * self.target.embedding.shape[1]
        out = torch.zeros(len(tokens_T), width, dtype=self.dtype, device=self.target.device)
        for start, end in zip(row.starts, row.starts[1:], strict=False):
            out[start:end] = self.document(tokens_T[start:end])
        return out

    def arrays(self, row: PackedRow) -> tuple[list[np.ndarray], dict[str, Intervals]]:
        """What `forward` takes, on the host: tokens and positions; masks by kind.  By our kernels only."""
        return [row.tokens, row.positions], packed_intervals(row, self.target.text_config, torch.device("cpu"))

    @torch.no_grad()
    def forward(self, tokens_T: Tensor, positions_T: Tensor, masks: dict[str, Intervals]) -> Tensor:
        """The device's part of `row`, once a row has run."""
        assert self.intervals is not None
        self.intervals.update(masks)
        return self._forward(tokens_T, positions_T, self.compiled, self.stand_in)

    def _masks(self, row: PackedRow) -> Any:
        """What transformers hands to the layers; where those see by Intervals, the first row's is as good as any."""
        text, device = self.target.text_config, self.target.device
        if self.intervals is None:
            return packed_masks(row, text, device)
        self.intervals.update(packed_intervals(row, text, device))
        if self.stand_in is None:
            self.stand_in = packed_masks(row, text, device)
        return self.stand_in

    def _forward(self, tokens_T: Tensor, positions_T: Tensor, trunk: Any = None, masks: Any = None) -> Tensor:
        # without masks transformers derives the documents from the positions, see keeps_documents_apart
        trunk = trunk or self.trunk
        with capture(trunk.layers, self.wanted) as found:
            trunk(input_ids=tokens_T[None], position_ids=positions_T[None], attention_mask=masks, use_cache=False)
        return torch.cat([f[0] for f in found], dim=-1).to(self.dtype)


@torch.no_grad()
def keeps_documents_apart(target: Target) -> bool:
    """Two short documents in one row: does changing the first leave the second as it was?

    Dense models pass bit for bit; in a mixture of experts the other document changes how many rows an expert gets and
    so the rounding, hence the bound: far above rounding, far below what a leak does.
    """
    positions = torch.cat([torch.arange(6), torch.arange(7)]).to(target.device)
    tokens = torch.arange(13, device=target.device) + 5
    other = tokens.clone()
    other[:6] += 20
    extract = FeatureExtractor(target, [target.text_config.num_hidden_layers - 1], torch.float32)
    one, two = extract._forward(tokens, positions)[6:], extract._forward(other, positions)[6:]
    worst = float(((one - two).norm(dim=-1) / one.norm(dim=-1)).max())
    return worst < (1e-4 if target.dtype == torch.float32 else 3e-2)
