"""What each process does besides the loop: a target serves features, a drafter finds them; and who waits for whom."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.loader import Loader
from draftsmith.records import PackedRow
from draftsmith.target.features import FeatureSource, TimedFeatures
from draftsmith.train.dist import World
from draftsmith.train.floor import PAUSES
from draftsmith.train.schedule import rows_of_target
from draftsmith.train.transport import SendRows, Stopped, Times, send_heldout, serve_rows


@dataclass
class KnownRows:
    """A FeatureSource of a few rows that are asked for again and again, in order."""

    features: list[Tensor]
    device: torch.device
    at: int = 0

    def row(self, row: PackedRow) -> Tensor:
        found = self.features[self.at % len(self.features)]
        self.at += 1
        return found.to(self.device)


def serve(
    world: World, loader: Loader, source: TimedFeatures, heldout_rows: Sequence[PackedRow], begin: Mapping[str, Any],
    run_ahead: int,
) -> bool:  # fmt: skip
    """A target's whole life: features of its rows, in order; False if the drafters stopped before all were sent.

    begin: what rank 0 published: first and last row of the run.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the drafters decide when to stop, and say so
    rows = rows_of_target(begin["first"], begin["last"], world.targets, world.index)
    try:
        if world.index == 0:
            send_heldout(world, [source.row(row) for row in heldout_rows if row.anchor_count])
            source.take()
        serve_rows(SendRows(world, run_ahead), with_anchors(loader, rows), source)
    except Stopped:
        return False
    return True


def with_anchors(loader: Loader, rows: Iterator[int]) -> Iterator[tuple[int, PackedRow]]:
    """(g, row) of the rows that train something: the others are neither computed nor sent."""
    for g in rows:
        row = loader.row(g)
        if row.anchor_count:
            yield g, row


class Clock:
    """Where the time between log points goes, by part (floor.LABELS), and who waited for whom.

    `features` is the source to train from: its rows are timed.  Everything that is not a named part is compute.
    """

    def __init__(self, world: World, source: FeatureSource, device: torch.device) -> None:
        self.world, self.device = world, device
        self.features = TimedFeatures(source, device)
        self.parts: dict[str, float] = {}
        self.checkpoints = 0
        self.begun = time.monotonic()
        self.compiled_before = compile_seconds()
        self.said_at_start: dict[int, dict[str, float]] = {}
        self.said_before: dict[int, dict[str, float]] = {}
        self.rows_served: float | None = None
        """By the targets, between the last two readings; None without targets."""
        self.total = Times()
        self.last: dict[str, Any] = {}

    def start(self) -> None:
        """Begin to count from now: what came before the first step is no part of the rate."""
        self.begun = time.monotonic()
        self.parts, self.checkpoints, self.compiled_before = {}, 0, compile_seconds()
        self.features.take()
        self.said_at_start = self.said_before = self._said()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is that part of the time, and not compute."""
        if name in PAUSES and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps still queued are training, not part of the pause
        begin, compiled = time.monotonic(), compile_seconds()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - begin
            self.compiled_before += compile_seconds() - compiled  # counted once, in the part
            self.checkpoints += name == "checkpoint"

    def read(self, rows: int) -> tuple[dict[str, float], int, dict[str, Any]]:
        """Seconds by part since the last reading, checkpoints, and shares of waiting; starts anew.

        Every drafter calls it.  rows: this process's own.  The time is rank 0's; loading, compiling and waiting for
        features are those of the slowest drafter, since all others wait for it.
        """
        now, compiled = time.monotonic(), compile_seconds()
        wall, self.begun = now - self.begun, now
        own = {"data": self.parts.get("data", 0.0), "wait": self.features.take()}
        new = compiled - self.compiled_before
        own["compile"] = new if new >= 0 else compiled  # torch.compiler.reset() sets it back to 0
        pauses = {name: self.parts.get(name, 0.0) for name in PAUSES}
        training = wall - sum(pauses.values())
        self.total.wait += own["wait"]
        self.total.compute += training - own["wait"]
        self.total.rows += rows
        waits = self._waits(training, own["wait"])
        parts = self._slowest(own)
        # both sides waiting at once: it is what lies between them
        parts["transfer"] = (
            min(parts["wait"], waits.get("targets_waited", 0.0) * training) if self.world.targets else 0.0
        )
        parts["wait"] -= parts["transfer"]
        parts["compute"] = max(0.0, training - sum(parts.values()))
        checkpoints, self.parts, self.checkpoints, self.compiled_before = self.checkpoints, {}, 0, compiled
        return {**parts, **pauses}, checkpoints, waits

    def _slowest(self, own: dict[str, float]) -> dict[str, float]:
        """Of each part, the most that any drafter spent."""
        size = len(own)
        table = [0.0] * (size * self.world.drafters)
        table[self.world.index * size : (self.world.index + 1) * size] = own.values()
        table = self.world.sum_host(table)
        return {name: max(table[i::size]) for i, name in enumerate(own)}

    def _waits(self, training: float, waited: float) -> dict[str, Any]:
        """Shares of the time since the last log point that drafters and targets waited for each other."""
        seconds, waits = self.world.sum_host([training, waited])
        if not self.world.targets:
            return {}
        out: dict[str, Any] = {"drafters_waited": waits / max(seconds, 1e-9)}
        said = self._said()
        if said:
            new, whole = _since(self.said_before, said), _since(self.said_at_start, said)
            out["targets_waited"] = new["wait"] / max(new["seconds"], 1e-9)
            if whole["rows"] < 1:  # all were ready before
                whole = _since({}, said)
            if whole["rows"] > 0 and whole["compute"] > 0:
                out["target_seconds_per_row"] = whole["compute"] / whole["rows"]
            self.rows_served = new["rows"]
        self.said_before = said
        self.last |= out
        return out

    def _said(self) -> dict[int, dict[str, float]]:
        """By rank, what the targets have said of their time; on rank 0."""
        if not self.world.first:
            return {}
        ranks = [r for r in range(self.world.drafters, self.world.size) if self.world.said(f"times/{r}")]
        return {r: self.world.read(f"times/{r}", r) for r in ranks}

    def advice(self, rows_per_step: int) -> str:
        waited = self.total.wait / max(self.total.wait + self.total.compute, 1e-9)
        per_row = self.total.compute / max(self.total.rows, 1)
        target = self.last.get("target_seconds_per_row")
        if target is None or per_row <= 0:  # too short a run to know
            return f"drafters waited {waited:.0%} of the time"
        return _advice(self.world, rows_per_step, target, per_row, waited)


def _since(before: Mapping[int, Mapping[str, float]], now: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Sums over the targets of what came between two of their words."""
    keys = ("seconds", "compute", "wait", "rows")
    return {k: sum(t[k] - before.get(r, {}).get(k, 0.0) for r, t in now.items()) for k in keys}


def compile_seconds() -> float:
    """Time that torch.compile has taken in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


def who_waits(parts: Mapping[str, float], waits: Mapping[str, Any]) -> str:
    """For the progress line: who waits for whom, as shares of the training time."""
    if "drafters_waited" in waits:
        targets = f", targets {waits['targets_waited']:.0%}" if "targets_waited" in waits else ""
        return f"drafters wait {waits['drafters_waited']:.0%}{targets}"
    training = max(sum(s for part, s in parts.items() if part not in PAUSES), 1e-9)
    return f"waits: features {parts['wait'] / training:.0%}, data {parts['data'] / training:.0%}"


def rows_per_second(targets: int, drafters: int, target_seconds: float, drafter_seconds: float) -> float:
    """What the slower role allows."""
    return min(targets / target_seconds, drafters / drafter_seconds)


def _advice(world: World, rows_per_step: int, target_seconds: float, drafter_seconds: float, waited: float) -> str:
    """One sentence: who is waiting, and which split of as many processes would be faster.

    target_seconds, drafter_seconds: compute time of one row on one process of the role.
    """
    now = rows_per_second(world.targets, world.drafters, target_seconds, drafter_seconds)
    splits = [(m, n) for n in range(1, world.size) if rows_per_step % n == 0 and (m := world.size - n) >= 1]
    best = max(splits, key=lambda s: rows_per_second(s[0], s[1], target_seconds, drafter_seconds))
    gain = rows_per_second(best[0], best[1], target_seconds, drafter_seconds) / now
    bound = "target" if world.targets / target_seconds < world.drafters / drafter_seconds else "drafter"
    sentence = f"drafters waited {waited:.0%} of the time: {world.targets} + {world.drafters} is {bound}-bound"
    if gain > 1.02:
        sentence += f"; {best[0]} + {best[1]} predicted {gain:.2f}x"
    return sentence
