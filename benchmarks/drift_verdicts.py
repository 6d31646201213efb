"""Does `runs diff` name the right cause?  Every staged drift, and runs between which nothing changed.

    python benchmarks/drift_verdicts.py            about two minutes on two CPU cores

Writes results/drift_verdicts.json: cases, right_first (the cause stood first in the verdict, with its effect and how to
put it back), false_alarms (a pair without a drift that was not called "nothing changed"), identical_runs.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import write_result

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "provenance")]

from staging import CASES, recorded, workshop  # noqa: E402

import draftsmith  # noqa: E402
from draftsmith.provenance.diff import diff  # noqa: E402
from draftsmith.provenance.manifest import RunRecord, load_run  # noqa: E402
from draftsmith.rundir import newest  # noqa: E402

PACKAGE = Path(draftsmith.__file__).parent
IDENTICAL = 10
NOISE: dict[str, list[Any]] = {
    "another time, process and boot": [
        [["clock", "time"], 1.0],
        [["process", "pid"], 1],
        [["process", "boot_id"], "x"],
    ],
    "another name and folder": [
        [["config", "name"], "b"],
        [["config", "runs_dir"], "r"],
        [["process", "folder"], "/b"],
    ],
    "the store and the target at another place": [[["data", "folder"], "/b"], [["target", "folder"], "/c"]],
    "resumed from a checkpoint": [[["built", "resumed_from"], "runs/a/attempt_1/checkpoints/step_1"]],
    "other results": [[["outcome", "loss"], 2.4], [["outcome", "tokens_per_s", "p50"], 4300.0]],
    "ran into its power cap": [[["gpu_samples", 0, "throttle"], ["software power cap"]]],
}
"""Recorded pairs that differ in what is no drift."""


def main() -> None:
    right = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            verdict = diff(*case.stage(Path(folder)))
        first = verdict.changes[0] if verdict.changes else None
        good = (
            first is not None and (first.field, first.effect) == (case.first, case.effect) and case.back in first.back
        )
        right += good
        print(f"{'right' if good else 'WRONG':6} {case.name}: {first.field if first else verdict.line}", flush=True)
    alarms = 0
    for name, edits in NOISE.items():
        verdict = diff(*recorded({"after": edits})(Path()))
        alarms += verdict.code != 0
        print(f"{'quiet' if verdict.code == 0 else 'ALARM':6} {name}: {verdict.line}", flush=True)
    runs = identical_runs()
    for before, after in itertools.pairwise(runs):
        verdict = diff(before, after)
        alarms += verdict.code != 0
        print(
            f"{'quiet' if verdict.code == 0 else 'ALARM':6} {before.label} -> {after.label}: {verdict.line}", flush=True
        )
    values = {"cases": len(CASES), "right_first": right, "false_alarms": alarms, "identical_runs": len(runs) - 1}
    print(write_result("drift_verdicts", values), json.dumps(values))


def identical_runs() -> list[RunRecord]:
    """The same training again and again, each in a process of its own, as a person would start it.

    From a copy of the package: whoever works on the source meanwhile is a drift, and would be found.
    """
    config, _, _ = workshop()
    with tempfile.TemporaryDirectory() as folder:
        values = {**json.loads(config.dump()), "runs_dir": f"{folder}/runs"}
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(values))
        command = [sys.executable, "-m", "draftsmith.cli", "train", str(path), "--new-attempt"]
        shutil.copytree(PACKAGE, f"{folder}/copy/draftsmith", ignore=shutil.ignore_patterns("__pycache__"))
        environ = {**os.environ, "PYTHONPATH": f"{folder}/copy"}
        records = []
        for _ in range(IDENTICAL + 1):
            subprocess.run(command, check=True, env=environ, cwd=folder, stdout=subprocess.DEVNULL)
            records.append(load_run(newest(Path(folder) / "runs", config.name)))
        return records


if __name__ == "__main__":
    main()
