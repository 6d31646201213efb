"""Conversations to a store: the target's own chat template, and the tokens that the target itself wrote.

The answer's span is found in characters by rendering prefixes, checked against the whole rendering, then mapped to
tokens through the tokenizer's offsets.  What cannot be mapped exactly is left out and counted, never guessed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import Config
from draftsmith.data.store import Document, write_store
from draftsmith.errors import InputError
from draftsmith.files import sha256
from draftsmith.progress import Progress
from draftsmith.records import Conversation, StoreManifest
from draftsmith.target.model import eos_token_ids, load_tokenizer

PROBE = [
    {"role": "user", "content": "What is 2 + 2?\nAnswer in one word."},
    {"role": "assistant", "content": "Four — 4."},
]


def tokenize(config: Config) -> StoreManifest:
    """Read conversations.jsonl, write the store.  Raises InputError for unreadable input or an empty result."""
    tokenizer = load_tokenizer(config.target)
    eos = eos_token_ids(config.target, tokenizer)
    conversations = read_conversations(config.conversations)
    counts: Counter[str] = Counter()
    return write_store(
        config.store,
        _documents(config, tokenizer, eos, conversations, counts),
        tokenizer=fingerprint(tokenizer),
        eos_token_ids=eos,
        sources={config.conversations.name: sha256(config.conversations)},
        counts=counts,
    )


def _documents(
    config: Config, tokenizer: Any, eos: Sequence[int], conversations: Sequence[Conversation], counts: Counter[str]
) -> Iterator[Document]:
    """Yield what is kept; count everything, the kept and the left out by reason."""
    with Progress("tokenizing", len(conversations), "conversations") as progress:
        for conversation in conversations:
            counts["read"] += 1
            made = _document(config, tokenizer, eos, conversation)
            if isinstance(made, str):
                counts[made] += 1
            else:
                counts["kept"] += 1
                counts["heldout"] += made.heldout
                yield made
            progress.advance()


def _document(config: Config, tokenizer: Any, eos: Sequence[int], conversation: Conversation) -> Document | str:
    """The document, or the reason why there is none."""
    if conversation.finish_reason != "stop" and config.tokenize.length_cut == "drop":
        return f"finish_reason_{conversation.finish_reason}"
    messages = list(conversation.messages)
    limit = config.max_document
    while messages:
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
            return "no_answer"
        text, spans = render(tokenizer, messages)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_spans = spans_to_tokens(encoded["offset_mapping"], spans)
        if token_spans is None:
            return "answer_boundary_inside_a_token"
        if token_spans[0][0] >= limit:
            if config.tokenize.long_prompt == "drop":
                return "prompt_too_long"
            raise InputError(
                f"{config.conversations}: the prompt of {conversation.id!r} has {token_spans[0][0]} tokens, a document "
                f"holds {limit} (train.row_tokens, tokenize.max_tokens): raise them or set tokenize.long_prompt=drop"
            )
        if len(encoded["input_ids"]) <= limit:
            break
        messages = messages[:-2]  # whole turns only: the last question goes with its answer
    else:
        return "too_long"
    tokens = np.array(encoded["input_ids"], dtype=np.int32)
    cut = conversation.finish_reason != "stop" and len(messages) == len(conversation.messages)
    supervised = [end_at_stop(tokens, s, e, eos, keep_stop=not (cut and i == len(token_spans) - 1))
                  for i, (s, e) in enumerate(token_spans)]  # fmt: skip
    supervised = [(s, e) for s, e in supervised if e > s]
    if not supervised:
        return "no_supervised_tokens"
    held = is_heldout(conversation, config.tokenize.heldout_fraction)
    return Document(tokens, tuple(supervised), conversation.id, conversation.category, held)


def render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and the character range of each assistant turn (what follows the generation prompt).

    Raises InputError if the template does not render prefixes as prefixes: then no span can be trusted.
    """
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(list(messages[:i]), tokenize=False, add_generation_prompt=True)
        until = tokenizer.apply_chat_template(list(messages[: i + 1]), tokenize=False)
        if not (until.startswith(before) and text.startswith(until)):
            raise InputError(
                "the chat template rewrites earlier turns (rendering a prefix does not give a prefix of the whole), "
                "so supervised spans of multi-turn conversations cannot be exact: split them into one answer each"
            )
        spans.append((len(before), len(until)))
    return text, spans


def spans_to_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Character ranges to token ranges; None if a range begins or ends inside a token."""
    begin = np.array([s for s, _ in offsets], dtype=np.int64)
    end = np.array([e for _, e in offsets], dtype=np.int64)
    out = []
    for s, e in spans:
        first, last = int(np.searchsorted(begin, s)), int(np.searchsorted(begin, e))
        if (first > 0 and end[first - 1] > s) or (last > 0 and end[last - 1] > e):
            return None
        out.append((first, last))
    return out


def end_at_stop(tokens: np.ndarray, start: int, end: int, eos: Sequence[int], *, keep_stop: bool) -> tuple[int, int]:
    """Cut a span behind its first stop token (what the template adds after it is never generated), or before it when
    the answer was cut by the length limit and the target did not write that token itself."""
    stops = np.flatnonzero(np.isin(tokens[start:end], list(eos)))
    if len(stops) == 0:
        return start, end
    return start, start + int(stops[0]) + (1 if keep_stop else 0)


def is_heldout(conversation: Conversation, fraction: float) -> bool:
    """By a hash of the first user turn, so that a prompt is on the same side in every build."""
    prompt = next((m["content"] for m in conversation.messages if m["role"] == "user"), "")
    return int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) < fraction * 2**32


def fingerprint(tokenizer: Any) -> str:
    """sha256 over a fixed conversation's rendering and its ids: changes with the template and with the vocabulary."""
    text = tokenizer.apply_chat_template(PROBE, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([text, ids, len(tokenizer)]).encode()).hexdigest()


def read_conversations(path: Path) -> list[Conversation]:
    out = []
    for number, value in read_jsonl(path, "conversations (run `draftsmith generate` first)"):
        try:
            out.append(
                Conversation(
                    id=str(value["id"]),
                    messages=tuple(value["messages"]),
                    finish_reason=value.get("finish_reason", "stop"),
                    completion_tokens=int(value.get("completion_tokens", 0)),
                    category=str(value.get("category", "all")),
                )
            )
            check_messages(value["messages"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}:{number}: not a conversation: {error}") from error
    if not out:
        raise InputError(f"{path} is empty: there is nothing to tokenize")
    return out


def read_jsonl(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line.  Raises InputError naming the file and the line."""
    number = 0
    try:
        with open(path, encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise InputError(f"{what} cannot be read: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number + 1}: not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error


def check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a non-empty list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message must have a role and a text content")
        if message.get("role") not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"unknown role {message.get('role')!r}")
