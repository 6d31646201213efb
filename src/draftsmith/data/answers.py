"""Answers as they come: conversations being held, and the append-only file they end in.  Needs no torch.

conversations.jsonl            a line a conversation, appended as soon as it is complete, synced every two seconds
conversations.settings.json    what the answers depend on; a later run with other settings is refused
conversations.refused.jsonl    prompts that a server would not take, and why: not asked again
conversations.speed.jsonl      of each run of the continuous engine: tokens a second, and what the device would allow
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.data.building import disk
from draftsmith.data.messages import has_lone_surrogate, prompt_digest, read_jsonl
from draftsmith.errors import InputError
from draftsmith.files import write_text
from draftsmith.records import Conversation, Prompt, read_json, to_json

SYNC_SECONDS = 2.0
REFUSAL = re.compile(
    r"\s*(i'?m (really |very |so )?sorry,? (but )?(i )?(can'?t|cannot|can not|am not able|am unable)|i (can'?t|cannot) "
    r"(help|assist|provide|fulfill|comply)|i'?m (not able|unable) to|as an ai( language model)?,? i (can'?t|cannot))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reply:
    """One answer.  Made by an engine or a server's client; read by Talk."""

    text: str
    finish_reason: str
    tokens: int
    reasoning: str = ""
    refused: bool = False
    tool_calls: tuple[dict[str, Any], ...] = ()


class Talk:
    """A conversation being held: the prompt's turns, each assistant turn written by the target in its turn.

    It ends early at an answer that did not end by itself, for what would follow answers something else, and at one
    with half a character, which cannot be sent.
    """

    def __init__(self, prompt: Prompt, reasoning: str) -> None:
        self.prompt, self.reasoning = prompt, reasoning
        self.messages: list[dict[str, Any]] = []
        self.replies: list[Reply] = []
        self.generated: list[int] = []
        self.apart: list[str] = []
        self._go_on()

    def _go_on(self) -> None:
        given = self.prompt.messages
        while len(self.messages) < len(given) and len(self.messages) not in self.prompt.regenerate:
            self.messages.append(given[len(self.messages)])

    @property
    def done(self) -> bool:
        return len(self.messages) > len(self.prompt.messages) or (
            bool(self.replies) and (self.replies[-1].finish_reason != "stop" or has_lone_surrogate(self.messages[-1]))
        )

    def take(self, reply: Reply) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.reasoning and self.reasoning == "keep":
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = list(reply.tool_calls)
        self.generated.append(len(self.messages))
        self.apart.append(reply.reasoning)
        self.messages.append(message)
        self.replies.append(reply)
        if not self.done:
            self._go_on()

    def conversation(self) -> Conversation:
        apart = tuple(self.apart) if self.reasoning == "apart" and any(self.apart) else ()
        hidden = self.reasoning != "keep" and any(self.apart)
        return Conversation(
            id=self.prompt.id,
            messages=tuple(self.messages),
            finish_reason=self.replies[-1].finish_reason,
            # reasoning that is not in the messages was generated too: then the count says nothing about them
            completion_tokens=0 if hidden else sum(r.tokens for r in self.replies),
            category=self.prompt.category,
            tools=self.prompt.tools,
            generated=tuple(self.generated),
            flags=tuple(sorted({flag for r in self.replies for flag in flags(r)})),
            apart=apart,
            prompt_digest=prompt_digest(self.prompt),
        )


def flags(reply: Reply) -> list[str]:
    """empty, refused, repeated: what a person would want to know about an answer."""
    out = []
    if not reply.text.strip() and not reply.tool_calls:
        out.append("empty")
    if reply.refused or reply.finish_reason == "content_filter" or REFUSAL.match(reply.text):
        out.append("refused")
    if reply.finish_reason == "length" and is_repeating(reply.text):
        out.append("repeated")
    return out


def is_repeating(text: str, tail: int = 400) -> bool:
    """Whether the end of the text is one piece over and over, at least four times."""
    end = text[-tail:]
    return len(end) >= 40 and any(end[period:] == end[:-period] for period in range(1, len(end) // 4 + 1))


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, answer) of a text in which the one ends with </think>."""
    before, mark, after = text.partition("</think>")
    return (before.replace("<think>", "", 1).strip("\n"), after.lstrip("\n")) if mark else ("", text)


class AnswerFile:
    """Appends conversations and counts them.  A line is in the operating system's hands when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> AnswerFile:
        with disk(self.path):
            self.handle = open(self.path, "ab", buffering=0)
        self.synced = time.monotonic()
        return self

    def write(self, talk: Talk) -> None:
        conversation = talk.conversation()
        self._append(self.handle, to_json(conversation))
        for reply in talk.replies:
            self.counts[f"finish_{reply.finish_reason}"] += 1
            self.counts["completion_tokens"] += reply.tokens
            self.counts["reasoning"] += bool(reply.reasoning)
            self.counts.update(flags(reply))
        if time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def refused(self, prompt: Prompt, why: str) -> None:
        """A server will not take this prompt: remembered, so that it is not asked again."""
        self.counts["refused_by_server"] += 1
        with disk(self.path), open(refused_file(self.path), "ab", buffering=0) as handle:
            self._append(handle, json.dumps({"id": prompt.id, "prompt_digest": prompt_digest(prompt), "why": why}))

    def _append(self, handle: Any, line: str) -> None:
        content = (line + "\n").encode("utf-8", errors="backslashreplace")
        with disk(self.path):
            start = os.fstat(handle.fileno()).st_size
            if handle.write(content) != len(content):
                os.ftruncate(handle.fileno(), start)
                raise OSError(28, "no space left on device")

    def sync(self) -> None:
        with disk(self.path):
            os.fsync(self.handle.fileno())
        self.synced = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self.handle:
            self.sync()


def refused_file(path: Path) -> Path:
    return path.with_suffix(".refused.jsonl")


def settings_file(path: Path) -> Path:
    return path.with_suffix(".settings.json")


def begin(path: Path, settings: dict[str, Any]) -> None:
    """Record what the answers depend on, before the first of them."""
    if not path.exists():
        with disk(path):
            write_text(settings_file(path), json.dumps(settings, indent=2))


def resume(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Digests of the prompts answered (or refused) before, by id.

    Cuts off a last line that a kill left half-written.  Raises InputError if the settings are others, with the
    difference.
    """
    if not path.exists():
        return {}
    before = read_json(settings_file(path), f"settings with which {path} was begun (or set data_dir to a new folder)")
    changed = [
        f"{key} was {was!r}, is {now!r}"
        for key, was, now in differences("", before, json.loads(json.dumps(settings)))
    ]  # fmt: skip
    if changed:
        raise InputError(
            f"{path} was begun with other settings ({'; '.join(changed)}): set them back, or data_dir to a new folder"
        )
    done: dict[str, str] = {}
    for file in (path, refused_file(path)):
        if file.exists():
            cut_half_line(file)
            done |= {str(v["id"]): str(v.get("prompt_digest", "")) for _, v in read_jsonl(file, "conversations")}
    return done


def cut_half_line(path: Path) -> None:
    with open(path, "rb+") as handle:
        end = handle.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - (1 << 16))
            handle.seek(start)
            at = handle.read(keep - start).rfind(b"\n")
            if at >= 0:
                keep = start + at + 1
                break
            keep = start
        if keep < end:
            handle.truncate(keep)


def differences(key: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of each leaf that differs."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*was, *(k for k in now if k not in was)]
        return [d for k in keys for d in differences(f"{key}.{k}" if key else k, was.get(k), now.get(k))]
    return [] if was == now else [(key, was, now)]
