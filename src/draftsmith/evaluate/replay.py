"""The serving loop's rounds at temperature 0 without the loop: all drafts of many prompts in a few passes.

The target's greedy answers are generated once and kept, so that every drafter is measured on the same text.  One
forward over prompt and answer gives the features, a block is drafted at every position of the answer, and the loop is
walked through those drafts: from an anchor past the drafts that agree, plus one.  In exact arithmetic these are the
loop's rounds, one by one; in bfloat16 near ties can fall otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from draftsmith.config import Config
from draftsmith.data.store import Document
from draftsmith.drafter.attention import TILE, any_shape, build_masks, put, put_all
from draftsmith.drafter.blocks import build_blocks
from draftsmith.drafter.model import DFlashDrafter, embed, to_logits
from draftsmith.errors import InputError
from draftsmith.files import make_folder, write_text
from draftsmith.progress import Progress
from draftsmith.records import Answer, GreedyAnswer, PackedRow, read_json
from draftsmith.target.extract import FeatureExtractor, check_finite
from draftsmith.target.model import Target, weights_fingerprint

BEYOND = 31
"""Tokens kept after a stop token; a block of B slots can reach B - 2 beyond it."""
ROW_QUERIES = {"cpu": 32768, "cuda": 131072}
"""Block slots of one pass, at least one answer's."""
CHUNK = 2048
"""Rows of logits that exist at a time."""


def greedy_answers(
    config: Config, target: Target, prompts: Sequence[Document], tell: Callable[[], None] = lambda: None
) -> list[GreedyAnswer]:
    """The target's own answers to the prompts, read from `greedy-<key>.json` in the data folder, or generated and kept
    there.  Batched: in bfloat16 near ties can fall otherwise than one by one.  tell: called after each batch."""
    ids = [d.prompt().tolist() for d in prompts]
    pins = {
        "target_weights": weights_fingerprint(config.target),
        "dtype": f"{target.dtype} {target.device.type}",
        "max_new_tokens": config.evaluate.max_new_tokens,
        "prompts": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()[:12]
    path = config.data / f"greedy-{key}.json"
    if not path.is_file():
        count = config.evaluate.max_new_tokens + BEYOND
        tokens = generate_greedily(target, ids, count, config.generate.batch_size, tell)
        answers = [
            GreedyAnswer(d.id, d.category, tuple(i), tuple(t), _length(t, target, config.evaluate.max_new_tokens))
            for d, i, t in zip(prompts, ids, tokens, strict=True)
        ]
        make_folder(config.data)
        write_text(path, json.dumps({"pins": pins, "answers": [dataclasses.asdict(a) for a in answers]}))
    return [
        GreedyAnswer(**{**a, "prompt": tuple(a["prompt"]), "tokens": tuple(a["tokens"])})
        for a in read_json(path, "greedy answers")["answers"]
    ]


@torch.inference_mode()
def generate_greedily(
    target: Target, prompts: Sequence[list[int]], count: int, batch_size: int, tell: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """`count` tokens for each prompt, also past a stop token; batches of prompts of about one length."""
    from transformers import GenerationConfig

    target.model.generation_config = GenerationConfig()  # or what is not set below would come from the model's own
    pad = target.pad_token_id
    out: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with any_shape(target.device), Progress("greedy answers", len(prompts), "prompts") as progress:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            width = max(len(prompts[i]) for i in batch)
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in batch], device=target.device)
            mask = torch.tensor([[0] * (width - n) + [1] * n for n in (len(prompts[i]) for i in batch)])
            settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=pad)
            found = target.model.generate(
                input_ids=ids, attention_mask=mask.to(target.device), generation_config=settings
            )
            out |= dict(zip(batch, found[:, width:].tolist(), strict=True))
            tell()
            progress.advance(len(batch))
    return [out[i] for i in range(len(prompts))]


def _length(tokens: Sequence[int], target: Target, limit: int) -> int:
    return next((i + 1 for i, t in enumerate(tokens[:limit]) if t in target.eos_token_ids), limit)


@torch.inference_mode()
def replay(
    target: Target, drafter: DFlashDrafter, answers: Sequence[GreedyAnswer], max_new_tokens: int
) -> list[Answer]:
    """The rounds of the serving loop for every answer; `seconds` are 0.

    Raises InputError for a block that reaches further than the answers were kept.
    """
    spec = drafter.spec
    if spec.block_size - 2 > BEYOND:
        raise InputError(f"evaluate.replay: blocks of up to {BEYOND + 2} slots, the drafter has {spec.block_size}")
    extract = FeatureExtractor(target, spec.feature_layers, target.dtype)
    with any_shape(target.device):
        return [
            walk(answer, drafts, spec.block_size, max_new_tokens, target.eos_token_ids)
            for group in _groups(answers, ROW_QUERIES[target.device.type] // spec.block_size)
            for answer, drafts in zip(group, _drafts(target, drafter, extract, group, max_new_tokens), strict=True)
        ]


def _groups(answers: Sequence[GreedyAnswer], most: int) -> Iterator[list[GreedyAnswer]]:
    """In the given order, `most` tokens of answers at the most, or a single one that is longer."""
    group: list[GreedyAnswer] = []
    for answer in answers:
        if group and sum(a.length for a in group) + answer.length > most:
            yield group
            group = []
        group.append(answer)
    if group:
        yield group


def make_row(answers: Sequence[GreedyAnswer]) -> PackedRow:
    """Prompts and answers as one row without a tail, every token of an answer but the last an anchor."""
    tokens = [np.array([*a.prompt, *a.tokens[: a.length]], dtype=np.int64) for a in answers]
    starts = np.cumsum([0, *map(len, tokens)])
    anchors = [np.arange(s + len(a.prompt), e - 1) for a, s, e in zip(answers, starts, starts[1:], strict=False)]
    return PackedRow(
        epoch=0,
        index=0,
        tokens=np.concatenate(tokens),
        positions=np.concatenate([np.arange(len(t)) for t in tokens]),
        document=np.repeat(np.arange(len(tokens), dtype=np.int32), [len(t) for t in tokens]),
        supervised=np.ones(starts[-1], dtype=bool),
        samples=tuple(range(len(tokens))),
        starts=tuple(starts.tolist()),
        anchors=np.concatenate(anchors),
        anchor_count=sum(map(len, anchors)),
    )


def _drafts(
    target: Target, drafter: DFlashDrafter, extract: FeatureExtractor, answers: Sequence[GreedyAnswer], limit: int
) -> list[np.ndarray]:
    """For each answer, drafts of slots 1..B-1 at each of its tokens but the last, int64 [length - 1, B - 1]."""
    spec, device, row = drafter.spec, target.device, make_row(answers)
    counts = [a.length - 1 for a in answers]
    if sum(counts) == 0:
        return [np.zeros((0, spec.block_size - 1), dtype=np.int64) for _ in answers]
    blocks = build_blocks(row, spec.block_size, spec.mask_token_id, 1.0, trim=True)
    features = extract.row(row)
    check_finite(target, [features])
    # as served: min(B, 1 + tokens still wanted) slots
    sizes = np.concatenate([np.minimum(spec.block_size, limit - np.arange(n)) for n in counts])
    masks = build_masks(
        "sdpa", blocks.low, blocks.high, len(row.tokens), spec.block_size, spec.windows(), device, trained=True,
        sizes=sizes, most=TILE if device.type == "cpu" else 8 * TILE,
    )  # fmt: skip
    dtype = drafter.fc.weight.dtype
    distinct, positions_P = put_all(
        [np.append(blocks.inputs[:, 0], spec.mask_token_id), blocks.positions.ravel()], device
    )
    hidden_QH = drafter(
        features.to(dtype), put(row.positions, device), embed(distinct, target.embedding, spec).to(dtype), positions_P,
        masks, (len(sizes), spec.block_size),
    )  # fmt: skip
    found = [to_logits(part @ target.head.T, spec).argmax(-1) for part in hidden_QH.to(target.dtype).split(CHUNK)]
    drafts = torch.cat(found).view(len(sizes), spec.block_size - 1).cpu().numpy()
    return np.split(drafts, np.cumsum(counts)[:-1])


def walk(answer: GreedyAnswer, drafts: np.ndarray, block_size: int, limit: int, stops: Sequence[int]) -> Answer:
    """The loop's rounds through the drafts of every position, [length - 1, B - 1]."""
    said, last = np.array(answer.tokens), answer.length - 1
    rounds, drafted, accepted, full = [], [], [], []
    offered, agreeing = np.zeros(block_size - 1, dtype=int), np.zeros(block_size - 1, dtype=int)
    at = 0
    while at < last:
        slots = min(block_size, limit - at)
        right = drafts[at, : slots - 1] == said[at + 1 : at + slots]
        agreed = slots - 1 if right.all() else int(right.argmin())
        kept = min(agreed + 1, last - at)
        rounds.append(kept)
        drafted.append(slots - 1)
        accepted.append(agreed)
        full.append(limit - at - 1 >= block_size and answer.tokens[at + kept] not in stops)
        offered[: slots - 1] += 1
        agreeing[:agreed] += 1
        at += kept
    return Answer(
        tokens=answer.tokens[: answer.length],
        rounds=tuple(rounds),
        drafted=tuple(drafted),
        accepted=tuple(accepted),
        full=tuple(full),
        block_size=block_size,
        seconds=0.0,
        prefill_seconds=0.0,
        slot_offered=tuple(offered.tolist()),
        slot_accepted=tuple(agreeing.tolist()),
    )
