"""The throughput floor: its arithmetic on made-up numbers, and tiny real runs with one part slowed on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from conftest import make_config, write_conversations

from draftsmith.config import Config
from draftsmith.data.loader import Loader
from draftsmith.data.tokenize import tokenize
from draftsmith.errors import TOO_SLOW, Interrupted
from draftsmith.provenance.history import finished_well, write_mark
from draftsmith.provenance.manifest import load_run
from draftsmith.rundir import newest
from draftsmith.target.extract import FeatureExtractor
from draftsmith.tracking import read_metrics
from draftsmith.train import checkpoint
from draftsmith.train.floor import (
    LABELS,
    Floor,
    Interval,
    Reference,
    changed_settings,
    from_line,
    grown,
    reference,
    together,
)
from draftsmith.train.loop import train
from draftsmith.train.step import RowStep

# made-up numbers: a good run does ten rows a second


def interval(seconds: float = 10.0, rows: float = 100.0, checkpoints: int = 0, **parts: float) -> Interval:
    return Interval(rows, {"compute": seconds - sum(parts.values()), **parts}, checkpoints)


GOOD = [interval(), *(interval(wait=2.0, data=0.1) for _ in range(8)), Interval(0, {"checkpoint": 3.0}, 1)]


def good() -> Reference:
    found = reference("good/attempt_1", GOOD)
    assert found is not None
    return found


def feed(floor: Floor, *intervals: Interval) -> list[int]:
    """Numbers of the intervals that ended a drop."""
    return [i for i, one in enumerate(intervals) if floor.add(one) is not None]


def test_a_line_reads_back_as_what_was_written():
    one = Interval(7.0, {"compute": 2.0, "wait": 1.0, "data": 0.25, "checkpoint": 4.0, "evaluation": 0.5}, 2)
    back = from_line(one.line())
    assert (back.rows, back.checkpoints) == (7.0, 2)
    assert {k: v for k, v in back.parts.items() if v} == pytest.approx(dict(one.parts))
    assert (back.training, back.wall) == (pytest.approx(3.25), pytest.approx(7.75))
    line = one.line()
    assert line["rows_per_s"] == pytest.approx(7 / 3.25)
    assert sum(line["shares"].values()) == pytest.approx(1) and line["shares"].keys() == LABELS.keys()


def test_a_line_without_shares_still_gives_a_rate():
    old = from_line({"kind": "rate", "seconds": 4.0, "rows_per_s": 2.5})
    assert (old.rows, old.training) == (10.0, 4.0)


def test_the_reference_leaves_warm_up_and_pauses_out():
    slow_start = Interval(1, {"compile": 500.0})
    found = reference("x", [slow_start, *GOOD[1:]])
    assert found.rows_per_s == pytest.approx(10) and found.checkpoint_seconds == 3.0
    assert reference("x", []) is None
    assert reference("x", [slow_start]).rows_per_s == pytest.approx(1 / 500)


def test_two_windows_on_end_below_are_a_drop_said_once():
    slow = interval(20.0)  # half the rate
    floor = Floor(good(), 0.7, 15.0)
    # windows: warm-up, good, low, low (a drop), low, good, low, low (another)
    assert feed(floor, slow, interval(20, 200), slow, slow, slow, interval(20, 200), slow, slow) == [3, 7]


def test_one_low_window_is_no_drop_nor_is_an_unwarmed_start():
    slow, fine = interval(20.0), interval(20.0, 200)
    assert feed(Floor(good(), 0.7, 15.0), slow, slow, fine, slow, fine, slow, fine) == []


def test_the_share_is_the_floor():
    edge = [interval(20, 140.1)] * 6
    assert feed(Floor(good(), 0.7, 15.0), *edge) == []
    assert feed(Floor(good(), 0.71, 15.0), *edge) == [2]


def test_windows_are_of_training_time():
    """Twenty intervals of a second, half of it evaluation, are ten seconds: no window of fifteen is full."""
    half = interval(1.0, 0.1, evaluation=0.5)
    assert feed(Floor(good(), 0.7, 15.0), *[half] * 20) == []
    assert feed(Floor(good(), 0.7, 2.0), *[half] * 20) == [11]


def test_evaluation_and_ordinary_checkpoints_never_fire():
    held = Interval(200, {"compute": 20.0, "evaluation": 500.0})
    saved = Interval(200, {"compute": 20.0, "checkpoint": 6.0}, 2)
    assert feed(Floor(good(), 0.99, 15.0), *[held, saved] * 6) == []


def test_checkpoints_slower_than_they_were_do_fire():
    slow = Interval(200, {"compute": 20.0, "checkpoint": 60.0}, 1)
    drop = [d for d in map(Floor(good(), 0.7, 15.0).add, [slow] * 3) if d]
    assert len(drop) == 1 and "the part that grew is checkpoint" in drop[0].sentence()
    unknown = Reference("x", good().whole, None)
    assert feed(Floor(unknown, 0.7, 15.0), *[slow] * 5) == []


@pytest.mark.parametrize("part", [p for p in LABELS if p not in ("evaluation", "checkpoint")])
def test_the_part_that_grew_is_named(part):
    before = good()
    now = together([*GOOD[1:9], Interval(0, {part: 80.0, "evaluation": 900.0})])
    assert grown(now, before)[0] == part


def test_a_share_that_only_looks_bigger_is_not_named():
    """Half the rate by data: compute's share fell, its cost a row did not; wait is still the larger share."""
    drops = [
        d
        for d in map(Floor(good(), 0.7, 15.0).add, [Interval(100, {"compute": 7.9, "wait": 2.0, "data": 10.1})] * 6)
        if d
    ]
    first, sentence, shares = drops[0].lines()
    assert sentence == "the part that grew is data: 1 ms a row before, 101 ms a row now"
    assert (
        "5 rows/s" in first and "10 rows/s in the last good run good/attempt_1 (50% of it, the floor is 70%)" in first
    )
    assert "data 50% (was 1%)" in shares and "wait for target 10%" in shares


def test_settings_that_move_the_rate_are_told_from_those_that_do_not():
    one = {
        "device": "cpu",
        "train": {"steps": 5, "row_tokens": 8},
        "floor": {"share": 0.7},
        "placement": {"drafters": 1},
    }
    assert changed_settings(one, {**one, "train": {"steps": 9, "row_tokens": 8, "new": 1}, "floor": {}}) == []
    assert changed_settings(one, {**one, "device": "cuda", "train": {"row_tokens": 9}}) == [
        "train.row_tokens",
        "device",
    ]
    assert changed_settings(one, {**one, "placement": {"drafters": 2}}) == ["placement.drafters"]
    compiled = {**one, "compile": {"graphs": False, "start": "auto"}}
    assert changed_settings(compiled, {**one, "compile": {"graphs": True, "start": "first"}}) == ["compile.graphs"]


# real runs

STEPS = ("train.steps=40", "train.checkpoint_every=2", "train.keep_checkpoints=1", "floor.window_seconds=0.15")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Config:
    """A config whose last good run is there."""
    config = make_config(target_folder, tmp_path_factory.mktemp("floor"), *STEPS, "name=good")
    write_conversations(config.conversations)
    tokenize(config)
    run = train(config)
    assert "no throughput floor: there is no last good run" in run.log.read_text()
    write_mark(run, True, "")  # whatever the other tests leave behind
    return config


def slowed(base: Config, name: str, *overrides: str) -> Config:
    work = base.runs_dir.parent
    return make_config(Path(base.target.model), work, *STEPS, f"name={name}", *overrides)


def pause(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
    real = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


def compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row compiles something new, as a shape that changes would make it."""
    real = RowStep.run

    def backend(graph, inputs):
        time.sleep(0.2)
        return graph.forward

    def run(self, *args):
        torch.compile(eval("lambda x: x + 1"), backend=backend)(torch.zeros(3))
        return real(self, *args)

    monkeypatch.setattr(RowStep, "run", run)


SLOW = {
    "data": lambda m: pause(m, Loader, "row", 0.2),
    "wait for target": lambda m: pause(m, FeatureExtractor, "row", 0.2),
    "compute": lambda m: pause(m, RowStep, "run", 0.2),
    "checkpoint": lambda m: pause(m, checkpoint.Saver, "save", 0.8),
    "compile": compile_anew,
}


@pytest.mark.parametrize("part", SLOW)
def test_the_part_that_was_slowed_is_named(base, monkeypatch, capfd, part):
    SLOW[part](monkeypatch)
    config = slowed(base, f"slow-{part.replace(' ', '-')}", "train.steps=12")
    run = train(config)
    said = run.log.read_text()
    assert said.count("throughput has dropped") == 1
    assert f"the part that grew is {part}:" in said
    assert "time shares: compute" in said
    assert "what changed since good/attempt_1:" in said and "packages: identical" in said
    assert "% of last-good)" in capfd.readouterr().out
    assert len(read_metrics(run.metrics)) > 12, "a warning does not stop"
    assert not finished_well(load_run(run)), "a slow run is no measure for the next one"


def test_stop_is_after_a_checkpoint_and_says_how_to_go_on(base, monkeypatch):
    pause(monkeypatch, Loader, "row", 0.2)
    config = slowed(base, "stopped", "floor.action=stop", "train.checkpoint_every=500", "train.steps=30")
    with pytest.raises(
        Interrupted, match="throughput floor: saved .* at step [0-9]+; go on with --resume auto"
    ) as stop:
        train(config)
    assert stop.value.code == TOO_SLOW == 3
    run = newest(config.runs_dir, config.name)
    done = checkpoint.read_state(checkpoint.newest_checkpoint(run)).step
    assert 3 <= done < 30
    assert "the part that grew is data" in run.log.read_text()
    monkeypatch.undo()
    resumed = train(slowed(base, "stopped", "train.steps=30", "floor.action=off"), resume="auto")
    assert checkpoint.read_state(checkpoint.newest_checkpoint(resumed)).step == 30


def test_evaluation_never_fires(base, monkeypatch):
    pause(monkeypatch, RowStep, "heldout", 0.5)  # more than ten times a step
    run = train(slowed(base, "evaluating", "train.heldout_every=1", "train.steps=12", "floor.share=0.1"))
    assert "throughput floor: 10% of the " in run.log.read_text()
    assert "throughput has dropped" not in run.log.read_text()
    shares = [line["shares"] for line in read_metrics(run.metrics) if line["kind"] == "rate"]
    assert shares[5]["evaluation"] > 0.5 and sum(shares[5].values()) == pytest.approx(1)


def test_a_changed_config_and_off_are_not_watched(base, monkeypatch):
    pause(monkeypatch, Loader, "row", 0.2)
    for name, override, said in (
        (
            "other",
            "train.compute_dtype=float64",
            "the config has changed since the last good run good/attempt_1: train.compute_dtype",
        ),
        ("geometry", "train.anchors=8", "there is no last good run"),
        ("unwatched", "floor.action=off", ""),
    ):
        log = train(slowed(base, name, override, "train.steps=6")).log.read_text()
        assert "throughput has dropped" not in log
        assert (f"no throughput floor: {said}" in log) if said else ("throughput floor" not in log)


def test_the_whole_time_is_accounted_for(base):
    lines = read_metrics(newest(base.runs_dir, "good").metrics)
    rates = [line for line in lines if line["kind"] == "rate"]
    assert sum(line["checkpoints"] for line in rates) == 19  # the last is behind the last line
    walls = sum(line["wall_seconds"] for line in rates[1:])
    assert walls == pytest.approx(rates[-1]["time"] - rates[0]["time"], rel=0.05)
    assert all(line["peak_rss_bytes"] > 1e8 for line in rates)
