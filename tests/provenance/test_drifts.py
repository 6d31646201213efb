"""Staged drifts: the right cause comes first, with what was, what is, why it can matter and how to put it back."""

from __future__ import annotations

import pytest
from staging import CASES, Case, Machine, committed_later, train_here

from draftsmith.provenance.diff import diff


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_right_cause_comes_first(case: Case, tmp_path):
    before, after = case.stage(tmp_path)
    verdict = diff(before, after)
    assert verdict.changes, verdict.text()
    first = verdict.changes[0]
    assert (first.field, first.effect, first.follows) == (case.first, case.effect, None), verdict.text()
    assert case.back in first.back and first.back and first.why and first.was != first.is_, first
    assert len(verdict.causes(case.effect)) == 1, verdict.text()
    assert verdict.code == 1 and verdict.line.startswith(f"{len(verdict.causes('loss'))} change")


def test_identical_runs_ten_times_out_of_ten(tmp_path):
    runs = [train_here(tmp_path / str(n)) for n in range(11)]
    for before, after in zip(runs, runs[1:], strict=False):
        verdict = diff(before, after)
        assert (verdict.line, verdict.code) == ("nothing changed", 0), verdict.text()
        assert not verdict.ranks and {s.split(":")[0] for s in verdict.same} >= {"code", "packages", "target", "data"}


def test_edits_that_were_committed_since_are_the_same_source(tmp_path):
    verdict = diff(*committed_later(tmp_path))
    fields = [f"code.pipeline.{name}" for name in ("commit", "edits", "untracked")]
    assert [(c.field, c.effect) for c in verdict.changes] == [(field, "neither") for field in fields], verdict.text()


def test_a_machine_left_alone_only_lacks_what_cannot_be_known(tmp_path):
    """Separate processes, other times and pids; torch is a stand-in here, so its state is unknown, and said to be."""
    machine = Machine(tmp_path)
    verdict = diff(machine.capture("before"), machine.capture("after"))
    assert not verdict.changes, verdict.text()
    assert verdict.code == 2 and {u.field for u in verdict.unknown} == {"torch", "switches"}, verdict.text()
