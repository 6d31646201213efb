"""Prompts to conversations: every answer is written by the target itself, so that the drafter learns its ways.

Answers are appended batch by batch and flushed to disk: after a kill, the same command goes on with what is missing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from draftsmith.config import Config
from draftsmith.data.tokenize import check_messages, read_jsonl
from draftsmith.errors import InputError
from draftsmith.files import write_text
from draftsmith.progress import Progress
from draftsmith.records import Conversation, Prompt, read_json, to_json
from draftsmith.target.model import Target, load_target


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """JSONL with `prompt` or `messages`, optional `id` and `category`.  Raises InputError naming file and line."""
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, value in read_jsonl(path, "prompts (generate.prompts)"):
        try:
            messages = value["messages"] if "messages" in value else [{"role": "user", "content": value["prompt"]}]
            check_messages(messages)
            if messages[-1]["role"] != "user":
                raise ValueError(f"the last message must be the user's, not {messages[-1]['role']!r}")
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{path}:{number}: not a prompt: {what}") from error
        prompt = Prompt(str(value.get("id", number)), tuple(messages), str(value.get("category", "all")))
        if prompt.id in seen:
            raise InputError(f"{path}:{number}: the id {prompt.id!r} appears twice")
        seen.add(prompt.id)
        prompts.append(prompt)
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    return prompts


def generate(config: Config, target: Target | None = None) -> dict[str, int]:
    """Answer every prompt that has no answer yet.  Returns counts: prompts, answered before, and by finish reason."""
    if config.generate.prompts is None:
        raise InputError("generate.prompts is not set: a JSONL file with `prompt` or `messages` on each line")
    prompts = read_prompts(config.generate.prompts, config.generate.limit)
    path = config.conversations
    done = _resume(config, path)
    todo = [p for p in prompts if p.id not in done]
    counts: Counter[str] = Counter(prompts=len(prompts), answered_before=len(prompts) - len(todo))
    if not todo:
        return dict(counts)
    target = target or load_target(config.target, config.device)
    encoded = [_prompt_ids(target, p) for p in todo]
    room = config.max_document
    for prompt, ids in zip(todo, encoded, strict=True):
        if len(ids) >= room:
            if config.tokenize.long_prompt == "error":
                raise InputError(
                    f"{config.generate.prompts}: the prompt {prompt.id!r} has {len(ids)} tokens, a row holds {room} "
                    f"(train.row_tokens, tokenize.max_tokens): raise them or set tokenize.long_prompt=drop"
                )
            counts["prompt_too_long"] += 1
    order = [i for i in sorted(range(len(todo)), key=lambda i: len(encoded[i])) if len(encoded[i]) < room]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out, Progress("generating", len(order), "answers") as progress:
        for start in range(0, len(order), config.generate.batch_size):
            batch = order[start : start + config.generate.batch_size]
            for i, (text, reason, length) in zip(
                batch, answer_batch(target, [encoded[i] for i in batch], config, stream=start), strict=True
            ):
                counts[f"finish_{reason}"] += 1
                counts["completion_tokens"] += length
                counts["empty"] += not text.strip()
                messages = (*todo[i].messages, {"role": "assistant", "content": text})
                out.write(to_json(Conversation(todo[i].id, messages, reason, length, todo[i].category)) + "\n")
            out.flush()
            os.fsync(out.fileno())
            progress.advance(len(batch), f"{counts['completion_tokens']} tokens")
    return dict(counts)


def _prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    text = target.tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: list[list[int]], config: Config, stream: int = 0
) -> list[tuple[str, str, int]]:
    """(text, finish reason, number of tokens) of each prompt, with transformers' batched generation."""
    settings = config.generate
    width = max(len(p) for p in prompts)
    pad = target.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    torch.manual_seed(settings.seed * 1_000_003 + stream)
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    out = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(target.eos_token_ids),
        pad_token_id=pad,
        **sampling,
    )
    answers = []
    for row in out[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in target.eos_token_ids), None)
        kept = row if stop is None else row[:stop]
        text = target.tokenizer.decode(kept, skip_special_tokens=True)
        answers.append((text, "length" if stop is None else "stop", len(row) if stop is None else stop + 1))
    return answers


def _resume(config: Config, path: Path) -> set[str]:
    """Ids answered before.  Cuts off a last line that a kill left half-written; refuses changed settings."""
    settings = {"model": config.target.model, "revision": config.target.revision}
    keys = ("max_new_tokens", "temperature", "top_p", "seed")
    settings |= {k: getattr(config.generate, k) for k in keys}
    record = path.with_suffix(".settings.json")
    if not path.exists():
        write_text(record, json.dumps(settings, indent=2))
        return set()
    before = read_json(record, "settings of the answers begun before")
    changed = {k: (before.get(k), v) for k, v in settings.items() if before.get(k) != v}
    if changed:
        what = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in changed.items())
        raise InputError(f"{path} was begun with other settings ({what}): set them back, or data_dir to a new folder")
    with open(path, "rb+") as handle:
        data = handle.read()
        whole = data.rfind(b"\n") + 1
        handle.truncate(whole)
    return {str(value["id"]) for _, value in read_jsonl(path, "conversations")}
