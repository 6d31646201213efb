"""The processes that tokenize.  This module is all they import: neither torch nor transformers, which would cost each
of them seconds and half a gigabyte."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any

from draftsmith import env
from draftsmith.data.documents import Made, Recipe, Worker
from draftsmith.data.messages import Chunk
from draftsmith.errors import InputError

SMALL_FILE = 4 << 20
"""Bytes below which starting processes costs more than it saves."""


class ChunkMaker:
    """`with ChunkMaker(recipe, workers) as make: for made in make(chunks)`: in order, a few chunks ahead at most."""

    def __init__(self, recipe: Recipe, workers: int) -> None:
        self.recipe, self.workers = recipe, workers
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Callable[[Iterable[Chunk]], Iterator[Made]]:
        if self.workers == 0:
            worker = Worker(self.recipe)
            return lambda chunks: (worker.chunk(chunk) for chunk in chunks)  # map would end at a StopIteration
        self.pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _start, (self.recipe,))
        return self._in_order

    def _in_order(self, chunks: Iterable[Chunk]) -> Iterator[Made]:
        assert self.pool is not None
        ahead: deque[Future[Made]] = deque()
        try:
            for chunk in chunks:
                ahead.append(self.pool.submit(_work, chunk))
                if len(ahead) > 2 * self.workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BrokenProcessPool as error:
            raise InputError(
                "a tokenizing process was killed (out of memory?): run the same command again, with fewer "
                "tokenize.workers; finished shards are kept"
            ) from error

    def __exit__(self, *_: Any) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


_worker: Worker | None = None
_chunks = 0


def _start(recipe: Recipe) -> None:
    global _worker
    env.prepare()  # one thread: each process is one of as many as there are CPUs
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = Worker(recipe)
    gc.collect()
    gc.freeze()
    gc.disable()  # looking for cycles after every few hundred messages costs a twentieth of the time: see _work


def _end_with_parent() -> None:
    """Or a writer that is killed would leave its workers waiting for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(chunk: Chunk) -> Made:
    global _chunks
    assert _worker is not None
    _chunks += 1
    if _chunks % 16 == 0:
        gc.collect()
    return _worker.chunk(chunk)


def worker_count(wanted: int | None, size: int) -> int:
    """0: in this process."""
    if wanted is not None:
        return wanted
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if size < SMALL_FILE or cpus == 1 else cpus
