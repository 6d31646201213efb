"""The runs of a folder: listing them, marking one good, and finding the last good one of the same kind."""

from __future__ import annotations

import getpass
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.files import write_text
from draftsmith.provenance.facts import attempt, why_unknown
from draftsmith.provenance.heartbeat import State, run_state
from draftsmith.provenance.manifest import RunRecord, load_run
from draftsmith.rundir import RunDir, attempts

GEOMETRY = {
    "drafter": (
        "block_size",
        "num_layers",
        "num_features",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    ),
    "train": ("row_tokens", "anchors", "rows_per_step"),
}
"""Keys of the config that fix the shapes.  Which layers are features is not among them: that is a change to find."""


@dataclass(frozen=True)
class Entry:
    """A line of `runs list`."""

    run: RunDir
    state: State
    record: RunRecord | None
    problem: str
    """Why there is no record."""


def list_runs(runs_dir: Path) -> list[Entry]:
    """Every attempt of every run, oldest first; those that cannot be read too, with the reason."""
    entries = []
    for folder in sorted(p for p in runs_dir.glob("*") if p.is_dir()):
        for run in attempts(runs_dir, folder.name):
            state = run_state(run)
            try:
                entries.append(Entry(run, state, load_run(run), ""))
            except (InputError, AttributeError, KeyError, TypeError, ValueError) as error:
                entries.append(Entry(run, state, None, f"it cannot be read: {error}"))
    return sorted(entries, key=lambda e: e.record.begun if e.record else 0.0)


def identity(record: RunRecord) -> dict[str, Any]:
    """What two runs must share for the one to be the other's measure: target, geometry, hardware.

    The target by its name: weights that changed under the same name are a change to find, not another target.
    """
    facts = record.facts
    config = {} if why_unknown(facts["config"]) else facts["config"]
    target = config.get("target", {})
    shapes = {
        f"{section}.{key}": config.get(section, {}).get(key) for section, keys in GEOMETRY.items() for key in keys
    }
    gpus, host = facts["gpu"], facts["host"]
    if why_unknown(gpus) is None and gpus["devices"]:
        hardware: Any = [device["name"] for device in gpus["devices"]]
    else:
        hardware = [host.get("cpu"), host.get("cpus_usable")]
    world = next(iter(record.ranks.values())).world
    named = [target.get("model"), target.get("revision")]
    return {"target": named, "geometry": shapes, "hardware": hardware, "processes": world}


def last_good(runs_dir: Path, record: RunRecord) -> RunRecord | None:
    """The newest earlier run of the same kind, target, geometry and hardware that a person marked good, else that
    finished with a finite loss and without a fallback.  Runs that a person marked as not good never count."""
    wanted = identity(record)
    if "built" not in record.facts:  # not a run yet: the number of processes is not known
        del wanted["processes"]
    candidates = [
        entry.record
        for entry in reversed(list_runs(runs_dir))
        if entry.record is not None
        and entry.record.path.absolute() != record.path.absolute()
        and entry.record.kind == record.kind
        and entry.record.begun <= record.begun
        and wanted.items() <= identity(entry.record).items()
    ]
    marks = {c.path: mark(RunDir(c.path)) for c in candidates}
    marked = [c for c in candidates if marks[c.path] is True]
    finished = [c for c in candidates if marks[c.path] is None and finished_well(c)]
    return next(iter([*marked, *finished]), None)


def finished_well(record: RunRecord) -> bool:
    outcome = record.facts.get("outcome", {})
    return record.state.how == "finished" and outcome.get("loss_finite") is True and not outcome.get("fallbacks")


def mark(run: RunDir) -> bool | None:
    """What a person said about a run: good, not good, or nothing."""
    try:
        return bool(json.loads(run.good.read_text(encoding="utf-8"))["good"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_mark(run: RunDir, good: bool, note: str) -> None:
    values = {"good": good, "note": note, "by": attempt(getpass.getuser), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_text(run.good, json.dumps(values, indent=1) + "\n")
