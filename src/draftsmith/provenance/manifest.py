"""Reading back what was recorded: the manifests of a run, later moments laid over earlier ones."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.provenance.capture import MOMENTS, SCHEMA
from draftsmith.provenance.facts import unknown, why_unknown
from draftsmith.provenance.heartbeat import State, run_state
from draftsmith.rundir import RunDir, attempts, newest

AT_START = ("config", "code", "packages", "python", "host", "gpu", "environment", "compile_cache")
AT_BUILD = ("imported", "torch", "switches", "libraries", "patches", "target", "data", "built")
HEADER = ("schema", "kind", "moment", "rank", "world", "seconds")
NEEDED = {
    "packages": ("installed", "startup"), "gpu": ("devices",), "environment": ("at_exec", "now"),
    "patches": ("audited", "replaced"), "compile_cache": ("inductor", "triton"), "host": ("cgroup",), "config": (),
}  # fmt: skip
"""What readers rely on; a manifest without it was damaged after it was written."""


@dataclass(frozen=True)
class ProcessRecord:
    """What one process recorded.  `facts` has a section for each part; a section that should be there and is not says
    why it is unknown."""

    rank: int
    world: int
    moments: tuple[str, ...]
    facts: dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run as it was recorded.  Made by load_run and load_file; read by diff, restore, show and last_good."""

    label: str
    path: Path
    kind: str
    """train, serving, check ...: only runs of one kind are compared."""
    state: State
    ranks: dict[int, ProcessRecord]

    @property
    def facts(self) -> dict[str, Any]:
        """Of the lowest rank, which also knows the outcome."""
        return self.ranks[min(self.ranks)].facts

    @property
    def begun(self) -> float:
        return float(self.facts["clock"]["time"])


def read_manifest(path: Path) -> dict[str, Any]:
    """One manifest file.  Raises InputError if it is missing, cut short, newer than this version, or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"manifest {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"manifest {path} is cut short or not JSON ({error})") from error
    if not isinstance(values, dict) or not isinstance(values.get("schema"), int):
        raise InputError(f"{path} is not a manifest: it states no schema")
    if values["schema"] > SCHEMA:
        raise InputError(
            f"manifest {path} has schema {values['schema']}, this version reads up to {SCHEMA}: use the version of "
            f"draftsmith that wrote it, or a newer one"
        )
    wanted = {"kind": str, "moment": str, "rank": int, "world": int, "clock": dict, "process": dict}
    wrong = [k for k, kind in wanted.items() if not isinstance(values.get(k), kind)]
    if not wrong and not isinstance(values["clock"].get("time"), (int, float)):
        wrong.append("clock.time")
    for section, keys in NEEDED.items():
        part = values.get(section, {"unknown": "not recorded"})
        if why_unknown(part) is None:
            there = part if isinstance(part, dict) else {}
            wrong += [f"{section}.{key}" for key in keys if not isinstance(there.get(key), (dict, list))]
    if wrong:
        raise InputError(f"manifest {path} is damaged: {', '.join(wrong)} is missing or of another type")
    return values


def load_file(path: Path) -> RunRecord:
    """A single manifest, as the stand-alone capture writes it."""
    values = read_manifest(path)
    record = ProcessRecord(values["rank"], values["world"], (values["moment"],), _sections(values))
    return RunRecord(str(path), path, values["kind"], State("recorded"), {values["rank"]: record})


def load_run(run: RunDir) -> RunRecord:
    """All manifests of a run folder.  Raises InputError if there are none, or one of them cannot be used."""
    label = f"{run.path.parent.name}/{run.path.name}"
    state = run_state(run)
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(run.manifests.glob("rank_*.json")):
        match = re.fullmatch(r"rank_(\d+)\.(\w+)\.json", path.name)
        if match and match[2] in MOMENTS:
            found.setdefault(int(match[1]), {})[match[2]] = read_manifest(path)
    if not found:
        why = (
            f"is still being written ({state.detail}): its first manifest is not there yet"
            if state.how == "running"
            else "holds no manifest: it was not made by `draftsmith train` of this version"
        )
        raise InputError(f"run folder {run.path} {why}")
    ranks = {rank: _merge(rank, moments, state) for rank, moments in sorted(found.items())}
    kind = next(iter(found[min(found)].values()))["kind"]
    return RunRecord(label, run.path, kind, state, ranks)


def find_run(runs_dir: Path, name: str) -> RunRecord:
    """NAME (its newest attempt), NAME/attempt_N, a run folder, or a manifest file.  Raises InputError."""
    path = Path(name)
    if path.is_file():
        return load_file(path)
    for folder in (path, runs_dir / name):
        if folder.is_dir() and re.fullmatch(r"attempt_\d+", folder.name):
            return load_run(RunDir(folder.absolute()))
    for parent in (path.parent, runs_dir):
        if path.name and attempts(parent, path.name):
            return load_run(newest(parent.absolute(), path.name))
    raise InputError(f"there is no run {name!r}, neither here nor in {runs_dir} (see `draftsmith runs list`)")


def _sections(manifest: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in manifest.items() if k not in HEADER}


def _merge(rank: int, moments: dict[str, Any], state: State) -> ProcessRecord:
    ordered = [m for m in MOMENTS if m in moments]
    facts: dict[str, Any] = {}
    for moment in ordered:
        first: dict[str, Any] = {k: facts[k] for k in ("clock", "process") if k in facts}
        facts = {**facts, **_sections(moments[moment]), **first}
    for moment, sections in (("start", AT_START), ("built", AT_BUILD)):
        if moment not in moments:
            why = "it is still running" if state.how == "running" else f"it ended first ({state.how})"
            facts.update({s: unknown(f"not recorded: {why}") for s in sections if s not in facts})
    if "end" not in moments and state.how != "running":
        facts["outcome"] = unknown(f"it left none ({state.how})")
    return ProcessRecord(rank, moments[ordered[0]]["world"], tuple(ordered), facts)
