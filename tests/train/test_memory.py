"""Rows under way against memory: what is refused, and that the figure it names is the largest that is not."""

from __future__ import annotations

import re

import pytest
import torch

from draftsmith.errors import InputError
from draftsmith.train import memory
from draftsmith.train.dist import World
from draftsmith.train.memory import check_rows_fit

SPLIT = World(targets=1, drafters=2, role="drafter")


def check(run_ahead: int, world: World = SPLIT, rows: int = 10**9) -> None:
    check_rows_fit(world, run_ahead, rows, 2**20, torch.device("cpu"))


def test_the_figure_that_is_named_is_the_largest_that_fits(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError) as caught:
        check(10**6)
    fits = int(re.search(r"run_ahead=(\d+) would fit", str(caught.value)).group(1))
    assert (fits + 1) * 3 * 2**20 <= memory.SHARE * 2**30 < (fits + 2) * 3 * 2**20
    check(fits)
    with pytest.raises(InputError):
        check(fits + 1)
    check(10**6, rows=8)  # no more than the run has
    check(10**6, World(drafters=2))  # colocated: nothing is under way


def test_where_not_even_one_fits(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    with pytest.raises(InputError, match=r"not even placement.run_ahead=1 fits: lower train.row_tokens"):
        check(1)


def test_a_control_group_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    machine = memory.available_memory()
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > machine / 2
    (tmp_path / "memory.max").write_text("1500\n")
    assert memory.available_memory() == 500
