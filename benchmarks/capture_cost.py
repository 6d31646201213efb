"""What recording costs: seconds of each capture, and the monitor's share of the training steps.

    python benchmarks/capture_cost.py [--seconds 60]

Trains the tiny target of the tests, whose steps of some milliseconds are the worst case for any monitor.  Writes
results/capture_cost.json: seconds_p50 and seconds_max of all captures (three a run, each run in a process of its own,
digests of weights and packages kept from an earlier run), step_slowdown = 1 + CPU time of the monitor / time of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

from _common import write_result

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "provenance")]

from staging import workshop  # noqa: E402

from draftsmith.provenance.heartbeat import Heartbeat  # noqa: E402
from draftsmith.rundir import RunDir, newest  # noqa: E402
from draftsmith.tracking import read_metrics  # noqa: E402

RUNS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run whose steps are timed")
    args = parser.parse_args()
    config, _, _ = workshop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps({**json.loads(config.dump()), "runs_dir": f"{folder}/runs"}))

        def train(*overrides: str) -> RunDir:
            command = [sys.executable, "-m", "draftsmith.cli", "train", str(path), *overrides, "--new-attempt"]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
            return newest(Path(folder) / "runs", config.name)

        train()  # makes the digests
        seconds = [moment["seconds"]["total"] for _ in range(RUNS) for moment in manifests(train())]
        pace = step_seconds(train("train.steps=200", "train.checkpoint_every=1000000"))
        steps = max(200, int(args.seconds / pace))
        run = train(f"train.steps={steps}", "train.log_every=100", "train.checkpoint_every=1000000")
        outcome = json.loads(run.manifest("end").read_text())["outcome"]
        heart = Heartbeat(run, 0)
        per_step = timeit.timeit(lambda: heart.at(1), number=100_000) / 100_000
        stepping = step_seconds(run) * steps
        monitor = outcome["monitor_cpu_seconds"] + per_step * steps
    values = {
        "seconds_p50": round(statistics.median(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "step_slowdown": round(1 + monitor / stepping, 6),
        "captures": len(seconds),
        "steps": steps,
        "step_ms": round(stepping / steps * 1000, 3),
        "monitor_cpu_ms": round(monitor * 1000, 3),
    }
    print(write_result("capture_cost", values), json.dumps(values))


def manifests(run: RunDir) -> list[dict]:
    return [json.loads(run.manifest(moment).read_text()) for moment in ("start", "built", "end")]


def step_seconds(run: RunDir) -> float:
    """Time of a step, from the run's own metrics."""
    lines = [line for line in read_metrics(run.metrics) if line["kind"] == "rate"]
    return sum(line["seconds"] for line in lines) / lines[-1]["step"]


if __name__ == "__main__":
    main()
