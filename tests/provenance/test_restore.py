"""restore: what a run had, in a new folder; the original is not touched."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from staging import Machine

from draftsmith.errors import InputError
from draftsmith.provenance.manifest import RunRecord
from draftsmith.provenance.restore import restore
from draftsmith.rundir import RunDir


@pytest.fixture
def machine(tmp_path):
    """A run with uncommitted edits, an untracked file, a file with a secret, and a package patched in place."""
    made = Machine(tmp_path / "machine") if (tmp_path / "machine").mkdir() is None else None
    (made.project / "pipeline" / "__init__.py").write_text("RATE = 6e-3\n# größer\n")
    (made.project / "pipeline" / "extra.py").write_text("X = 1\n")
    (made.project / "pipeline" / "data.bin").write_bytes(b"\0\1")
    made.git("add", "pipeline/data.bin")
    (made.site / "transformers" / "core.py").write_text("def f(x):\n    return x + 1\n")
    return made


def fingerprint(folder: Path) -> str:
    """Every file with its content and mode, .git and all."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.lstat().st_mode}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def test_restores_what_the_run_had_and_touches_nothing(machine, tmp_path):
    run = machine.capture("run")
    machine.git("stash", "-q")  # life went on: the edits are gone, another commit is checked out
    (machine.project / "pipeline" / "extra.py").unlink()
    (machine.project / "pipeline" / "__init__.py").write_text("RATE = 0\n")
    machine.commit("later")
    before = fingerprint(machine.folder)
    done = restore(run, tmp_path / "new")
    assert fingerprint(machine.folder) == before
    source = tmp_path / "new" / "source" / "pipeline" / "pipeline"
    assert (source / "__init__.py").read_text() == "RATE = 6e-3\n# größer\n"
    assert (source / "extra.py").read_text() == "X = 1\n" and (source / "data.bin").read_bytes() == b"\0\1"
    commit = run.facts["code"]["pipeline"]["commit"]
    head = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert head.stdout.strip() == commit
    constraints = (tmp_path / "new" / "constraints.txt").read_text().splitlines()
    assert "transformers==5.8.1" in constraints and "torch==2.11.0+cu128" in constraints
    assert not [line for line in constraints if line.startswith("pipeline")], "its source is there"
    assert (tmp_path / "new" / "patched" / "transformers" / "core.py").read_text().endswith("x + 1\n")
    environment = (tmp_path / "new" / "environment.sh").read_text()
    assert "export OMP_NUM_THREADS=8" in environment and "HOME" not in environment
    assert any("torch is the cu128 build" in c for c in done.commands)
    assert any(c.startswith("cp -r patched/. venv/lib/") for c in done.commands)
    assert not done.missing or done.missing == ("the run bundled no compile cache: the first start compiles",)
    script = tmp_path / "new" / "rebuild.sh"
    assert subprocess.run(["sh", "-n", str(script)]).returncode == 0
    assert all(c in script.read_text() for c in done.commands)


def test_the_compile_cache_comes_along(machine, tmp_path):
    record = machine.capture("run")
    folder = tmp_path / "runs" / "r" / "attempt_1"
    RunDir(folder).compile_cache.mkdir(parents=True)
    (RunDir(folder).compile_cache / "kernel").write_text("k")
    run = RunRecord("r/attempt_1", folder, record.kind, record.state, record.ranks)
    done = restore(run, tmp_path / "new")
    assert (tmp_path / "new" / "compile_cache" / "kernel").read_text() == "k" and not done.missing
    assert 'export TORCHINDUCTOR_CACHE_DIR="$PWD/compile_cache"' in done.commands


def test_a_commit_that_no_branch_holds_any_more(machine, tmp_path):
    machine.commit("to be amended")
    run = machine.capture("run")
    machine.git("commit", "-q", "--amend", "-m", "amended")
    restore(run, tmp_path / "new")
    assert (tmp_path / "new" / "source" / "pipeline" / "pipeline" / "extra.py").is_file()


def test_masked_secrets_are_said_to_be_missing(machine, tmp_path):
    (machine.project / "pipeline" / "__init__.py").write_text('T = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"\n')
    done = restore(machine.capture("run"), tmp_path / "new")
    assert any("secrets in it were masked" in line for line in done.missing)


def test_an_existing_folder_is_refused(machine, tmp_path):
    (tmp_path / "new").mkdir()
    with pytest.raises(InputError, match="new exists: restore only writes into a new folder"):
        restore(machine.capture("run"), tmp_path / "new")


def test_source_that_is_gone_leaves_nothing_behind(machine, tmp_path):
    run = machine.capture("run")
    machine.project.rename(machine.folder / "moved")
    with pytest.raises(InputError, match="not at .*project any more"):
        restore(run, tmp_path / "new")
    assert not (tmp_path / "new").exists() and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    run.facts["code"]["pipeline"]["root"], run.facts["code"]["pipeline"]["commit"] = (
        str(machine.folder / "moved"),
        "0" * 40,
    )
    with pytest.raises(InputError, match="commit 0000.* of pipeline cannot be had"):
        restore(run, tmp_path / "new")
