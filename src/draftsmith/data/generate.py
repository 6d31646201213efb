"""Prompts to conversations: every answer is written by the target itself, so that the drafter learns its ways.

By OpenAI-compatible servers (`generate.servers`) or, without any, by the embedded engine.  Conversations are appended
as they are complete: after a kill, the same command goes on with what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config import Config
from draftsmith.data.answers import AnswerFile, Talk, begin, resume
from draftsmith.data.building import disk, writing
from draftsmith.data.messages import iter_prompts, prompt_digest
from draftsmith.errors import InputError
from draftsmith.records import GenerationSpeed, Prompt, to_json

if TYPE_CHECKING:
    from draftsmith.target.model import Target


def generate(config: Config, target: Target | None = None) -> dict[str, int]:
    """Answer every prompt that has no answer yet.  Returns counts: prompts, answered before, by finish reason, and of
    what a person should look at (empty, refused, repeated, failed ...)."""
    from draftsmith.data import client

    settings, path = config.generate, config.conversations
    if settings.prompts is None:
        raise InputError("generate.prompts is not set: a file with `prompt` or `messages` on each line")
    asked = client.identify(settings) if settings.servers else None
    engine, why = ("server", "") if asked else _engine(config)
    recorded = _recorded(config, asked, engine)
    counts: Counter[str] = Counter()
    with writing(path, "answers in"):
        done = resume(path, recorded)  # only now does what is answered stay what it is
        if asked is None and any(p.id not in done for p in _prompts(config, quiet=True)):
            from draftsmith.target.model import load_target

            target = target or load_target(config.target, config.device)
        lengths = _survey(config, target, done, counts)
        if not lengths:
            return dict(counts)
        todo = (p for p in _prompts(config, quiet=True) if p.id in lengths)
        begin(path, recorded)
        with AnswerFile(path) as out:
            if asked is not None:
                client.answer_all(settings, asked["model"], todo, len(lengths), out)
            else:
                from draftsmith.data.engine import answer_all, answer_continuously

                assert target is not None
                if why:
                    print(f"generate.engine: static batches: {why}", flush=True)
                # the shortest first, so that a batch is little padded
                by_length = sorted(todo, key=lambda p: lengths[p.id])
                if engine == "static":
                    answer_all(config, target, by_length, out, stream=len(done))
                else:
                    _say_speed(path, answer_continuously(config, target, by_length, out, stream=len(done)))
    return {**counts, **{k: v for k, v in out.counts.items() if v}}


def _prompts(config: Config, *, quiet: bool = False) -> Iterator[Prompt]:
    settings = config.generate
    assert settings.prompts is not None
    return iter_prompts(
        settings.prompts, settings.limit, multi_turn=settings.multi_turn, max_bad_lines=settings.max_bad_lines,
        quiet=quiet,
    )  # fmt: skip


def _survey(config: Config, target: Target | None, done: dict[str, str], counts: Counter[str]) -> dict[str, int]:
    """Read all prompts once, holding none.  Tokens of each that is still to be answered, by id; without the target
    (then nothing is sorted by it) the length in bytes stands for tokens where even that fits.

    Raises InputError for a prompt that was answered in other words, or leaves no room for an answer.
    """
    from draftsmith.data.engine import prompt_ids, prompt_text
    from draftsmith.target.model import load_tokenizer

    tokenizer, room, lengths = target.tokenizer if target else None, config.max_document, {}
    for prompt in _prompts(config):
        counts["prompts"] += 1
        if done.get(prompt.id) not in (None, prompt_digest(prompt)):
            raise InputError(
                f"{config.generate.prompts}: the prompt {prompt.id!r} is not the one answered in "
                f"{config.conversations} under this id: give it another id, or set data_dir to a new folder"
            )
        counts["answered_before"] += prompt.id in done
        if prompt.id in done:
            continue
        tokenizer = tokenizer or load_tokenizer(config.target)
        messages = Talk(prompt, "keep").messages
        length = len(prompt_text(tokenizer, prompt, messages, config).encode()) if target is None else room
        if length >= room:
            length = len(prompt_ids(tokenizer, prompt, messages, config))
        if length < room or config.tokenize.long_documents == "windows":
            lengths[prompt.id] = length
        elif config.tokenize.long_prompt == "error":
            raise InputError(
                f"{config.generate.prompts}: the prompt {prompt.id!r} has {length} tokens, a row holds {room} "
                f"(train.row_tokens, tokenize.max_tokens): raise them or set tokenize.long_prompt=drop"
            )
        else:
            counts["prompt_too_long"] += 1
    return lengths


def _say_speed(path: Path, speed: GenerationSpeed) -> None:
    with disk(path), open(path.with_suffix(".speed.jsonl"), "a", encoding="utf-8") as handle:
        handle.write(to_json(speed) + "\n")
    print(
        f"generating: {speed.tokens_per_second:,.0f} tokens/s over {speed.seconds:.0f} s, {speed.share:.1%} of the "
        f"roofline's {speed.roofline_tokens_per_second:,.0f} (copies {speed.copy_tb_per_s:.3g} TB/s, products "
        f"{speed.gemm_tflops:.3g} TFLOP/s)",
        flush=True,
    )


def _engine(config: Config) -> tuple[str, str]:
    from draftsmith.data.engine import choose

    return choose(config)


def _recorded(config: Config, asked: dict[str, Any] | None, engine: str) -> dict[str, Any]:
    """What an answer depends on, besides its prompt."""
    keys = (
        "max_new_tokens", "temperature", "top_p", "seed", "multi_turn", "reasoning", "chat_template_kwargs",
    )  # fmt: skip
    return {
        "model": config.target.model,
        "revision": config.target.revision,
        **{k: getattr(config.generate, k) for k in keys},
        "engine": engine,
        "server": asked,
    }
