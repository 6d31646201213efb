"""What split_runs.py makes of its runs, and that its stored result is that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import split_runs
from flow.test_placements import processes_of
from test_results import RESULTS

from draftsmith.config import load_config

FOLDER = RESULTS[0].parent


def run(*losses: float, **more) -> dict:
    return {"exit_code": 0, "orphans": 0, "losses": list(losses), **more}


def test_curves_are_compared_step_by_step():
    assert split_runs.apart([1.0, 2.0], [1.0, 1.6]) == {
        "most": pytest.approx(0.25), "mean": pytest.approx(0.125), "bit_for_bit": False,
    }  # fmt: skip
    assert split_runs.apart([1.0, 2.0], [1.0, 2.0]) == {"most": 0.0, "mean": 0.0, "bit_for_bit": True}
    assert split_runs.apart([1.0], [1.0, 2.0]) is None and split_runs.apart([], []) is None


def test_a_kill_is_recovered_if_it_was_named_and_the_run_went_on_from_a_checkpoint_to_its_end():
    runs = {"one": run(2.0, 1.0), "colocated": run(2.0, 1.1), "split": run(2.0, 1.1)}
    said = ["drafter 2 (rank 2, pid 7) was killed by SIGKILL: stopping the others"]
    kill = run(
        2.0, 1.1, victim="drafter", rank=2, killed=True, steps=2, said=said, attempts=2, told_twice=0, steps_before=1
    )
    top = split_runs.summary(runs | {"kill": kill}, 2)
    assert top["split_beside_colocated"]["bit_for_bit"] and top["kills_beside_split"]["kill"]["bit_for_bit"]
    assert top["beside_one_process"]["split"]["most"] == pytest.approx(0.1)
    assert (top["kills"], top["recovered"], top["orphans"], top["failed"]) == (1, 1, 0, [])
    for wrong in (
        {"killed": False}, {"said": []}, {"said": ["target 0 (rank 2, pid 7)"]}, {"rank": 1}, {"attempts": 1},
        {"told_twice": 1}, {"exit_code": 1}, {"steps": 1},
    ):  # fmt: skip
        assert split_runs.summary(runs | {"kill": kill | wrong}, 2)["recovered"] == 0, wrong
    runs["one"] |= {"exit_code": 2}
    runs["split"] |= {"losses": [2.0], "orphans": 3}
    top = split_runs.summary(runs | {"kill": kill}, 2)
    assert top["failed"] == ["one", "split"] and top["orphans"] == 3 and top["split_beside_colocated"] is None


LAUNCHER = """
import json, os, pathlib, subprocess, sys, time
config = pathlib.Path(sys.argv[1])
def attempt(number, steps):
    folder = config.parent / "runs" / "x" / f"attempt_{number}"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"kind": "train", "step": s, "loss": 1 / s}) + "\\n" for s in steps))
    return folder
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(config)], env={**os.environ, "RANK": "1"}, stdout=-3, stderr=-3)
if len(sys.argv) < 3:
    (attempt(1, (1, 2)) / "checkpoints" / "step_1").mkdir(parents=True)
assert child.wait() == -9
print(f"target 0 (rank 1, pid {child.pid}) was killed by SIGKILL: stopping the others")
attempt(2, (2, 3))
"""


def test_a_process_is_killed_after_the_first_checkpoint_and_what_is_left_is_counted(tmp_path, monkeypatch):
    """With a launcher made up, whose one child is the victim."""
    (tmp_path / "x.yaml").write_text("")
    config = SimpleNamespace(runs_dir=tmp_path / "runs", name="x")

    def started(*more):
        def start(path):
            command = [sys.executable, "-c", LAUNCHER, str(path), *more]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            while 1 not in dict(processes_of(config)) and process.poll() is None:
                time.sleep(0.02)
            return process

        return start

    monkeypatch.setattr(split_runs, "start", started())
    found = split_runs.trained(tmp_path / "x.yaml", config, 60.0, "target", 1)
    assert found["losses"] == [1.0, 1 / 2, 1 / 3] and split_runs.recovered(found, 3)
    assert (found["steps_before"], found["told_twice"], found["apart_where_told_twice"]) == (2, 1, 0.0)
    assert found["orphans"] == 0 and found["exit_code"] == 0
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr(split_runs, "start", started("never saves"))
    monkeypatch.setattr(split_runs, "time", SimpleNamespace(monotonic=Clock(), sleep=lambda seconds: None))
    try:
        late = split_runs.trained(tmp_path / "x.yaml", config, 5.0, "target", 1)
    finally:
        for _, pid in processes_of(config):
            os.kill(pid, signal.SIGKILL)
    assert not late["killed"] and late["exit_code"] == -9 and "longer than 5 s" in late["log"]
    assert late["orphans"] == 1 and not split_runs.recovered(late, 3)


def test_each_run_has_the_placement_that_it_is_named_after_whatever_the_config_has(tmp_path):
    """As the example of 5 + 3 has it: a split, epochs, and three restarts."""
    path = tmp_path / "c.yaml"
    path.write_text("""
name: c
target: {model: x}
train: {epochs: 2, rows_per_step: 6}
placement: {mode: split, targets: 5, drafters: 3, max_restarts: 3}
""")
    args = SimpleNamespace(config=path, fields=[], steps=50, drafters=3)
    for name, given in (("one", (0, 1)), ("colocated", (0, 3)), ("split", (5, 3)), ("kill", (5, 3, 1))):
        written, config = split_runs.configured(args, tmp_path, name, *split_runs.placement(*given))
        place, train = config.placement, config.train
        assert (place.targets, place.drafters, place.max_restarts) == (*given, 0)[:3] and (place.mode == "split") == (
            given[0] > 0
        )
        assert (train.steps, train.epochs, train.checkpoint_every, train.rows_per_step) == (50, None, 10, 6)
        assert load_config(written) == config


class Clock:
    """A second passes whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_losses_are_read_attempt_by_attempt(tmp_path):
    for number, losses in ((1, {1: 3.0, 2: 2.0}), (2, {2: 2.5, 3: 1.0})):
        attempt = tmp_path / "x" / f"attempt_{number}"
        attempt.mkdir(parents=True)
        lines = [{"kind": "train", "step": s, "loss": v} for s, v in losses.items()]
        (attempt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "rate"}]))
    assert split_runs.told(SimpleNamespace(runs_dir=tmp_path, name="x")) == {1: [3.0], 2: [2.0, 2.5], 3: [1.0]}


def test_the_stored_runs_are_summed_up_as_the_script_does_and_keep_the_bound():
    """Of one process, other kernels alone move a loss by up to 0.6%, 0.1% on average: the bound leaves a margin over that."""
    stored = json.loads((FOLDER / "split_runs_h200_x1.json").read_text())
    made = split_runs.summary(stored["runs"], stored["steps"])
    assert {k: stored[k] for k in made} == made
    assert (
        made["split_beside_colocated"]["bit_for_bit"] and made["recovered"] == made["kills"] == 2 and not made["failed"]
    )
    assert all(k["bit_for_bit"] for k in made["kills_beside_split"].values()) and made["orphans"] == 0
    for name in ("noise", "split"):
        assert made["beside_one_process"][name]["most"] < 1e-2 and made["beside_one_process"][name]["mean"] < 2e-3
    assert len(stored["runs"]["split"]["losses"]) == 50
