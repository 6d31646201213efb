"""`draftsmith bench` of a split, by the command: it ends, and its rate is of rows that were made in its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TINY = (
    "--geometry", "tiny", "--device", "cpu", "--row-tokens", "256", "--anchors", "16", "--block-size", "8", "--layers", "1",
    "--rows-per-step", "4",
)  # fmt: skip


def bench(tmp_path, *more: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "draftsmith.cli", "bench", *TINY, "--json", str(tmp_path / "found.json"), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **environment})


@pytest.mark.parametrize("targets, drafters", [(1, 1), (2, 1)])
def test_a_split_ends_and_counts_what_its_targets_made(tmp_path, targets, drafters):
    split = f"placement.targets={targets}", f"placement.drafters={drafters}", "placement.mode=split"
    done = bench(tmp_path, "--steps", "3", *split)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows_timed"] == 12 and 0 < found["rows_served"] <= 12 + 5 * targets + 4 * drafters
    made = min(found["rows_timed"], found["rows_served"])
    assert found["rows_per_s"] == pytest.approx(made / found["seconds"])
    # 4 to warm up, 3 that are timed, and as many as targets can be ahead
    assert len(found["losses"]) == 4 + 3 + {1: 3, 2: 4}[targets]
    assert found["waits"]["target_seconds_per_row"] > 0


def test_no_step_to_time_is_refused(tmp_path):
    done = bench(tmp_path, "--steps", "0")
    assert done.returncode == 2 and "--steps 0: at least one step is timed" in done.stderr


def test_the_parts_of_a_step_that_runs_as_a_graph_are_not_told(tmp_path):
    """They would be those of steps without.  What compilation would make of them is not looked at."""
    compiled = "compile.graphs=true", "compile.enabled=true", f"compile.cache_dir={tmp_path}/cache"
    done = bench(tmp_path, *compiled, TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["drafter_parts_ms"] == {} and found["drafter_step_ms"] > 0 and found["target_ms"] > 0
    refused = bench(tmp_path, "compile.graphs=true")
    assert refused.returncode == 2 and "compile.graphs: nothing is compiled here" in refused.stderr
