"""Packages: the bytes on disk against RECORD, hashed once."""

from __future__ import annotations

import os
import sys

import pytest
from staging import Machine

from draftsmith.provenance import packages


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(sys, "path", [str(made.site)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return made


def read(name: str = "transformers", **options: bool) -> dict:
    return packages.read_packages(**options)["installed"][name]


def test_as_installed(machine):
    facts = read()
    assert (facts["version"], facts["installer"], facts["modules"]) == ("5.8.1", "pip", ["transformers"])
    assert facts["files"] == {"recorded": True, "same": 2, "changed": {}, "missing": []}


def test_patched_in_place_keeps_the_text(machine):
    read()
    (machine.site / "transformers" / "core.py").write_text("def f(x):\n    return 0\n")
    changed = read()["files"]["changed"]
    assert changed["transformers/core.py"]["text"] == "def f(x):\n    return 0\n"


def test_missing_file(machine):
    (machine.site / "transformers" / "core.py").unlink()
    assert read()["files"] == {"recorded": True, "same": 1, "changed": {}, "missing": ["transformers/core.py"]}


def test_hashed_once_while_size_and_time_agree(machine, monkeypatch):
    first = packages.read_packages()
    hashed = []
    real = packages._compare
    monkeypatch.setattr(packages, "_compare", lambda folder, chosen: hashed.append(folder) or real(folder, chosen))
    assert packages.read_packages() == first and not hashed
    os.utime(machine.site / "torch" / "core.py", ns=(1, 1))
    assert packages.read_packages() == first and len(hashed) == 1, "only the package whose file was touched"


def test_only_python_files_unless_all_are_asked_for(machine):
    (machine.site / "transformers-5.8.1.dist-info" / "INSTALLER").write_text("somebody\n")
    assert not read()["files"]["changed"]
    assert list(read(every_file=True)["files"]["changed"]) == ["transformers-5.8.1.dist-info/INSTALLER"]


def test_without_record_it_is_said(machine):
    (machine.site / "transformers-5.8.1.dist-info" / "RECORD").unlink()
    assert read()["files"] == {"recorded": False}


def test_editable_shadowed_and_startup(machine, monkeypatch):
    second = machine.folder / "second"
    (second / "torch-1.0.dist-info").mkdir(parents=True)
    (second / "torch-1.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0\n")
    (second / "broken-1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(machine.site), str(second)])
    found = packages.read_packages()
    assert found["shadowed"] == [f"torch 1.0 in {second}"] and list(found["startup"]) == ["pipeline.pth"]
    assert packages.editables(found) == {"pipeline": machine.project}


def test_a_memory_that_is_damaged_only_costs_time(machine):
    first = packages.read_packages()
    for memory in (machine.folder / "user-cache" / "draftsmith" / "packages").iterdir():
        memory.write_text('{"cut sho')
    assert packages.read_packages() == first
