"""A whole training step on the CPU against vLLM's speculators (PyPI, `make .peers/speculators/installed`), in one run.

    OMP_NUM_THREADS=2 python benchmarks/step_cpu.py     writes results/step_cpu.json

Same geometry, weights, row, anchors, labels, float32, AdamW and clipping; steps of both alternate.  First one step of
each is compared: loss and every gradient.  Two differences are of definition and stay in the times: speculators sends
slot 0 and slots without weight through the head too, and it makes its labels itself, by the target's head on the
target's last hidden states; `given_labels` is its time without that second head.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _common import write_result
from torch import Tensor, nn

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.records import DrafterSpec, PackedRow
from draftsmith.train.optim import make_optimizer
from draftsmith.train.step import Frozen, RowStep

PEER = Path(__file__).parent.parent / ".peers" / "speculators"
GAMMA, RATE, DECAY, STEPS = 7.0, 1e-4, 0.01, 8
ROWS = ((512, 4, 32), (1024, 4, 64))
"""Tokens, documents, anchors."""

SPEC = DrafterSpec(  # SmolLM2-135M's widths
    hidden_size=576, vocab_size=49152, num_layers=5, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
    rms_norm_eps=1e-5, rope_theta=1e5, max_position_embeddings=8192, attention_bias=False, block_size=16,
    mask_token_id=4, feature_layers=(1, 8, 14, 20, 27), num_target_layers=30, layer_types=("full",) * 5,
    sliding_window=None,
)  # fmt: skip


def make_row(tokens: int, documents: int, anchors: int) -> PackedRow:
    """Documents of equal length, the last two thirds of each supervised, every anchor's block whole inside its own."""
    rng = np.random.default_rng(0)
    length = tokens // documents
    position = np.tile(np.arange(length), documents)
    whole = (position >= length // 3) & (position < length - SPEC.block_size)
    return PackedRow(
        epoch=0, index=0, tokens=rng.integers(5, SPEC.vocab_size, tokens), positions=position,
        document=np.repeat(np.arange(documents, dtype=np.int32), length), supervised=position >= length // 3,
        samples=tuple(range(documents)), starts=tuple(range(0, tokens + 1, length)),
        anchors=np.sort(rng.choice(np.flatnonzero(whole), anchors, replace=False)), anchor_count=anchors,
    )  # fmt: skip


class Ours:
    def __init__(self, row: PackedRow, features: Tensor, frozen: Frozen) -> None:
        settings = TrainConfig(steps=1, learning_rate=RATE, weight_decay=DECAY)
        self.row, self.drafter = row, DFlashDrafter(SPEC).initialize(0)
        source: Any = SimpleNamespace(row=lambda row: features)
        self.row_step = RowStep(
            self.drafter, frozen, source, settings, LossConfig(gamma=GAMMA), attention="sdpa",
            compute_dtype=torch.float32,
        )  # fmt: skip
        self.optimizer = make_optimizer(self.drafter, settings)

    def step(self) -> None:
        self.row_step.step(0, [self.row], self.optimizer, RATE)

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        blocks = self.row_step.blocks(self.row)
        loss = self.row_step.run(self.row, blocks, self.row_step.source.row(self.row)).weighted
        loss = loss / self.row_step.denominator(blocks)
        loss.backward()
        return float(loss.detach()), taken(self.drafter)


class Speculators:
    """Its DFlash model on its SDPA path with its eager cross entropy, and its trainer's order of things."""

    def __init__(self, row: PackedRow, features: Tensor, frozen: Frozen, drafter: DFlashDrafter) -> None:
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.models.dflash import core as peer
        from speculators.train.optimizers import build_optimizers
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

        layers = Qwen3Config(
            vocab_size=SPEC.vocab_size, hidden_size=SPEC.hidden_size, intermediate_size=SPEC.intermediate_size,
            num_hidden_layers=SPEC.num_layers, num_attention_heads=SPEC.num_heads,
            num_key_value_heads=SPEC.num_kv_heads, head_dim=SPEC.head_dim, rms_norm_eps=SPEC.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": SPEC.rope_theta},
            max_position_embeddings=SPEC.max_position_embeddings, tie_word_embeddings=False,
            layer_types=["full_attention"] * SPEC.num_layers,
        )  # fmt: skip
        layers._attn_implementation = "sdpa"
        self.model = DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=layers, draft_vocab_size=SPEC.vocab_size, block_size=SPEC.block_size,
                aux_hidden_state_layer_ids=list(SPEC.feature_layers), mask_token_id=SPEC.mask_token_id,
            )
        ).train()  # fmt: skip
        missing, unexpected = self.model.load_state_dict(drafter.state_dict(), strict=False)
        assert not unexpected and not [n for n in missing if n.startswith(("layers", "fc", "norm", "hidden_norm"))]
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(frozen.embedding)
            for head in (self.model.lm_head, self.model.verifier_lm_head):
                head.weight.copy_(frozen.head)
            self.model.verifier_norm.weight.fill_(1.0)
        for module in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
            getattr(self.model, module).requires_grad_(False)
        anchors = torch.from_numpy(row.anchors)
        valid = torch.ones(len(anchors), dtype=torch.bool)
        peer.select_anchors = lambda *args: (anchors, valid)  # the same anchors, not its own draw
        tokens = torch.from_numpy(row.tokens)
        self.given = GivenLabels(tokens)
        self.batch = {
            "hidden_states": features[None],
            "verifier_last_hidden_states": torch.randn(1, len(tokens), SPEC.hidden_size),
            "input_ids": tokens[None],
            "loss_mask": torch.from_numpy(row.supervised)[None],
            "document_ids": torch.from_numpy(row.document)[None],
            "position_ids": torch.from_numpy(row.positions)[None],
        }
        self.settings, _ = DFlashDraftModel.get_trainer_kwargs(
            loss_fn="ce", loss_implementation="eager", max_anchors=len(anchors),
            per_position_loss_weight="fixed-exp-decay", dflash_decay_gamma=GAMMA,
        )  # fmt: skip
        adamw = SimpleNamespace(optimizer="adamw", lr=RATE, weight_decay=DECAY)
        self.optimizers = build_optimizers(self.model, adamw)

    def loss(self) -> Tensor:
        return self.model(**self.batch, **self.settings)[1]

    def step(self) -> None:
        loss = self.loss()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def step_with_given_labels(self) -> None:
        own, self.model.verifier_lm_head = self.model.verifier_lm_head, self.given
        self.step()
        self.model.verifier_lm_head = own

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        own, self.model.verifier_lm_head = self.model.verifier_lm_head, self.given
        loss = self.loss()
        loss.backward()
        self.model.verifier_lm_head = own
        return float(loss.detach()), taken(self.model)


class GivenLabels(nn.Module):
    """In the place of the target's head: logits of every position, largest at the row's next token; no product."""

    def __init__(self, tokens_T: Tensor) -> None:
        super().__init__()
        following_T = tokens_T.roll(-1)
        self.logits_TV = torch.zeros(len(tokens_T), SPEC.vocab_size).scatter_(1, following_T[:, None], 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        assert hidden.shape[1] == len(self.logits_TV)  # the peer takes this way where A * B >= T
        return self.logits_TV[None]


def taken(module: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def compare(ours: Ours, peer: Speculators) -> dict[str, float]:
    """The peer divides by the number of slots that count, we by the sum of their weights: a constant, taken out."""
    blocks = ours.row_step.blocks(ours.row)
    scale = float(blocks.counts.sum()) / ours.row_step.denominator(blocks)
    (loss, gradients), (other, others) = ours.gradients(), peer.gradients()
    assert gradients.keys() == others.keys()
    worst = max(float((others[n] * scale - g).norm() / g.norm()) for n, g in gradients.items())
    found = {"loss": loss, "peer_loss": other * scale, "worst_gradient_difference": worst}
    assert abs(other * scale / loss - 1) < 1e-5 and worst < 1e-4, found
    return found


def time_alternately(steps: dict[str, Callable[[], None]]) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU milliseconds of each step, in turn, the order reversed every time; two rounds warm up."""
    taken_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(STEPS + 2):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            if turn >= 2:
                taken_ms[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    return taken_ms


def ratio(peer: list[tuple[float, float]], ours: list[tuple[float, float]]) -> dict[str, float]:
    """Of steps that ran side by side: median and middle half; of CPU time too, which a busy machine disturbs less."""
    pairs = list(zip(peer, ours, strict=True))
    low, middle, high = statistics.quantiles([a[0] / b[0] for a, b in pairs], n=4)
    return {
        "median": middle,
        "quarter": low,
        "three_quarters": high,
        "cpu": statistics.median(a[1] / b[1] for a, b in pairs),
    }


def main() -> None:
    if not (PEER / "installed").exists():
        raise SystemExit("make .peers/speculators/installed first")
    sys.path.append(str(PEER))
    cases: dict[str, Any] = {}
    for tokens, documents, anchors in ROWS:
        torch.manual_seed(1)
        row = make_row(tokens, documents, anchors)
        features = torch.randn(tokens, len(SPEC.feature_layers) * SPEC.hidden_size)
        frozen = Frozen(*(torch.randn(SPEC.vocab_size, SPEC.hidden_size) * 0.02 for _ in range(2)))
        ours = Ours(row, features, frozen)
        peer = Speculators(row, features, frozen, ours.drafter)
        same = compare(ours, peer)
        times = time_alternately({"ours": ours.step, "peer": peer.step, "given_labels": peer.step_with_given_labels})
        name = f"T{tokens} A{anchors} B{SPEC.block_size}"
        cases[name] = {
            "same": same,
            "ms": {n: statistics.median(wall for wall, _ in t) for n, t in times.items()},
            "cpu_ms": {n: statistics.median(cpu for _, cpu in t) for n, t in times.items()},
            "ratio": ratio(times["peer"], times["ours"]),
            "ratio_given_labels": ratio(times["given_labels"], times["ours"]),
        }
        print(name, json.dumps(cases[name], indent=1), flush=True)
        result = {
            "peer": "speculators 0.9.0, sdpa, eager ce",
            "threads": torch.get_num_threads(),
            "steps": STEPS,
            "ratio": min(case["ratio"]["median"] for case in cases.values()),
            "cases": cases,
        }
        print(write_result("step_cpu", result))


if __name__ == "__main__":
    main()
