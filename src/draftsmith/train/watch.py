"""The throughput floor at work: finds the last good run, adds each interval, and says what a drop comes from."""

from __future__ import annotations

from typing import Any

from draftsmith.config import Config
from draftsmith.errors import InputError
from draftsmith.provenance.diff import diff
from draftsmith.provenance.facts import attempt, why_unknown
from draftsmith.provenance.history import last_good
from draftsmith.provenance.manifest import load_run
from draftsmith.provenance.recorder import Recorder
from draftsmith.rundir import RunDir
from draftsmith.tracking import Tracker, read_metrics
from draftsmith.train.floor import Floor, Interval, Reference, changed_settings, from_line, reference


class Watch:
    """Only the process that writes the run folder watches: elsewhere `active` is False and nothing is read."""

    def __init__(self, config: Config, run: RunDir, tracker: Tracker, recorder: Recorder, *, active: bool) -> None:
        self.run, self.tracker, self.recorder = run, tracker, recorder
        self.stops = config.floor.action == "stop"
        self.before: Reference | None = None
        self.good: RunDir | None = None
        self.floor: Floor | None = None
        if not active or config.floor.action == "off":
            return
        found = attempt(self._find, config)
        if why := why_unknown(found):
            tracker.say(f"no throughput floor: {why.removeprefix('InputError: ')}")
            return
        self.before, self.good = found
        self.floor = Floor(self.before, config.floor.share, config.floor.window_seconds)
        good = f"{self.before.rows_per_s:.3g} rows/s of {self.before.label}"
        tracker.say(f"throughput floor: {config.floor.share:.0%} of the {good}")

    def _find(self, config: Config) -> tuple[Reference, RunDir]:
        """Raises InputError that says why there is nothing to be held against."""
        record = last_good(config.runs_dir, load_run(self.run))
        if record is None:
            raise InputError("there is no last good run of this target, geometry and hardware")
        changed = changed_settings(record.facts["config"], config.model_dump(mode="json"))
        if changed:
            raise InputError(f"the config has changed since the last good run {record.label}: {', '.join(changed)}")
        good = RunDir(record.path)
        lines = [line for line in read_metrics(good.metrics) if line.get("kind") == "rate"]
        found = reference(record.label, [from_line(line) for line in lines])
        if found is None:
            raise InputError(f"the last good run {record.label} recorded no rate")
        return found, good

    def beside(self, interval: Interval) -> str:
        """Rows a second now, and as a share of the last good run's."""
        rate = interval.rows / max(interval.training, 1e-9)
        if self.before is None:
            return f"{rate:.3g} rows/s"
        return f"{rate:.3g} rows/s ({rate / self.before.rows_per_s:.0%} of last-good)"

    def too_slow(self, interval: Interval) -> bool:
        """Add an interval; say a drop; whether the run should stop for it."""
        drop = self.floor.add(interval) if self.floor else None
        if drop is None:
            return False
        self.recorder.fell_back("throughput fell below the floor")  # or the next run would be held against this one
        for line in [*drop.lines(), f"what changed since {drop.before.label}:", self._verdict()]:
            self.tracker.say(line)
        return self.stops

    def _verdict(self) -> str:
        def text() -> Any:
            assert self.good is not None
            return diff(load_run(self.good), load_run(self.run)).text()

        found = attempt(text)
        return f"it cannot be told: {why_unknown(found)}" if why_unknown(found) else str(found)
