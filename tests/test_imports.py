"""What must work where torch is broken or missing: config, run folder, store, loader, provenance, dry run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "config", "records", "rundir", "files", "tracking", "data.store", "data.loader", "drafter.blocks",
    "provenance.capture", "cli", "sinks", "report", "report_plots", "train.floor",
]  # fmt: skip
CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module("draftsmith." + name)
    found = {"torch", "transformers"} & set(sys.modules)
    assert not found, f"draftsmith.{name} imports {sorted(found)}"
"""


def test_modules_import_neither_torch_nor_transformers():
    done = subprocess.run([sys.executable, "-c", CHECK, *WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_check_itself_notices():
    done = subprocess.run([sys.executable, "-c", CHECK, "train.optim"], capture_output=True, text=True)
    assert "draftsmith.train.optim imports ['torch'" in done.stderr


@pytest.fixture
def broken(tmp_path):
    """An environment in which importing torch or transformers raises."""
    for name in ("torch", "transformers"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text(f"raise ImportError('{name} is broken here')")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}


def test_dry_run_without_torch(broken, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("{name: r, target: {model: /nowhere}, train: {steps: 3}}")
    command = [sys.executable, "-m", "draftsmith.cli", "train", str(config)]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, env=broken, cwd=tmp_path)
    assert (dry.returncode, dry.stderr) == (0, "")
    assert '"steps": 3' in dry.stdout
    real = subprocess.run(command, capture_output=True, text=True, env=broken, cwd=tmp_path)
    assert "torch is broken here" in real.stderr, "torch must really be out of reach for this test to mean anything"
