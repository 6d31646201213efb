"""README's stages one by one, on real weights and real prompts: a file of its own, so that another worker can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from flow.test_demo import draftsmith, pytestmark  # noqa: F401 (what it needs)


@pytest.mark.timeout(600)
def test_readmes_stages_one_by_one(tmp_path):
    """README's commands in README's order, on the example, made small by overrides."""
    from draftsmith.demo import MODEL_FOLDER, PROMPTS, SMALL, fetch_model, write_prompts

    example = Path(__file__).parents[2] / "examples" / "smollm2-135m-cpu.yaml"
    fetch_model(tmp_path / MODEL_FOLDER)
    write_prompts(tmp_path / PROMPTS)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    small = [o for o in SMALL if not o.startswith("name=")] + ["generate.limit=16", "train.steps=4"]
    for stage in ("generate", "tokenize", "train", "evaluate", "export"):
        assert f"draftsmith {stage}" in readme
        draftsmith(tmp_path, stage, str(example), *small)
    run = tmp_path / "runs" / "smollm2-135m-cpu" / "attempt_1"
    assert (run / "export" / "model.safetensors").is_file() and list((run / "evaluation").glob("*.json"))
