"""Files and folders are written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch

from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, sha256, write_tensors, write_text

BROKEN = "x" * 100_000 + "\ud800"
"""Fails in the middle of writing: a lone surrogate has no UTF-8."""


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_text_is_written_and_replaced(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_text(path, "one é")
    assert path.read_bytes() == "one é".encode()
    write_text(path, "two")
    assert path.read_text() == "two"
    assert names(path.parent) == ["b.json"]


def test_text_that_fails_leaves_the_old_text(tmp_path):
    path = tmp_path / "b.json"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, BROKEN)
    assert names(tmp_path) == []
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, BROKEN)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["b.json"]


def test_folder_gets_its_name_at_the_end(tmp_path):
    path = tmp_path / "deep" / "store"
    with folder_written_whole(path) as folder:
        (folder / "a").write_text("1")
        assert not path.exists()
        assert folder.parent == path.parent, "a rename is only atomic within one file system"
    assert names(path.parent) == ["store"]
    assert (path / "a").read_text() == "1"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_folder_is_gone_when_the_block_raises(tmp_path, error):
    with pytest.raises(error), folder_written_whole(tmp_path / "store") as folder:
        (folder / "a").write_text("1")
        raise error
    assert names(tmp_path) == []


def test_folder_with_folders_inside(tmp_path):
    with folder_written_whole(tmp_path / "store") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")
    assert (tmp_path / "store" / "inner" / "a").read_text() == "1"


def test_folder_never_replaces_one_with_content(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    (path / "precious").write_text("1")
    with pytest.raises(OSError), folder_written_whole(path) as folder:
        (folder / "a").write_text("2")
    assert names(tmp_path) == ["store"] and names(path) == ["precious"]


def test_killed_in_the_block_leaves_no_folder_of_that_name(tmp_path):
    """A kill cannot clean up, but what it leaves is not mistaken for the real thing, and is in nobody's way."""
    script = (
        "import os, sys, pathlib; from draftsmith.files import folder_written_whole\n"
        "with folder_written_whole(pathlib.Path(sys.argv[1])) as f:\n"
        "    (f / 'a').write_text('1'); os._exit(9)"
    )
    path = tmp_path / "store"
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == 9
    assert not path.exists()
    assert all(n.startswith(".store.") and n.endswith(".tmp") for n in names(tmp_path))
    with folder_written_whole(path) as folder:
        (folder / "b").write_text("2")
    assert names(path) == ["b"]


def test_leftovers_under_the_same_process_number_do_not_get_in(tmp_path):
    left = tmp_path / f".store.{os.getpid()}.tmp"
    left.mkdir()
    (left / "stale").write_text("")
    with folder_written_whole(tmp_path / "store") as folder:
        (folder / "a").write_text("1")
    assert names(tmp_path / "store") == ["a"]


def test_a_place_that_cannot_hold_folders_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "deep" / "x"
    with pytest.raises(InputError, match=r"cannot make the folder .*/file/deep .*data_dir"):
        write_text(path, "1")
    with pytest.raises(InputError, match=r"cannot make the folder .*/file/deep .*data_dir"), folder_written_whole(path):
        pass


def test_sha256(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(content)
    assert sha256(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def test_tensors_that_the_disk_refuses_are_an_os_error(tmp_path):
    """A file size limit, which fails as a full disk does."""
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as raised, folder_written_whole(tmp_path / "out") as folder:
            write_tensors(folder / "a", {"x": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert raised.value.errno == errno.EFBIG and raised.value.filename.endswith("/a")
    assert names(tmp_path) == []


def test_another_error_of_tensors_is_none_of_the_disk(tmp_path, monkeypatch):
    def failing(*args):
        raise SafetensorError("invalid")

    monkeypatch.setattr(safetensors_torch, "save_file", failing)
    with pytest.raises(RuntimeError, match="a: invalid"):
        write_tensors(tmp_path / "a", {})
