"""Features from targets to drafters, row by row, in the order that schedule.py fixes.

A target runs ahead by at most `run_ahead` rows: beyond that it waits until a drafter has taken one (bounded memory,
back-pressure).  A drafter asks for its next rows before it needs them, so that transfers run beside its compute.
Every message is [T, K*H] of the feature dtype; its shape never changes.  Rows without an anchor are not sent: both
sides know them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.records import PackedRow
from draftsmith.target.features import TimedFeatures
from draftsmith.train.dist import World
from draftsmith.train.schedule import drafter_of, target_of

TAGS = 2**30
"""Tags of training rows are below, those of held-out rows from here on."""
LOOK = 0.2
"""Seconds between two looks at whether the drafters have stopped."""


class Stopped(Exception):
    """The drafters have stopped before the last row."""


@dataclass
class Times:
    """What one process did with its time: seconds of compute, of waiting for a peer, and rows done, since `reset`."""

    compute: float = 0.0
    wait: float = 0.0
    rows: int = 0
    since: float = field(default_factory=time.monotonic)

    def summary(self) -> dict[str, float]:
        return {
            "seconds": time.monotonic() - self.since,
            "compute": self.compute,
            "wait": self.wait,
            "rows": self.rows,
        }

    def reset(self) -> None:
        self.compute, self.wait, self.rows, self.since = 0.0, 0.0, 0, time.monotonic()


@contextmanager
def reaching(world: World, what: str, *, stoppable: bool) -> Iterator[None]:
    """Around every use of a connection.  Raises PeerError if the peer is lost or too late; with `stoppable` Stopped if
    that is because the drafters have stopped."""
    with world.waiting(what):
        try:
            yield
        except RuntimeError as error:
            if stoppable and world.said("stopped"):
                raise Stopped from error
            raise


def wait_for(work: Any, world: World, what: str, *, stoppable: bool = False) -> None:
    """Wait for a transfer.  Raises like `reaching`."""
    begin = looked = time.monotonic()
    pause = 1e-5
    with reaching(world, what, stoppable=stoppable):
        while not work.is_completed():
            now = time.monotonic()
            if now - begin > world.timeout:
                raise RuntimeError("no answer")
            if stoppable and now - looked > LOOK:
                looked = now
                if world.said("stopped"):
                    raise Stopped
            time.sleep(pause)
            pause = min(pause * 2, 2e-3)
        work.wait()


class SendRows:
    """A target's side."""

    def __init__(self, world: World, run_ahead: int) -> None:
        self.world, self.run_ahead = world, run_ahead
        self.flying: deque[tuple[Any, Tensor, int]] = deque()
        self.times = Times()

    def send(self, g: int, features_TK: Tensor) -> None:
        """Hand over row g; waits while `run_ahead` rows are under way."""
        self.drain(self.run_ahead - 1)
        rank = drafter_of(g, self.world.drafters)
        buffer = features_TK.cpu() if self.world.staged else features_TK.contiguous()
        with reaching(self.world, f"{self.world.name(rank)} to take row {g}", stoppable=True):
            self.flying.append((_start(dist.isend, buffer, rank, g % TAGS), buffer, g))

    def drain(self, keep: int) -> None:
        begin = time.monotonic()
        while len(self.flying) > keep:
            work, _, g = self.flying.popleft()
            taker = self.world.name(drafter_of(g, self.world.drafters))
            wait_for(work, self.world, f"{taker} to take row {g}", stoppable=True)
        self.times.wait += time.monotonic() - begin


class ReceiveRows:
    """A drafter's side: a FeatureSource whose rows are asked for in the order of the schedule.

    rows: this drafter's rows with anchors, ascending.  shape: [T, K*H].  ahead: rows asked for beforehand.
    """

    def __init__(
        self, world: World, rows: Iterator[int], shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
        ahead: int,
    ) -> None:  # fmt: skip
        self.world, self.rows, self.shape, self.dtype, self.device = world, rows, shape, dtype, device
        self.flying: deque[tuple[Any, Tensor, int]] = deque()
        while len(self.flying) < ahead and self._ask():
            pass

    def _ask(self) -> bool:
        """Ask for the next row; False if there is none."""
        g = next(self.rows, None)
        if g is None:
            return False
        on = torch.device("cpu") if self.world.staged else self.device
        buffer = torch.empty(self.shape, dtype=self.dtype, device=on)
        rank = self.world.drafters + target_of(g, self.world.targets)
        with reaching(self.world, f"{self.world.name(rank)} to give row {g}", stoppable=False):
            self.flying.append((_start(dist.irecv, buffer, rank, g % TAGS), buffer, g))
        return True

    def row(self, row: PackedRow) -> Tensor:
        work, buffer, g = self.flying.popleft()
        giver = self.world.name(self.world.drafters + target_of(g, self.world.targets))
        wait_for(work, self.world, f"{giver} to give row {g}")
        self._ask()
        return buffer.to(self.device)


def _start(operation: Any, buffer: Tensor, rank: int, tag: int) -> Any:
    """One non-blocking transfer.  Batched even when alone: NCCL would serialise it otherwise."""
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, buffer, rank, tag=tag)])
    return work if buffer.is_cuda else WaitedFor(work)


class WaitedFor:
    """A gloo transfer with a truthful `is_completed`: gloo's own says False until somebody has waited for it."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.failure: RuntimeError | None = None
        self.thread = threading.Thread(target=self._wait, daemon=True)  # may outlive a peer that never answers
        self.thread.start()

    def _wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self.failure = error

    def is_completed(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        self.thread.join()
        if self.failure is not None:
            raise self.failure


def send_heldout(world: World, features: Sequence[Tensor]) -> None:
    """Target 0 to drafter 0, before the first row."""
    for i, one in enumerate(features):
        with reaching(world, f"{world.name(0)} to take held-out row {i}", stoppable=True):
            work = _start(dist.isend, one.cpu() if world.staged else one.contiguous(), 0, TAGS + i)
            wait_for(work, world, "", stoppable=True)


def receive_heldout(
    world: World, count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    out = []
    for i in range(count):
        buffer = torch.empty(shape, dtype=dtype, device=torch.device("cpu") if world.staged else device)
        with reaching(world, f"{world.name(world.drafters)} to give held-out row {i}", stoppable=False):
            wait_for(_start(dist.irecv, buffer, world.drafters, TAGS + i), world, "")
        out.append(buffer.cpu())
    return out


def serve_rows(sender: SendRows, rows: Iterator[tuple[int, PackedRow]], source: TimedFeatures) -> None:
    """Compute rows in order and hand them over, until all are taken.  Raises Stopped when the drafters stop before."""
    world, times, before = sender.world, sender.times, source.ended
    for g, row in rows:
        features = source.row(row)
        times.compute += source.take(keep=1)  # the GPU has this row to do meanwhile
        times.rows = source.ended - before
        if source.by_events:  # the host waits for the GPU too
            times.wait = max(0.0, time.monotonic() - times.since - times.compute)
        with reaching(world, f"the store of {world.name(0)}", stoppable=True):
            world.publish(f"times/{world.rank}", times.summary())
        sender.send(g, features)
    sender.drain(0)
