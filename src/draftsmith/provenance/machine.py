"""This machine as a run would find it now, for `runs check`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.provenance.artifacts import model_folder
from draftsmith.provenance.facts import unknown, why_unknown
from draftsmith.provenance.manifest import RunRecord, load_file

NOT_YET = ("switches", "imported")
"""Sections that a process only has once it runs: `check` does not compare them."""


def this_machine(config: dict[str, Any], every_file: bool = False) -> RunRecord:
    """What a run of this config would start from, captured in a process of its own: importing a broken torch can end
    the process that tries it."""
    target = config.get("target", {})
    model = model_folder(target.get("model", ""), target.get("revision"))
    store = Path(config.get("data_dir") or Path("data") / config.get("name", "")) / "store"
    with tempfile.TemporaryDirectory() as folder:
        output, given = Path(folder) / "now.json", Path(folder) / "config.json"
        given.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "draftsmith.provenance.capture", str(output), "--kind", "train"]
        command += ["--config", str(given), "--model", str(model), "--store", str(store)]
        command += ["--all-files"] if every_file else []
        done = subprocess.run([*command, "--load", "torch"], capture_output=True, text=True)
        problem = ""
        if done.returncode:
            problem = f"importing torch ended the process with {done.returncode}: {_last_line(done.stderr)}"
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"this machine cannot be captured: {_last_line(done.stderr)}")
        record = load_file(output)
    process = record.ranks[min(record.ranks)]
    facts = {k: v for k, v in process.facts.items() if k not in NOT_YET}
    if problem:
        facts["torch"] = unknown(problem)
    return dataclasses.replace(
        record, label="this machine now", ranks={process.rank: dataclasses.replace(process, facts=facts)}
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def as_started(record: RunRecord) -> RunRecord:
    """With the environment as the shell gave it: what a run's own imports set cannot be seen before it runs."""
    ranks = {}
    for rank, process in record.ranks.items():
        facts = dict(process.facts)
        if why_unknown(facts["environment"]) is None:
            facts["environment"] = {**facts["environment"], "now": {}}
        ranks[rank] = dataclasses.replace(process, facts=facts)
    return dataclasses.replace(record, ranks=ranks)
