"""What each process does besides the loop: a target serves features, a drafter finds them; and who waits for whom."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.loader import Loader
from draftsmith.records import PackedRow
from draftsmith.rundir import RunDir
from draftsmith.target.features import FeatureSource
from draftsmith.target.model import FeatureExtractor
from draftsmith.train.dist import World
from draftsmith.train.schedule import rows_of_target
from draftsmith.train.transport import ReceiveRows, SendRows, Times, send_heldout, serve_rows


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
    world: World, loader: Loader, extract: FeatureExtractor, heldout_rows: Sequence[PackedRow], run_ahead: int
) -> RunDir:
    """A target's whole life: features of its rows, in order, until all are sent or the drafters stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the drafters decide when to stop, and say so
    begin = world.read("begin")
    if world.index == 0:
        send_heldout([extract.row(row) for row in heldout_rows if row.anchor_count])
    rows = rows_of_target(begin["first"], begin["last"], world.targets, world.index)
    serve_rows(SendRows(world, run_ahead), with_anchors(loader, rows), extract.row)
    return RunDir(Path(begin["run"]))


def with_anchors(loader: Loader, rows: Iterator[int]) -> Iterator[tuple[int, PackedRow]]:
    """(g, row) of the rows that train something: the others are neither computed nor sent."""
    for g in rows:
        row = loader.row(g)
        if row.anchor_count:
            yield g, row


class Clock:
    """Time between log points, and how much of it this process waited for features."""

    def __init__(self, world: World, source: FeatureSource) -> None:
        self.world, self.source = world, source
        self.times = Times()
        self.waited_before = 0.0
        self.total = Times()
        self.last: dict[str, Any] = {}

    def waited(self) -> float:
        return self.source.waited if isinstance(self.source, ReceiveRows) else 0.0

    def read(self, rows: int) -> tuple[float, dict[str, Any]]:
        """Seconds since the last reading, and the shares of waiting; starts anew."""
        seconds = self.times.summary()["seconds"]
        waited = self.waited() - self.waited_before
        self.total.compute += seconds - waited
        self.total.wait += waited
        self.total.rows += rows
        found = _shares(self.world, self.times, waited)
        self.last |= found
        self.reset()
        return seconds, found

    def reset(self) -> None:
        self.times.reset()
        self.waited_before = self.waited()

    def advice(self, rows_per_step: int) -> str:
        waited = self.total.wait / max(self.total.wait + self.total.compute, 1e-9)
        per_row = self.total.compute / max(self.total.rows, 1)
        return _advice(self.world, rows_per_step, self.last.get("target_seconds_per_row", per_row), per_row, waited)


def _shares(world: World, own: Times, waited: float) -> dict[str, Any]:
    """Shares of the time since the last log point that drafters and targets waited.  Every drafter calls it."""
    seconds, waits = world.sum_host([own.summary()["seconds"], waited])
    out: dict[str, Any] = {"drafters_waited": waits / max(seconds, 1e-9)}
    if world.targets and world.first:
        said = [world.read(f"times/{r}", r) for r in range(world.drafters, world.size) if world.said(f"times/{r}")]
        if said:
            out["targets_waited"] = sum(t["wait"] for t in said) / max(sum(t["seconds"] for t in said), 1e-9)
            rows = sum(t["rows"] for t in said)
            out["target_seconds_per_row"] = sum(t["compute"] for t in said) / max(rows, 1)
    return out


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
