"""metrics.jsonl: readable while it is being written, strict JSON, and what a kill cut off is left out."""

from __future__ import annotations

import json
import time

import pytest

from draftsmith.errors import InputError
from draftsmith.rundir import RunDir
from draftsmith.tracking import Tracker, read_metrics


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_line_is_there_as_soon_as_it_is_recorded(tmp_path):
    run = RunDir(tmp_path)
    tracker = Tracker(run)
    before = time.time()
    tracker.record(3, kind="train", loss=1.5, by_slot=[0.5, None])
    tracker.record(4, kind="train", loss=1.25)
    lines = read_metrics(run.metrics)
    assert [line.pop("time") >= round(before, 3) for line in lines] == [True, True]
    assert lines == [
        {"step": 3, "kind": "train", "loss": 1.5, "by_slot": [0.5, None]},
        {"step": 4, "kind": "train", "loss": 1.25},
    ]
    tracker.close()


def test_what_is_not_finite_stays_visible_and_the_line_stays_json(tmp_path):
    run = RunDir(tmp_path)
    tracker = Tracker(run)
    nan, inf = float("nan"), float("inf")
    tracker.record(1, loss=nan, deep={"a": [inf, {"b": -inf}, (nan, 2.0)]})
    tracker.close()
    line = json.loads(run.metrics.read_text(), parse_constant=refuse)
    assert line["loss"] == "nan"
    assert line["deep"] == {"a": ["inf", {"b": "-inf"}, ["nan", 2.0]]}


def test_said_is_printed_and_logged(tmp_path, capsys):
    run = RunDir(tmp_path)
    tracker = Tracker(run)
    tracker.say("left out: 3")
    assert capsys.readouterr().out == "left out: 3\n"
    assert run.log.read_text().endswith(" left out: 3\n")
    tracker.close()


def test_opened_again_it_appends(tmp_path):
    run = RunDir(tmp_path)
    for step in (1, 2):
        tracker = Tracker(run)
        tracker.record(step)
        tracker.say(f"step {step}")
        tracker.close()
    assert [m["step"] for m in read_metrics(run.metrics)] == [1, 2]
    assert len(run.log.read_text().splitlines()) == 2


def test_every_cut_of_the_last_line_reads_as_the_lines_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "loss": 2.5}\n{"step": 12, "loss": 1.5}\n'
    first = whole.index("\n") + 1
    for cut in range(first, len(whole) - 1):
        path.write_text(whole[:cut])
        assert [m["step"] for m in read_metrics(path)] == [1]
    path.write_text(whole)
    assert [m["step"] for m in read_metrics(path)] == [1, 12]


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(path)
