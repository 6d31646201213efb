"""The run folder: every path in it is named here and nowhere else.

    runs/<name>/attempt_<n>/
        config.json           the resolved config (the hand-written one is YAML)
        manifests/            rank_<r>.<moment>.json: what each process was made of at its start, once built, at its end
        alive/                rank_<r>.json: sign of life; .exit.json: how it ended; .fault.txt: fatal signal
        good.json             a person says that this run is good (`draftsmith runs good`)
        metrics.jsonl         one JSON object a line, appended
        log.txt               what was printed
        checkpoints/step_<n>/ drafter.safetensors, optimizer.safetensors, state.json
        evaluation/           accepted lengths, JSON and text
        export/               the folder that servers load
        plots/                PNG
        report.html           what `draftsmith report` made of all this
        tracking/             what optional trackers wrote: wandb, tensorboard, trackio, mlflow
        compile_cache/        the compiled kernels of the run, if they were bundled
        summary.json          the last word

An attempt is append-only and never reused: resuming makes the next attempt, which says where it came from.
"""

from __future__ import annotations

import re
from pathlib import Path

from draftsmith.errors import InputError


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.manifests = path / "manifests"
        self.alive = path / "alive"
        self.good = path / "good.json"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.evaluation = path / "evaluation"
        self.export = path / "export"
        self.plots = path / "plots"
        self.report = path / "report.html"
        self.tracking = path / "tracking"
        self.compile_cache = path / "compile_cache"
        self.summary = path / "summary.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def manifest(self, moment: str, rank: int = 0) -> Path:
        """moment: start, built or end."""
        return self.manifests / f"rank_{rank}.{moment}.json"

    def sign_of_life(self, rank: int = 0) -> Path:
        return self.alive / f"rank_{rank}.json"

    def exit(self, rank: int = 0) -> Path:
        return self.alive / f"rank_{rank}.exit.json"

    def fault(self, rank: int = 0) -> Path:
        return self.alive / f"rank_{rank}.fault.txt"


def attempts(runs_dir: Path, name: str) -> list[RunDir]:
    """Attempts of a run, oldest first."""
    found = []
    for path in (runs_dir / name).glob("attempt_*"):
        match = re.fullmatch(r"attempt_(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), RunDir(path)))
    return [run for _, run in sorted(found, key=lambda pair: pair[0])]


def create(runs_dir: Path, name: str, *, new_attempt: bool = False) -> RunDir:
    """Make the next attempt's folder.

    Raises InputError if the run exists and the caller did not ask for another attempt.
    """
    existing = attempts(runs_dir, name)
    if existing and not new_attempt:
        raise InputError(
            f"run folder {runs_dir / name} exists: continue it with --resume auto, start again beside it with "
            f"--new-attempt, or choose another name (name=...)"
        )
    number = int(existing[-1].path.name.removeprefix("attempt_")) + 1 if existing else 1
    run = RunDir(runs_dir / name / f"attempt_{number}")
    try:
        run.path.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot make the run folder {run.path} (runs_dir): {error}") from error
    return run


def newest(runs_dir: Path, name: str) -> RunDir:
    """The newest attempt.  Raises InputError if there is none."""
    existing = attempts(runs_dir, name)
    if not existing:
        raise InputError(f"no run in {runs_dir / name}: run `draftsmith train` first, or set runs_dir and name")
    return existing[-1]
