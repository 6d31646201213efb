"""Making and growing a store: one writer at a time, whole or not at all, resumable shard by shard.

.<store>.lock                 who is writing
.<store>.building/            a store being made; renamed to <store> at the end
<store>/.growing/             shards being added; moved beside the others at the end, then the manifest changes
    shard-00003.arrow ...     finished shards
    progress.json             what they hold and how far the sources were read; written after each shard
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftsmith.data import store as layout
from draftsmith.data.store import Document, Store, generation_file, record_batch
from draftsmith.errors import InputError
from draftsmith.files import make_folder, sha256, write_text
from draftsmith.records import Shard, StoreManifest, read_json, to_json

SHARD_TOKENS = 1 << 24
"""A shard is finished when it holds so many: what a kill can cost."""


@dataclass
class Source:
    """How far a file has been read."""

    name: str
    position: int = 0
    """As in Chunk.position."""
    size: int = 0
    """Bytes of the file that `sha256` covers."""
    sha256: str = ""


@dataclass
class Progress:
    """progress.json of an unfinished build."""

    header: dict[str, Any]
    """Tokenizer, settings and the generation built on: another build does not go on with these shards."""
    shards: list[Shard] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)


class Build:
    """A store being made, or grown if there is a `base`.  Use as a context inside `writing(path)`.

    `add` batches, `finish_shard` where the sources may be left, `commit` at the end.  Leaving without `commit` keeps
    the finished shards for the next try, and nothing if there are none.
    """

    def __init__(self, path: Path, base: StoreManifest | None, header: dict[str, Any]) -> None:
        self.path, self.base = path, base
        self.header = {**header, "base": base.fingerprint if base else None}
        self.work = path / ".growing" if base else path.with_name(f".{path.name}.building")
        self.first = len(base.shards) if base else 0
        self.waiting: list[pa.RecordBatch] = []
        self.waiting_rows = 0
        self.sink: Any = None
        self.writer: Any = None
        self.totals = np.zeros(3, dtype=np.int64)

    def __enter__(self) -> Build:
        with disk(self.path):
            self.progress = self._resume() or Progress(self.header)
            if not self.progress.shards:
                shutil.rmtree(self.work, ignore_errors=True)
            make_folder(self.work)
        self.counts = Counter(self.progress.counts)
        return self

    def __exit__(self, kind: Any, value: Any, tb: Any) -> None:
        self._close()
        if self.work.exists() and not (self.work / "progress.json").exists():
            shutil.rmtree(self.work, ignore_errors=True)

    def _resume(self) -> Progress | None:
        file = self.work / "progress.json"
        if not file.is_file():
            return None
        values = read_json(file, "progress of an unfinished build")
        if values["header"] != json.loads(json.dumps(self.header)):
            return None
        shards = [Shard(**s) for s in values["shards"]]
        if not all((f := self._where(s)).is_file() and sha256(f) == s.sha256 for s in shards):
            return None
        print(f"{self.path}: going on behind {sum(s.documents for s in shards)} documents finished before")
        return Progress(self.header, shards, values["counts"], [Source(**s) for s in values["sources"]])

    def _where(self, shard: Shard) -> Path:
        file = self.work / shard.file
        return file if file.is_file() or not self.base else self.path / shard.file

    def keys(self) -> np.ndarray:
        """S16, ascending: the conversations of the base and of the finished shards."""
        parts = [Store(self.path).keys()] if self.base else []
        for shard in self.progress.shards:
            parts += [layout._keys(b) for b in layout._open_shard(self._where(shard), shard)]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype="S16")

    @property
    def shard_tokens(self) -> int:
        """Of the shard being written."""
        return int(self.totals[1])

    def add(self, batch: pa.RecordBatch) -> None:
        self.waiting.append(batch)
        self.waiting_rows += batch.num_rows
        spans = batch.column("spans").values.to_numpy()
        tokens = len(batch.column("tokens").values)
        self.totals += (batch.num_rows, tokens, int(spans[1::2].sum() - spans[::2].sum()))
        if self.waiting_rows >= layout.BATCH:
            self._flush(layout.BATCH)

    def _flush(self, size: int) -> None:
        """Write what waits in batches of `size`; what is left over waits on."""
        with disk(self.path):
            whole = pa.concat_batches(self.waiting) if self.waiting else None
            while whole is not None and (whole.num_rows >= size or (size == 1 and whole.num_rows)):
                rows = min(layout.BATCH, whole.num_rows)
                if self.writer is None:
                    self.sink = pa.OSFile(str(self.work / self._shard_name()), "wb")
                    self.writer = pa.ipc.new_file(self.sink, layout.SCHEMA)
                self.writer.write_batch(whole.slice(0, rows))
                whole = whole.slice(rows)
        self.waiting = [whole] if whole is not None and whole.num_rows else []
        self.waiting_rows = sum(b.num_rows for b in self.waiting)

    def _shard_name(self) -> str:
        return f"shard-{self.first + len(self.progress.shards):05d}.arrow"

    def finish_shard(self, sources: Sequence[Source]) -> None:
        """Everything up to these positions of the sources is on disk afterwards, and is not done again."""
        self._flush(1)
        if self.writer is None:
            return
        file = self.work / self._shard_name()
        with disk(self.path):
            self.writer.close()
            self.sink.close()
            self.writer = self.sink = None
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            documents, tokens, supervised = (int(x) for x in self.totals)
            self.progress.shards.append(Shard(file.name, documents, tokens, supervised, sha256(file)))
            self.totals[:] = 0
            self.progress.counts, self.progress.sources = dict(self.counts), list(sources)
            write_text(self.work / "progress.json", json.dumps(asdict(self.progress)))

    def commit(self, *, tokenizer: str, eos: Sequence[int], sources: Sequence[Source]) -> StoreManifest:
        """Make the store, or its next generation.  With nothing new to a base: no new generation.  Raises InputError if
        the store is no longer what it was: nobody's generation is overwritten."""
        self.finish_shard(sources)
        shards, base = self.progress.shards, self.base
        if base is not None and layout.read_manifest(self.path) != base:
            raise InputError(f"the store {self.path} has changed meanwhile: run the same command again")
        if not shards and base is None:
            why = ", ".join(f"{k} {v}" for k, v in self.counts.items() if v) or "no conversations"
            raise InputError(f"nothing to store in {self.path}: the data set is empty ({why})")
        before: Counter[str] = Counter(base.counts if base else {})
        manifest = StoreManifest(
            generation=base.generation + 1 if base else 1,
            tokenizer=tokenizer,
            eos_token_ids=tuple(eos),
            shards=(*(base.shards if base else ()), *shards),
            sources={**(base.sources if base else {}), **{s.name: s.sha256 for s in sources}},
            counts={k: before[k] + self.counts[k] for k in (*before, *(k for k in self.counts if k not in before))},
            source_bytes={**(base.source_bytes if base else {}), **{s.name: s.size for s in sources if s.size}},
            settings=self.header.get("settings") or {},
        )
        text = to_json(manifest, indent=2)
        with disk(self.path):
            if base is None:
                write_text(generation_file(self.work, 1), text)
                write_text(self.work / "manifest.json", text)
                (self.work / "progress.json").unlink()
                os.rename(self.work, self.path)
            else:
                if not shards:
                    shutil.rmtree(self.work)
                    return replace(base, counts=manifest.counts)
                for shard in shards:
                    if (self.work / shard.file).is_file():
                        os.replace(self.work / shard.file, self.path / shard.file)
                write_text(generation_file(self.path, manifest.generation), text)
                write_text(self.path / "manifest.json", text)
                shutil.rmtree(self.work)
            _sync_folder(self.path)
            _sync_folder(self.path.parent)
        return manifest

    def _close(self) -> None:
        """Let go of a shard that was not finished; that its file may not even close well is no news."""
        for handle in (self.writer, self.sink):
            if handle is not None:
                with contextlib.suppress(OSError, pa.ArrowException):
                    handle.close()
        if self.writer is not None:
            (self.work / self._shard_name()).unlink(missing_ok=True)
        self.writer = self.sink = None


def write_store(
    path: Path,
    documents: Iterable[Document],
    *,
    tokenizer: str,
    eos_token_ids: Sequence[int],
    sources: dict[str, str],
    counts: dict[str, int],
    base: StoreManifest | None = None,
) -> StoreManifest:
    """Write documents that are there already: a new store, or the next generation of `base`.  Whole or not at all.
    `counts` may still grow while `documents` is being consumed."""
    if path.exists() and base is None:
        raise InputError(exists(path))
    read = [Source(name, sha256=digest) for name, digest in sources.items()]
    with writing(path), Build(path, base, {"once": os.urandom(8).hex()}) as build:
        batch: list[Document] = []
        for document in documents:
            batch.append(document)
            if len(batch) == layout.BATCH:
                build.add(record_batch(batch, [_token_key(d) for d in batch]))
                batch = []
                if build.shard_tokens >= SHARD_TOKENS:
                    build.finish_shard(())
        if batch:
            build.add(record_batch(batch, [_token_key(d) for d in batch]))
        build.counts = Counter(counts)
        return build.commit(tokenizer=tokenizer, eos=eos_token_ids, sources=read)


def _token_key(document: Document) -> bytes:
    return hashlib.blake2b(document.tokens.tobytes(), digest_size=16).digest()


def exists(path: Path) -> str:
    return (
        f"the store {path} exists: remove it, or set data_dir to another folder, or add to it with "
        f"`draftsmith data append`"
    )


@contextlib.contextmanager
def disk(path: Path) -> Iterator[None]:
    """A full disk and the like become an InputError that says what to do."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror or error}): make room, then run the same command again; "
            f"what is finished is kept"
        ) from error


@contextlib.contextmanager
def writing(path: Path, what: str = "the store") -> Iterator[None]:
    """One writer of `path` at a time.  Raises InputError that names the other one.

    The lock is the kernel's (flock), so it ends with its process, however that ends; the file says who it is, which
    also keeps a second host out where flock does not reach across.  A folder made for it goes if nothing was written.
    """
    made = not path.parent.exists()
    make_folder(path.parent)
    file = path.with_name(f".{path.name}.lock")
    while True:
        with disk(path):
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.read(handle, 4096))
            os.close(handle)
            who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
            raise InputError(f"{what} {path}: being written by {who}: wait for it, or stop it") from None
        if os.fstat(handle).st_nlink and os.path.exists(file) and os.stat(file).st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)  # its owner removed it between our two calls
    try:
        holder = _holder(os.read(handle, 4096))
        if holder and _lives(holder):
            raise InputError(
                f"{what} {path}: being written by process {holder['pid']} on {holder['host']}: wait for it, or, "
                f"if that is no longer so, remove {file}"
            )
    except InputError:
        os.close(handle)
        raise
    try:
        with disk(path):
            os.ftruncate(handle, 0)
            me = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "started": _started(os.getpid())}
            os.pwrite(handle, json.dumps(me).encode(), 0)
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)
        if made:
            with contextlib.suppress(OSError):
                path.parent.rmdir()


def _holder(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        return found if isinstance(found, dict) and {"pid", "host"} <= found.keys() else {}
    except ValueError:
        return {}


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the process that a lock file names may still be writing.  Of another host nobody here can tell."""
    if holder["host"] != socket.gethostname():
        return True
    if holder.get("boot") != _boot():
        return False
    started = _started(int(holder["pid"]))
    return started is not None and started == holder.get("started")


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot: a number used again is told apart by it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
