"""Where the clock says the time went: parts that add up, compile time once, and who waited for whom."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from draftsmith.train.dist import World
from draftsmith.train.roles import Clock, compile_seconds, who_waits

CPU = torch.device("cpu")


class Source:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def row(self, row: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(1)


class Split(World):
    """Two drafters, one target; what the others said is made up."""

    def __init__(self, said: list[dict[str, float]], other: dict[str, float]) -> None:
        super().__init__(rank=0, targets=1, drafters=2, role="drafter")
        object.__setattr__(self, "_said", said)
        object.__setattr__(self, "_other", other)

    def said(self, key: str) -> bool:
        return True

    def read(self, key: str, who: int = 0) -> Any:
        assert (key, who) == ("times/2", 2)
        return self._said.pop(0)

    def sum_host(self, values):
        if len(values) == 2:  # training, waited
            return [2 * values[0], values[1] + self._other["wait"]]
        return [*values[:3], *(self._other[k] for k in ("data", "wait", "compile"))]


def test_parts_add_up_to_the_time():
    clock = Clock(World(), Source(0.05), CPU)
    clock.start()
    begin = time.monotonic()
    for part, seconds in (("data", 0.03), ("evaluation", 0.06), ("checkpoint", 0.02), ("checkpoint", 0.02)):
        with clock.part(part):
            time.sleep(seconds)
    clock.features.row(None)
    time.sleep(0.04)
    parts, checkpoints, waits = clock.read(1)
    assert checkpoints == 2 and waits == {}
    assert sum(parts.values()) == pytest.approx(time.monotonic() - begin, abs=0.01)
    expected = {"data": 0.03, "evaluation": 0.06, "checkpoint": 0.04, "wait": 0.05, "compute": 0.04}
    for part, seconds in expected.items():
        assert parts[part] == pytest.approx(seconds, abs=0.02), part
    parts, checkpoints, _ = clock.read(1)
    assert checkpoints == 0 and sum(parts.values()) < 0.01, "each reading starts anew"


def test_what_came_before_start_does_not_count():
    clock = Clock(World(), Source(0.05), CPU)
    clock.features.row(None)
    with clock.part("data"):
        time.sleep(0.05)
    clock.start()
    parts, _, _ = clock.read(1)
    assert sum(parts.values()) < 0.01


def compile_something() -> None:
    def backend(graph, inputs):
        time.sleep(0.1)
        return graph.forward

    torch.compile(eval("lambda x: x + 1"), backend=backend)(torch.zeros(3))


def test_compiling_is_counted_once_and_survives_a_reset():
    compile_something()
    clock = Clock(World(), Source(), CPU)
    clock.start()
    with clock.part("evaluation"):
        compile_something()
    parts, _, _ = clock.read(1)
    assert parts["compile"] < 0.01 and parts["evaluation"] > 0.1
    compile_something()
    parts, _, _ = clock.read(1)
    assert parts["compile"] > 0.1 and parts["compute"] < 0.1
    torch.compiler.reset()
    assert compile_seconds() == 0
    compile_something()
    parts, _, _ = clock.read(1)
    assert 0.1 < parts["compile"] < 1


NOTHING = {"seconds": 0.0, "wait": 0.0, "compute": 0.0, "rows": 0}


def split_read(wait: float, target: dict[str, float], other: dict[str, float] | None = None) -> dict[str, float]:
    """Parts after 0.2 s, of which this drafter waited `wait`."""
    world = Split([NOTHING, target], {"data": 0.0, "wait": wait, "compile": 0.0, **(other or {})})
    clock = Clock(world, Source(wait), CPU)
    clock.start()
    clock.features.row(None)
    time.sleep(0.2 - wait)
    return clock.read(1)[0]


def test_a_slow_target_is_waited_for_and_a_slow_transfer_is_when_both_wait():
    slow_target = {"seconds": 10.0, "wait": 0.0, "compute": 10.0, "rows": 5}
    parts = split_read(0.15, slow_target)
    assert parts["wait"] == pytest.approx(0.15, abs=0.02) and parts["transfer"] == 0
    waiting_target = {"seconds": 10.0, "wait": 9.0, "compute": 1.0, "rows": 5}
    parts = split_read(0.15, waiting_target)
    assert parts["transfer"] == pytest.approx(0.15, abs=0.02) and parts["wait"] == pytest.approx(0, abs=0.01)


def test_targets_waits_are_those_since_the_last_reading():
    said = [
        {"seconds": 10.0, "wait": 9.0, "compute": 1.0, "rows": 5},
        {"seconds": 20.0, "wait": 9.0, "compute": 11.0, "rows": 10},
    ]
    clock = Clock(Split(said, {"data": 0.0, "wait": 0.0, "compile": 0.0}), Source(), CPU)
    assert clock.read(1)[2]["targets_waited"] == pytest.approx(0.9)
    assert clock.read(1)[2]["targets_waited"] == 0


def test_of_targets_counts_what_came_since_the_start():
    """Their rows before it took longer: they are compiled in them."""
    said = [
        {"seconds": 30.0, "wait": 9.0, "compute": 20.0, "rows": 4},
        {"seconds": 40.0, "wait": 9.0, "compute": 25.0, "rows": 14},
        {"seconds": 50.0, "wait": 9.0, "compute": 35.0, "rows": 29},
    ]
    clock = Clock(Split(said, {"data": 0.0, "wait": 0.0, "compile": 0.0}), Source(), CPU)
    assert clock.rows_served is None
    clock.start()
    waits = clock.read(1)[2]
    assert (clock.rows_served, waits["target_seconds_per_row"], waits["targets_waited"]) == (10, 0.5, 0.0)
    waits = clock.read(1)[2]
    assert (clock.rows_served, waits["target_seconds_per_row"]) == (15, 0.6)


def test_a_run_too_short_to_know_ends_with_what_is_known():
    """The targets had made all rows before the clock started; or have not been heard of since they made the first."""

    def waits(*said):
        clock = Clock(Split(list(said), {"data": 0.0, "wait": 0.0, "compile": 0.0}), Source(), CPU)
        clock.start()
        return clock.read(1)[2], clock.advice(8)

    ready = {"seconds": 9.0, "wait": 1.0, "compute": 8.0, "rows": 4}
    assert waits(ready, ready)[0]["target_seconds_per_row"] == 2.0
    read, advice = waits(NOTHING, {**NOTHING, "seconds": 9.0})
    assert "target_seconds_per_row" not in read and advice == "drafters waited 0% of the time"


def test_the_slowest_drafters_loading_is_data_everywhere():
    target = {"seconds": 10.0, "wait": 9.0, "compute": 1.0, "rows": 5}
    parts = split_read(0.0, target, {"data": 0.18})
    assert parts["data"] == 0.18 and parts["compute"] < 0.05


def test_who_waits_is_said_for_both_placements():
    parts = {"compute": 1.0, "wait": 2.0, "data": 1.0, "evaluation": 50.0}
    assert who_waits(parts, {}) == "waits: features 50%, data 25%"
    assert who_waits(parts, {"drafters_waited": 0.12, "targets_waited": 0.4}) == "drafters wait 12%, targets 40%"
    assert who_waits(parts, {"drafters_waited": 0.12}) == "drafters wait 12%"
