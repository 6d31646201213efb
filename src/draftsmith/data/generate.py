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
from jinja2 import TemplateError

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
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
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
    path, record = config.conversations, config.conversations.with_suffix(".settings.json")
    settings = _settings(config)
    done = _resume(path, record, settings)
    for prompt in prompts:
        if done.get(prompt.id, prompt.messages) != prompt.messages:
            raise InputError(
                f"{config.generate.prompts}: the prompt {prompt.id!r} is not the one answered in {path} under this id: "
                f"give it another id, or set data_dir to a new folder"
            )
    todo = [p for p in prompts if p.id not in done]
    counts: Counter[str] = Counter(prompts=len(prompts), answered_before=len(prompts) - len(todo))
    if not todo:
        return dict(counts)
    target = target or load_target(config.target, config.device)
    encoded = [_prompt_ids(target, p, config.generate.prompts) for p in todo]
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
    if not path.exists():
        write_text(record, json.dumps(settings, indent=2))
    with open(path, "a", encoding="utf-8") as out, Progress("generating", len(order), "answers") as progress:
        for start in range(0, len(order), config.generate.batch_size):
            batch = order[start : start + config.generate.batch_size]
            for i, (text, reason, length) in zip(
                batch, answer_batch(target, [encoded[i] for i in batch], config, stream=len(done) + start), strict=True
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


def _prompt_ids(target: Target, prompt: Prompt, source: Path) -> list[int]:
    try:
        text = target.tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise InputError(f"{source}: the chat template refuses {prompt.id!r}: {error}") from error
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: list[list[int]], config: Config, stream: int = 0
) -> list[tuple[str, str, int]]:
    """(text, finish reason, number of tokens) of each prompt, with transformers' batched generation.

    stream: separates the random numbers of one batch from those of the others.
    """
    from transformers import GenerationConfig

    # the model's own (repetition_penalty, no_repeat_ngram_size ...) would bend answers in ways that serving does not
    target.model.generation_config = GenerationConfig()
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


def _settings(config: Config) -> dict[str, Any]:
    """What an answer depends on, besides its prompt."""
    keys = ("max_new_tokens", "temperature", "top_p", "seed")
    return {
        "model": config.target.model,
        "revision": config.target.revision,
        **{k: getattr(config.generate, k) for k in keys},
    }


def _resume(path: Path, record: Path, settings: dict[str, Any]) -> dict[str, tuple[dict[str, str], ...]]:
    """Prompts answered before, by id.  Cuts off a last line that a kill left half-written; refuses changed settings."""
    if not path.exists():
        return {}
    before = read_json(record, f"settings with which {path} was begun (or set data_dir to a new folder)")
    changed = {k: (before.get(k), v) for k, v in settings.items() if before.get(k) != v}
    if changed:
        what = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in changed.items())
        raise InputError(f"{path} was begun with other settings ({what}): set them back, or data_dir to a new folder")
    with open(path, "rb+") as handle:
        data = handle.read()
        whole = data.rfind(b"\n") + 1
        handle.truncate(whole)
    return {str(value["id"]): tuple(value["messages"][:-1]) for _, value in read_jsonl(path, "conversations")}
