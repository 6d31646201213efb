"""The serving loop and plain decoding with fixed shapes: a whole round, or token, is one CUDA graph.

The loop of speculate.py asks the device for every kernel of every round, and a small target waits for the host most of
the time.  Here keys and values of target and drafter lie in buffers as long as the longest answer, each at its
position, masked beyond what is known; so a round always runs the same kernels, and forgetting a rejected draft is not
counting it.  The host reads a round's tokens and nothing else.  On a CPU the same functions run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.cuda_graphs import one_launch
from draftsmith.drafter.attention import Mask, dense_mask, put_all
from draftsmith.drafter.blocks import block_interval
from draftsmith.drafter.model import DFlashDrafter, embed, to_logits
from draftsmith.evaluate.speculate import _cut, _seconds, rejection
from draftsmith.records import Answer
from draftsmith.target.extract import capture, check_finite
from draftsmith.target.model import Target


class FixedCache:
    """What transformers' layers need of a cache: keys and values [1, M, length, D] of each layer, written in place at
    the positions `at`."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, torch.zeros(0, dtype=torch.int64)
        self.held: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self.held):
            shapes = ((*x.shape[:2], self.length, x.shape[3]) for x in (keys, values))
            self.held.append(tuple(keys.new_zeros(shape) for shape in shapes))  # type: ignore[arg-type]
        for there, new in zip(self.held[layer_idx], (keys, values), strict=True):
            there.index_copy_(2, self.at, new)
        return self.held[layer_idx]


def unsupported(target: Target) -> str | None:
    """Why the target cannot be served so; None: it can."""
    if target.model._is_stateful:
        return "its state is recurrent"
    kinds = set(getattr(target.text_config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(target.text_config, "sliding_window", None)):
        return "it has layers without full attention"
    if target.model.config._attn_implementation == "eager":  # which adds a mask to the scores: ours is of booleans
        return "its attention is eager"
    return None


class GraphedLoop:
    """Decodes prompts of at most `longest` tokens to at most `limit` new ones; without a drafter only plainly.

    temperature > 0: by either rule of EvaluateConfig; random numbers are those of the device's default generator.
    """

    @torch.inference_mode()
    def __init__(
        self, target: Target, drafter: DFlashDrafter | None, longest: int, limit: int, temperature: float = 0.0,
        rule: str = "match",
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.limit, self.temperature = target, drafter, limit, temperature
        self.reject = temperature > 0 and rule == "reject"
        device, size = target.device, drafter.spec.block_size if drafter else 1
        self.total = longest + limit + size
        self.cache = FixedCache(self.total)
        self.wanted = drafter.spec.feature_layers if drafter else ()
        self.length, self.end = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.said = torch.zeros(size + 1, dtype=torch.int64, device=device)
        if drafter is not None:
            spec, dtype = drafter.spec, drafter.fc.weight.dtype
            shape = (spec.num_kv_heads, self.total, spec.head_dim)
            self.context = [
                (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
                for _ in range(spec.num_layers)
            ]
            self.own = {w: put_all(block_interval(1, size, w), device) for w in set(spec.windows())}
        self._start(torch.full((2,), target.pad_token_id, device=device))  # makes the buffers
        self.next_token = _graph(self._next_token, device)
        self.round = _graph(self._round, device) if drafter is not None else None

    def _choose(self, logits_nV: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits_nV.argmax(-1)
        return _draw(self._chances(logits_nV))

    def _chances(self, logits_nV: Tensor) -> Tensor:
        return torch.softmax(logits_nV.float() / self.temperature, -1)

    def _target(self, tokens_n: Tensor, at_n: Tensor, keep: int) -> tuple[Tensor, list[Tensor]]:
        """Logits of the last `keep` tokens (0: of all), and features by layer."""
        self.cache.at = at_n
        mask = torch.arange(self.total, device=at_n.device) <= at_n[:, None]
        with capture(self.target.layers, self.wanted) as found:
            out = self.target.model(
                input_ids=tokens_n[None], position_ids=at_n[None], attention_mask=mask[None, None],
                past_key_values=self.cache, use_cache=True, logits_to_keep=keep,
            )  # fmt: skip
        return out.logits[0], found

    def _extend(self, found: list[Tensor], at_n: Tensor) -> None:
        assert self.drafter is not None
        features = torch.cat([f[0] for f in found], dim=-1).to(self.drafter.fc.weight.dtype)
        for held, new in zip(self.context, self.drafter.context(features, at_n), strict=True):
            for there, values in zip(held, new, strict=True):
                there.index_copy_(1, at_n, values)

    def _start(self, prompt: Tensor) -> None:
        """Prefill, and the first token."""
        at = torch.arange(len(prompt), device=prompt.device)
        logits, found = self._target(prompt, at, keep=1)
        if self.drafter is not None:
            check_finite(self.target, found)
            self._extend(found, at)
        self.length.fill_(len(prompt))
        self.end.fill_(len(prompt) + self.limit)
        self.token.copy_(self._choose(logits))

    def _next_token(self) -> None:
        logits, _ = self._target(self.token, self.length[None], keep=1)
        self.token.copy_(self._choose(logits))
        self.length.add_(1)

    def _masks(self, at_B: Tensor, slots: Tensor) -> list[Mask]:
        """Of the block at positions `at_B`, of which `slots` are wanted: drafter/blocks.py's rule on the device."""
        assert self.drafter is not None
        made: dict[int | None, Mask] = {}
        for window, (own_lo, own_hi) in self.own.items():
            low = torch.zeros_like(at_B) if window is None else (at_B - (window - 1)).clamp(min=0)
            known, hi = self.length.expand_as(at_B), torch.minimum(own_hi, slots)
            lo = torch.minimum(own_lo, hi - 1)  # as in block_interval
            made[window] = dense_mask(low, known, lo, hi, context=self.total, own=len(at_B))
        return [made[w] for w in self.drafter.spec.windows()]

    def _round(self) -> None:
        """Draft, verify, accept.  Leaves the target's tokens and the number of drafts accepted in `said`."""
        drafter, target = self.drafter, self.target
        assert drafter is not None
        spec = drafter.spec
        slot = torch.arange(spec.block_size, device=target.device)
        at, slots = self.length + slot, (self.end - self.length).clamp(max=spec.block_size)
        block = torch.where(slot == 0, self.token, spec.mask_token_id)
        x = embed(block, target.embedding, spec).to(drafter.fc.weight.dtype)
        hidden = drafter.blocks(x, at, self.context, self._masks(at, slots))
        proposed = to_logits(hidden[1:].to(target.head.dtype) @ target.head.T, spec)
        q = self._chances(proposed) if self.reject else None
        drafts = proposed.argmax(-1) if q is None else _draw(q)
        logits, found = self._target(torch.cat([self.token, drafts]), at, keep=0)
        if q is None:
            choice = self._choose(logits)
            right = drafts == choice[:-1]
        else:
            right, after = rejection(drafts, q, self._chances(logits), torch.rand_like(drafts, dtype=q.dtype))
            choice = _draw(after)  # that behind the last wanted draft is one too many, and cut off
        agreed = (right & (slot[1:] < slots)).long().cumprod(0).sum(0, keepdim=True)
        if q is not None:
            choice = torch.where(slot < agreed, torch.cat([drafts, self.token]), choice)
        self._extend(found, at)
        self.said.copy_(torch.cat([choice, agreed]))
        self.token.copy_(choice.gather(0, agreed))
        self.length.add_(agreed[0] + 1)

    @torch.inference_mode()
    def decode_plain(self, prompt: Tensor, seed: int = 0) -> Answer:
        begin, out, ended, prefilled = self._begin(prompt, seed)
        while not ended:
            self.next_token()
            out, ended = _cut([*out, int(self.token)], self.target.eos_token_ids, self.limit)
        ones = (1,) * (len(out) - 1)
        seconds = _seconds(self.target.device) - begin
        return Answer(tuple(out), ones, (0,) * len(ones), (0,) * len(ones), (True,) * len(ones), 1, seconds, prefilled)

    @torch.inference_mode()
    def decode_speculative(self, prompt: Tensor, seed: int = 0) -> Answer:
        assert self.drafter is not None and self.round is not None
        size, stops = self.drafter.spec.block_size, self.target.eos_token_ids
        begin, out, ended, prefilled = self._begin(prompt, seed)
        rounds, drafted, accepted, full = [], [], [], []
        offered, agreeing = [0] * size, [0] * size
        while not ended:
            wanted = self.limit - len(out)
            self.round()
            *choice, agreed = self.said.tolist()
            kept, ended = _cut([*out, *choice[: agreed + 1]], stops, self.limit)
            rounds.append(len(kept) - len(out))
            drafted.append(min(size, 1 + wanted) - 1)
            accepted.append(agreed)
            full.append(wanted >= size and kept[-1] not in stops)
            for k in range(1, drafted[-1] + 1):
                offered[k] += 1
                agreeing[k] += k <= agreed
            out = kept
        return Answer(
            tokens=tuple(out), rounds=tuple(rounds), drafted=tuple(drafted), accepted=tuple(accepted), full=tuple(full),
            block_size=size, seconds=_seconds(self.target.device) - begin, prefill_seconds=prefilled,
            slot_offered=tuple(offered[1:]), slot_accepted=tuple(agreeing[1:]),
        )  # fmt: skip

    def _begin(self, prompt: Tensor, seed: int) -> tuple[float, list[int], bool, float]:
        """When it began, the first token, whether that was all, and the seconds until then."""
        begin = _seconds(self.target.device)
        torch.manual_seed(seed)
        self._start(prompt)
        out, ended = _cut([int(self.token)], self.target.eos_token_ids, self.limit)
        return begin, out, ended, _seconds(self.target.device) - begin


def _draw(chances_nV: Tensor) -> Tensor:
    """One draw a row, nothing read back."""
    return (chances_nV / torch.empty_like(chances_nV).exponential_()).argmax(-1)


@torch.inference_mode()
def _graph(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The function as one launch.  It reads and writes tensors that stay where they are."""
    return one_launch(function, device)[0] if device.type == "cuda" else function
