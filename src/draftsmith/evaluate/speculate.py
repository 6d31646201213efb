"""The serving loop: a block-diffusion drafter proposes, the target verifies, the output is the target's own.

One round: block [token, MASK ...], one drafter pass over the features that are new, drafts from slots 1..B-1; one
target pass over the block; accept the longest agreeing prefix and the target's next token.  The features of the anchor
and the accepted drafts become context; the token that the target added is the next anchor and has none yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafter.attention import Mask, build_masks
from draftsmith.drafter.model import DFlashDrafter, KeyValue, embed, to_logits
from draftsmith.errors import InputError
from draftsmith.records import Answer
from draftsmith.target.extract import capture, check_finite
from draftsmith.target.model import Target


@dataclass
class Sampler:
    """How tokens are chosen.  temperature 0: argmax.  rule: match or reject, see EvaluateConfig."""

    temperature: float = 0.0
    rule: str = "match"
    generator: torch.Generator | None = None

    def probabilities(self, logits_nV: Tensor) -> Tensor:
        return torch.softmax(logits_nV.float() / self.temperature, dim=-1)

    def draw(self, logits_nV: Tensor) -> Tensor:
        """One token a row, [n]."""
        if self.temperature == 0:
            return logits_nV.argmax(-1)
        return torch.multinomial(self.probabilities(logits_nV), 1, generator=self.generator)[:, 0]


class Verifier:
    """The target with its KV cache: feeds tokens, gives logits and features, forgets what was not accepted."""

    def __init__(self, target: Target, feature_layers: Sequence[int]) -> None:
        from transformers import DynamicCache

        if target.model._is_stateful:
            raise InputError(
                f"{target.name} ({target.text_config.model_type}) has a recurrent state, from which rejected drafts "
                f"cannot be taken back: measure it on a server instead (draftsmith evaluate CONFIG --server URL)"
            )
        # without the config every layer keeps all it has seen, sliding ones too, so a rejected tail can be taken back
        self.target, self.wanted, self.cache = target, tuple(feature_layers), DynamicCache()
        self.length = 0
        self.passes = 0

    def feed(self, tokens_n: Tensor, *, last_logits_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] (or [1, V]) and, if feature layers were named, features [n, K*H]."""
        n = len(tokens_n)
        positions = torch.arange(self.length, self.length + n, device=tokens_n.device)
        with capture(self.target.layers, self.wanted) as found:
            out = self.target.model(
                input_ids=tokens_n[None],
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1 if last_logits_only else 0,
            )
        self.length += n
        self.passes += 1
        return out.logits[0], torch.cat([f[0] for f in found], dim=-1) if self.wanted else None

    def forget(self, tokens: int) -> None:
        if tokens:
            self.cache.crop(-tokens)
            self.length -= tokens


class Drafts:
    """The drafter with its context cache: keys and values of context only, a block leaves nothing behind."""

    def __init__(self, drafter: DFlashDrafter, target: Target) -> None:
        self.drafter, self.spec = drafter, drafter.spec
        self.embedding, self.head, self.device = target.embedding, target.head, target.device
        self.context: list[KeyValue] | None = None
        self.length = 0

    def extend(self, features_nK: Tensor) -> None:
        """Append the features of accepted tokens, [n, K*H]."""
        positions = torch.arange(self.length, self.length + len(features_nK), device=self.device)
        new = self.drafter.context(features_nK.to(self.drafter.fc.weight.dtype), positions)
        if self.context is None:
            self.context = new
        else:
            self.context = [
                (torch.cat([k, nk], dim=1), torch.cat([v, nv], dim=1))
                for (k, v), (nk, nv) in zip(self.context, new, strict=True)
            ]
        self.length += len(features_nK)

    def propose(self, anchor: int, slots: int) -> Tensor:
        """Logits of slots 1..slots-1 of the block that begins with `anchor`, [slots - 1, V]."""
        tokens = torch.full((slots,), self.spec.mask_token_id, device=self.device)
        tokens[0] = anchor
        positions = torch.arange(self.length, self.length + slots, device=self.device)
        masks: list[Mask] = [None] * self.spec.num_layers
        if any(window is not None for window in self.spec.windows()):
            here = np.array([self.length])
            masks = build_masks("dense", here * 0, here, self.length, slots, self.spec.windows(), self.device)
        assert self.context is not None
        x = embed(tokens, self.embedding, self.spec).to(self.drafter.fc.weight.dtype)
        hidden = self.drafter.blocks(x, positions, self.context, masks)
        return to_logits(hidden[1:].to(self.head.dtype) @ self.head.T, self.spec)


def _seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _cut(tokens: list[int], stops: Sequence[int], limit: int) -> tuple[list[int], bool]:
    """Tokens up to the first stop token and to the limit; whether the answer ends here."""
    for i, token in enumerate(tokens[:limit]):
        if token in stops:
            return tokens[: i + 1], True
    return tokens[:limit], len(tokens) >= limit


@torch.inference_mode()
def decode_plain(target: Target, prompt: Tensor, max_new_tokens: int, sampler: Sampler) -> Answer:
    """One target pass a token.  prompt: [n]."""
    begin = _seconds(target.device)
    verifier = Verifier(target, ())
    out: list[int] = []
    feed, ended, prefilled = prompt, False, 0.0
    while not ended:
        logits, _ = verifier.feed(feed, last_logits_only=True)
        feed = sampler.draw(logits)
        kept, ended = _cut([*out, int(feed)], target.eos_token_ids, max_new_tokens)
        out = kept
        prefilled = prefilled or _seconds(target.device) - begin
    seconds = _seconds(target.device) - begin
    ones = (1,) * (len(out) - 1)
    return Answer(tuple(out), ones, (0,) * len(ones), (0,) * len(ones), (True,) * len(ones), 1, seconds, prefilled)


@torch.inference_mode()
def decode_speculative(
    target: Target, drafter: DFlashDrafter, prompt: Tensor, max_new_tokens: int, sampler: Sampler
) -> Answer:
    """The serving loop for one prompt, [n].  At temperature 0 its tokens equal `decode_plain`'s."""
    spec = drafter.spec
    begin = _seconds(target.device)
    verifier, drafts = Verifier(target, spec.feature_layers), Drafts(drafter, target)
    logits, features = verifier.feed(prompt, last_logits_only=True)
    assert features is not None
    check_finite(target, [features])
    drafts.extend(features)
    out, ended = _cut([int(sampler.draw(logits))], target.eos_token_ids, max_new_tokens)
    prefilled = _seconds(target.device) - begin
    rounds, drafted, accepted, full = [], [], [], []
    offered_B, agreed_B = [0] * spec.block_size, [0] * spec.block_size
    while not ended:
        wanted = max_new_tokens - len(out)
        slots = min(spec.block_size, 1 + wanted)
        proposal_logits = drafts.propose(out[-1], slots)
        reject = sampler.temperature > 0 and sampler.rule == "reject"
        proposal = sampler.draw(proposal_logits) if reject else proposal_logits.argmax(-1)
        block = torch.cat([torch.tensor([out[-1]], device=target.device), proposal])
        logits, features = verifier.feed(block)
        assert features is not None
        if reject:
            agreed, bonus = _reject(proposal, proposal_logits, logits, sampler)
        else:
            choice = sampler.draw(logits)
            agreed = int((proposal == choice[:-1]).long().cumprod(0).sum())
            bonus = int(choice[agreed])
        verifier.forget(slots - 1 - agreed)
        drafts.extend(features[: agreed + 1])
        kept, ended = _cut([*out, *proposal[:agreed].tolist(), bonus], target.eos_token_ids, max_new_tokens)
        rounds.append(len(kept) - len(out))
        drafted.append(slots - 1)
        accepted.append(agreed)
        full.append(wanted >= spec.block_size and kept[-1] not in target.eos_token_ids)
        for k in range(1, slots):
            offered_B[k] += 1
            agreed_B[k] += k <= agreed
        out = kept
    return Answer(
        tokens=tuple(out),
        rounds=tuple(rounds),
        drafted=tuple(drafted),
        accepted=tuple(accepted),
        full=tuple(full),
        block_size=spec.block_size,
        seconds=_seconds(target.device) - begin,
        prefill_seconds=prefilled,
        slot_offered=tuple(offered_B[1:]),
        slot_accepted=tuple(agreed_B[1:]),
    )


def _reject(proposal: Tensor, proposal_logits: Tensor, logits: Tensor, sampler: Sampler) -> tuple[int, int]:
    """How many drafts stand, and the token that follows."""
    q, p = sampler.probabilities(proposal_logits), sampler.probabilities(logits)
    chance = torch.rand(len(proposal), generator=sampler.generator, device=p.device)
    stands, after = rejection(proposal, q, p, chance)
    agreed = int(stands.long().cumprod(0).sum())
    return agreed, int(torch.multinomial(after[agreed], 1, generator=sampler.generator))


def rejection(drafts_n: Tensor, q_nV: Tensor, p_mV: Tensor, chance_n: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling (Leviathan et al. 2023, algorithm 1), m = n + 1: which drafts stand if all before them do, and
    what to draw from, [m, V], in place of the first that does not, or behind the last.

    q: the drafter's probabilities, p: the target's.  chance: uniform in [0, 1)."""
    at_n = drafts_n[:, None]
    stands_n = chance_n * q_nV.gather(1, at_n)[:, 0] < p_mV[:-1].gather(1, at_n)[:, 0]
    rest_nV = (p_mV[:-1] - q_nV).clamp_(min=0)
    rest_nV = torch.where(rest_nV.sum(1, keepdim=True) > 0, rest_nV, p_mV[:-1])
    return stands_n, torch.cat([rest_nV, p_mV[-1:]])
