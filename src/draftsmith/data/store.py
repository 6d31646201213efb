"""The store: token ids and supervised spans of every document, memory-mapped, append-only.

    store/manifest.json       written last: a store without it is not a store
    store/shard-00000.arrow   Arrow IPC; columns tokens, spans, id, category, heldout

`spans` holds start, end, start, end ...: half-open token ranges that the target itself wrote.  Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, sha256, write_text
from draftsmith.records import Shard, StoreManifest, read_json, to_json

SCHEMA = pa.schema(
    [
        ("tokens", pa.large_list(pa.int32())),
        ("spans", pa.large_list(pa.int32())),
        ("id", pa.string()),
        ("category", pa.string()),
        ("heldout", pa.bool_()),
    ]
)
BATCH = 4096
"""Documents in one Arrow record batch."""


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


def write_store(
    path: Path,
    documents: Iterable[Document],
    *,
    tokenizer: str,
    eos_token_ids: Sequence[int],
    sources: dict[str, str],
    counts: dict[str, int],
) -> StoreManifest:
    """Write a new store, whole or not at all.  `counts` may still grow while `documents` is being consumed."""
    if path.exists():
        raise InputError(f"the store {path} exists: remove it, or set data_dir to another folder")
    with folder_written_whole(path) as folder:
        file = folder / "shard-00000.arrow"
        totals = np.zeros(3, dtype=np.int64)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            batch: list[Document] = []
            for document in documents:
                batch.append(document)
                totals += (1, len(document.tokens), sum(e - s for s, e in document.spans))
                if len(batch) == BATCH:
                    writer.write_batch(_record_batch(batch))
                    batch = []
            if batch:
                writer.write_batch(_record_batch(batch))
        if totals[0] == 0:
            why = ", ".join(f"{k} {v}" for k, v in counts.items() if v) or "no conversations"
            raise InputError(f"nothing to store in {path}: the data set is empty ({why})")
        manifest = StoreManifest(
            generation=1,
            tokenizer=tokenizer,
            eos_token_ids=tuple(eos_token_ids),
            shards=(Shard(file.name, int(totals[0]), int(totals[1]), int(totals[2]), sha256(file)),),
            sources=sources,
            counts=dict(counts),
        )
        write_text(folder / "manifest.json", to_json(manifest, indent=2))
    return manifest


def _record_batch(documents: Sequence[Document]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([d.tokens for d in documents], SCHEMA.field("tokens").type),
            pa.array([[x for span in d.spans for x in span] for d in documents], SCHEMA.field("spans").type),
            pa.array([d.id for d in documents]),
            pa.array([d.category for d in documents]),
            pa.array([d.heldout for d in documents]),
        ],
        schema=SCHEMA,
    )


def read_manifest(path: Path) -> StoreManifest:
    values = read_json(path / "manifest.json", "store manifest (run `draftsmith tokenize` first)")
    if values.get("schema") != 1:
        raise InputError(f"{path}/manifest.json has schema {values.get('schema')}, this version reads 1")
    values["shards"] = tuple(Shard(**s) for s in values["shards"])
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    return StoreManifest(**values)


class Store:
    """Random access to the documents of a store, by number, without reading the others.

    lengths, longest_span, eligible: int64 [documents]; heldout: bool [documents].  `eligible` counts the positions
    that may become anchors: both the position and the next one are in one supervised span.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
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


def _open_shard(file: Path, shard: Shard) -> list[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"shard {file} cannot be read ({error}): it is missing or cut short") from error
    if sum(b.num_rows for b in batches) != shard.documents:
        raise InputError(f"shard {file} does not hold the {shard.documents} documents its manifest states")
    return batches


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
    left_out = {k: v for k, v in manifest.counts.items() if v and k not in ("read", "kept", "heldout")}
    out = f"{documents} documents, {tokens} tokens ({supervised} supervised), {manifest.counts['heldout']} held out"
    return out + (f"; left out: {json.dumps(left_out)}" if left_out else "; none left out")


def as_dict(manifest: StoreManifest) -> dict[str, object]:
    return dataclasses.asdict(manifest)
