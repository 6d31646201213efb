"""Conversations to a store: the target's own chat template, and the tokens that the target itself wrote.

    file --chunks of lines--> workers: parse, render, encode, spans --record batches, in order--> one writer

The order of documents is that of the file, whatever the number of workers.  What is read of a source is remembered
by its length and hash, so that a file that has only grown is read on from there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftsmith.config import Config
from draftsmith.data import building
from draftsmith.data.building import Build, Source, exists, writing
from draftsmith.data.documents import DocumentSettings, Made, Recipe
from draftsmith.data.messages import BadLine, Chunk, Leniency, parse_lines, read_chunks
from draftsmith.data.render import ChatTemplate
from draftsmith.data.store import read_manifest
from draftsmith.data.workers import ChunkMaker, worker_count
from draftsmith.errors import InputError
from draftsmith.files import sha256
from draftsmith.progress import Progress
from draftsmith.records import StoreManifest
from draftsmith.target.model import eos_token_ids, load_tokenizer

PROBE = [
    {"role": "user", "content": "What is 2 + 2?\nAnswer in one word."},
    {"role": "assistant", "content": "Four — 4."},
]
DATE = "1 January 2025"
UNCHANGED = 1 << 62
"""Position of a JSON list or Parquet file that has been read before and is as it was."""
WHAT = "conversations (run `draftsmith generate` first)"


def tokenize(config: Config) -> StoreManifest:
    """Read the conversations, write the store.  Raises InputError for unreadable input or an empty result."""
    return _build(config, [config.conversations], grow=False)


def append(config: Config, sources: Sequence[Path] = ()) -> StoreManifest:
    """Add what is new in `sources` (default: the conversations of the config) as the next generation of the store.

    Raises InputError if the store was made with another tokenizer, template or other settings.  If nothing is new, the
    generation stays; the counts returned say what was found.
    """
    return _build(config, sources or [config.conversations], grow=True)


def _build(config: Config, files: Sequence[Path], *, grow: bool) -> StoreManifest:
    _base(config, grow)  # what cannot be is said before anything is loaded or locked
    tokenizer = load_tokenizer(config.target)
    recipe = recipe_of(config, tokenizer)
    settings, name = recipe.settings.as_dict(), fingerprint(tokenizer)
    for file in files:
        next(iter(read_chunks(file, WHAT, size=1)), None)  # a file that is not there: before anything is written
    with writing(config.store):
        base = _base(config, grow)  # only now does it stay what it is
        if base is not None:
            _same(config, base, name, settings)
        header = {"tokenizer": name, "settings": settings, "files": [str(f) for f in files]}
        with Build(config.store, base, header) as build:
            run = _Run(config, build, files, base)
            known = build.keys()
            workers = worker_count(config.tokenize.workers, sum(run.bytes_left))
            progress = Progress("tokenizing", sum(run.bytes_left) >> 10, "KiB")
            with progress, ChunkMaker(replace(recipe, known=known), workers) as make:
                for number in range(len(files)):
                    run.source(number, make, progress)
            if not build.counts and base is None:
                raise InputError(f"{files[0]} is empty: there is nothing to tokenize")
            return build.commit(tokenizer=name, eos=recipe.eos, sources=run.sources)


def _base(config: Config, grow: bool) -> StoreManifest | None:
    """The generation to build on; none for the first.  Raises InputError for a store that is (not) there."""
    if grow:
        return read_manifest(config.store)
    if config.store.exists():
        raise InputError(exists(config.store))
    return None


class _Run:
    """The writer's side: takes what the workers made, in order."""

    def __init__(self, config: Config, build: Build, files: Sequence[Path], base: StoreManifest | None) -> None:
        self.build, self.files, self.base = build, files, base
        self.leniency = Leniency(
            config.tokenize.max_bad_lines, "tokenize.max_bad_lines", build.counts.get("bad_lines", 0)
        )
        self.seen: set[bytes] = set()
        self.sources: list[Source] = list(build.progress.sources)
        self.done = len(self.sources)
        self.bytes_left = [f.stat().st_size for f in files]
        for i, source in enumerate(self.sources):
            self.bytes_left[i] -= source.size if source.sha256 else 0  # without: a list or Parquet file half read

    def source(self, number: int, make: Callable[[Iterable[Chunk]], Iterator[Made]], progress: Progress) -> None:
        """Read one file from where it was left to its end."""
        file, lines = self.files[number], is_lines(self.files[number])
        known = self.sources[number] if number < len(self.sources) else self._before(file, lines)
        hashed = HashedPrefix(file, known.size if lines else 0)
        if known.size and (hashed.digest() != known.sha256 if lines else file.stat().st_size != known.size):
            raise InputError(f"{file} is not the file whose tokenization was begun: remove {self.build.work}")
        if number >= len(self.sources):
            self.sources.append(known)
        skipped = known.position
        if skipped == UNCHANGED:
            print(f"{file}: unchanged, in the store already")
            return
        if skipped and self.base is not None and number >= self.done:
            print(f"{file}: its first {skipped} {'bytes' if lines else 'entries'} are in the store already")
            progress.advance((known.size if lines else 0) >> 10)
        shown = known.size >> 10
        for made in make(hashed.over(without_half_line(read_chunks(file, WHAT, known.position)), lines)):
            self._take(made)
            done = made.chunk_position if lines else 0
            size, digest = (done, hashed.at(done)) if lines else (file.stat().st_size, "")
            self.sources[number] = Source(known.name, made.chunk_position, size, digest)
            progress.advance((done >> 10) - shown if lines else 0, f"{self.build.counts['kept']} kept")
            shown = done >> 10
            if self.build.shard_tokens >= building.SHARD_TOKENS:
                self.build.finish_shard(self.sources)
        if not lines:
            last = self.sources[number]
            self.sources[number] = Source(last.name, last.position, file.stat().st_size, sha256(file))

    def _before(self, file: Path, lines: bool) -> Source:
        """What the generations before have read of this file: its beginning, if it has only grown."""
        sources, sizes = (self.base.sources, self.base.source_bytes) if self.base else ({}, {})
        for name in reversed([n for n in sizes if n == file.name or n.startswith(f"{file.name} (")]):
            read, whole = sizes[name], file.stat().st_size
            if (read == whole or (lines and read < whole)) and HashedPrefix(file, read).digest() == sources[name]:
                return Source(name, read if lines else UNCHANGED, read, sources[name])
        taken = {*sources, *(s.name for s in self.sources)}
        names = itertools.chain([file.name], (f"{file.name} ({n})" for n in itertools.count(2)))
        return Source(next(name for name in names if name not in taken))

    def _take(self, made: Made) -> None:
        for line in made.bad:
            self.build.counts["bad_lines"] += 1
            self.leniency.bad(line)
        if made.fault:
            raise InputError(made.fault)
        self.build.counts.update(made.counts)
        batch = made.batch
        if batch is None:
            return
        again = [key for key in made.keys if key in self.seen]
        for key, note in zip(made.keys, made.notes, strict=True):
            self.build.counts.update({"duplicate": 1} if key in self.seen else note)
        if again:  # within a chunk, and against what is stored, the worker has looked
            keys = batch.column("key")
            batch = batch.filter(pc.invert(pc.is_in(keys, value_set=pa.array(again, keys.type))))
        self.seen.update(made.keys)
        if batch.num_rows:
            self.build.add(batch)


class HashedPrefix:
    """sha256 of the beginning of a file, as it is being read."""

    def __init__(self, file: Path, size: int) -> None:
        self.hash, left = hashlib.sha256(), size
        self.digests: deque[tuple[int, str]] = deque()
        if size:
            with open(file, "rb") as handle:
                while left > 0 and (block := handle.read(min(left, 1 << 20))):
                    self.hash.update(block)
                    left -= len(block)

    def digest(self) -> str:
        return self.hash.hexdigest()

    def over(self, chunks: Iterable[Chunk], lines: bool) -> Iterator[Chunk]:
        for chunk in chunks:
            if lines:
                self.hash.update(chunk.data)
                self.digests.append((chunk.position, self.hash.hexdigest()))
            yield chunk

    def at(self, position: int) -> str:
        """Of everything before `position`, the end of a chunk; what lies before is forgotten."""
        while self.digests[0][0] < position:
            self.digests.popleft()
        return self.digests[0][1]


def without_half_line(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Up to a last line still being written: without an end, and no JSON yet.  An append reads on from there."""
    for chunk in chunks:
        whole = chunk.data.rfind(b"\n") + 1
        rest = chunk.data[whole:]
        if any(isinstance(value, BadLine) for _, value in parse_lines(replace(chunk, data=rest))):
            print(f"{chunk.file}: its last line is half written: left to `draftsmith data append`", file=sys.stderr)
            if whole:
                yield replace(chunk, data=chunk.data[:whole], position=chunk.position - len(rest))
            return
        yield chunk


def is_lines(file: Path) -> bool:
    return file.suffix not in (".parquet", ".json")


def recipe_of(config: Config, tokenizer: Any) -> Recipe:
    """What the workers need, from a transformers tokenizer."""
    settings = DocumentSettings(
        max_tokens=config.max_document,
        length_cut=config.tokenize.length_cut,
        long_prompt=config.tokenize.long_prompt,
        long_documents=config.tokenize.long_documents,
        rewritten_history=config.tokenize.rewritten_history,
        heldout_fraction=config.tokenize.heldout_fraction,
        chat_template_kwargs=config.generate.chat_template_kwargs,
    )
    return Recipe(
        template=ChatTemplate.of(tokenizer, config.generate.chat_template_kwargs),
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        eos=tuple(eos_token_ids(config.target, tokenizer)),
        settings=settings,
        known=np.zeros(0, dtype="S16"),
    )


def fingerprint(tokenizer: Any) -> str:
    """sha256 over the renderings of a fixed conversation and of a prompt, and their ids: changes with the template, its
    generation prompt and the vocabulary.  A template that prints the date is given a fixed one."""
    template = ChatTemplate.of(tokenizer)
    texts = [template.render(PROBE, now=DATE), template.render(PROBE[:1], generation_prompt=True, now=DATE)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return hashlib.sha256(json.dumps([texts, ids, len(tokenizer)]).encode()).hexdigest()


def _same(config: Config, base: StoreManifest, tokenizer: str, settings: dict[str, Any]) -> None:
    if base.tokenizer != tokenizer:
        raise InputError(
            f"{config.store} was made with another tokenizer or chat template than {config.target.model}'s: "
            f"append needs the same, or set data_dir to a new folder"
        )
    changed = {k: (base.settings.get(k), v) for k, v in settings.items() if base.settings.get(k) != v}
    if changed:
        what = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in changed.items())
        raise InputError(f"{config.store} was made with other settings ({what}): set them back, or set data_dir")


def counts_since(before: StoreManifest, after: StoreManifest) -> Counter[str]:
    """What an append added to the counts."""
    return Counter({k: v - before.counts.get(k, 0) for k, v in after.counts.items() if v != before.counts.get(k, 0)})
