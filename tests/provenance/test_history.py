"""Which run is the last good one."""

from __future__ import annotations

import pytest
from staging import write_run

from draftsmith.provenance.history import last_good, list_runs, mark, write_mark
from draftsmith.provenance.manifest import find_run, load_run
from draftsmith.rundir import RunDir


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


def good_for(runs, name: str = "now"):
    found = last_good(runs, find_run(runs, name))
    return found.label.partition("/")[0] if found else None


def test_newest_that_finished(runs):
    for n, begun in (("old", 1.0), ("newer", 5.0), ("now", 9.0), ("later", 20.0)):
        write_run(runs, n, begun=begun)
    assert good_for(runs) == "newer"


def test_a_persons_word_counts_more(runs):
    for n, begun in (("old", 1.0), ("newer", 5.0), ("now", 9.0)):
        write_run(runs, n, begun=begun)
    write_mark(RunDir(runs / "old" / "attempt_1"), True, "published")
    assert good_for(runs) == "old"
    write_mark(RunDir(runs / "old" / "attempt_1"), False, "")
    assert good_for(runs) == "newer" and mark(RunDir(runs / "old" / "attempt_1")) is False
    write_mark(RunDir(runs / "newer" / "attempt_1"), False, "wrong data")
    assert good_for(runs) is None


@pytest.mark.parametrize(
    ("edit", "how"),
    [
        ((["outcome", "loss_finite"], False), "finished"),
        ((["outcome", "fallbacks"], ["dense attention"]), "finished"),
        ((["config", "target", "model"], "/models/other"), "finished"),
        ((["config", "drafter", "block_size"], 8), "finished"),
        ((["config", "train", "row_tokens"], 4096), "finished"),
        ((["gpu", "devices", "*", "name"], "NVIDIA A100"), "finished"),
        ((["world"], 4), "finished"),
        ((["kind"], "serving"), "finished"),
        ((["clock", "time"], 2.0), "crashed"),
        ((["clock", "time"], 2.0), "interrupted"),
        ((["clock", "time"], 2.0), "running"),
    ],
)  # fmt: skip
def test_what_never_counts(runs, edit, how):
    write_run(runs, "other", edit, begun=1.0, how=how)
    write_run(runs, "now", begun=9.0)
    assert good_for(runs) is None


@pytest.mark.parametrize(
    "edit",
    [
        (["config", "drafter", "feature_layers"], [1, 2, 3, 4, 5]), (["target", "weights", "sha256"], "x"),
        (["packages", "installed", "torch", "version"], "2.10"), (["gpu", "driver"], "1"),
    ],
)  # fmt: skip
def test_what_is_a_change_to_find_and_not_another_run(runs, edit):
    write_run(runs, "other", edit, begun=1.0)
    write_run(runs, "now", begun=9.0)
    assert good_for(runs) == "other"


def test_unreadable_runs_are_listed_and_passed_over(runs):
    write_run(runs, "fine", begun=1.0)
    broken = RunDir(write_run(runs, "broken", begun=3.0))
    broken.manifest("built").write_text('{"schema": 1, "kind": "tra')
    write_run(runs, "now", begun=9.0)
    (runs / "empty" / "attempt_1").mkdir(parents=True)
    assert good_for(runs) == "fine"
    problems = {e.run.path.parent.name: e.problem for e in list_runs(runs)}
    assert "cut short" in problems["broken"] and "holds no manifest" in problems["empty"] and problems["fine"] == ""


def test_a_process_that_died_before_it_was_built(runs):
    path = write_run(runs, "young", moments=("start",), how="crashed")
    facts = load_run(RunDir(path)).facts
    assert facts["built"] == {"unknown": "not recorded: it ended first (crashed)"}
    assert facts["gpu"]["devices"] and facts["outcome"] == {"unknown": "it left none (crashed)"}
