"""Prompts to conversations: every answer is written by the target itself, so that the drafter learns its ways.

By OpenAI-compatible servers (`generate.servers`) or, without any, by the embedded engine.  Conversations are appended
as they are complete: after a kill, the same command goes on with what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftsmith.config import Config
from draftsmith.data.answers import AnswerFile, Talk, begin, resume
from draftsmith.data.building import writing
from draftsmith.data.messages import prompt_digest, read_prompts
from draftsmith.errors import InputError
from draftsmith.records import Prompt

if TYPE_CHECKING:
    from draftsmith.target.model import Target

__all__ = ["generate", "read_prompts"]


def generate(config: Config, target: Target | None = None) -> dict[str, int]:
    """Answer every prompt that has no answer yet.  Returns counts: prompts, answered before, by finish reason, and of
    what a person should look at (empty, refused, repeated, failed ...)."""
    from draftsmith.data import client

    settings, path = config.generate, config.conversations
    if settings.prompts is None:
        raise InputError("generate.prompts is not set: a file with `prompt` or `messages` on each line")
    prompts = read_prompts(
        settings.prompts, settings.limit, multi_turn=settings.multi_turn, max_bad_lines=settings.max_bad_lines
    )
    asked = client.identify(settings) if settings.servers else None
    recorded = _recorded(config, asked)
    done = resume(path, recorded)
    for prompt in prompts:
        if done.get(prompt.id) not in (None, prompt_digest(prompt)):
            raise InputError(
                f"{settings.prompts}: the prompt {prompt.id!r} is not the one answered in {path} under this id: "
                f"give it another id, or set data_dir to a new folder"
            )
    todo = [p for p in prompts if p.id not in done]
    counts: Counter[str] = Counter(prompts=len(prompts), answered_before=len(prompts) - len(todo))
    if not todo:
        return dict(counts)
    if asked is None:
        from draftsmith.target.model import load_target

        target = target or load_target(config.target, config.device)
    todo = _that_fit(config, target, todo, counts)
    with writing(path, "answers in"):
        begin(path, recorded)
        with AnswerFile(path) as out:
            if asked is not None:
                client.answer_all(settings, asked["model"], todo, out)
            else:
                from draftsmith.data import engine

                assert target is not None
                engine.answer_all(config, target, todo, out, stream=len(done))
    return {**counts, **{k: v for k, v in out.counts.items() if v}}


def _that_fit(config: Config, target: Target | None, prompts: Sequence[Prompt], counts: Counter[str]) -> list[Prompt]:
    """Those with room for an answer, the shortest first, so that a batch is little padded."""
    from draftsmith.data.engine import prompt_ids
    from draftsmith.target.model import load_tokenizer

    tokenizer = target.tokenizer if target is not None else load_tokenizer(config.target)
    room, fit = config.max_document, []
    for prompt in prompts:
        length = len(prompt_ids(tokenizer, prompt, Talk(prompt, "keep").messages, config))
        if length < room or config.tokenize.long_documents == "windows":
            fit.append((length, prompt))
        elif config.tokenize.long_prompt == "error":
            raise InputError(
                f"{config.generate.prompts}: the prompt {prompt.id!r} has {length} tokens, a row holds {room} "
                f"(train.row_tokens, tokenize.max_tokens): raise them or set tokenize.long_prompt=drop"
            )
        else:
            counts["prompt_too_long"] += 1
    return [prompt for _, prompt in sorted(fit, key=lambda pair: pair[0])]


def _recorded(config: Config, asked: dict[str, Any] | None) -> dict[str, Any]:
    """What an answer depends on, besides its prompt."""
    keys = (
        "max_new_tokens", "temperature", "top_p", "seed", "multi_turn", "reasoning", "chat_template_kwargs",
    )  # fmt: skip
    return {
        "model": config.target.model,
        "revision": config.target.revision,
        **{k: getattr(config.generate, k) for k in keys},
        "engine": "embedded" if asked is None else "server",
        "server": asked,
    }
