"""The cache folder of a fingerprint and its bundle: what fits is used, what does not is named."""

from __future__ import annotations

import json

import pytest

from draftsmith.errors import InputError
from draftsmith.rundir import RunDir
from draftsmith.train import compile_cache

PARTS = {"torch": "2.11.0", "device": "H200"}
OTHER = {"torch": "2.13.0", "device": "H200"}


@pytest.fixture
def bundled(tmp_path):
    """(runs_dir, run): a run whose bundle holds two files."""
    folder = compile_cache.folder_for(tmp_path / "caches", PARTS)
    (folder / "aa").mkdir()
    (folder / "aa" / "graph.py").write_text("kernel")
    (folder / "triton").mkdir()
    (folder / "triton" / "code.cubin").write_bytes(b"\x00\x01")
    (folder / "x.lock").touch()
    run = RunDir(tmp_path / "runs" / "one" / "attempt_1")
    run.path.mkdir(parents=True)
    compile_cache.save(folder, PARTS, run)
    return tmp_path / "runs", run


def restored(tmp_path, bundled, parts=PARTS, name="one") -> tuple[str, list[str], object]:
    said: list[str] = []
    folder = compile_cache.folder_for(tmp_path / "elsewhere", parts)
    return compile_cache.restore(folder, parts, bundled[0], name, said.append), said, folder


def test_a_bundle_that_fits_is_restored_byte_for_byte(tmp_path, bundled):
    state, said, folder = restored(tmp_path, bundled)
    assert state == "restored" and "restored from" in said[0]
    assert (folder / "aa" / "graph.py").read_text() == "kernel"
    assert (folder / "triton" / "code.cubin").read_bytes() == b"\x00\x01"
    assert not (folder / "x.lock").exists()
    assert restored(tmp_path, bundled)[0] == "warm"


def test_another_run_of_the_same_fingerprint_uses_it_too(tmp_path, bundled):
    assert restored(tmp_path, bundled, name="two")[0] == "restored"


def test_one_that_does_not_match_is_not_used_and_the_log_says_what_differs(tmp_path, bundled):
    state, said, _ = restored(tmp_path, bundled, OTHER)
    assert state == "cold"
    assert said == ["compile-cache bundle of attempt_1 not used: torch was 2.11.0, is 2.13.0"]


@pytest.mark.parametrize(("damage", "word"), [("flip", "damaged"), ("cut", "damaged"), ("partial", "partial")])
def test_a_damaged_bundle_is_noticed(tmp_path, bundled, damage, word):
    bundle = bundled[1].compile_cache / "bundle.tar"
    content = bundle.read_bytes()
    if damage == "flip":
        bundle.write_bytes(content[:600] + bytes([content[600] ^ 1]) + content[601:])
    elif damage == "cut":
        bundle.write_bytes(content[:600])
    else:
        (bundled[1].compile_cache / "manifest.json").unlink()
    state, said, folder = restored(tmp_path, bundled)
    assert state == "cold" and len(said) == 1 and word in said[0] and str(bundled[1].path) in said[0]
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"compile\.cache_dir: .* cannot be written .*compile\.enabled=false"):
        compile_cache.folder_for(tmp_path / "file", PARTS)


def test_a_folder_that_holds_another_torchs_results(tmp_path):
    folder = compile_cache.folder_for(tmp_path, PARTS)
    (folder / compile_cache.MARKER).write_text(json.dumps(OTHER))
    with pytest.raises(InputError, match=r"for something else \(torch was 2\.13\.0, is 2\.11\.0\)"):
        compile_cache.folder_for(tmp_path, PARTS)


def test_versions_never_share_a_folder(tmp_path):
    assert compile_cache.folder_for(tmp_path, PARTS) != compile_cache.folder_for(tmp_path, OTHER)
