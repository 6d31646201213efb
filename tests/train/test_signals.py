"""The real command, stopped by a real signal: its exit code, what it leaves, and that going on equals the whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.config import Config
from draftsmith.rundir import RunDir, attempts
from draftsmith.tracking import read_metrics
from draftsmith.train import checkpoint
from draftsmith.train.loop import train

STEPS = 40
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""As in this process: another number of threads sums in another order."""


def command(config: Config, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "draftsmith.cli", "train", str(config.runs_dir.parent / "config.yaml"), *arguments]


def configure(stored: Config, work: Path) -> Config:
    """The tiny run with slower steps (4 rows each), written down as the YAML that the command reads."""
    settings = {"rows_per_step": 4, "steps": STEPS, "log_every": 3, "checkpoint_every": 500, "keep_checkpoints": 2}
    config = stored.model_copy(
        update={"runs_dir": work / "runs", "data_dir": stored.data, "train": stored.train.model_copy(update=settings)}
    )
    work.mkdir()
    (work / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return config


def wait_for_step(run: RunDir, process: subprocess.Popen, step: int) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        if run.metrics.exists() and any(line["step"] >= step for line in read_metrics(run.metrics)):
            return
        time.sleep(0.005)
    raise AssertionError(f"no step {step} within 90 s")


def trained_lines(*runs: RunDir) -> list[dict]:
    found = [line for run in runs for line in read_metrics(run.metrics) if line["kind"] in ("train", "heldout")]
    return [{k: v for k, v in line.items() if k != "time"} for line in found]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_saves_when_stopped_and_goes_on_to_the_same_end(stored, tmp_path, number, code):
    config = configure(stored, tmp_path / "stopped")
    run = RunDir(config.runs_dir / "tiny" / "attempt_1")
    process = subprocess.Popen(
        command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        wait_for_step(run, process, 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, (out, err)
    assert "Traceback" not in err and f"{number.name}: saved" in err and "--resume auto" in err
    (saved,) = checkpoint.listed(run)
    state = checkpoint.read_state(saved)
    assert 3 <= state.step < STEPS and state.rows_done == 4 * state.step
    assert [line["step"] for line in trained_lines(run)] == list(range(1, state.step + 1))
    assert not [p for p in run.path.rglob("*") if p.name.endswith(".tmp")]

    go_on = command(config, "--resume", "auto")
    done = subprocess.run(go_on, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {saved} at step {state.step}" in done.stdout
    second = attempts(config.runs_dir, "tiny")[-1]
    assert done.stdout.splitlines()[-1] == str(second.path)

    whole = train(configure(stored, tmp_path / "whole"))
    assert trained_lines(run, second) == trained_lines(whole)
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        ours, theirs = (load_file(r.checkpoint(STEPS) / name) for r in (second, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
