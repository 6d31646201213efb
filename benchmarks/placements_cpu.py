"""The same run under every placement, resumed, and with processes killed at random moments: losses, orphans, recovery.

    python benchmarks/placements_cpu.py [--kills 30]     writes results/placements_cpu.json

A tiny random target, float64, 20 steps, real processes over gloo, started by the command itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "flow"))

from _common import write_result
from conftest import make_config, write_conversations, write_target
from test_placements import SPLITS, finish, losses, processes_of, settings, start, wait_for_checkpoint

from draftsmith.data.tokenize import tokenize

PLACEMENTS = {
    "single": (),
    **SPLITS,
    "split_3_2": ("placement.mode=split", "placement.targets=3", "placement.drafters=2"),
}
STEPS = "train.steps=20"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="placements-"))
    target = write_target(work / "target")
    config = make_config(target, work)
    write_conversations(config.conversations, count=24)
    tokenize(config)

    curves = {}
    for name, overrides in PLACEMENTS.items():
        path, run = settings(target, work, name, *overrides, STEPS)
        finish(start(path))
        curves[name] = losses(run)
        print(name, curves[name][-1], flush=True)
    worst = max(abs(a / b - 1) for c in curves.values() for a, b in zip(c, curves["single"], strict=True))
    same = {
        "one drafter": curves["single"] == curves["split_1_1"] == curves["split_2_1"],
        "two drafters": curves["colocated_2"] == curves["split_1_2"] == curves["split_3_2"],
    }

    path, run = settings(target, work, "resumed", STEPS)
    process = start(path)
    wait_for_checkpoint(run)
    process.send_signal(signal.SIGTERM)
    finish(process, 143)
    path, run = settings(target, work, "resumed", *SPLITS["split_2_1"], STEPS)
    finish(start(path, "--resume", "auto"))
    resumed = losses(run) == curves["single"]
    print("resume identical:", resumed, flush=True)

    recovered = orphans = 0
    rng = random.Random(0)
    seconds = []
    for number in range(args.kills):
        victim = ("drafter", "target", "launcher")[number % 3]
        restarts = "placement.max_restarts=1"
        path, run = settings(target, work, f"kill_{number}", *SPLITS["split_1_2"], restarts, STEPS)
        process = start(path)
        seconds.append(kill_once(process, run, victim, rng))
        for _ in range(100):
            if not processes_of(run) or victim != "launcher":
                break
            time.sleep(0.1)
        if victim == "launcher":
            process.communicate(timeout=60)
            orphans += len(processes_of(run))
            process = start(path, "--resume", "auto", "--new-attempt")
        finish(process)
        orphans += len(processes_of(run))
        recovered += losses(run) == curves["split_1_2"]
        print(
            f"kill {number + 1} ({victim}, {seconds[-1]:.1f} s in): recovered {recovered}, orphans {orphans}",
            flush=True,
        )
    result = {
        "curves": curves,
        "max_rel_diff": worst,
        "bit_identical": same,
        "resume_identical": resumed,
        "kills": args.kills,
        "recovered": recovered,
        "orphans": orphans,
    }
    print(write_result("placements_cpu", result))
    print(json.dumps({k: v for k, v in result.items() if k != "curves"}))


def kill_once(process, run, victim: str, rng: random.Random) -> float:
    """Kill one process at a random moment after all have started; seconds since the start."""
    begin = time.monotonic()
    while len(processes_of(run)) < 4:
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 12))
    ranks = dict(processes_of(run))
    rank = {"drafter": rng.choice([0, 1]), "target": 2, "launcher": -1}[victim]
    if rank in ranks and process.poll() is None:
        os.kill(ranks[rank], signal.SIGKILL)
    return time.monotonic() - begin


if __name__ == "__main__":
    main()
