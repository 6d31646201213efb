"""Texts to token ids, and character ranges in them to token ranges, exact to the token.

The plain way asks the tokenizer for the offsets of every token (`token_spans`).  Keeping them costs it a sixth of its
speed.  A byte-level vocabulary needs none: what each token stands for is a number of bytes, fixed, so the running sum
says where it begins.  That is believed for a text only if the sum over all its tokens is the length of the text.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

FEW_SPANS = 16
"""Asking for a boundary takes time in proportion to the tokens before it: for more spans the table is quicker."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """Ids of a text, and the token range of each span asked for; None if one begins or ends inside a token."""

    ids: np.ndarray  # int32 [n]
    spans: list[Span] | None


class SpanEncoder:
    """A tokenizer and, where that is possible, the number of bytes that each of its tokens stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lengths = token_bytes(tokenizer)
        self.composes = _parts(tokenizer)["normalizer"] is not None

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> Iterator[Encoded]:
        """Of each text, with the character ranges `spans` of it."""
        if self.lengths is None:
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
            for encoding, wanted in zip(encodings, spans, strict=True):
                yield Encoded(np.array(encoding.ids, dtype=np.int32), token_spans(encoding, wanted))
            return
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        for text, encoding, wanted in zip(texts, encodings, spans, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            ends = np.cumsum(self.lengths[ids])
            size = len(text) if text.isascii() else len(text.encode())
            unchanged = not self.composes or text.isascii() or unicodedata.is_normalized("NFC", text)
            if unchanged and (int(ends[-1]) if len(ends) else 0) == size:
                yield Encoded(ids, _by_bytes(text, ends, wanted))
            else:
                yield Encoded(ids, token_spans(self.tokenizer.encode(text, add_special_tokens=False), wanted))


def _by_bytes(text: str, ends: np.ndarray, spans: Sequence[Span]) -> list[Span] | None:
    """ends: where each token ends, in bytes of `text`, ascending."""
    if not spans:
        return []
    edges = [at for span in spans for at in span]
    if not text.isascii():
        edges = _in_bytes(text, edges)
    places = np.array(edges)
    after = np.searchsorted(ends, places)  # the token that ends there or behind
    inside = ends[np.minimum(after, len(ends) - 1)] != places if len(ends) else places != 0
    if (inside & (places != 0)).any():
        return None
    tokens = np.where(places == 0, 0, after + 1).tolist()
    return list(zip(tokens[::2], tokens[1::2], strict=True))


def _in_bytes(text: str, edges: Sequence[int]) -> list[int]:
    """Places in characters, ascending, to places in bytes."""
    out, at, total = [], 0, 0
    for edge in edges:
        total += len(text[at:edge].encode())
        at = edge
        out.append(total)
    return out


def token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """int64 by id: the bytes each token stands for; None unless this is a byte-level byte-pair vocabulary whose only
    change to a text, if any, is to compose its characters (NFC)."""
    parts = _parts(tokenizer)
    before = parts["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    byte_level = [s for s in steps if s.get("type") == "ByteLevel"]
    normalizer = parts["normalizer"]
    if (
        parts["model"]["type"] != "BPE"
        or len(byte_level) != 1
        or byte_level[0].get("add_prefix_space")
        or any(parts["model"].get(k) for k in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
        or (normalizer is not None and normalizer.get("type") != "NFC")
    ):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(max([*vocabulary.values(), *added]) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)  # a byte is a character of its own
    for number, special in added.items():
        lengths[number] = len(special.content.encode())
    return lengths


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:
    parts = json.loads(tokenizer.to_str())
    parts["model"] = {k: v for k, v in parts["model"].items() if k not in ("vocab", "merges")}
    return parts


def token_spans(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Character ranges to token ranges; None if a range begins or ends inside a token.

    Asks the encoding for the few boundaries instead of bringing every token's offsets into Python, which would cost a
    tenth of the tokenization; same results as `spans_to_tokens`, which does what is not that simple.
    """
    if len(spans) > FEW_SPANS or len(encoding) == 0:
        return spans_to_tokens(encoding.offsets, spans)
    ask: Any = encoding  # its stub says that any answer may be None
    end_of_text, out = ask.token_to_chars(len(encoding) - 1)[1], []
    for span in spans:
        pair = []
        for at in span:
            token = ask.char_to_token(at) if at < end_of_text else len(encoding)
            if token is None or (token > 0 and ask.token_to_chars(token - 1)[0] >= at):
                return spans_to_tokens(encoding.offsets, spans)
            if token < len(encoding) and ask.token_to_chars(token)[0] < at:
                return None
            pair.append(token)
        out.append((pair[0], pair[1]))
    return out


def spans_to_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """As token_spans, from (begin, end) of each token in characters."""
    table = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    begin, end = table[:, 0], table[:, 1]
    out = []
    for s, e in spans:
        first, last = int(np.searchsorted(begin, s)), int(np.searchsorted(begin, e))
        if (first > 0 and end[first - 1] > s) or (last > 0 and end[last - 1] > e):
            return None
        out.append((first, last))
    return out
