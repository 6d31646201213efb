"""The run folder: attempts are numbered, never reused, and every path lies inside."""

from __future__ import annotations

import pytest

from draftsmith.errors import InputError
from draftsmith.rundir import RunDir, attempts, create, newest


def test_a_run_that_exists_is_refused_and_left_alone(tmp_path):
    run = create(tmp_path, "r")
    run.metrics.write_text("kept")
    with pytest.raises(InputError, match=r"--resume auto.*--new-attempt.*name="):
        create(tmp_path, "r")
    assert [r.path.name for r in attempts(tmp_path, "r")] == ["attempt_1"]
    assert run.metrics.read_text() == "kept"


def test_attempts_are_counted_as_numbers(tmp_path):
    for n in range(1, 12):
        assert create(tmp_path, "r", new_attempt=True).path.name == f"attempt_{n}"
    assert [r.path.name for r in attempts(tmp_path, "r")] == [f"attempt_{n}" for n in range(1, 12)]
    assert newest(tmp_path, "r").path.name == "attempt_11"


def test_number_follows_the_highest_not_the_count(tmp_path):
    (tmp_path / "r" / "attempt_7").mkdir(parents=True)
    assert create(tmp_path, "r", new_attempt=True).path.name == "attempt_8"


def test_what_is_no_attempt_is_not_taken_for_one(tmp_path):
    (tmp_path / "r" / "attempt_old").mkdir(parents=True)
    (tmp_path / "r" / ".attempt_9.tmp").mkdir()
    (tmp_path / "r" / "attempt_5").write_text("a file")
    assert attempts(tmp_path, "r") == []
    assert create(tmp_path, "r").path.name == "attempt_1"


def test_runs_do_not_see_each_other(tmp_path):
    create(tmp_path, "a")
    assert create(tmp_path, "ab").path.name == "attempt_1"
    assert newest(tmp_path, "a").path.parent.name == "a"


def test_no_run_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"no run in .*/r: run `draftsmith train` first"):
        newest(tmp_path, "r")


def test_runs_dir_that_cannot_hold_folders_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"runs_dir"):
        create(tmp_path / "file", "r")


def test_paths_are_different_and_inside(tmp_path):
    run = RunDir(tmp_path)
    paths = [p for name, p in vars(run).items() if name != "path"]
    assert len(set(paths)) == len(paths) == 14
    assert all(p.parent == tmp_path for p in paths)


def test_checkpoint_names_sort_by_step(tmp_path):
    steps = [1, 9, 10, 99, 100, 12345, 99_999_999]
    names = [RunDir(tmp_path).checkpoint(s).name for s in steps]
    assert names == sorted(names)
