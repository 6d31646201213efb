"""Bad input: exit code 2, one line on stderr that names the key or the file and the fix, nothing half-written."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import make_config, write_conversations, write_prompts, write_target
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.cli import main
from draftsmith.config import Config
from draftsmith.data.tokenize import tokenize
from draftsmith.export import export
from draftsmith.rundir import newest
from draftsmith.train.checkpoint import newest_checkpoint
from draftsmith.train.loop import train


class Place:
    """A work folder with a config file in it; every file of the test lies below."""

    def __init__(self, work: Path, model: Path, *overrides: str) -> None:
        self.work, self.file = work, work / "config.yaml"
        self.config: Config = make_config(model, work, *overrides)
        work.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.config.dump())

    def listing(self) -> dict[str, str]:
        """Every file and folder with its content; a cache of digests is nothing half-written."""
        files = (p for p in sorted(self.work.rglob("*")) if p.name != ".draftsmith-digests.json")
        return {
            str(p.relative_to(self.work)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
            for p in files
        }

    def refused(self, capfd: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
        """Run a command that must not work; what it said."""
        before = self.listing()
        capfd.readouterr()
        code = main([command, str(self.file), *arguments])
        out, error = capfd.readouterr()
        assert code == 2, (code, out, error)
        assert error.startswith(f"draftsmith {command}: ") and error.count("\n") == 1 and error.endswith("\n"), error
        assert "Traceback" not in out
        assert self.listing() == before
        return error


@pytest.fixture
def place(tmp_path, target_folder) -> Place:
    """Prompts, and nothing else yet."""
    write_prompts(tmp_path)
    return Place(tmp_path, target_folder)


@pytest.fixture
def stored_place(place) -> Place:
    """Prompts, conversations and a store."""
    write_conversations(place.config.conversations)
    tokenize(place.config)
    return place


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory, target_folder) -> Path:
    work = tmp_path_factory.mktemp("trained")
    place = Place(work, target_folder, "train.steps=2", "train.checkpoint_every=1")
    write_conversations(place.config.conversations)
    tokenize(place.config)
    train(place.config)
    return work


@pytest.fixture
def trained(trained_once, tmp_path, target_folder) -> Place:
    """A finished run of two steps, a checkpoint after each."""
    shutil.copytree(trained_once, tmp_path / "work")
    return Place(tmp_path / "work", target_folder, "train.steps=2", "train.checkpoint_every=1")


def checkpoint(place: Place) -> Path:
    return newest_checkpoint(newest(place.config.runs_dir, place.config.name))


def cut(file: Path, share: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


# ---- the target


def prepare_for(place: Place, command: str) -> None:
    if command != "generate":
        write_conversations(place.config.conversations)
    if command == "train":
        tokenize(place.config)


@pytest.mark.parametrize("command", ["generate", "tokenize", "train"])
def test_missing_model_folder(place, capfd, command):
    prepare_for(place, command)
    if command == "tokenize":
        assert not place.config.store.exists()
    error = place.refused(capfd, command, "target.model=/no/such/model")
    assert "target.model /no/such/model: there is no such folder" in error


@pytest.mark.parametrize("command", ["generate", "tokenize", "train"])
def test_model_folder_without_config(place, capfd, command, tmp_path):
    prepare_for(place, command)
    (tmp_path / "bare").mkdir()
    error = place.refused(capfd, command, f"target.model={tmp_path}/bare")
    assert "target.model" in error and "bare: the folder has no config.json" in error


def test_model_with_missing_weights(place, tmp_path):
    """In a process of its own, since transformers has its own ways to stderr."""
    folder = write_target(tmp_path / "holes")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"], weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    before = place.listing()
    command = [sys.executable, "-m", "draftsmith.cli", "generate", str(place.file), f"target.model={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "holes: 2 weights are not in its files (missing_keys: lm_head.weight ...)" in done.stderr
    assert place.listing() == before


# ---- the config


@pytest.mark.parametrize("command", ["generate", "tokenize", "train", "evaluate", "export"])
def test_wrong_key_names_the_closest(place, capfd, command):
    error = place.refused(capfd, command, "train.learnign_rate=1")
    assert f"{place.file}: unknown key train.learnign_rate, did you mean train.learning_rate?" in error


def test_wrong_key_in_the_file(place, capfd):
    place.file.write_text(place.file.read_text().replace('"block_size"', '"blok_size"'))
    error = place.refused(capfd, "train", "--dry-run")
    assert "unknown key drafter.blok_size, did you mean drafter.block_size?" in error


def test_no_config_file(place, capfd):
    place.file.unlink()
    assert f"cannot read the config {place.file}" in place.refused(capfd, "train")


def test_dry_run_prints_the_resolved_config_and_writes_nothing(place, capfd):
    before = place.listing()
    for arguments in (["train.steps=9", "--dry-run"], ["--dry-run", "train.steps=9"]):
        assert main(["train", str(place.file), *arguments]) == 0
        assert json.loads(capfd.readouterr().out)["train"]["steps"] == 9
    assert place.listing() == before


@pytest.mark.parametrize("argument", ["steps", "--stesp=3", "--stesp"])
def test_unknown_arguments_are_refused(place, capfd, argument):
    with pytest.raises(SystemExit) as stop:
        main(["train", str(place.file), "--dry-run", argument])
    assert stop.value.code == 2
    assert argument in capfd.readouterr().err


# ---- prompts and conversations


def test_prompts_that_are_not_there(place, capfd, tmp_path):
    error = place.refused(capfd, "generate", f"generate.prompts={tmp_path}/none.jsonl")
    assert "generate.prompts" in error and "none.jsonl" in error and "No such file" in error
    assert "generate.prompts is not set" in place.refused(capfd, "generate", "generate.prompts=null")
    assert "directory" in place.refused(capfd, "generate", f"generate.prompts={tmp_path}")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (b'{"prompt": "x', "prompts.jsonl:2: not JSON"),
        (b'{"prompt": "caf\xe9"}', "prompts.jsonl:2: not UTF-8"),
        (b'{"messages": [{"role": "human", "content": "x"}]}', "prompts.jsonl:2: not a prompt: unknown role 'human'"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "the last message must be the user's"),
        (b'{"question": "x"}', "prompts.jsonl:2: not a prompt: prompt is missing"),
    ],
    ids=["json", "utf-8", "role", "last role", "key"],
)
def test_unreadable_prompts(place, capfd, second, said):
    place.config.generate.prompts.write_bytes(b'{"prompt": "fine"}\n' + second + b"\n")
    assert said in place.refused(capfd, "generate")


def test_empty_prompts(place, capfd):
    place.config.generate.prompts.write_text("\n \n")
    assert "prompts.jsonl holds no prompts" in place.refused(capfd, "generate")


def test_prompt_longer_than_the_row(place, capfd):
    with open(place.config.generate.prompts, "a") as out:
        out.write(json.dumps({"id": "long", "prompt": "x" * 500}) + "\n")
    error = place.refused(capfd, "generate")
    for word in ("prompts.jsonl", "'long'", "a row holds 128", "train.row_tokens", "tokenize.long_prompt=drop"):
        assert word in error
    write_conversations(place.config.conversations)
    error = place.refused(capfd, "tokenize", "tokenize.max_tokens=30")
    for word in ("conversations.jsonl", "'p0'", "tokenize.max_tokens", "tokenize.long_prompt=drop"):
        assert word in error


def test_data_folder_that_is_a_file(place, capfd, tmp_path):
    (tmp_path / "file").write_text("")
    own = write_conversations(tmp_path / "own.jsonl")
    for command, *more in (["generate"], ["tokenize", f"tokenize.conversations={own}"]):
        error = place.refused(capfd, command, f"data_dir={tmp_path}/file", *more)
        assert "cannot make the folder" in error and "file" in error and "set data_dir" in error


def test_nothing_generated_yet(place, capfd):
    error = place.refused(capfd, "tokenize")
    assert "run `draftsmith generate` first" in error and "conversations.jsonl" in error


def test_damaged_conversations(place, capfd):
    path = write_conversations(place.config.conversations)
    cut(path, 0.95)
    with open(path, "a") as file:
        file.write("\n")  # without it the line may still be being written
    assert "conversations.jsonl:12: not JSON" in place.refused(capfd, "tokenize")


def test_empty_data_set(place, capfd):
    write_conversations(place.config.conversations, count=0)
    assert "conversations.jsonl is empty" in place.refused(capfd, "tokenize")


def test_no_supervised_tokens(place, capfd):
    path = write_conversations(place.config.conversations)
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**x, "messages": x["messages"][:1]}) + "\n" for x in lines))
    error = place.refused(capfd, "tokenize")
    assert "the data set is empty (read 12, no_answer 12)" in error


def test_answers_too_short_to_train_on(place, capfd):
    """One supervised token each: stored, but no position can be an anchor."""
    path = write_conversations(place.config.conversations)
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    for x in lines:
        x["messages"][1]["content"] = "a"
        x["finish_reason"] = "length"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    tokenize(place.config)
    error = place.refused(capfd, "train")
    assert "no training document has two supervised tokens in a row" in error


# ---- the store


def test_no_store_yet(place, capfd):
    assert "run `draftsmith tokenize` first" in place.refused(capfd, "train")


def test_store_exists(stored_place, capfd):
    error = stored_place.refused(capfd, "tokenize")
    assert "store exists: remove it, or set data_dir" in error


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("name", ["shard-00000.arrow", "manifest.json"])
def test_store_cut_short(trained, capfd, command, name):
    cut(trained.config.store / name)
    more = ["--new-attempt"] if command == "train" else []
    error = trained.refused(capfd, command, *more)
    assert name in error and "draftsmith tokenize" in error


def test_store_of_another_tokenizer(stored_place, capfd, tmp_path):
    folder = write_target(tmp_path / "other")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<|im_end|>", "<|im_end|> ")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    error = stored_place.refused(capfd, "train", f"target.model={folder}")
    assert "was made with another tokenizer or chat template" in error


# ---- the drafter's geometry


def test_block_larger_than_any_answer(stored_place, capfd):
    error = stored_place.refused(capfd, "train", "drafter.block_size=64")
    assert "drafter.block_size 64 is larger than any training answer" in error and "generate.max_new_tokens" in error


@pytest.mark.parametrize(
    ("token", "said"), [(0, "pad or eos"), (2, "pad or eos"), (272, "272 rows"), (9999, "272 rows")]
)
def test_mask_token_that_cannot_be(stored_place, capfd, token, said):
    error = stored_place.refused(capfd, "train", f"drafter.mask_token_id={token}")
    assert f"drafter.mask_token_id {token} " in error and said in error


@pytest.mark.parametrize("layers", ["[1,3,8]", "[1,3,7]", "[1,3,3]", "[3,1,5]", "[-1,3,5]"])
def test_feature_layers_that_cannot_be(stored_place, capfd, layers):
    """Out of range, the last, repeated, unordered, negative."""
    error = stored_place.refused(capfd, "train", f"drafter.feature_layers={layers}")
    assert "drafter.feature_layers [" in error and "must ascend without repeats within 0..6" in error


def test_more_features_than_the_target_has_room_for(stored_place, capfd):
    error = stored_place.refused(capfd, "train", "drafter.num_features=7")
    assert "drafter.num_features 7 is too many" in error and "drafter.feature_layers" in error


# ---- runs and checkpoints


def test_run_folder_exists(trained, capfd):
    error = trained.refused(capfd, "train")
    for word in ("tiny exists", "--resume auto", "--new-attempt", "name="):
        assert word in error


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_no_run_yet(stored_place, capfd, command):
    assert "run `draftsmith train` first" in stored_place.refused(capfd, command)


def test_nothing_to_resume(stored_place, capfd):
    error = stored_place.refused(capfd, "train", "--resume", "auto")
    assert "--resume auto: no complete checkpoint under" in error


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_checkpoint_cut_short(trained, capfd, name, damage):
    path = checkpoint(trained)
    if damage == "cut":
        cut(path / name)
    else:
        (path / name).unlink()
    for command, more in (
        ("train", ["--resume", str(path)]),
        ("evaluate", []),
        ("evaluate", [f"evaluate.drafter={path}"]),
        ("export", []),
    ):
        error = trained.refused(capfd, command, *more)
        assert str(path) in error and (name in error or damage == "gone")


def test_features_cut_short(trained, capfd):
    assert main(["train", str(trained.file), "--new-attempt", "train.features=files"]) == 0
    (file,) = trained.config.store.glob("features-*/features.bin")
    cut(file)
    error = trained.refused(capfd, "train", "--new-attempt", "train.features=files")
    assert "features.bin is missing or cut short" in error and f"remove {file.parent}" in error


def test_every_checkpoint_cut_short(trained, capfd):
    for path in checkpoint(trained).parent.iterdir():
        cut(path / "drafter.safetensors", 0.99)
    error = trained.refused(capfd, "train", "--resume", "auto")
    assert "no complete checkpoint" in error and error.count("drafter.safetensors has") == 2


def test_resume_takes_the_newest_whole_checkpoint_and_says_so(trained, capfd):
    cut(checkpoint(trained) / "drafter.safetensors")
    assert main(["train", str(trained.file), "--resume", "auto"]) == 0
    out = capfd.readouterr().out
    assert "step_00000002 is damaged" in out and "step_00000001 at step 1" in out


def test_resume_from_what_is_no_checkpoint(trained, capfd, tmp_path):
    error = trained.refused(capfd, "train", "--resume", str(tmp_path / "none"))
    assert "none/state.json" in error


def test_resume_with_another_drafter(trained, capfd):
    error = trained.refused(capfd, "train", "--resume", "auto", "drafter.num_layers=1")
    assert "cannot resume from" in error and "num_layers was 2, is 1" in error


def nan_checkpoint(place: Place) -> Path:
    """A checkpoint whose records are in order and whose weights are not."""
    path = checkpoint(place)
    file = path / "drafter.safetensors"
    weights = load_file(file)
    weights["layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, file)
    state = json.loads((path / "state.json").read_text())
    state["files"][file.name] = {
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("command", [["evaluate"], ["export"], ["train", "--resume", "auto", "train.steps=4"]])
def test_nan_in_a_drafter(trained, capfd, command):
    path = nan_checkpoint(trained)
    error = trained.refused(capfd, *command)
    assert f"{path}/drafter.safetensors: layers.1.mlp.up_proj.weight holds NaN or Inf" in error


def test_nan_in_an_exported_drafter(trained, capfd):
    folder = export(trained.config)
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors")
    error = trained.refused(capfd, "evaluate", f"evaluate.drafter={folder}")
    assert "model.safetensors: fc.weight holds NaN or Inf" in error


def test_export_exists(trained, capfd):
    assert main(["export", str(trained.file)]) == 0
    assert "export exists: set export.output" in trained.refused(capfd, "export")


def test_no_room_for_an_export(trained, capfd, monkeypatch):
    def full(*args):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    line = trained.refused(capfd, "export")
    assert "No space left on device" in line and "model.safetensors): free space, then go on" in line


def test_evaluate_what_is_no_drafter(trained, capfd, tmp_path):
    error = trained.refused(capfd, "evaluate", f"evaluate.drafter={tmp_path}/none")
    assert "none is neither a checkpoint (state.json) nor an exported drafter (config.json)" in error
