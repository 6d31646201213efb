"""Sinks: everything arrives where it can, and one that raises or hangs neither stops nor slows what feeds it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import make_config

from draftsmith import sinks
from draftsmith.errors import InputError
from draftsmith.rundir import RunDir
from draftsmith.sinks import Sinks, flat
from draftsmith.tracking import Tracker, read_metrics
from draftsmith.train import loop


class Kept:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step, when, values):
        self.written.append((step, values))

    def close(self):
        self.closed = True


class Raises(Kept):
    def write(self, step, when, values):
        if step == 3:
            raise ConnectionError("the tracker is down\nsecond line")
        super().write(step, when, values)


class Hangs(Kept):
    def write(self, step, when, values):
        threading.Event().wait()


def hang_while_opening() -> Kept:
    threading.Event().wait()
    raise AssertionError


def test_numbers_are_flat_and_named_by_kind():
    values = {
        "kind": "train",
        "loss": 1,
        "note": "x",
        "ok": True,
        "none": None,
        "by_slot": [0.5, None],
        "a": {"b": 2.0},
    }
    assert dict(flat(values)) == {"train/loss": 1.0, "train/by_slot/1": 0.5, "train/a/b": 2.0}
    assert dict(flat({"x": 1})) == {"x": 1.0}


def test_every_record_arrives_in_order_before_close_returns():
    kept = Kept()
    fed = Sinks({"wandb": lambda: kept})
    for step in range(1000):
        fed.record(step, 0.0, {"kind": "train", "loss": step})
    assert fed.close() == []
    assert kept.written == [(step, {"train/loss": float(step)}) for step in range(1000)]
    assert kept.closed


def test_one_that_raises_and_one_that_hangs_stop_nothing(tmp_path, capsys):
    kept, raises, hangs = Kept(), Raises(), Hangs()
    makers = {
        "mlflow": lambda: kept,
        "wandb": lambda: raises,
        "trackio": lambda: hangs,
        "tensorboard": hang_while_opening,
    }
    run = RunDir(tmp_path)
    tracker = Tracker(run, sinks=Sinks(makers, close_seconds=0.3))
    begin = time.monotonic()
    for step in range(1, 11):
        tracker.record(step, kind="train", loss=1.0)
    assert time.monotonic() - begin < 0.2
    tracker.close()
    assert time.monotonic() - begin < 2
    assert len(read_metrics(run.metrics)) == len(kept.written) == 10
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "tracking.wandb: it failed (ConnectionError: the tracker is down): 8 of 10 records dropped; all are in metrics.jsonl",
        "tracking.trackio: it did not answer: 10 of 10 records dropped; all are in metrics.jsonl",
        "tracking.tensorboard: it did not answer: 10 of 10 records dropped; all are in metrics.jsonl",
    ]
    assert run.log.read_text().count("records dropped") == 3


def test_a_full_queue_drops_and_counts(monkeypatch):
    fed = sinks.Fed("wandb", Hangs, size=5)
    begin = time.monotonic()
    for step in range(20_000):
        fed.feed(step, 0.0, {"loss": 1.0})
    assert time.monotonic() - begin < 1
    assert fed.queue.qsize() == 5
    fed.ask_to_close()
    assert "20000 of 20000 records dropped" in str(fed.problem(time.monotonic()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_otherwise_is_noticed():
    def leave() -> Kept:
        raise SystemExit(1)

    fed = sinks.Fed("wandb", leave)
    fed.feed(1, 0.0, {})
    fed.ask_to_close()
    assert "1 of 1 records dropped" in str(fed.problem(time.monotonic() + 5))


def test_training_with_a_hanging_sink_is_not_slower(stored, monkeypatch, capsys):
    def seconds(makers) -> float:
        monkeypatch.setattr(loop, "open_sinks", lambda *_: Sinks(makers, close_seconds=0.1))
        run = loop.train(
            make_config(Path(stored.target.model), stored.runs_dir.parent, "train.steps=12"), new_attempt=True
        )
        rates = [line for line in read_metrics(run.metrics) if line["kind"] == "rate"]
        assert len(rates) == 12
        return sorted(line["seconds"] for line in rates)[6]

    without = seconds({})
    assert seconds({"wandb": Hangs, "mlflow": Raises}) < 1.5 * without + 0.02
    assert "tracking.wandb: it did not answer" in capsys.readouterr().out


def test_a_sink_that_is_not_installed_is_refused_before_there_is_a_run(stored, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_config(Path(stored.target.model), stored.runs_dir.parent, "tracking.trackio=true")
    with pytest.raises(InputError, match=r"tracking.trackio=true needs the package trackio: pip install"):
        loop.train(config)
    assert not config.runs_dir.exists()


# the real libraries, each in a process of its own: they set up threads, exit hooks and global state

FEED = """
import sys
from pathlib import Path
from draftsmith.rundir import RunDir
from draftsmith.sinks import open_sinks
from draftsmith.tracking import Tracker
run = RunDir(Path(sys.argv[1]) / "name" / "attempt_1")
run.path.mkdir(parents=True)
tracker = Tracker(run, sinks=open_sinks([sys.argv[2]], run, {"train": {"steps": 3}}))
for step in (1, 2, 3):
    tracker.record(step, kind="train", loss=4.0 / step, accuracy_by_slot=[0.5, None, 0.25])
tracker.record(3, kind="heldout", loss=2.5)
tracker.close()
"""


def fed(tmp_path: Path, name: str) -> Path:
    """Feed the real library with every way to the network shut; its folder."""
    proxy = {k: "http://127.0.0.1:9" for k in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    environment = {**os.environ, **proxy, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FEED, str(tmp_path), name], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "dropped" not in done.stdout, done.stdout
    return tmp_path / "name" / "attempt_1" / "tracking"


def test_wandb(tmp_path):
    pytest.importorskip("wandb")
    files = list(fed(tmp_path, "wandb").rglob("run-*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"train/loss" in content and b"heldout/loss" in content


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(fed(tmp_path, "tensorboard") / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 4.0),
        (2, 2.0),
        (3, pytest.approx(4 / 3)),
    ]
    assert "train/accuracy_by_slot/3" in events.Tags()["scalars"]


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    import sqlite3

    (database,) = fed(tmp_path, "trackio").rglob("draftsmith*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, values["train/loss"]) for step, values in found[:3]] == [(1, 4.0), (2, 2.0), (3, 4 / 3)]
    assert found[3][1]["heldout/loss"] == 2.5


def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    folder = fed(tmp_path, "mlflow") / "mlflow"
    (loss,) = folder.rglob("metrics/train/loss")
    assert [(float(v), int(s)) for _, v, s in map(str.split, loss.read_text().splitlines())] == [
        (4.0, 1),
        (2.0, 2),
        (4 / 3, 3),
    ]
    (config,) = folder.rglob("config.json")
    assert json.loads(config.read_text()) == {"train": {"steps": 3}}
