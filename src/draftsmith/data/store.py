"""The store: token ids and supervised spans of every document, memory-mapped, append-only.

    store/manifest.json           the newest generation; written last: a store without it is not a store
    store/generations/00001.json  the manifest of every generation, this one's too
    store/shard-00000.arrow       Arrow IPC; columns tokens, spans, id, category, heldout, key; never changed again

`spans` holds start, end, start, end ...: half-open token ranges that the target itself wrote.  `key` names the
conversation (messages.conversation_key), so that it is stored once.  Reading is here, writing in building.py.
Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from draftsmith.errors import InputError
from draftsmith.files import sha256
from draftsmith.records import Shard, StoreManifest, read_json

SCHEMA = pa.schema(
    [
        ("tokens", pa.large_list(pa.int32())),
        ("spans", pa.large_list(pa.int32())),
        ("id", pa.string()),
        ("category", pa.string()),
        ("heldout", pa.bool_()),
        ("key", pa.binary(16)),
    ]
)
BATCH = 4096
"""Documents in one Arrow record batch."""
BESIDE = (
    "read", "kept", "heldout", "shortened", "cut_into_windows", "token_count_known", "retokenized_differently",
    "leading_answers_dropped", "answers_left_out",
)  # fmt: skip
"""Counts of a manifest that are no reasons for leaving a conversation out."""


@dataclass(frozen=True)
class Document:
    """One tokenized conversation.  Written by tokenize; read by the loader and by evaluate."""

    tokens: np.ndarray  # int32 [n]
    spans: tuple[tuple[int, int], ...]
    id: str
    category: str
    heldout: bool

    def supervised(self) -> np.ndarray:
        """bool [n]: tokens that the target itself wrote."""
        mask = np.zeros(len(self.tokens), dtype=bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def prompt(self) -> np.ndarray:
        """int32: the tokens before the first answer."""
        return self.tokens[: self.spans[0][0]]


def record_batch(documents: Sequence[Document], keys: Sequence[bytes]) -> pa.RecordBatch:
    """Documents with the key of the conversation that each comes from."""
    spans = [np.array(d.spans, dtype=np.int32).reshape(-1) for d in documents]
    return pa.record_batch(
        [
            _lists([d.tokens for d in documents]),
            _lists(spans),
            pa.array([d.id for d in documents], pa.string()),
            pa.array([d.category for d in documents], pa.string()),
            pa.array([d.heldout for d in documents], pa.bool_()),
            pa.array(keys, pa.binary(16)),
        ],
        schema=SCHEMA,
    )


def _lists(parts: Sequence[np.ndarray]) -> pa.Array:
    offsets = np.cumsum([0] + [len(p) for p in parts], dtype=np.int64)
    values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))


def read_manifest(path: Path, generation: int | None = None) -> StoreManifest:
    """Of the newest generation, or of an earlier one."""
    file = path / "manifest.json" if generation is None else generation_file(path, generation)
    if generation is not None and (path / "manifest.json").is_file() and not file.is_file():
        newest = read_manifest(path).generation
        raise InputError(f"{path} has no generation {generation}: its newest is {newest}")
    values = read_json(file, "store manifest (run `draftsmith tokenize` first)")
    try:
        if values["schema"] != 1:
            raise InputError(f"{file} has schema {values['schema']}, this version reads 1")
        values["shards"] = tuple(Shard(**s) for s in values["shards"])
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        return StoreManifest(**values)
    except (KeyError, TypeError) as error:
        raise InputError(f"{file} is not a store manifest ({error}): {_anew(path)}") from error


def generation_file(path: Path, generation: int) -> Path:
    return path / "generations" / f"{generation:05d}.json"


def _anew(path: Path) -> str:
    return f"remove {path} and run `draftsmith tokenize` again"


class Store:
    """Random access to the documents of a store, by number, without reading the others.

    lengths, longest_span, eligible: int64 [documents]; heldout: bool [documents].  `eligible` counts the positions
    that may become anchors: both the position and the next one are in one supervised span.

    generation, fingerprint: an earlier content of a store that has grown since; default: the newest.  A run that
    goes on opens the store by the fingerprint it began with.
    """

    def __init__(self, path: Path, generation: int | None = None, fingerprint: str | None = None) -> None:
        self.path = path
        found = read_manifest(path, generation) if fingerprint is None else find_content(path, fingerprint)
        if found is None:
            raise InputError(f"{path} has no generation with the content {fingerprint}: it is another store")
        self.manifest = found
        self.batches: list[pa.RecordBatch] = []
        for shard in self.manifest.shards:
            self.batches.extend(_open_shard(path / shard.file, shard))
        self.first = np.cumsum([0] + [b.num_rows for b in self.batches])
        self.lengths = np.concatenate([np.diff(_offsets(b, "tokens")) for b in self.batches])
        self.heldout = np.concatenate([b.column("heldout").to_numpy(zero_copy_only=False) for b in self.batches])
        stats = [_span_stats(b) for b in self.batches]
        self.eligible = np.concatenate([s[0] for s in stats])
        self.longest_span = np.concatenate([s[1] for s in stats])

    def __len__(self) -> int:
        return int(self.first[-1])

    def document(self, number: int) -> Document:
        which = int(np.searchsorted(self.first, number, side="right")) - 1
        batch, row = self.batches[which], number - int(self.first[which])
        spans = _values(batch, "spans", row).reshape(-1, 2).tolist()
        return Document(
            tokens=_values(batch, "tokens", row),
            spans=tuple((s, e) for s, e in spans),
            id=batch.column("id")[row].as_py(),
            category=batch.column("category")[row].as_py(),
            heldout=bool(self.heldout[number]),
        )

    def identity(self, number: int) -> str:
        """Id of a document."""
        which = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.batches[which].column("id")[number - int(self.first[which])].as_py()

    def keys(self) -> np.ndarray:
        """S16, ascending: the conversations stored."""
        parts = [_keys(batch) for batch in self.batches]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype="S16")


def find_content(path: Path, fingerprint: str | None) -> StoreManifest | None:
    """The generation with this content, if the store has one."""
    newest = read_manifest(path)
    for generation in range(newest.generation, 0, -1):
        manifest = newest if generation == newest.generation else read_manifest(path, generation)
        if manifest.fingerprint == fingerprint:
            return manifest
    return None


def verify(path: Path) -> list[str]:
    """What is wrong with the bytes of a store, a line each; nothing if it is as it was written, in every generation."""
    newest, wrong = read_manifest(path), []
    stated: dict[str, str] = {}
    for generation in range(1, newest.generation + 1):
        try:
            manifest = read_manifest(path, generation)
        except InputError as error:
            wrong.append(str(error))
            continue
        if generation == newest.generation and manifest != newest:
            wrong.append(f"{path}/manifest.json differs from {generation_file(path, generation)}")
        for shard in manifest.shards:
            if stated.setdefault(shard.file, shard.sha256) != shard.sha256:
                wrong.append(f"{shard.file} is stated with another hash in generation {generation}")
    for shard in newest.shards:
        stated.setdefault(shard.file, shard.sha256)
    for name, digest in stated.items():
        file = path / name
        if not file.is_file():
            wrong.append(f"shard {file} is missing")
        elif sha256(file) != digest:
            wrong.append(f"shard {file} is not as it was written: its sha256 is not {digest[:12]}...")
    return wrong


def _open_shard(file: Path, shard: Shard) -> list[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException) as error:
        what = f"shard {file} is missing or cut short ({str(error).splitlines()[0]})"
        raise InputError(f"{what}: {_anew(file.parent)}") from error
    if sum(b.num_rows for b in batches) != shard.documents:
        what = f"shard {file} does not hold the {shard.documents} documents its manifest states"
        raise InputError(f"{what}: {_anew(file.parent)}")
    return batches


def _keys(batch: pa.RecordBatch) -> np.ndarray:
    column = batch.column("key")
    return np.frombuffer(column.buffers()[1], dtype="S16", count=len(column), offset=16 * column.offset)


def _offsets(batch: pa.RecordBatch, column: str) -> np.ndarray:
    return batch.column(column).offsets.to_numpy()


def _values(batch: pa.RecordBatch, column: str, row: int) -> np.ndarray:
    array = batch.column(column)
    start, end = array.offsets[row].as_py(), array.offsets[row + 1].as_py()
    return array.values.slice(start, end - start).to_numpy()


def _span_stats(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    offsets = _offsets(batch, "spans") // 2
    flat = batch.column("spans").values.to_numpy()[: int(offsets[-1]) * 2].reshape(-1, 2)
    lengths = (flat[:, 1] - flat[:, 0]).astype(np.int64)
    owner = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
    eligible = np.bincount(owner, weights=np.maximum(lengths - 1, 0), minlength=batch.num_rows).astype(np.int64)
    longest = np.zeros(batch.num_rows, dtype=np.int64)
    np.maximum.at(longest, owner, lengths)
    return eligible, longest


def describe(manifest: StoreManifest) -> str:
    """One line for people."""
    documents = sum(s.documents for s in manifest.shards)
    tokens, supervised = sum(s.tokens for s in manifest.shards), sum(s.supervised for s in manifest.shards)
    counts = manifest.counts
    left_out = {k: v for k, v in counts.items() if v and k not in BESIDE}
    out = f"{documents} documents, {tokens} tokens ({supervised} supervised), {counts['heldout']} held out"
    out += f"; left out: {json.dumps(left_out)}" if left_out else "; none left out"
    if manifest.generation > 1:
        out = f"generation {manifest.generation}: {out}"
    for key, what in (
        ("shortened", "shortened by whole turns"),
        ("cut_into_windows", "cut into windows"),
        ("leading_answers_dropped", "began with an answer, which is dropped"),
    ):
        out += f"; {counts[key]} {what}" if counts.get(key) else ""
    if counts.get("retokenized_differently"):
        known = counts["token_count_known"]
        out += f"; {counts['retokenized_differently']} of {known} answers have another number of tokens than generated"
    return out


def as_dict(manifest: StoreManifest) -> dict[str, object]:
    return dataclasses.asdict(manifest)
