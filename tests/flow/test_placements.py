"""The same run on several processes: real processes, started by the command itself, over gloo."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_config, write_conversations

from draftsmith.config import Config
from draftsmith.data.tokenize import append, tokenize

STEPS = 8


@pytest.fixture(scope="module")
def work(target_folder, tmp_path_factory) -> Path:
    """A store shared by all runs of this module."""
    folder = tmp_path_factory.mktemp("placements")
    config = make_config(target_folder, folder)
    write_conversations(config.conversations, count=24)
    tokenize(config)
    return folder


def settings(target_folder: Path, work: Path, name: str, *overrides: str) -> tuple[Path, Config]:
    config = make_config(
        target_folder, work, f"name={name}", f"train.steps={STEPS}", "train.rows_per_step=6", "train.log_every=2",
        "train.checkpoint_every=4", "train.compute_dtype=float64", "placement.timeout_seconds=60", *overrides,
    )  # fmt: skip
    path = work / f"{name}.yaml"
    path.write_text(config.dump())
    return path, config


def start(path: Path, *args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", "train", str(path), *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == code, out[-3000:]
    return out


def losses(config: Config, tolerance: float = 0.0) -> list[float]:
    """Loss by step over all attempts; a step told twice must be told alike, to a relative `tolerance`."""
    found: dict[int, float] = {}
    for attempt in sorted((config.runs_dir / config.name).glob("attempt_*")):
        for line in (attempt / "metrics.jsonl").read_text().splitlines():
            value = json.loads(line)
            if value["kind"] == "train":
                told = found.setdefault(value["step"], value["loss"])
                assert math.isclose(told, value["loss"], rel_tol=tolerance)
    return [found[s] for s in sorted(found)]


SPLITS = {
    "split_1_1": ("placement.mode=split", "placement.targets=1", "placement.drafters=1"),
    "split_2_1": ("placement.mode=split", "placement.targets=2", "placement.drafters=1"),
    "colocated_2": ("placement.drafters=2",),
    "split_1_2": ("placement.mode=split", "placement.targets=1", "placement.drafters=2"),
}


@pytest.fixture(scope="module")
def curves(target_folder, work) -> dict[str, list[float]]:
    out = {}
    files = {"files_2": (*SPLITS["colocated_2"], "train.features=files")}
    for name, overrides in {"single": (), **SPLITS, **files}.items():
        path, config = settings(target_folder, work, name, *overrides)
        text = finish(start(path))
        out[name] = losses(config)
        if "split" in name:
            assert "drafters waited" in text and "-bound" in text
    return out


def test_same_curve_bit_for_bit_for_the_same_number_of_drafters(curves):
    assert len(curves["single"]) == STEPS
    assert curves["split_1_1"] == curves["single"] and curves["split_2_1"] == curves["single"]
    assert curves["split_1_2"] == curves["colocated_2"] == curves["files_2"]


def test_another_number_of_drafters_only_reorders_sums(curves):
    worst = max(abs(a / b - 1) for a, b in zip(curves["colocated_2"], curves["single"], strict=True))
    assert 0 < worst < 1e-9 or curves["colocated_2"] == curves["single"]


def test_resume_on_another_placement_continues_the_same_curve(target_folder, work, curves):
    """And on a store that has grown since: every process opens the generation that the run began with."""
    data = f"data_dir={work}/moved"
    shutil.copytree(work / "data", work / "moved")
    path, config = settings(target_folder, work, "moved", data)
    first = start(path)
    wait_for_checkpoint(config)
    first.send_signal(signal.SIGTERM)
    finish(first, 143)
    write_conversations(config.conversations, count=40)
    assert append(config).generation == 2
    path, config = settings(target_folder, work, "moved", data, *SPLITS["split_2_1"])
    finish(start(path, "--resume", "auto"))
    assert losses(config) == curves["single"]


def wait_for_checkpoint(config: Config) -> None:
    deadline = time.monotonic() + 120
    while not list((config.runs_dir / config.name).glob("attempt_*/checkpoints/step_*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_steps(config: Config) -> None:
    metrics = config.runs_dir / config.name / "attempt_1" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(config: Config) -> list[tuple[int, int]]:
    """(rank, pid) of the training processes that carry this run's config path on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
            environment = (entry / "environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(c.endswith(f"/{config.name}.yaml") for c in command):
            rank = next((int(e[5:]) for e in environment if e.startswith("RANK=")), -1)
            found.append((rank, int(entry.name)))
    return found


@pytest.mark.parametrize("victim", ["drafter", "target", "launcher"])
def test_a_lost_process_ends_all_and_the_run_goes_on(target_folder, work, curves, victim):
    restarts = 0 if victim == "launcher" else 1
    path, config = settings(
        target_folder, work, f"kill_{victim}", *SPLITS["split_1_2"], f"placement.max_restarts={restarts}"
    )
    process = start(path)
    wait_for_checkpoint(config)
    ranks = dict(processes_of(config))
    os.kill(ranks[{"drafter": 1, "target": 2, "launcher": -1}[victim]], signal.SIGKILL)
    if victim == "launcher":
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 20
        while processes_of(config) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(config) == [], "orphans"
        path, config = settings(target_folder, work, f"kill_{victim}")  # by one drafter: only sums are reordered
        finish(start(path, "--resume", "auto"))
        assert losses(config, 1e-9) == pytest.approx(curves["split_1_2"], rel=1e-9, abs=0)
    else:
        out = finish(process)
        assert losses(config) == curves["split_1_2"]
        assert f"{victim} {1 if victim == 'drafter' else 0} (rank" in out and "SIGKILL" in out
    assert processes_of(config) == []


def test_sigterm_saves_on_all_and_exits_143(target_folder, work):
    path, config = settings(target_folder, work, "terminated", *SPLITS["split_1_2"], "train.steps=200")
    process = start(path)
    wait_for_checkpoint(config)
    process.send_signal(signal.SIGTERM)
    out = finish(process, 143)
    assert "SIGTERM: saved" in out
    assert processes_of(config) == []


def test_bad_input(target_folder, work, capsys):
    from draftsmith.cli import main

    path, _ = settings(target_folder, work, "bad")
    for overrides, said in (
        (["placement.drafters=4"], "nearest that can is 4 or 8"),
        (["placement.mode=split"], "needs placement.targets"),
        (["placement.targets=2"], "placement.targets belongs to"),
        (["placement.mode=split", "placement.targets=1", "train.features=files"], "needs no targets"),
    ):
        assert main(["train", str(path), *overrides]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1


def test_torchrun_starts_the_same_run_and_starts_it_again(target_folder, work, curves):
    path, config = settings(target_folder, work, "torchrun", *SPLITS["split_1_1"])
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
         "-m", "draftsmith.cli", "train", str(path), "--resume", "auto", "--new-attempt"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for_checkpoint(config)
    os.kill(dict(processes_of(config))[1], signal.SIGKILL)
    finish(process)
    assert (config.runs_dir / config.name / "attempt_2").is_dir() and processes_of(config) == []
    assert losses(config) == curves["single"]


def test_processes_with_other_configs_are_refused_with_the_difference(target_folder, work):
    common = ("placement.drafters=2", "placement.timeout_seconds=60")
    one, _ = settings(target_folder, work, "alike", *common)
    other, _ = settings(target_folder, work, "other", *common, "train.learning_rate=0.5")
    ranks = [
        start(
            path,
            *("--new-attempt",) * rank,
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29997",
        )
        for rank, path in enumerate((one, other))
    ]
    for rank in ranks:
        out = finish(rank, 2)
        assert "do not run the same thing" in out and "config train" in out and "0.5" in out
        assert "--new-attempt: process 1 (rank 1) has True, rank 0 False" in out
