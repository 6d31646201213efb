"""Every stage on the tiny target, each starting from the files of the one before."""

from __future__ import annotations

import json

from conftest import make_config, write_prompts

from draftsmith.data.generate import generate
from draftsmith.data.tokenize import tokenize
from draftsmith.evaluate.acceptance import evaluate
from draftsmith.export import export, read_drafter
from draftsmith.train.loop import train


def test_generate_to_export(target_folder, tmp_path):
    write_prompts(tmp_path)
    config = make_config(target_folder, tmp_path, "evaluate.untrained=true", "train.accept_every=6")
    counts = generate(config)
    assert counts["prompts"] == 12 and counts["completion_tokens"] > 12
    manifest = tokenize(config)
    assert manifest.counts["read"] == 12 and manifest.counts["kept"] >= 8
    run = train(config)
    result = evaluate(config)
    assert [r["lossless"] for r in result["results"]] == [True, True]
    folder = export(config)
    assert read_drafter(folder).spec.block_size == 4
    kinds = {json.loads(line)["kind"] for line in run.metrics.read_text().splitlines()}
    assert kinds == {"train", "rate", "heldout", "accepted"}
