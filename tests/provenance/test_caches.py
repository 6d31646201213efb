"""Compile caches: where they are and why, what is in them, and what was lost."""

from __future__ import annotations

import shutil

import pytest

from draftsmith.provenance import caches
from draftsmith.provenance.caches import inventory, lost, read_caches


@pytest.fixture
def folder(tmp_path):
    """Ten files in three folders, and what is no entry."""
    for i in range(10):
        path = tmp_path / "cache" / str(i % 3) / f"kernel-{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    (tmp_path / "cache" / "0" / "x.lock").write_text("")
    return tmp_path / "cache"


def state(folder, why="TORCHINDUCTOR_CACHE_DIR") -> dict:
    return {"path": str(folder), "why": why, **inventory(folder)}


def test_inventory(folder, tmp_path):
    found = inventory(folder)
    assert (found["entries"], found["bytes"], found["complete"]) == (10, 1000, True) and found["oldest"] <= found[
        "newest"
    ]
    shutil.copytree(folder, tmp_path / "copy")
    assert inventory(tmp_path / "copy")["digest"] == found["digest"], "a copy elsewhere, later, is the same"
    empty = inventory(tmp_path / "none")
    assert (empty["entries"], empty["digest"], empty["oldest"]) == (0, None, None)


@pytest.mark.parametrize(
    ("environ", "inductor", "triton"),
    [
        ({"TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b"}, ("/a", "TORCHINDUCTOR_CACHE_DIR"), ("/b", "TRITON_CACHE_DIR")),
        ({"TRITON_HOME": "/t"}, (None, "torch's default"), ("/t/.triton/cache", "TRITON_HOME")),
        ({"TMPDIR": "/x"}, (None, "TMPDIR"), (None, "HOME")),
    ],
)  # fmt: skip
def test_path_and_why(environ, inductor, triton):
    found = read_caches(environ)
    for name, (path, why) in (("inductor", inductor), ("triton", triton)):
        assert found[name]["why"] == why and (path is None or found[name]["path"] == path)
    assert "torchinductor_" in read_caches({})["inductor"]["path"]


def test_torchs_own_word_for_its_default():
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert read_caches({})["inductor"]["path"] == default_cache_dir()


def test_what_was_lost(folder, tmp_path):
    before = state(folder)
    (folder / "1" / "kernel-new").write_text("more")
    assert lost(before, state(folder)) is None, "it only grew"
    shutil.rmtree(folder / "1")
    was, now = lost(before, state(folder))
    assert was == f"10 files, 0.0 MB in {folder} (TORCHINDUCTOR_CACHE_DIR)"
    assert now == "7 files, 0.0 MB: partial, 7 of the 10 files are there"
    shutil.rmtree(folder)
    assert lost(before, state(folder))[1] == "0 files, 0.0 MB: deleted, 0 of the 10 files are there"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kernel").write_text("x")
    _, now = lost(before, state(tmp_path / "other", "HOME"))
    assert now.startswith("1 files, 0.0 MB: of another run, 0 of the 10") and "it is now looked for in" in now
    assert now.endswith("(HOME)")


def test_too_large_or_unknown_cannot_be_told(folder, monkeypatch):
    before = state(folder)
    assert lost(before, {"unknown": "no permission"}) == "no permission"
    monkeypatch.setattr(caches, "MOST_FILES", 5)
    assert not state(folder)["complete"] and "more than" in lost(before, state(folder))
