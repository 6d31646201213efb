"""The throughput floor: windows of training time held against the last good run, and what grew when they fall below.

Pure: made of numbers alone.  watch.py finds the last good run and says what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LABELS = {
    "compute": "compute", "wait": "wait for target", "transfer": "transfer", "data": "data", "compile": "compile",
    "checkpoint": "checkpoint", "evaluation": "evaluation",
}  # fmt: skip
"""Parts of a run's time.  checkpoint: only what training waits for.  wait: for features, from wherever they come."""
PAUSES = ("checkpoint", "evaluation")
"""Parts that are not training: the rate is that of the rest."""


@dataclass(frozen=True)
class Interval:
    """Time between two log points.  Made from Clock's reading; written as a `rate` line of metrics.jsonl; read by the
    floor and the report."""

    rows: float
    parts: Mapping[str, float]
    """Seconds of each of LABELS."""
    checkpoints: int = 0

    @property
    def wall(self) -> float:
        return sum(self.parts.values())

    @property
    def training(self) -> float:
        return sum(seconds for part, seconds in self.parts.items() if part not in PAUSES)

    def line(self) -> dict[str, Any]:
        """What goes into metrics.jsonl; `seconds` is training time, the shares are of all time."""
        wall = max(self.wall, 1e-9)
        return {
            "rows": self.rows,
            "seconds": self.training,
            "wall_seconds": self.wall,
            "rows_per_s": self.rows / max(self.training, 1e-9),
            "shares": {part: self.parts.get(part, 0.0) / wall for part in LABELS},
            "checkpoints": self.checkpoints,
        }


def from_line(line: Mapping[str, Any]) -> Interval:
    """An interval read back; of a line without shares, all time counts as compute."""
    wall = line.get("wall_seconds", line["seconds"])
    shares = line.get("shares") or {"compute": 1.0}
    rows = line.get("rows", line["rows_per_s"] * line["seconds"])
    return Interval(rows, {part: share * wall for part, share in shares.items()}, line.get("checkpoints", 0))


def together(intervals: Iterable[Interval]) -> Interval:
    parts = dict.fromkeys(LABELS, 0.0)
    rows, checkpoints = 0.0, 0
    for one in intervals:
        rows += one.rows
        checkpoints += one.checkpoints
        for part, seconds in one.parts.items():
            parts[part] += seconds
    return Interval(rows, parts, checkpoints)


@dataclass(frozen=True)
class Reference:
    """What the last good run did."""

    label: str
    whole: Interval
    checkpoint_seconds: float | None
    """What its slowest checkpoint kept training waiting for; None: it recorded none."""

    @property
    def rows_per_s(self) -> float:
        return self.whole.rows / max(self.whole.training, 1e-9)


def reference(label: str, intervals: Sequence[Interval]) -> Reference | None:
    """Of a run's intervals in order; the first is its warm-up.  None if nothing was measured."""
    steady = intervals[1:] or intervals
    whole = together(steady)
    if whole.rows <= 0 or whole.training <= 0:
        return None
    costs = [one.parts.get("checkpoint", 0.0) / one.checkpoints for one in intervals if one.checkpoints]
    return Reference(label, whole, max(costs, default=None))


@dataclass(frozen=True)
class Drop:
    """A sustained drop below the floor."""

    now: Interval
    rows_per_s: float
    before: Reference
    share: float

    def lines(self) -> list[str]:
        """How far it fell, the part that grew in one sentence, and all time shares."""
        good = self.before.rows_per_s
        ratio = self.rows_per_s / good
        return [
            f"throughput has dropped: {self.rows_per_s:.3g} rows/s over {self.now.wall:.0f} s, {good:.3g} rows/s "
            f"in the last good run {self.before.label} ({ratio:.0%} of it, the floor is {self.share:.0%})",
            self.sentence(),
            f"time shares: {shares_text(self.now, self.before.whole)}",
        ]

    def sentence(self) -> str:
        part, was, now = grown(self.now, self.before)
        return f"the part that grew is {LABELS[part]}: {_time(was)} a row before, {_time(now)} a row now"


def grown(now: Interval, before: Reference) -> tuple[str, float, float]:
    """(part, seconds a row before, now) of the part that costs most more than before.  Evaluation is never the cause,
    and a checkpoint only beyond what checkpoints cost before."""
    rows, old_rows = max(now.rows, 1e-9), max(before.whole.rows, 1e-9)
    costs = []
    for part in LABELS:
        if part == "evaluation":
            continue
        was, is_ = before.whole.parts.get(part, 0.0) / old_rows, now.parts.get(part, 0.0) / rows
        more = is_ - was if part != "checkpoint" else _excess(now, before) / rows
        costs.append((more, part, was, is_))
    _, part, was, is_ = max(costs)
    return part, was, is_


def shares_text(now: Interval, before: Interval) -> str:
    parts = [part for part in LABELS if now.parts.get(part, 0.0) or before.parts.get(part, 0.0)]
    of = [(LABELS[p], now.parts.get(p, 0.0) / now.wall, before.parts.get(p, 0.0) / before.wall) for p in parts]
    return ", ".join(f"{label} {is_:.0%} (was {was:.0%})" for label, is_, was in of)


class Floor:
    """Windows of at least `window_seconds` of training; the first is warm-up and never counts.

    A window's rate is rows per second of training and of what checkpoints took beyond those of the last good run:
    evaluation and ordinary checkpoints cannot make it fall.
    """

    def __init__(self, before: Reference, share: float, window_seconds: float) -> None:
        self.before, self.share, self.window_seconds = before, share, window_seconds
        self.open: list[Interval] = []
        self.warm = False
        self.low: list[Interval] = []
        """Windows on end that were below the floor."""

    def add(self, interval: Interval) -> Drop | None:
        """A drop, when this interval ends the second window below the floor on end; said once, until one is above."""
        self.open.append(interval)
        window = together(self.open)
        if window.training + _excess(window, self.before) < self.window_seconds:
            return None
        self.open = []
        if not self.warm:
            self.warm = True
            return None
        if self.rate(window) >= self.share * self.before.rows_per_s:
            self.low = []
            return None
        self.low.append(window)
        if len(self.low) != 2:
            return None
        both = together(self.low)
        return Drop(both, self.rate(both), self.before, self.share)

    def rate(self, window: Interval) -> float:
        return window.rows / max(window.training + _excess(window, self.before), 1e-9)


def _excess(window: Interval, before: Reference) -> float:
    """Seconds that checkpoints took beyond the slowest of the last good run."""
    if before.checkpoint_seconds is None:
        return 0.0
    return max(0.0, window.parts.get("checkpoint", 0.0) - window.checkpoints * before.checkpoint_seconds)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


SPEEDLESS = {
    "train": (
        "steps", "epochs", "learning_rate", "schedule", "warmup_fraction", "decay_fraction", "min_lr_ratio",
        "weight_decay", "betas", "clip_norm", "log_every", "heldout_every", "heldout_rows", "accept_every",
        "accept_prompts", "checkpoint_every", "keep_checkpoints", "seed",
    ),
    "placement": ("timeout_seconds", "max_restarts"),
    "target": ("model", "revision"),
    "loss": ("gamma", "dpace_alpha"),
    "compile": ("on_fallback", "start", "cache_dir"),
}  # fmt: skip
"""Keys of the config that the rate does not depend on; the target itself is compared by last_good."""


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys on which throughput depends that differ between two configs; a key that one does not know is left out."""
    out = []
    for section in ("target", "drafter", "loss", "train", "placement", "compile"):
        old, new = before.get(section, {}), now.get(section, {})
        for key in sorted(old.keys() & new.keys() - set(SPEEDLESS.get(section, ()))):
            if old[key] != new[key]:
                out.append(f"{section}.{key}")
    return out + (["device"] if before.get("device") != now.get("device") else [])
