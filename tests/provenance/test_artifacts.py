"""The target and the store as files."""

from __future__ import annotations

import json

import pytest
from staging import TEMPLATE, Machine

from draftsmith.provenance.artifacts import altered_shards, model_folder, read_store, read_target


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_template_in_its_own_file_counts_more(machine):
    inside = read_target(machine.model)
    (machine.model / "chat_template.jinja").write_text(TEMPLATE)
    own = read_target(machine.model)
    assert own["chat_template"] == inside["chat_template"], "the same text in another place"
    (machine.model / "chat_template.jinja").write_text(TEMPLATE + "x")
    assert read_target(machine.model)["chat_template"] != inside["chat_template"]
    assert read_target(machine.model)["tokenizer_config"] == inside["tokenizer_config"]


def test_a_folder_without_a_model_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model in"):
        read_target(tmp_path)


def test_hub_names_are_found_in_the_hubs_cache(machine, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(machine.folder / "hf"))
    snapshots = machine.folder / "hf" / "hub" / "models--org--name" / "snapshots"
    (snapshots.parent / "refs").mkdir(parents=True)
    (snapshots.parent / "refs" / "main").write_text("abc\n")
    assert model_folder("org/name", None) == snapshots / "abc"
    assert model_folder("org/name", "def") == snapshots / "def"
    assert model_folder(str(machine.model), None) == machine.model


def test_store_sums_and_altered_shards(machine):
    found = read_store(machine.store)
    assert (found["documents"], found["tokens"], found["shards"], found["generation"]) == (902, 902 * 1800, 1, 1)
    assert altered_shards(machine.store) == ["shard-00000.arrow"], "gone"
    (machine.store / "shard-00000.arrow").write_text("one")
    manifest = machine.store / "manifest.json"
    values = json.loads(manifest.read_text())
    assert altered_shards(machine.store) == [], "its digest is that of the text `one`"
    values["shards"][0]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(values))
    assert altered_shards(machine.store) == ["shard-00000.arrow"]
