"""Checkpoints: safetensors and JSON, written whole or not at all, the last K kept.  No pickle is ever loaded."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, sha256, write_tensors, write_text
from draftsmith.provenance.heartbeat import rank_state
from draftsmith.records import CheckpointState, DrafterSpec, read_json, spec_from_dict
from draftsmith.rundir import RunDir, attempts, newest

WEIGHTS, OPTIMIZER, STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"


class Saver:
    """Writes checkpoints/step_<n>/ beside training: the state is copied at once, the files are written by a thread.

    Each is written whole or not at all; all but the newest `keep` are then removed.  A write that failed (a full disk)
    raises InputError at the next call.
    """

    def __init__(self, run: RunDir, keep: int) -> None:
        self.run, self.keep = run, keep
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.path: Path | None = None

    def save(
        self, step: int, rows_done: int, drafter: DFlashDrafter, optimizer: torch.optim.Optimizer,
        pins: Mapping[str, str],
    ) -> Path:  # fmt: skip
        """Begin to write; the folder it will have.  Waits for the one before."""
        self.wait()
        if self.path is None:
            remove_unfinished(self.run)
        self.path = self.run.checkpoint(step)
        if self.path.exists():
            return self.path
        names = {id(p): name for name, p in drafter.named_parameters()}
        moments = {
            f"{key}/{names[id(parameter)]}": _copy(value)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
        weights = {k: _copy(v) for k, v in drafter.state_dict().items()}
        state = CheckpointState(step, rows_done, drafter.spec, {}, dict(pins))
        self.thread = threading.Thread(target=self._write, args=(self.path, weights, moments, state))
        self.thread.start()
        return self.path

    def wait(self) -> None:
        """Until the last checkpoint is on disk."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            error, self.failure = self.failure, None
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise InputError(
                f"checkpoint {self.path} could not be written: {why}: free space there, or set runs_dir; then go on "
                f"with --resume auto"
            ) from error

    close = wait

    def _write(
        self, path: Path, weights: dict[str, Tensor], moments: dict[str, Tensor], state: CheckpointState
    ) -> None:
        try:
            with folder_written_whole(path) as folder:
                write_tensors(folder / WEIGHTS, weights)
                write_tensors(folder / OPTIMIZER, moments)
                files = {
                    name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
                    for name in (WEIGHTS, OPTIMIZER)
                }
                record = dataclasses.replace(state, files=files)
                write_text(folder / STATE, json.dumps(dataclasses.asdict(record), indent=2))
            for old in listed(self.run)[: -self.keep]:
                shutil.rmtree(old)
        except (OSError, InputError, RuntimeError, MemoryError) as error:  # of a thread: nobody else would see it
            self.failure = error


def _copy(value: Tensor) -> Tensor:
    """On the CPU, in memory of its own: training goes on changing the original."""
    return value.detach().to("cpu", copy=True).contiguous()


def save(
    run: RunDir, step: int, rows_done: int, drafter: DFlashDrafter, optimizer: torch.optim.Optimizer,
    pins: Mapping[str, str], keep: int,
) -> Path:  # fmt: skip
    """`Saver.save`, and wait."""
    saver = Saver(run, keep)
    path = saver.save(step, rows_done, drafter, optimizer, pins)
    saver.wait()
    return path


def remove_unfinished(run: RunDir) -> None:
    """What attempts that were killed while they saved have left."""
    for other in attempts(run.path.parent.parent, run.path.parent.name):
        if rank_state(other, 0).how not in ("running", "unknown"):
            for path in other.checkpoints.glob(".step_*.tmp"):
                shutil.rmtree(path, ignore_errors=True)


def listed(run: RunDir) -> list[Path]:
    """Checkpoint folders of an attempt, oldest first, complete or not."""
    return sorted(p for p in run.checkpoints.glob("step_*") if p.is_dir())


def read_state(path: Path) -> CheckpointState:
    """state.json, checked against the files beside it.  Raises InputError naming the file that is missing or short."""
    values = read_json(path / STATE, "checkpoint state")
    try:
        if values["schema"] != 1:
            raise InputError(f"{path / STATE} has schema {values['schema']}, this version reads 1")
        state = CheckpointState(**{**values, "spec": spec_from_dict(values["spec"])})
        written = {name: state.files[name] for name in (WEIGHTS, OPTIMIZER)}
    except (KeyError, TypeError) as error:
        raise InputError(f"{path / STATE} is not the state of a checkpoint: {error} is missing or wrong") from error
    for name, facts in written.items():
        file = path / name
        if not file.is_file():
            raise InputError(f"checkpoint {path} is incomplete: {name} is missing")
        if file.stat().st_size != facts["bytes"]:
            raise InputError(
                f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, {facts['bytes']} were written"
            )
        if sha256(file) != facts["sha256"]:
            raise InputError(f"checkpoint {path} is damaged: the content of {name} is not what was written")
    return state


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error


def load_weights(drafter: DFlashDrafter, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy into the drafter, casting to its dtype.  Raises InputError for a missing, extra or misshapen key."""
    own = drafter.state_dict()
    for kind, keys in (("missing", own.keys() - tensors.keys()), ("unknown", tensors.keys() - own.keys())):
        if keys:
            raise InputError(f"{source}: {len(keys)} {kind} keys, the first is {min(keys)}")
    for key, value in own.items():
        if tensors[key].shape != value.shape:
            raise InputError(f"{source}: {key} is {list(tensors[key].shape)}, must be {list(value.shape)}")
        if not torch.isfinite(tensors[key]).all():
            raise InputError(f"{source}: {key} holds NaN or Inf")
        value.copy_(tensors[key])


def restore(path: Path, drafter: DFlashDrafter, optimizer: torch.optim.Optimizer) -> CheckpointState:
    """Load weights and moments into a drafter and an optimizer built for the same spec.

    Raises InputError if they are another optimizer's.
    """
    state, moments = read_state(path), read_tensors(path / OPTIMIZER)
    muon = any(key.startswith("momentum_buffer/") for key in moments)
    if moments and muon != isinstance(optimizer, torch.optim.Muon):
        raise InputError(
            f"{path} was saved with train.optimizer={'muon' if muon else 'adamw'}: set it to that, or start a new run "
            f"under another name"
        )
    with torch.no_grad():
        load_weights(drafter, read_tensors(path / WEIGHTS), path / WEIGHTS)
    names = {name: p for name, p in drafter.named_parameters()}
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        parameter = names[name]
        # step counters stay on the CPU unless the optimizer is fused
        on = parameter.device if kind != "step" or optimizer.defaults.get("fused") else torch.device("cpu")
        optimizer.state[parameter][kind] = value.to(on)
    return state


def newest_checkpoint(run: RunDir) -> Path:
    """The newest checkpoint of the attempt; if it has none, of the newest attempt before it that has one (and say so).

    Raises InputError if there is none.
    """
    every = attempts(run.path.parent.parent, run.path.parent.name)
    paths = [other.path for other in every]
    earlier = every[: paths.index(run.path)] if run.path in paths else []
    for attempt in (run, *reversed(earlier)):
        if found := listed(attempt):
            if attempt is not run:
                print(f"{run.path.name} has no checkpoint: taking {found[-1]}", flush=True)
            return found[-1]
    raise InputError(
        f"{run.path} has no checkpoint yet{', nor has an earlier attempt' if earlier else ''}: train on until the "
        f"first is written (train.checkpoint_every), or set evaluate.drafter (to export: export.drafter) to a "
        f"checkpoint or an exported folder"
    )


def newest_or(runs_dir: Path, name: str, key: str) -> RunDir:
    """The newest attempt.  Raises InputError if there is none, naming the key that makes it unnecessary."""
    try:
        return newest(runs_dir, name)
    except InputError as error:
        raise InputError(f"{error}, or set {key}") from error


def default_checkpoint(runs_dir: Path, name: str, key: str) -> tuple[RunDir, Path]:
    """`newest_checkpoint` of a run, with the attempt that it belongs to: what is made of it goes there."""
    path = newest_checkpoint(newest_or(runs_dir, name, key))
    return RunDir(path.parent.parent), path


def find_resume(runs_dir: Path, name: str, resume: str) -> tuple[Path, list[str]]:
    """The checkpoint that `--resume` means, and what was passed over on the way.

    auto: the newest complete checkpoint of the newest attempt that has one.  Otherwise a folder.
    """
    if resume != "auto":
        read_state(Path(resume))
        return Path(resume), []
    passed: list[str] = []
    for run in reversed(attempts(runs_dir, name)):
        for path in reversed(listed(run)):
            try:
                read_state(path)
            except InputError as error:
                passed.append(str(error))
                continue
            return path, passed
    why = f" ({'; '.join(passed)})" if passed else ""
    raise InputError(f"--resume auto: no complete checkpoint under {runs_dir / name}{why}")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where training begins: at a checkpoint, or (none) afresh; and what is to be said about it."""

    checkpoint: Path | None = None
    state: CheckpointState | None = None
    notes: tuple[str, ...] = ()

    @property
    def store(self) -> str | None:
        """The content of the store that the run began with."""
        return self.state.pins.get("store") if self.state else None


def find_start(runs_dir: Path, name: str, resume: str, new_attempt: bool) -> Start:
    """The checkpoint to go on from.  Raises InputError if there is none and none was not allowed for."""
    try:
        path, notes = find_resume(runs_dir, name, resume)
    except InputError as error:
        if resume == "auto" and new_attempt:
            return Start(notes=(f"nothing to resume, starting afresh: {error}",))
        raise
    return Start(path, read_state(path), tuple(notes))


HARD_PINS = ("target_weights", "store", "tokenizer", "feature_layers", "block_size")


def check_pins(before: CheckpointState, now: Mapping[str, Any], spec: DrafterSpec, source: Path) -> list[str]:
    """Refuse to resume onto what would make the result wrong; return warnings for everything else that changed."""
    changed = {k: f"{k} was {before.pins.get(k)}, is {v}" for k, v in now.items() if before.pins.get(k) != v}
    hard = [text for k, text in changed.items() if k in HARD_PINS]
    if before.spec != spec:
        fields = [f.name for f in dataclasses.fields(spec) if getattr(before.spec, f.name) != getattr(spec, f.name)]
        hard += [f"drafter {f} was {getattr(before.spec, f)}, is {getattr(spec, f)}" for f in fields]
    if hard:
        raise InputError(f"cannot resume from {source}: {'; '.join(hard)}")
    return [f"warning: since {source}, {text}" for k, text in changed.items()]
