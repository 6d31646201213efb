"""Digests of large files are kept and used again while size and modification time agree."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest

from draftsmith.provenance import digests
from draftsmith.provenance.digests import BESIDE, sha256_cached


@pytest.fixture
def shard(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model" / "a.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"first")
    settle(path)
    return path


def settle(path, back: float = 60.0) -> None:
    then = time.time() - back
    os.utime(path, (then, then))


def reads(monkeypatch) -> list:
    done: list = []
    real = digests.sha256
    monkeypatch.setattr(digests, "sha256", lambda path: done.append(path) or real(path))
    return done


def test_read_once_and_kept_beside_the_file(shard, monkeypatch):
    done = reads(monkeypatch)
    expected = {shard: hashlib.sha256(b"first").hexdigest()}
    assert sha256_cached([shard], beside=True) == sha256_cached([shard], beside=True) == expected
    assert done == [shard] and list(json.loads((shard.parent / BESIDE).read_text())) == ["a.safetensors"]


@pytest.mark.parametrize("change", [lambda p: p.write_bytes(b"second!"), lambda p: settle(p, back=30.0)])
def test_read_again_after_a_change_of_size_or_time(shard, monkeypatch, change):
    sha256_cached([shard], beside=True)
    change(shard)
    settle(shard, back=30.0)
    done = reads(monkeypatch)
    assert sha256_cached([shard], beside=True)[shard] == hashlib.sha256(shard.read_bytes()).hexdigest() and done


def test_read_again_after_a_change_of_size_alone(shard, monkeypatch):
    sha256_cached([shard], beside=True)
    then = shard.stat().st_mtime_ns
    shard.write_bytes(b"longer than first")
    os.utime(shard, ns=(then, then))
    assert sha256_cached([shard], beside=True)[shard] == hashlib.sha256(b"longer than first").hexdigest()


def test_a_file_just_written_is_not_trusted(shard, monkeypatch):
    shard.write_bytes(b"fresh")
    sha256_cached([shard], beside=True)
    done = reads(monkeypatch)
    sha256_cached([shard], beside=True)
    assert done == [shard] and not (shard.parent / BESIDE).exists()


def test_in_the_users_cache_where_nothing_can_be_put_beside(shard, monkeypatch):
    (shard.parent / BESIDE).mkdir()  # nobody, not even root, can write a file there
    sha256_cached([shard], beside=True)
    done = reads(monkeypatch)
    sha256_cached([shard], beside=True)
    assert not done and list((shard.parents[1] / "cache" / "draftsmith" / "digests").iterdir())


def test_nothing_can_be_kept_and_it_still_works(shard, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shard))  # a file
    assert sha256_cached([shard], beside=False)[shard] == hashlib.sha256(b"first").hexdigest()


def test_damaged_memory_and_missing_file(shard):
    (shard.parent / BESIDE).write_text("[1, 2")
    assert sha256_cached([shard], beside=True)[shard] == hashlib.sha256(b"first").hexdigest()
    with pytest.raises(OSError):
        sha256_cached([shard.with_name("gone")], beside=True)
