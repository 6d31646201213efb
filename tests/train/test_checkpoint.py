"""Checkpoints: what goes in comes out, bit for bit; what is damaged is refused by name; nothing is half-written."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading

import pytest
import torch
from helpers_train import make_spec
from safetensors.torch import load_file

from draftsmith.config import TrainConfig
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.files import write_tensors
from draftsmith.provenance.heartbeat import State
from draftsmith.rundir import RunDir, create
from draftsmith.train import checkpoint
from draftsmith.train.optim import make_optimizer

SPEC = make_spec()
PINS = {
    "target_weights": "w",
    "store": "s",
    "tokenizer": "t",
    "feature_layers": "[1, 3]",
    "block_size": "4",
    "loss": "l",
}


def trained(steps: int, seed: int = 0, kind: str = "adamw") -> tuple[DFlashDrafter, torch.optim.Optimizer]:
    drafter = DFlashDrafter(SPEC).initialize(seed)
    optimizer = make_optimizer(drafter, TrainConfig(steps=9, weight_decay=0.1, optimizer=kind))
    for number in range(steps):
        move(drafter, optimizer, number)
    return drafter, optimizer


def move(drafter: DFlashDrafter, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


def save(run: RunDir, step: int, keep: int = 9):
    drafter, optimizer = trained(2, seed=step)
    return checkpoint.save(run, step, 2 * step, drafter, optimizer, PINS, keep)


@pytest.fixture
def run(tmp_path) -> RunDir:
    return create(tmp_path / "runs", "r")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_and_moments_come_back_bit_for_bit_and_go_on_as_before(run, kind):
    drafter, optimizer = trained(3, kind=kind)
    path = checkpoint.save(run, 3, 6, drafter, optimizer, PINS, keep=2)
    other, fresh = trained(0, seed=1, kind=kind)
    state = checkpoint.restore(path, other, fresh)
    assert (state.step, state.rows_done, state.spec, state.pins) == (3, 6, SPEC, PINS)
    for number in range(3, 6):
        move(drafter, optimizer, number)
        move(other, fresh, number)
    for (name, a), b in zip(drafter.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        before, after = optimizer.state[a], fresh.state[b]
        muon = kind == "muon" and a.dim() == 2
        assert before.keys() == after.keys() == ({"momentum_buffer"} if muon else {"step", "exp_avg", "exp_avg_sq"})
        assert all(torch.equal(before[k], after[k]) for k in before) and (muon or float(after["step"]) == 6)


@pytest.mark.parametrize(("saved", "wanted"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_moments_of_another_optimizer_are_refused(run, saved, wanted):
    path = checkpoint.save(run, 3, 6, *trained(1, kind=saved), PINS, keep=2)
    drafter, optimizer = trained(0, seed=1, kind=wanted)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    with pytest.raises(InputError, match=f"saved with train.optimizer={saved}: set it to that"):
        checkpoint.restore(path, drafter, optimizer)
    assert all(torch.equal(p, before[n]) for n, p in drafter.named_parameters()) and not optimizer.state


def test_a_checkpoint_is_safetensors_and_json_and_nothing_else(run):
    path = save(run, 5)
    assert path == run.checkpoints / "step_00000005"
    assert sorted(p.name for p in path.iterdir()) == ["drafter.safetensors", "optimizer.safetensors", "state.json"]
    assert set(load_file(path / checkpoint.WEIGHTS)) == set(DFlashDrafter(SPEC).state_dict())
    moments = load_file(path / checkpoint.OPTIMIZER)
    assert {k.partition("/")[0] for k in moments} == {"step", "exp_avg", "exp_avg_sq"}
    assert json.loads((path / "state.json").read_text())["spec"]["layer_types"] == ["full", "full"]


def test_a_run_that_has_not_moved_yet_can_be_saved_and_restored(run):
    drafter, optimizer = trained(0)
    path = checkpoint.save(run, 1, 1, drafter, optimizer, PINS, keep=2)
    other, fresh = trained(0, seed=1)
    checkpoint.restore(path, other, fresh)
    assert not fresh.state and torch.equal(other.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER])
def test_files_cut_short_changed_or_missing_are_refused_by_name(run, name):
    path = save(run, 5)
    file = path / name
    data = file.read_bytes()
    for cut in (0, 1, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        with pytest.raises(InputError, match=rf"damaged: {re.escape(name)} has {cut} bytes, {len(data)} were written"):
            checkpoint.read_state(path)
    changed = bytearray(data)
    changed[-5] ^= 1
    file.write_bytes(changed)
    with pytest.raises(InputError, match=f"the content of {re.escape(name)} is not what was written"):
        checkpoint.read_state(path)
    file.unlink()
    with pytest.raises(InputError, match=f"incomplete: {re.escape(name)} is missing"):
        checkpoint.restore(path, *trained(0))
    file.write_bytes(data)
    assert checkpoint.read_state(path).step == 5


def test_a_state_that_is_none_is_refused(run):
    path = save(run, 5)
    text = (path / "state.json").read_text()
    values = json.loads(text)
    wrong = [
        "",
        text[:-9],
        "[]",
        "{}",
        "3",
        *(json.dumps({k: v for k, v in values.items() if k != key}) for key in values),
    ]
    wrong.remove(json.dumps({k: v for k, v in values.items() if k != "extra"}))  # has a default
    wrong += [json.dumps({**values, "files": {}}), json.dumps({**values, "spec": {**values["spec"], "new": 1}})]
    for content in wrong:
        (path / "state.json").write_text(content)
        with pytest.raises(InputError, match=r"state\.json"):
            checkpoint.read_state(path)
    (path / "state.json").write_text(json.dumps({**values, "schema": 2}))
    with pytest.raises(InputError, match="has schema 2, this version reads 1"):
        checkpoint.read_state(path)
    (path / "state.json").unlink()
    with pytest.raises(InputError, match="checkpoint state not found"):
        checkpoint.read_state(path)


def test_the_newest_are_kept_and_the_rest_removed(run):
    for step in (2, 4, 10, 100):
        save(run, step, keep=2)
    assert [p.name for p in checkpoint.listed(run)] == ["step_00000010", "step_00000100"]
    assert checkpoint.newest_checkpoint(run).name == "step_00000100"


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_save_that_fails_leaves_the_checkpoints_there_are(run, monkeypatch, failing_call):
    save(run, 2, keep=1)
    calls = []

    def failing(file, tensors, *rest):
        calls.append(file)
        if len(calls) == failing_call:
            file.write_bytes(b"half")
            raise OSError("No space left on device")
        write_tensors(file, tensors, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", failing)
    with pytest.raises(InputError, match="No space"):
        save(run, 4, keep=1)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step_00000002"]
    assert checkpoint.read_state(run.checkpoint(2)).step == 2


def test_old_checkpoints_go_only_after_the_new_one_is_whole(run, monkeypatch):
    save(run, 2, keep=1)
    there = []
    real = checkpoint.shutil.rmtree
    monkeypatch.setattr(
        checkpoint.shutil, "rmtree", lambda p, *a, **k: there.append(run.checkpoint(4).exists()) or real(p, *a, **k)
    )
    save(run, 4, keep=1)
    assert there[-1] and [p.name for p in checkpoint.listed(run)] == ["step_00000004"]


def test_resume_auto_takes_the_newest_complete_one_and_says_what_it_passed_over(tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(InputError, match="no complete checkpoint under"):
        checkpoint.find_resume(runs, "r", "auto")
    first = create(runs, "r")
    for step in (2, 4):
        save(first, step)
    second = create(runs, "r", new_attempt=True)
    save(second, 6)
    create(runs, "r", new_attempt=True)  # an attempt that never got to a checkpoint
    assert checkpoint.find_resume(runs, "r", "auto") == (second.checkpoint(6), [])
    (second.checkpoint(6) / checkpoint.WEIGHTS).write_bytes(b"short")
    (first.checkpoint(4) / "state.json").write_text("{}")
    path, passed = checkpoint.find_resume(runs, "r", "auto")
    assert path == first.checkpoint(2)
    assert len(passed) == 2 and "step_00000006 is damaged" in passed[0] and "step_00000004" in passed[1]
    assert checkpoint.find_resume(runs, "r", str(first.checkpoint(2)))[0] == first.checkpoint(2)
    with pytest.raises(InputError, match="damaged"):
        checkpoint.find_resume(runs, "r", str(second.checkpoint(6)))
    (first.checkpoint(2) / checkpoint.OPTIMIZER).unlink()
    with pytest.raises(InputError, match=r"no complete checkpoint .*step_00000006.*step_00000002"):
        checkpoint.find_resume(runs, "r", "auto")


def test_starting_afresh_says_what_was_passed_over(run):
    (save(run, 6) / checkpoint.WEIGHTS).write_bytes(b"short")
    start = checkpoint.find_start(run.path.parent.parent, "r", "auto", new_attempt=True)
    (note,) = start.notes
    assert start.checkpoint is None and "starting afresh" in note and "step_00000006 is damaged" in note


def test_training_goes_on_while_a_checkpoint_is_written(run, monkeypatch):
    """And what is written is the state at the call."""
    go_on, real = threading.Event(), checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *args: go_on.wait(20) and real(*args))
    drafter, optimizer = trained(2)
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    saver = checkpoint.Saver(run, keep=2)
    path = saver.save(2, 4, drafter, optimizer, PINS)
    assert not path.exists()
    move(drafter, optimizer, 2)
    go_on.set()
    saver.wait()
    written = load_file(path / checkpoint.WEIGHTS)
    assert all(torch.equal(written[k], v) for k, v in before.items())
    assert not torch.equal(written["fc.weight"], drafter.fc.weight)


@pytest.mark.parametrize(("how", "stays"), [("dead", False), ("crashed", False), ("running", True), ("unknown", True)])
def test_what_a_killed_attempt_was_writing_is_removed(run, monkeypatch, how, stays):
    left = run.checkpoints / ".step_00000002.4321.tmp"
    left.mkdir(parents=True)
    (left / checkpoint.WEIGHTS).write_bytes(b"half")
    second = create(run.path.parent.parent, "r", new_attempt=True)
    states = {run.path: how, second.path: "running"}
    monkeypatch.setattr(checkpoint, "rank_state", lambda run, rank: State(states[run.path]))
    save(second, 4)
    assert left.exists() == stays and checkpoint.listed(second)


def test_an_attempt_without_a_checkpoint_is_named(run):
    with pytest.raises(InputError, match="has no checkpoint yet"):
        checkpoint.newest_checkpoint(run)


def test_weights_that_do_not_fit_are_refused_by_key(tmp_path):
    drafter = DFlashDrafter(SPEC).initialize(0)
    good = {k: v.clone() for k, v in drafter.state_dict().items()}
    source = tmp_path / "w.safetensors"

    def refused(tensors, match: str) -> None:
        with pytest.raises(InputError, match=match):
            checkpoint.load_weights(drafter.requires_grad_(False), tensors, source)

    key = "layers.1.mlp.up_proj.weight"
    refused({k: v for k, v in good.items() if k != key}, rf"w\.safetensors: 1 missing keys, the first is {key}")
    refused({**good, "model.fc.weight": good["fc.weight"]}, r"1 unknown keys, the first is model\.fc\.weight")
    refused({**good, key: good[key].T.contiguous()}, rf"{key} is \[32, 48\], must be \[48, 32\]")
    for value in (math.nan, math.inf):
        bad = good[key].clone()
        bad[3, 4] = value
        refused({**good, key: bad}, f"{key} holds NaN or Inf")


def test_what_cannot_be_read_as_tensors_is_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read"):
        checkpoint.read_tensors(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.read_tensors(tmp_path / "nowhere")


def test_pins_refuse_what_makes_the_result_wrong_and_warn_of_the_rest(run, tmp_path):
    state = checkpoint.read_state(save(run, 5))
    assert checkpoint.check_pins(state, PINS, SPEC, tmp_path) == []
    for key in checkpoint.HARD_PINS:
        with pytest.raises(InputError, match=f"cannot resume from .*{key} was {re.escape(PINS[key])}, is other"):
            checkpoint.check_pins(state, {**PINS, key: "other"}, SPEC, tmp_path)
    (warning,) = checkpoint.check_pins(state, {**PINS, "loss": "other"}, SPEC, tmp_path)
    assert "loss was l, is other" in warning
    with pytest.raises(InputError, match="drafter sliding_window was None, is 8"):
        checkpoint.check_pins(state, PINS, dataclasses.replace(SPEC, sliding_window=8), tmp_path)
