"""Conversations to documents: token ids and the spans that the target itself wrote, exact to the token.

What cannot be mapped exactly is left out and counted, never guessed.  A worker process runs `Worker.chunk` on a piece
of a file; it needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import TemplateError
from tokenizers import Tokenizer

from draftsmith.data.messages import (
    BadLine,
    Chunk,
    conversation_key,
    has_lone_surrogate,
    parse_conversation,
    parse_lines,
)
from draftsmith.data.render import ChatTemplate, Rendered, RewritesHistory
from draftsmith.data.spans import Encoded, SpanEncoder
from draftsmith.data.store import Document, record_batch
from draftsmith.errors import InputError
from draftsmith.records import Conversation

OVERLAP = 8
"""A window of n tokens begins n // OVERLAP tokens before the end of the one before."""


@dataclass(frozen=True)
class DocumentSettings:
    """What decides how a conversation becomes documents.  Recorded in the store; the same for every generation."""

    max_tokens: int
    length_cut: str
    long_prompt: str
    long_documents: str
    rewritten_history: str
    heldout_fraction: float
    chat_template_kwargs: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Recipe:
    """All a worker needs: sent once to each."""

    template: ChatTemplate
    tokenizer: str
    """The fast tokenizer as JSON: the very one that transformers runs."""
    eos: tuple[int, ...]
    settings: DocumentSettings
    known: np.ndarray
    """Keys of the conversations already stored, S16, ascending."""


@dataclass
class Made:
    """What became of a chunk.  Written by a worker; read by the one process that writes the store."""

    chunk_position: int
    batch: pa.RecordBatch | None = None
    keys: list[bytes] = field(default_factory=list)
    notes: list[Counter[str]] = field(default_factory=list)
    """Of each conversation in `batch`, in order: its key, and what is to be counted unless it is stored already."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of everything else."""
    bad: list[str] = field(default_factory=list)
    """Lines that are no conversation, with file and number, in order."""
    fault: str | None = None
    """Why the whole cannot go on, if so."""


class LeftOut(Exception):
    """This conversation is left out; the reason is what it is counted as."""


class Worker:
    """Turns chunks into record batches."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.settings, self.template = recipe, recipe.settings, recipe.template
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.encoder = SpanEncoder(self.tokenizer)
        self.most_chars = most_characters(self.tokenizer, recipe.settings.max_tokens)

    def chunk(self, chunk: Chunk) -> Made:
        made = Made(chunk.position)
        try:
            rendered: list[tuple[bytes, Conversation, list[Rendered], Counter[str]]] = []
            for key, where, conversation in self._new(chunk, made):
                note: Counter[str] = Counter()
                try:
                    rendered.append((key, conversation, self._render(conversation, where, note), note))
                except LeftOut as reason:
                    made.counts[str(reason)] += 1
                except TemplateError as error:
                    made.bad.append(f"{where}: the chat template refuses {conversation.id!r}: {error}")
            every = [r for _, _, renderings, _ in rendered for r in renderings]
            encodings = self.encoder.encode([r.text for r in every], [r.spans for r in every])
            documents: list[tuple[bytes, Document]] = []
            for key, conversation, renderings, note in rendered:
                mine = [self._documents(conversation, r, next(encodings), chunk.file, note) for r in renderings]
                found = [d for part in mine if not isinstance(part, str) for d in part]
                if not found:
                    made.counts[next((part for part in mine if isinstance(part, str)), "no_supervised_tokens")] += 1
                elif key in made.keys:
                    made.counts["duplicate"] += 1
                else:
                    note.update(kept=1, heldout=int(found[0].heldout))
                    note["answers_left_out"] += sum(isinstance(part, str) for part in mine)
                    made.keys.append(key)
                    made.notes.append(note)
                    documents += [(key, d) for d in found]
            if documents:
                made.batch = record_batch([d for _, d in documents], [k for k, _ in documents])
        except InputError as error:
            made.fault = str(error)
        return made

    def _new(self, chunk: Chunk, made: Made) -> Iterator[tuple[bytes, str, Conversation]]:
        """(key, place, conversation) of what can be read and is not stored yet."""
        for number, value in parse_lines(chunk):
            where = f"{chunk.file}:{number}"
            if isinstance(value, BadLine):
                made.bad.append(str(value))
                continue
            try:
                conversation = parse_conversation(value, number)
            except BadLine as error:
                made.bad.append(f"{where}: {error}")
                continue
            made.counts["read"] += 1
            key = conversation_key(conversation.messages, conversation.tools)
            if _among(self.recipe.known, key):
                made.counts["duplicate"] += 1
                continue
            yield key, where, without_leading_answers(conversation, made.counts)

    def _render(self, conversation: Conversation, where: str, counts: Counter[str]) -> list[Rendered]:
        """The whole, or each answer that the target wrote by itself."""
        settings, messages = self.settings, list(conversation.messages)
        finish = conversation.finish_reason
        if finish != "stop" and not (finish == "length" and settings.length_cut == "keep"):
            raise LeftOut(f"finish_reason_{finish}")
        if messages[-1]["role"] != "assistant" or not _says(messages[-1]):
            raise LeftOut("no_answer")
        if has_lone_surrogate([conversation.id, conversation.category, messages, conversation.tools]):
            raise LeftOut("lone_surrogate")
        if not all(_says(m) for m in messages if m["role"] != "tool"):
            raise LeftOut("empty_turn")
        if next(m["role"] for m in messages if m["role"] != "system") in ("assistant", "tool"):
            raise LeftOut("no_prompt")
        messages = self._within_reach(messages, where)
        if len(messages) < len(conversation.messages):
            counts["shortened"] = 1
        try:
            return [self.template.spans(messages, conversation.tools)]
        except RewritesHistory as error:
            if settings.rewritten_history != "per_turn":
                raise InputError(f"{where}: {conversation.id!r}: {error}") from error
            own = [i for i in own_answers(conversation) if i < len(messages)]
            return [self.template.turn(messages[: i + 1], conversation.tools) for i in own]

    def _within_reach(self, messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        """Without the turns at the end that cannot fit whatever their tokens are, so that nobody tokenizes them."""
        if self.most_chars is None or self.settings.long_documents != "turns":
            return messages
        total, reach = 0, len(messages)
        for i, message in enumerate(messages):
            total += len(message["content"])
            if total > self.most_chars:
                reach = i
                break
        if reach == len(messages):
            return messages
        kept = messages[:reach]
        while kept and kept[-1]["role"] != "assistant":
            kept.pop()
        if not kept:
            first_answer = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
            if reach >= first_answer:
                raise LeftOut("too_long")
            if self.settings.long_prompt == "drop":
                raise LeftOut("prompt_too_long")
            raise InputError(
                f"{where}: the prompt has {sum(len(m['content']) for m in messages[:first_answer])} characters, a "
                f"document holds {self.settings.max_tokens} tokens (train.row_tokens, tokenize.max_tokens): raise them "
                f"or set tokenize.long_prompt=drop"
            )
        return kept

    def _documents(
        self, conversation: Conversation, rendered: Rendered, encoded: Encoded, file: str, counts: Counter[str]
    ) -> list[Document] | str:
        """The documents of one rendering, or the reason why there are none."""
        settings, limit = self.settings, self.settings.max_tokens
        tokens, spans = encoded.ids, encoded.spans
        if spans is None:
            return "answer_boundary_inside_a_token"
        if settings.long_documents == "turns" and spans[0][0] >= limit:
            if settings.long_prompt == "drop":
                return "prompt_too_long"
            raise InputError(
                f"{file}: the prompt of {conversation.id!r} has {spans[0][0]} tokens, a document holds {limit} "
                f"(train.row_tokens, tokenize.max_tokens): raise them or set tokenize.long_prompt=drop"
            )
        if len(tokens) > limit and settings.long_documents == "refuse":
            raise InputError(
                f"{file}: {conversation.id!r} has {len(tokens)} tokens, a document holds {limit} (train.row_tokens, "
                f"tokenize.max_tokens) and tokenize.long_documents is refuse"
            )
        if len(tokens) > limit and settings.long_documents == "turns":
            if (shorter := self._shorten(rendered, spans)) is None:
                return "too_long"
            tokens, spans = shorter
            counts["shortened"] = 1
        own, cut = own_answers(conversation), conversation.finish_reason == "length"
        supervised = []
        for answer, (start, end) in zip(rendered.answers, spans, strict=False):  # shortened: fewer spans
            if answer in own:
                keep = not (cut and answer == len(conversation.messages) - 1)
                supervised.append(end_at_stop(tokens, start, end, self.recipe.eos, keep_stop=keep))
        every = len(supervised) == len(own)
        supervised = [(s, e) for s, e in supervised if e > s]
        if not supervised:
            return "no_supervised_tokens"
        if conversation.completion_tokens and every:
            counts["token_count_known"] += 1
            length = sum(e - s for s, e in supervised)
            counts["retokenized_differently"] += not agrees(length, conversation, len(supervised))
        held = is_heldout(conversation, settings.heldout_fraction)
        document = Document(tokens, tuple(supervised), conversation.id, conversation.category, held)
        if len(tokens) <= limit:
            return [document]
        windows = list(cut_windows(document, limit))
        counts["cut_into_windows"] += 1
        return windows or "no_supervised_tokens"

    def _shorten(self, rendered: Rendered, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, Any] | None:
        """Ids and spans ending after the last answer that fits, tokenized anew: a shorter text need not give a shorter
        prefix."""
        for count in range(len(spans) - 1, 0, -1):
            if spans[count - 1][1] > self.settings.max_tokens + 8:
                continue
            text = rendered.text[: rendered.spans[count - 1][1]]
            (encoded,) = self.encoder.encode([text], [rendered.spans[:count]])
            if len(encoded.ids) <= self.settings.max_tokens:
                return None if encoded.spans is None else (encoded.ids, encoded.spans)
        return None


def own_answers(conversation: Conversation) -> list[int]:
    """Indices of the messages that the target wrote, ascending."""
    if conversation.generated is not None:
        return sorted(set(conversation.generated))
    return [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]


def without_leading_answers(conversation: Conversation, counts: Counter[str]) -> Conversation:
    """Others' conversations may begin in the middle: an answer to nothing teaches nothing and is dropped, counted."""
    messages = conversation.messages
    at = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), at)
    if first == at or conversation.generated is not None:
        return conversation
    counts["leading_answers_dropped"] += 1
    return replace(conversation, messages=(*messages[:at], *messages[first:]))


def agrees(length: int, conversation: Conversation, turns: int) -> bool:
    """Whether `length` supervised tokens can be what the target generated.  Some servers count an answer's stop token
    as generated, others do not; it is supervised."""
    least = length - turns if conversation.finish_reason == "stop" else length - turns + 1
    return conversation.completion_tokens in (length, least)


def end_at_stop(tokens: np.ndarray, start: int, end: int, eos: Sequence[int], *, keep_stop: bool) -> tuple[int, int]:
    """Cut a span behind its first stop token (what the template adds after it is never generated), or before it when
    the answer was cut by the length limit and the target did not write that token itself."""
    answer = tokens[start:end]
    for stop in eos:  # seldom more than two; each looks at what is left
        found = answer == stop
        first = int(found.argmax()) if len(found) else 0
        if len(found) and found[first]:
            answer = answer[:first]
    if len(answer) == end - start:
        return start, end
    return start, start + len(answer) + (1 if keep_stop else 0)


def cut_windows(document: Document, size: int) -> Iterator[Document]:
    """Windows of `size` tokens, each size - size // OVERLAP further on; a supervised token counts in the first window
    that holds it.  Windows without a supervised token are not made."""
    step, n = size - size // OVERLAP, len(document.tokens)
    fresh = 0  # first token that no window has held
    for number, start in enumerate(range(0, n, step)):
        end = min(start + size, n)
        spans = [(max(s, fresh) - start, min(e, end) - start) for s, e in document.spans]
        kept = tuple((s, e) for s, e in spans if s < e)
        if kept:
            yield Document(
                document.tokens[start:end], kept, f"{document.id}#{number}", document.category, document.heldout
            )
        fresh = end
        if end == n:
            return


def is_heldout(conversation: Conversation, fraction: float) -> bool:
    """By its first user turn."""
    return held_out(next((m["content"] for m in conversation.messages if m["role"] == "user"), ""), fraction)


def held_out(prompt: str, fraction: float) -> bool:
    """By a hash of the text, so that a prompt is on the same side in every build."""
    return int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) < fraction * 2**32


def most_characters(tokenizer: Tokenizer, tokens: int) -> int | None:
    """Text of more characters certainly has more than `tokens` tokens; None where that is not so certain: only
    byte-pair vocabularies without an unknown token, which could stand for any number of characters."""
    model = tokenizer.model
    if type(model).__name__ != "BPE" or (getattr(model, "unk_token", None) and not getattr(model, "byte_fallback", 0)):
        return None
    return 4 * tokens * max(len(token) for token in tokenizer.get_vocab())


def _says(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _among(keys: np.ndarray, key: bytes) -> bool:
    at = int(np.searchsorted(keys, np.frombuffer(key, dtype=keys.dtype)[0]))
    return at < len(keys) and keys[at] == np.frombuffer(key, dtype=keys.dtype)[0]
