"""The embedded engine: transformers' own batched generation, for when no server is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from draftsmith.config import Config
from draftsmith.data.answers import AnswerFile, Reply, Talk, split_reasoning
from draftsmith.errors import InputError
from draftsmith.progress import Progress
from draftsmith.records import Prompt
from draftsmith.target.model import Target


def prompt_text(tokenizer: Any, prompt: Prompt, messages: Sequence[dict[str, Any]], config: Config) -> str:
    """What the target is given before its next answer."""
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(prompt.tools) or None, tokenize=False, add_generation_prompt=True,
            **config.generate.chat_template_kwargs,
        )  # fmt: skip
    except TemplateError as error:
        raise InputError(f"{config.generate.prompts}: the chat template refuses {prompt.id!r}: {error}") from error


def prompt_ids(tokenizer: Any, prompt: Prompt, messages: Sequence[dict[str, Any]], config: Config) -> list[int]:
    """The same as token ids."""
    return tokenizer(prompt_text(tokenizer, prompt, messages, config), add_special_tokens=False)["input_ids"]


def answer_all(config: Config, target: Target, prompts: Sequence[Prompt], out: AnswerFile, stream: int) -> None:
    """Answer prompts, batch by batch, each conversation turn by turn; `stream` as in answer_batch."""
    settings = config.generate
    with Progress("generating", len(prompts), "answers") as progress:
        for start in range(0, len(prompts), settings.batch_size):
            talks = [Talk(p, settings.reasoning) for p in prompts[start : start + settings.batch_size]]
            turn = 0
            while open_talks := [t for t in talks if not t.done]:
                ids = [prompt_ids(target.tokenizer, t.prompt, t.messages, config) for t in open_talks]
                # another turn is another stream of random numbers, far from those of other batches
                answers = answer_batch(target, ids, config, stream=stream + start + turn * 1_000_000_007)
                for talk, (text, reason, length) in zip(open_talks, answers, strict=True):
                    reasoning, rest = ("", text) if settings.reasoning == "keep" else split_reasoning(text)
                    talk.take(Reply(rest, reason, length, reasoning))
                turn += 1
            for talk in talks:
                out.write(talk)
            out.sync()
            progress.advance(len(talks), f"{out.counts['completion_tokens']} tokens")


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
