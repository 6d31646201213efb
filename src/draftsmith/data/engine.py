"""The embedded engine, for when no server is given.

static: transformers' own generation, batch after batch, each as slow as its longest answer.  continuous: a finished
answer makes room for the next prompt at once (slots.py); used on GPUs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from draftsmith.config import Config
from draftsmith.data.answers import AnswerFile, Reply, Talk, split_reasoning
from draftsmith.data.render import rendered
from draftsmith.data.slots import Slots, attending
from draftsmith.errors import InputError
from draftsmith.progress import Progress
from draftsmith.records import GenerationSpeed, Prompt
from draftsmith.target.model import Target, model_folder, pick_device
from draftsmith.target.packed import KINDS

Answer = tuple[str, str, int]
"""Text, finish reason, number of tokens."""


def prompt_text(tokenizer: Any, prompt: Prompt, messages: Sequence[dict[str, Any]], config: Config) -> str:
    """What the target is given before its next answer."""

    def render(shown: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            shown, tools=list(prompt.tools) or None, tokenize=False, add_generation_prompt=True,
            **config.generate.chat_template_kwargs,
        )  # fmt: skip

    try:
        return rendered(render, messages)
    except TemplateError as error:
        raise InputError(f"{config.generate.prompts}: the chat template refuses {prompt.id!r}: {error}") from error


def prompt_ids(tokenizer: Any, prompt: Prompt, messages: Sequence[dict[str, Any]], config: Config) -> list[int]:
    """The same as token ids."""
    return tokenizer(prompt_text(tokenizer, prompt, messages, config), add_special_tokens=False)["input_ids"]


def choose(config: Config) -> tuple[str, str]:
    """(static or continuous, why not continuous if it was left to us).  Raises InputError for what cannot be."""
    import transformers

    wanted, device = config.generate.engine, pick_device(config.device).type
    if wanted == "static":
        return "static", ""
    if wanted == "auto" and device != "cuda":
        return "static", f"continuous batching pays on a GPU, the device is {device}"
    auto = transformers.AutoConfig.from_pretrained(
        model_folder(config.target), trust_remote_code=config.target.trust_remote_code
    )
    text = auto.get_text_config()
    odd = set(getattr(text, "layer_types", None) or ()) - KINDS
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(auto), None)
    if odd:
        why = f"continuous batching cannot do {' or '.join(sorted(odd))} layers"
    elif getattr(text, "attn_logit_softcapping", None) or (known is not None and not known._supports_sdpa):
        why = f"continuous batching cannot do a {auto.model_type} model's attention (capped scores, sinks)"
    elif known is None or not known._supports_flex_attn:
        why = f"continuous batching needs to choose the attention, which a {auto.model_type} model does not let it"
    else:
        return "continuous", ""
    if wanted == "continuous":
        raise InputError(f"generate.engine is continuous, but {why}: set generate.engine=static")
    return "static", why


@torch.inference_mode()
def answer_continuously(
    config: Config, target: Target, prompts: Sequence[Prompt], out: AnswerFile, stream: int
) -> GenerationSpeed:
    """Answer prompts, `generate.batch_size` at a time, each conversation written when it is complete.

    stream: separates the random numbers of one run from those of the others.  Raises InputError if the GPU's memory
    does not hold them.
    """
    settings, coming = config.generate, iter(prompts)
    ready: deque[tuple[Talk, list[int]]] = deque()
    flying: dict[int, Talk] = {}

    ended: list[tuple[Talk, list[int]]] = []

    def asked(talk: Talk) -> tuple[Talk, list[int]]:
        return talk, prompt_ids(target.tokenizer, talk.prompt, talk.messages, config)

    def get_ready() -> None:
        missing = settings.batch_size - len(ready)
        ready.extend(asked(Talk(p, settings.reasoning)) for p in itertools.islice(coming, missing))

    with Progress("generating", len(prompts), "answers") as progress, attending(target):
        slots = Slots(target, settings, stream)
        get_ready()
        while ready or flying or ended:
            if now := [ready.popleft() for _ in range(min(len(slots.free), len(ready)))]:
                flying |= zip(slots.fill([ids for _, ids in now]), (talk for talk, _ in now), strict=True)
            if flying:
                slots.advance()
            for talk, tokens in ended:  # of the steps before: written while the device is at these
                talk.take(as_reply(read_answer(target, tokens), settings.reasoning))
                if not talk.done:
                    ready.appendleft(asked(talk))
                    continue
                out.write(talk)
                progress.advance(1, f"{out.counts['completion_tokens']} tokens")
            get_ready()
            ended = [(flying.pop(slot), tokens) for slot, tokens in slots.take()]
        return slots.speed()


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
                for talk, answer in zip(open_talks, answers, strict=True):
                    talk.take(as_reply(answer, settings.reasoning))
                turn += 1
            for talk in talks:
                out.write(talk)
            out.sync()
            progress.advance(len(talks), f"{out.counts['completion_tokens']} tokens")


def generation_config(target: Target, config: Config) -> Any:
    """Not the model's own, whose repetition_penalty and the like would bend answers in ways that serving does not."""
    from transformers import GenerationConfig

    settings = config.generate
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens, eos_token_id=list(target.eos_token_ids),
        pad_token_id=target.pad_token_id, **sampling,
    )  # fmt: skip


@torch.inference_mode()
def answer_batch(target: Target, prompts: list[list[int]], config: Config, stream: int = 0) -> list[Answer]:
    """The answer to each prompt, with transformers' batched generation.

    stream: separates the random numbers of one batch from those of the others.
    """
    from transformers import GenerationConfig

    target.model.generation_config = GenerationConfig()  # or what is not set below would come from the model's own
    settings = config.generate
    width = max(len(p) for p in prompts)
    pad = target.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    torch.manual_seed(settings.seed * 1_000_003 + stream)
    out = target.model.generate(input_ids=ids, attention_mask=mask, generation_config=generation_config(target, config))
    return [read_answer(target, row) for row in out[:, width:].tolist()]


def read_answer(target: Target, row: list[int]) -> Answer:
    """Of what was generated, up to its stop token."""
    stop = next((i for i, token in enumerate(row) if token in target.eos_token_ids), None)
    text = target.tokenizer.decode(row if stop is None else row[:stop], skip_special_tokens=True)
    return text, "length" if stop is None else "stop", len(row) if stop is None else stop + 1


def as_reply(answer: Answer, reasoning: str) -> Reply:
    text, reason, length = answer
    thought, rest = ("", text) if reasoning == "keep" else split_reasoning(text)
    return Reply(rest, reason, length, thought)
