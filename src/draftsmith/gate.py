"""Gates: two checks that catch what a loss curve hides.

overfit  one conversation, trained until it is known by heart: the accepted length of full rounds must reach B in the
         serving loop.  A label, mask or position that is off by one cannot pass.
parity   the exported folder in the official package, in an environment of its own: the same hidden states, logits,
         answers and accepted lengths as here.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.config import Config
from draftsmith.data.loader import eligible_anchors
from draftsmith.drafter.attention import build_masks, pick_attention
from draftsmith.drafter.blocks import build_blocks
from draftsmith.drafter.model import DFlashDrafter, embed, to_logits
from draftsmith.errors import InputError
from draftsmith.evaluate.speculate import Sampler, decode_plain, decode_speculative
from draftsmith.export import export_folder, load_drafter
from draftsmith.files import write_tensors
from draftsmith.progress import Progress
from draftsmith.records import PackedRow
from draftsmith.rundir import newest
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.model import Target, drafter_spec, load_target, model_folder
from draftsmith.train.checkpoint import newest_checkpoint
from draftsmith.train.optim import make_optimizer, rate, set_rate
from draftsmith.train.step import Frozen, RowStep

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "A farmer has 12 hens. Each lays 5 eggs a week. How many eggs are that in 3 weeks?",
    "Write a short poem about a lighthouse.",
)


class KnownFeatures:
    """Features computed once, for a row that never changes."""

    def __init__(self, features: Tensor) -> None:
        self.features = features

    def row(self, row: PackedRow) -> Tensor:
        return self.features


def one_row(tokens: Sequence[int], prompt: int) -> PackedRow:
    """A row of one document in which everything after the prompt is supervised and every possible anchor is drawn."""
    n = len(tokens)
    supervised = np.arange(n) >= prompt
    document = np.zeros(n, dtype=np.int32)
    anchors = eligible_anchors(supervised, document)
    ids = np.array(tokens, dtype=np.int64)
    return PackedRow(0, 0, ids, np.arange(n), document, supervised, (0,), (0, n), anchors, len(anchors))


def overfit(
    config: Config, *, answer_tokens: int = 64, steps: int = 400, learning_rate: float = 2e-3,
    target: Target | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Learn one answer of the target by heart, then serve it.  Returns accepted_length (mean of full rounds),
    block_size, steps, lossless; passed if accepted_length == block_size."""
    target = target or load_target(config.target, config.device)
    spec = drafter_spec(config.drafter, target)
    if answer_tokens < 2 * spec.block_size:
        raise InputError(f"gate overfit: the answer must be at least two blocks ({2 * spec.block_size} tokens) long")
    prompt = prompt_ids(target, QUESTIONS[1])
    answer = decode_plain(target, prompt, answer_tokens, Sampler())
    row = one_row([*prompt.tolist(), *answer.tokens], len(prompt))
    features = FeatureExtractor(target, spec.feature_layers, target.dtype).row(row)
    settings = config.train.model_copy(update={"learning_rate": learning_rate, "warmup_fraction": 0.05})
    drafter = DFlashDrafter(spec).initialize(settings.seed).to(target.device)
    optimizer = make_optimizer(drafter, settings)
    step = RowStep(
        drafter, Frozen(target.embedding, target.head), KnownFeatures(features), settings, config.loss,
        attention=pick_attention(settings.attention, target.device, spec.head_dim, target.dtype),
        compute_dtype=target.dtype,
    )  # fmt: skip
    result: dict[str, Any] = {}
    with Progress("learning one conversation by heart", steps, "steps") as progress:
        for number in range(steps):
            set_rate(optimizer, rate(number, steps, settings))
            sums = step.step(number, [row], optimizer, optimizer.param_groups[0]["lr"])
            accuracy = float(sums.correct_B.sum() / sums.count_B.sum())
            progress.advance(note=f"accuracy {accuracy:.3f}")
            if accuracy == 1.0 or number == steps - 1:
                serving = DFlashDrafter(spec).to(target.device, target.dtype)
                serving.load_state_dict(drafter.state_dict())
                served = decode_speculative(target, serving, prompt, answer_tokens, Sampler())
                full = served.full_rounds()
                result = {
                    "accepted_length": sum(full) / len(full) if full else 0.0,
                    "block_size": spec.block_size,
                    "full_rounds": len(full),
                    "steps": number + 1,
                    "lossless": served.tokens == answer.tokens,
                }
                if result["accepted_length"] == spec.block_size:
                    break
    return {**result, "passed": result["accepted_length"] == spec.block_size and result["lossless"]}


def parity(
    config: Config, official_python: Path, *, prompts: Sequence[str] = QUESTIONS, max_new_tokens: int = 48,
    target: Target | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare the drafter of `evaluate.drafter` (default: the newest checkpoint) with the official package.

    Both sides load the same exported folder in float32.  Returns logits_rel_err, hidden_rel_err, features_rel_err
    (norm of the difference over norm), tokens_equal, accepted_equal; passed if all are equal and the drafter's errors
    < 1e-5.
    """
    if not official_python.is_file():
        raise InputError(f"gate parity needs the official package's python, {official_python} is missing: make peers")
    target = target or load_target(config.target.model_copy(update={"dtype": "float32"}), "cpu")
    path = config.evaluate.drafter or newest_checkpoint(newest(config.runs_dir, config.name))
    with tempfile.TemporaryDirectory() as work:
        folder = path
        if (path / "state.json").is_file():
            folder = export_folder(path, Path(work) / "export", config.target.model)
        drafter = load_drafter(folder, target)
        ids = [prompt_ids(target, p) for p in prompts]
        mine = [decode_speculative(target, drafter, p, max_new_tokens, Sampler()) for p in ids]
        row = one_row([*ids[0].tolist(), *mine[0].tokens], len(ids[0]))
        features = FeatureExtractor(target, drafter.spec.feature_layers, torch.float32).row(row)
        hidden, logits = packed_outputs(drafter, target, row, features)
        theirs = run_official(
            official_python, Path(work), target=model_folder(config.target), drafter=folder, prompts=ids, row=row,
            features=features, max_new_tokens=max_new_tokens, eos=target.eos_token_ids,
        )  # fmt: skip
    result = {
        "logits_rel_err": rel_err(logits, theirs["logits"]),
        "hidden_rel_err": rel_err(hidden, theirs["hidden"]),
        "features_rel_err": rel_err(features, theirs["features"]),
        "tokens_equal": [list(a.tokens) for a in mine] == theirs["tokens"],
        "accepted_equal": [list(a.rounds) for a in mine] == theirs["accepted"],
        "prompts": len(ids),
        "rounds": sum(len(a.rounds) for a in mine),
        "accepted_drafts": sum(sum(a.accepted) for a in mine),
        "anchors": row.anchor_count,
        "versions": theirs["versions"],
    }
    # features come from two versions of transformers: a layer off by one differs by far more than their rounding
    close = result["logits_rel_err"] < 1e-5 and result["hidden_rel_err"] < 1e-5 and result["features_rel_err"] < 1e-4
    return {**result, "passed": close and result["tokens_equal"] and result["accepted_equal"]}


@torch.no_grad()
def packed_outputs(drafter: DFlashDrafter, target: Target, row: PackedRow, features: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [A, B, H] and logits [A, B - 1, V] of all blocks of a row, by the training forward."""
    spec = drafter.spec
    blocks = build_blocks(row, spec.block_size, spec.mask_token_id, 1.0, trim=True)
    masks = build_masks(
        "sdpa", blocks.low, blocks.high, len(row.tokens), spec.block_size, spec.windows(), target.device
    )
    x = embed(torch.from_numpy(blocks.inputs.reshape(-1)), target.embedding, spec)
    hidden = drafter(
        features, torch.from_numpy(row.positions), x, torch.from_numpy(blocks.positions.reshape(-1)), masks
    )
    hidden = hidden.view(blocks.anchors, spec.block_size, -1)
    return hidden, to_logits(hidden[:, 1:] @ target.head.T, spec)


def run_official(
    python: Path, work: Path, *, target: Path, drafter: Path, prompts: Sequence[Tensor], row: PackedRow,
    features: Tensor, max_new_tokens: int, eos: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Run official.py under the other environment's python; exchange JSON and safetensors in `work`."""
    tensors = {"features": features.contiguous(), "tokens": torch.from_numpy(row.tokens)}
    write_tensors(work / "in.safetensors", tensors)
    job = {
        "target": str(target.resolve()),
        "drafter": str(drafter.resolve()),
        "prompts": [p.tolist() for p in prompts],
        "anchors": row.anchors[: row.anchor_count].tolist(),
        "max_new_tokens": max_new_tokens,
        "eos": list(eos),
    }
    (work / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("official.py")
    done = subprocess.run([str(python), str(script), str(work)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the official package failed:\n{done.stderr[-3000:]}")
    return {**json.loads((work / "out.json").read_text()), **load_file(work / "out.safetensors")}


def prompt_ids(target: Target, question: str) -> Tensor:
    messages = [{"role": "user", "content": question}]
    text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, device=target.device)


def rel_err(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm())
