"""Progress of a long step: a rich bar on a terminal, a plain line every few seconds elsewhere.  Both show the ETA."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """`with Progress("training", 100, "steps") as p: p.advance(1, "loss 3.2")`"""

    def __init__(self, label: str, total: int, unit: str, every_seconds: float = 10.0, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.label, self.total, self.unit, self.every = label, total, unit, every_seconds
        self.done, self.note = 0, ""
        self.started = self.last = time.monotonic()
        self.rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            disable=quiet or not sys.stdout.isatty(),
        )
        self.task = self.rich.add_task(label, total=total, note="")

    def __enter__(self) -> Progress:
        self.rich.start()
        return self

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self.done += amount
        self.note = self.note if note is None else note
        self.rich.update(self.task, advance=amount, note=self.note)
        now = time.monotonic()
        if self.rich.disable and not self.quiet and (now - self.last >= self.every or self.done >= self.total):
            self.last = now
            rate = self.done / max(now - self.started, 1e-9)
            eta = (self.total - self.done) / max(rate, 1e-9)
            print(
                f"{self.label}: {self.done}/{self.total} {self.unit}, {rate:.3g}/s, "
                f"ETA {eta:.0f} s{'  ' + self.note if self.note else ''}",
                flush=True,
            )

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.rich.stop()
