"""How placements_gpu.py shares a machine's GPUs out among its runs."""

from __future__ import annotations

import threading

import placements_gpu as placements
import pytest


def test_a_placement_takes_as_many_gpus_as_it_has_processes():
    for count, sizes in {2: [2, 2, 1], 4: [4, 4, 4, 1], 8: [8, 8, 8, 8, 1]}.items():
        assert [placements.size(overrides) for _, overrides in placements.placements(count)] == sizes


def test_runs_that_fit_go_beside_each_other_on_gpus_of_their_own_and_say_so():
    together = threading.Barrier(2, timeout=20)  # the two small ones meet, or this fails
    cards, found = {}, {}

    def run(key, mine):
        cards[key] = mine
        if key.startswith("one"):
            together.wait()
        return {"rows_per_s": 1.0}

    needs = {"both a": 2, "one a": 1, "both b": 2, "one b": 1}
    assert placements.packed(needs, ["0", "1"], run, found.__setitem__) == []
    assert cards == {"both a": ["0", "1"], "one a": ["0"], "one b": ["1"], "both b": cards["both b"]}
    assert sorted(cards["both b"]) == ["0", "1"]
    assert {key: result["beside"] for key, result in found.items()} == {
        "both a": [], "one a": ["one b"], "one b": ["one a"], "both b": [],
    }  # fmt: skip


def test_what_would_not_end_in_time_is_left():
    begun = []
    left = placements.packed(
        {"a": 2, "b": 2, "c": 1}, ["0", "1"], lambda key, mine: begun.append(key) or {}, lambda *a: None,
        lambda: len(begun) < 1,
    )  # fmt: skip
    assert begun == ["a"] and left == ["b", "c"]


def test_what_a_split_allows_is_the_slower_role_without_waiting():
    def split(targets, drafters, seconds, busy):
        return {
            "placement": {"targets": targets, "drafters": drafters}, "rows_timed": 240,
            "waits": {"target_seconds_per_row": seconds}, "seconds_by_part": {"compute": busy},
        }  # fmt: skip

    # 5 targets of 0.5 s a row: 10 a second; 3 drafters, 80 rows each, 20 s busy: 4 a second each
    assert placements.allowed(split(5, 3, 0.5, 20.0)) == 10.0
    assert placements.allowed(split(5, 3, 0.25, 20.0)) == pytest.approx(12.0)
    assert placements.allowed(split(0, 2, 0.5, 20.0)) is None


def test_a_run_that_raises_is_one_that_failed_and_the_others_go_on():
    found = {}

    def run(key, mine):
        if key == "a":
            raise OSError("no room")
        return {"rows_per_s": 1.0}

    assert placements.packed({"a": 1, "b": 1}, ["0"], run, found.__setitem__) == []
    assert "no room" in found["a"]["failed"] and found["b"]["rows_per_s"] == 1.0
