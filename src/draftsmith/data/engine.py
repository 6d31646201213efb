"""The embedded engine, for when no server is given: transformers' own generation.

static: batch after batch, each as slow as its longest answer.  continuous: a finished answer makes room for the next
prompt at once; used on GPUs, whose memory it sizes its cache by.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from draftsmith.config import Config
from draftsmith.data.answers import AnswerFile, Reply, Talk, split_reasoning
from draftsmith.data.render import rendered
from draftsmith.errors import InputError
from draftsmith.progress import Progress
from draftsmith.records import Prompt
from draftsmith.target.model import Target, model_folder, pick_device

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
    from transformers import AutoConfig

    wanted, device = config.generate.engine, pick_device(config.device).type
    if device != "cuda":
        why = f"continuous batching needs a GPU, the device is {device}"
    else:
        model = AutoConfig.from_pretrained(
            model_folder(config.target), trust_remote_code=config.target.trust_remote_code
        ).get_text_config()
        odd = set(getattr(model, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        why = f"continuous batching cannot do {' or '.join(sorted(odd))} layers" if odd else ""
    if wanted == "continuous" and why:
        raise InputError(f"generate.engine is continuous, but {why}: set generate.engine=static")
    return ("static" if wanted == "static" or why else "continuous"), ("" if wanted == "static" else why)


def answer_continuously(
    config: Config, target: Target, prompts: Sequence[Prompt], out: AnswerFile, stream: int
) -> None:
    """Answer prompts, `generate.batch_size` at a time, each conversation written when it is complete.

    stream: separates the random numbers of one run from those of the others.  Raises InputError if transformers' engine
    stops; what was answered is in the file.
    """
    from transformers import ContinuousBatchingConfig

    settings, waiting = config.generate, iter(prompts)
    flying: dict[str, Talk] = {}
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=settings.batch_size, seed=(settings.seed * 1_000_003 + stream) % 2**31
    )

    def ask(talk: Talk) -> None:
        ids = prompt_ids(target.tokenizer, talk.prompt, talk.messages, config)
        flying[manager.add_request(ids, max_new_tokens=settings.max_new_tokens)] = talk

    with (
        Progress("generating", len(prompts), "answers") as progress,
        target.model.continuous_batching_context_manager(
            generation_config(target, config), timeout=5, continuous_batching_config=batching
        ) as manager,
    ):
        for prompt in itertools.islice(waiting, 2 * settings.batch_size):  # as many again wait in its queue
            ask(Talk(prompt, settings.reasoning))
        while flying:
            result = manager.get_result(timeout=1)
            if (result is None and not manager.is_running()) or (result is not None and result.error is not None):
                why = result.error if result is not None else manager.background_thread_status.fatal_error
                raise InputError(
                    f"transformers' continuous batching stopped ({why}): set generate.engine=static in a new data_dir"
                )
            if result is None or not result.is_finished():
                continue
            talk = flying.pop(result.request_id)
            talk.take(as_reply(read_answer(target, result.generated_tokens), settings.reasoning))
            if not talk.done:
                ask(talk)
                continue
            out.write(talk)
            progress.advance(1, f"{out.counts['completion_tokens']} tokens")
            for prompt in itertools.islice(waiting, 1):
                ask(Talk(prompt, settings.reasoning))


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
