"""The same run under every placement, resumed, and with processes killed at random moments: losses, orphans, recovery.

    python benchmarks/placements_cpu.py [--kills 30] [--work FOLDER --seconds 500]     writes results/placements_cpu.json

A tiny random target, float64, 20 steps, real processes over gloo, started by the command itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "flow"))

from _common import write_result
from conftest import make_config, write_conversations, write_target
from test_placements import SPLITS, finish, losses, processes_of, settings, start, wait_for_checkpoint

from draftsmith.config import Config
from draftsmith.data.tokenize import tokenize
from draftsmith.files import write_text

PLACEMENTS = {
    "single": (),
    **SPLITS,
    "split_3_2": ("placement.mode=split", "placement.targets=3", "placement.drafters=2"),
    "colocated_3": ("placement.drafters=3",),
    "split_5_3": ("placement.mode=split", "placement.targets=5", "placement.drafters=3"),
}
STEPS = "train.steps=20"
TRAINING = 1.5
"""Seconds from the first checkpoint to the end, about."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--work", type=Path, help="a folder that keeps what is done: the same command goes on from there"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing new after so long, exit 75")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    work = args.work or Path(tempfile.mkdtemp(prefix="placements-"))
    target = work / "target"
    if not (work / "state.json").exists():
        write_target(target)
        config = make_config(target, work)
        write_conversations(config.conversations, count=24)
        tokenize(config)
        save(work, {"curves": {}, "seconds": {}, "kills": []})
    state = json.loads((work / "state.json").read_text())

    for name, overrides in PLACEMENTS.items():
        if name not in state["curves"]:
            stop_if_late(until)
            begin = time.monotonic()
            path, run = fresh(target, work, name, *overrides)
            finish(start(path))
            state["curves"][name], state["seconds"][name] = losses(run), time.monotonic() - begin
            print(f"{name}: {state['curves'][name][-1]} after {state['seconds'][name]:.1f} s", flush=True)
            save(work, state)
    curves = state["curves"]
    if "resumed" not in state:
        stop_if_late(until)
        state["resumed"] = resume_elsewhere(target, work) == curves["single"]
        print("resume identical:", state["resumed"], flush=True)
        save(work, state)
    while len(state["kills"]) < args.kills:
        stop_if_late(until)
        number = len(state["kills"])
        kill = kill_one(target, work, number, state["seconds"]["split_1_2"], curves["split_1_2"])
        print(f"kill {number + 1}: {kill}", flush=True)
        state["kills"].append(kill)
        save(work, state)

    kills = state["kills"]
    result = {
        "curves": curves,
        "max_rel_diff": max(abs(a / b - 1) for c in curves.values() for a, b in zip(c, curves["single"], strict=True)),
        "bit_identical": {
            "one drafter": curves["single"] == curves["split_1_1"] == curves["split_2_1"],
            "two drafters": curves["colocated_2"] == curves["split_1_2"] == curves["split_3_2"],
            "three drafters": curves["colocated_3"] == curves["split_5_3"],
        },
        "resume_identical": state["resumed"],
        "kills": len(kills),
        "recovered": sum(k["recovered"] for k in kills),
        "orphans": sum(k["orphans"] for k in kills),
        "moments": [{k: v for k, v in kill.items() if k not in ("recovered", "orphans")} for kill in kills],
    }
    print(write_result("placements_cpu", result))
    print(json.dumps({k: v for k, v in result.items() if k not in ("curves", "moments")}))


def save(work: Path, state: dict[str, Any]) -> None:
    write_text(work / "state.json", json.dumps(state))


def stop_if_late(until: float) -> None:
    if time.monotonic() > until:
        print("not done yet: go on with the same --work", flush=True)
        sys.exit(75)


def fresh(target: Path, work: Path, name: str, *overrides: str) -> tuple[Path, Config]:
    """Config of a run that has no folder yet, whatever an earlier call has left."""
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return settings(target, work, name, *overrides, STEPS)


def resume_elsewhere(target: Path, work: Path) -> list[float]:
    """Stopped as one process, gone on with as two targets and a drafter."""
    path, run = fresh(target, work, "resumed")
    process = start(path)
    wait_for_checkpoint(run)
    process.send_signal(signal.SIGTERM)
    finish(process, 143)
    path, run = settings(target, work, "resumed", *SPLITS["split_2_1"], STEPS)
    finish(start(path, "--resume", "auto"))
    return losses(run)


def kill_one(target: Path, work: Path, number: int, seconds: float, curve: list[float]) -> dict[str, Any]:
    """Kill one process at a random moment: of the whole run, or (every other three) of the time after the first
    checkpoint, since most of so short a run is its start.  A moment after the end is drawn again."""
    rng = random.Random(number)
    victim = ("drafter", "target", "launcher")[number % 3]
    rank = {"drafter": rng.choice([0, 1]), "target": 2, "launcher": -1}[victim]
    while True:
        path, run = fresh(target, work, f"kill_{number}", *SPLITS["split_1_2"], "placement.max_restarts=1")
        process = start(path)
        while len(processes_of(run)) < 4:  # the launcher and its three
            time.sleep(0.05)
        begin = time.monotonic()
        if number // 3 % 2:
            wait_for_checkpoint(run)
            time.sleep(rng.uniform(0, TRAINING))
        else:
            time.sleep(rng.uniform(0, seconds))
        moment = time.monotonic() - begin
        ranks = dict(processes_of(run))
        if process.poll() is None and rank in ranks:
            break
        finish(process)
    at = len(losses(run)) if (run.runs_dir / run.name).exists() else 0
    os.kill(ranks[rank], signal.SIGKILL)
    orphans, said = 0, ""
    if victim == "launcher":
        said, _ = process.communicate(timeout=60)
        orphans = left_over(run)
        process = start(path, "--resume", "auto", "--new-attempt")
    out, _ = process.communicate(timeout=200)
    orphans += left_over(run)
    said += out
    done_before = "nothing is left to train" in out  # killed after its last checkpoint
    recovered = process.returncode == 0 and losses(run) == curve and "Traceback" not in said
    if not recovered:
        print(said, flush=True)
    return {
        "victim": victim, "rank": rank, "seconds": round(moment, 2), "steps_logged": at, "done_before": done_before, "recovered": recovered,
        "orphans": orphans,
    }  # fmt: skip


def left_over(run: Config) -> int:
    """Processes of the run that are still there when the kernel has had ten seconds to end them."""
    deadline = time.monotonic() + 10
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(processes_of(run))


if __name__ == "__main__":
    main()
