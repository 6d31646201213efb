"""What the scripts have written can be read, and is what its script makes of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import step_gpu

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_is_whole(path):
    assert "date" in json.loads(path.read_text())["environment"]


def test_the_step_is_summed_up_as_its_script_does():
    stored = json.loads((RESULTS[0].parent / "step_h200.json").read_text())
    made = step_gpu.summary(stored["device"], stored["sections"])
    assert {k: stored[k] for k in made} == made
