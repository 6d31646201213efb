"""One process's record of a run: a manifest at its start, once built and at its end, and signs of life in between.

recorder = Recorder("train", config)      the start, before models are loaded
with recorder.recording(run):             from here on the run folder exists
    recorder.built(facts, model, store)   models, optimizer and compiled functions are there
    recorder.at(step)                     in the loop: two assignments
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith import env
from draftsmith.errors import Interrupted
from draftsmith.files import write_text
from draftsmith.provenance import capture, gpu, heartbeat
from draftsmith.provenance.diff import diff
from draftsmith.provenance.facts import attempt, why_unknown
from draftsmith.provenance.manifest import load_run
from draftsmith.provenance.masking import masker
from draftsmith.provenance.outcome import read_outcome
from draftsmith.provenance.verdict import Verdict
from draftsmith.rundir import RunDir


class Recorder:
    def __init__(self, kind: str, config: dict[str, Any]) -> None:
        self.kind = kind
        self.rank = env.world()[0]
        self.begun = time.monotonic()
        self.fallbacks: list[str] = []
        self.start = capture.at_start(kind, config)
        self.run: RunDir | None = None
        self.heart: heartbeat.Heartbeat | None = None

    @contextmanager
    def recording(self, run: RunDir) -> Iterator[None]:
        """Write the start, show signs of life, and at the end write how it ended.  Exceptions pass through."""
        self.run = run
        self._safely(self._write, self.start)
        devices = self.start["gpu"].get("devices")
        self.heart = heartbeat.Heartbeat(run, self.rank, sample=gpu.sample if devices else None)
        self._safely(self.heart.start)
        ending: dict[str, Any] = {"how": "finished"}
        try:
            yield
        except Interrupted as stop:
            ending = {"how": "interrupted", "detail": masker().text(str(stop)), "code": stop.code}
            raise
        except KeyboardInterrupt:
            ending = {"how": "interrupted", "detail": "SIGINT", "code": 130}
            raise
        except BaseException as error:
            mask = masker()
            ending = {
                "how": "crashed",
                "detail": mask.text(f"{type(error).__name__}: {error}".splitlines()[0]),
                "traceback": mask.text("".join(traceback.format_exception(error)), source=True),
            }
            raise
        finally:
            self._safely(self._end, run, ending)

    def built(
        self, facts: dict[str, Any], model: Path | None = None, store: Path | None = None, generation: int | None = None
    ) -> None:
        """facts: parameters, dtypes, attention, what was compiled: whatever only the caller knows."""
        self._safely(lambda: self._write(capture.at_build(self.kind, facts, model, store, generation)))

    def at(self, step: int) -> None:
        """The last finished step, for `runs list`."""
        if self.heart is not None:
            self.heart.at(step)

    def fell_back(self, what: str) -> None:
        """Something ran another way than meant: such a run is never taken as the last good one by itself."""
        self.fallbacks.append(what)

    def changed_since(self, earlier: RunDir) -> list[str]:
        """What changed since an earlier run, a line each, the verdict first."""
        assert self.run is not None
        verdict = attempt(lambda run: diff(load_run(earlier), load_run(run)), self.run)
        if not isinstance(verdict, Verdict):
            return [f"what changed since {earlier.path} cannot be told: {verdict['unknown']}"]
        lines = [f"since {verdict.before}: {verdict.line}"]
        return lines + [f"  {c.field}: was {c.was}, is {c.is_}" for c in verdict.changes if c.effect != "neither"]

    def _end(self, run: RunDir, ending: dict[str, Any]) -> None:
        samples, cpu = None, None
        if self.heart is not None:
            self.heart.stop()
            samples, cpu = self.heart.samples, self.heart.cpu_seconds
        heartbeat.write_exit(run, self.rank, **ending)  # at once: an impatient second Ctrl-C may end what follows
        outcome = attempt(read_outcome, run.metrics, self.fallbacks)
        if why_unknown(outcome) is None:
            outcome |= {**ending, "seconds": time.monotonic() - self.begun, "monitor_cpu_seconds": cpu}
        self._write(capture.at_end(self.kind, outcome, samples))

    def _write(self, manifest: dict[str, Any]) -> None:
        assert self.run is not None
        write_text(self.run.manifest(manifest["moment"], self.rank), json.dumps(manifest, indent=1))

    def _safely(self, do: Callable[..., Any], *args: Any) -> None:
        """Recording must not fail the run: what cannot be written is said and left out."""
        why = why_unknown(attempt(partial(do, *args)))
        if why:
            print(f"provenance: not recorded: {why}", file=sys.stderr, flush=True)
