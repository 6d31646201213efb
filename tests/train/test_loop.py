"""The training loop: a stored loss curve, resuming bit for bit, files as good as online, and faults that stop it.

`PYTHONPATH=tests python tests/train/test_loop.py` writes tests/golden/loss_curve.json anew; do that only for a change that is meant to
change numbers, and say so.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import make_config, write_conversations, write_target
from safetensors.torch import load_file

from draftsmith.config import Config
from draftsmith.data.loader import Loader
from draftsmith.data.store import Store
from draftsmith.data.tokenize import append, tokenize
from draftsmith.errors import InputError, Interrupted
from draftsmith.rundir import RunDir, attempts
from draftsmith.target.extract import FeatureExtractor
from draftsmith.tracking import read_metrics
from draftsmith.train import loop
from draftsmith.train.dist import World
from draftsmith.train.flush import flush
from draftsmith.train.loop import train
from draftsmith.train.step import RowStep, StepSums

GOLDEN = Path(__file__).parents[1] / "golden" / "loss_curve.json"
GOLDEN_OVERRIDES = (
    "train.steps=20", "train.rows_per_step=2", "drafter.layer_types=[full, sliding]", "drafter.sliding_window=12",
    "train.warmup_fraction=0.1", "train.learning_rate=3e-3", "train.checkpoint_every=100",
)  # fmt: skip
TOLERANCE = 5e-5
"""Relative.  Other CPUs and torch versions sum in another order: see test_the_tolerance_of_the_curve_is_not_idle."""


def again(config: Config, work: Path, *overrides: str) -> Config:
    """The same data, another runs folder, other settings."""
    return make_config(Path(config.target.model), work, f"data_dir={config.data}", *overrides)


def lines(*runs: RunDir, kind: str = "train") -> list[dict]:
    """Metrics of one kind over attempts, without the time of day."""
    found = [line for run in runs for line in read_metrics(run.metrics) if line["kind"] == kind]
    return [{k: v for k, v in line.items() if k != "time"} for line in found]


def tensors(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    folder = run.checkpoint(step)
    return {**load_file(folder / "drafter.safetensors"), **load_file(folder / "optimizer.safetensors")}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and len(a) > 50
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


def curve(config: Config) -> list[float]:
    return [line["loss"] for line in lines(train(config))]


# the curve


def test_twenty_steps_reproduce_the_stored_curve(stored, tmp_path):
    losses = curve(again(stored, tmp_path / "golden", *GOLDEN_OVERRIDES))
    expected = json.loads(GOLDEN.read_text())["losses"]
    assert len(losses) == len(expected) == 20
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert losses[-1] < 0.8 * losses[0]


def test_the_tolerance_of_the_curve_is_not_idle(stored, tmp_path):
    """Another order of sums stays within a tenth of it; a label, gamma or rate slightly off does not stay within it."""
    expected = json.loads(GOLDEN.read_text())["losses"]

    def off(override: str) -> float:
        losses = curve(again(stored, tmp_path / override.partition("=")[0], *GOLDEN_OVERRIDES, override))
        return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))

    assert off("train.compute_dtype=float64") < TOLERANCE / 10
    assert off("loss.gamma=4.01") > TOLERANCE
    assert off("train.learning_rate=3.01e-3") > TOLERANCE
    assert off("drafter.sliding_window=11") > TOLERANCE


# resuming

RESUMED = (
    "train.steps=9", "train.checkpoint_every=2", "train.keep_checkpoints=9", "train.rows_per_step=2",
    "train.heldout_every=3", "train.accept_every=4", "train.accept_prompts=1", "train.weight_decay=0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target_folder) -> tuple[Config, RunDir]:
    """A run of nine steps that nobody interrupts."""
    work = tmp_path_factory.mktemp("whole")
    config = make_config(target_folder, work, *RESUMED)
    write_conversations(config.conversations)
    tokenize(config)
    return config, train(config)


def compare(whole_run: RunDir, *parts: RunDir) -> None:
    assert_same(tensors(whole_run, 9), tensors(parts[-1], 9))
    for kind in ("train", "heldout", "accepted"):
        assert lines(whole_run, kind=kind) == lines(*parts, kind=kind)
    assert [line["step"] for line in lines(*parts)] == list(range(1, 10))


@pytest.mark.parametrize("step", [2, 4, 8])
def test_resuming_equals_never_having_stopped_bit_for_bit(whole, tmp_path, step):
    config, uninterrupted = whole
    source = tmp_path / "copy" / f"step_{step:08d}"
    shutil.copytree(uninterrupted.checkpoint(step), source)
    run = train(again(config, tmp_path, *RESUMED), resume=str(source))
    assert_same(tensors(uninterrupted, 9), tensors(run, 9))
    for kind in ("train", "heldout", "accepted"):
        later = [line for line in lines(uninterrupted, kind=kind) if line["step"] > step]
        assert lines(run, kind=kind) == later and later
    assert f"resumed from {source} at step {step}" in run.log.read_text()


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("at", [1, 5])
def test_a_signal_saves_and_the_resumed_run_equals_the_whole(whole, tmp_path, monkeypatch, log_every, number, code, at):
    config, uninterrupted = whole
    config = again(config, tmp_path, *RESUMED, f"train.log_every={log_every}")
    real = RowStep.step

    def interrupted(self, step, *rest):
        if step + 1 == at:
            os.kill(os.getpid(), number)
        return real(self, step, *rest)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(RowStep, "step", interrupted)
        with pytest.raises(
            Interrupted, match=rf"{number.name}: saved .*step_0000000{at} at step {at}; .*--resume auto"
        ) as stop:
            train(config)
    assert stop.value.code == code
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    second = train(config, resume="auto")
    first = attempts(config.runs_dir, "tiny")[0]
    assert second.path.name == "attempt_2" and "saved" in first.log.read_text()
    compare(uninterrupted, first, second)


def test_a_signal_between_the_log_line_and_the_checkpoint_loses_no_metrics(whole, tmp_path, monkeypatch):
    config, uninterrupted = whole
    config = again(config, tmp_path, *RESUMED, "train.log_every=5", "train.checkpoint_every=100")
    real = RowStep.heldout

    def interrupted(self, rows, source):
        os.kill(os.getpid(), signal.SIGTERM)  # after step 3, which is no log point
        return real(self, rows, source)

    with monkeypatch.context() as patch:
        patch.setattr(RowStep, "heldout", interrupted)
        with pytest.raises(Interrupted):
            train(config)
    second = train(config, resume="auto")
    compare(uninterrupted, attempts(config.runs_dir, "tiny")[0], second)


def test_checkpoints_between_log_points_lose_no_metrics_to_a_kill(whole, tmp_path, monkeypatch):
    """Killed right after a checkpoint, the metrics up to it are on disk."""
    config, uninterrupted = whole
    config = again(config, tmp_path, *RESUMED, "train.log_every=7")
    real = loop.checkpoint.Saver.save

    class Killed(BaseException):
        pass

    def killed(self, step, *rest):
        path = real(self, step, *rest)
        if step == 4:
            self.wait()
            raise Killed
        return path

    with monkeypatch.context() as patch:
        patch.setattr(loop.checkpoint.Saver, "save", killed)
        with pytest.raises(Killed):
            train(config)
    second = train(config, resume="auto")
    compare(uninterrupted, attempts(config.runs_dir, "tiny")[0], second)


def test_resuming_passes_over_a_damaged_checkpoint_and_says_so(whole, tmp_path):
    config, uninterrupted = whole
    config = again(config, tmp_path, *RESUMED)
    shutil.copytree(uninterrupted.path, config.runs_dir / "tiny" / "attempt_1")
    first = attempts(config.runs_dir, "tiny")[0]
    for step in (9, 8):
        (first.checkpoint(step) / "optimizer.safetensors").write_bytes(b"cut")
    second = train(config, resume="auto")
    assert "step_00000009 is damaged" in second.log.read_text() and "at step 6" in second.log.read_text()
    assert_same(tensors(uninterrupted, 9), tensors(second, 9))


def test_a_resumed_run_stays_with_the_generation_it_began_with(whole, tmp_path):
    """The store grows between: the same curve, bit for bit; a new run takes the newest generation."""
    config, uninterrupted = whole
    shutil.copytree(config.data, tmp_path / "data")
    config = again(config, tmp_path, *RESUMED, f"data_dir={tmp_path}/data")
    shutil.copytree(uninterrupted.path, config.runs_dir / "tiny" / "attempt_1")
    first = attempts(config.runs_dir, "tiny")[0]
    for step in (8, 9):
        shutil.rmtree(first.checkpoint(step))
    before = Store(config.store).manifest
    write_conversations(config.conversations, count=30)
    assert append(config).generation == 2
    second = train(config, resume="auto")
    assert "has grown to generation 2: this run stays with generation 1" in second.log.read_text()
    assert_same(tensors(uninterrupted, 9), tensors(second, 9))
    for kind in ("train", "heldout", "accepted"):
        assert lines(second, kind=kind) == [line for line in lines(uninterrupted, kind=kind) if line["step"] > 6]
    recorded = json.loads(second.manifest("built").read_text())
    assert recorded["data"]["generation"] == 1 and recorded["built"]["pins"]["store"] == before.fingerprint
    fresh = again(config, tmp_path / "fresh", *RESUMED, f"data_dir={tmp_path}/data")
    plan = loop.prepare(fresh)
    assert plan.store.manifest.generation == 2 and len(plan.store) == 30 and not plan.notes
    elsewhere = again(config, tmp_path, *RESUMED, f"data_dir={tmp_path}/elsewhere")
    write_conversations(elsewhere.conversations, count=13)
    tokenize(elsewhere)
    with pytest.raises(InputError, match="cannot resume from .*: store was"):
        train(elsewhere, resume=str(uninterrupted.checkpoint(4)))


def test_a_run_that_is_complete_is_not_resumed_into_an_empty_attempt(whole, capsys):
    """Asked for by a person it is refused; by who starts it again, whatever became of it, it has ended well."""
    config, uninterrupted = whole
    assert train(config, resume="auto", new_attempt=True).path == uninterrupted.path
    assert "nothing is left to train" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"nothing is left to train: .* at step 9 of 9 .*train\.steps"):
        train(config, resume="auto")
    assert [r.path for r in attempts(config.runs_dir, "tiny")] == [uninterrupted.path]


def test_other_drafters_begin_at_the_checkpoint_that_rank_0_found(whole, tmp_path, monkeypatch):
    """Theirs may be another: a file system shows them other files, or the folder has changed meanwhile."""
    config, uninterrupted = whole
    shutil.copytree(uninterrupted.path, tmp_path / "runs" / "tiny" / "attempt_1")
    first = str(uninterrupted.checkpoint(4))

    class Second(World):
        def from_first(self, key, value):
            return [value[0], first, 4] if key == "start" else str(uninterrupted.path)

    begun = []
    monkeypatch.setattr(loop, "join", lambda *args: nullcontext(Second(rank=1, drafters=2, index=1)))
    monkeypatch.setattr(loop, "_run", lambda *args: begun.append(args[5]))
    train(again(config, tmp_path, *RESUMED), resume="auto")
    assert begun == [Path(first)]


def test_resuming_onto_something_else_is_refused_before_a_folder_is_made(whole, tmp_path):
    config, uninterrupted = whole
    source = str(uninterrupted.checkpoint(4))
    for override, message in (
        ("drafter.block_size=5", "block_size was 4, is 5"),
        ("drafter.feature_layers=[0, 3, 5]", "feature_layers"),
        ("drafter.num_layers=1", "drafter num_layers was 2, is 1"),
    ):
        changed = again(config, tmp_path, *RESUMED, override)
        with pytest.raises(InputError, match=message):
            train(changed, resume=source)
        assert not changed.runs_dir.exists()
    run = train(again(config, tmp_path, *RESUMED, "loss.kind=dpace", "train.compute_dtype=bfloat16"), resume=source)
    log = run.log.read_text()
    assert "loss was decay" in log and "precision was" in log


def test_with_another_number_of_rows_a_step_it_goes_on_with_rows_not_seen_yet(whole, tmp_path, monkeypatch):
    """The place in the data is the number of rows done, not the number of steps."""
    config, uninterrupted = whole
    seen, real = [], RowStep.step
    monkeypatch.setattr(RowStep, "step", lambda self, n, rows, *rest: seen.extend(rows) or real(self, n, rows, *rest))
    changed = again(config, tmp_path, *RESUMED, "train.rows_per_step=3", "train.steps=6")
    run = train(changed, resume=str(uninterrupted.checkpoint(4)))
    expected = [loop.prepare(changed).loader.row(g) for g in range(8, 14)]
    assert [(r.epoch, r.index) for r in seen] == [(r.epoch, r.index) for r in expected]
    assert loop.checkpoint.read_state(run.checkpoint(6)).rows_done == 14
    assert "rows was T=128 A=16 R=2" in run.log.read_text()


def test_a_run_that_exists_is_refused(whole):
    with pytest.raises(InputError, match=r"exists: continue it with --resume auto"):
        train(whole[0])


# features from files


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_features_from_files_train_the_same_drafter_bit_for_bit(stored, tmp_path, monkeypatch, kind):
    settings = ("train.steps=4", "train.rows_per_step=2", f"loss.kind={kind}", "train.checkpoint_every=4")
    online = train(again(stored, tmp_path / "online", *settings))
    first = train(again(stored, tmp_path / "files", *settings, "train.features=files"))
    assert_same(tensors(online, 4), tensors(first, 4))
    for kind_of_line in ("train", "heldout"):
        assert lines(online, kind=kind_of_line) == lines(first, kind=kind_of_line)
    assert "computing the features of 12 documents" in first.log.read_text()

    def not_again(*args):
        raise AssertionError("computed twice")

    monkeypatch.setattr(loop, "write_features", not_again)
    second = train(again(stored, tmp_path / "again", *settings, "train.features=files"))
    assert_same(tensors(online, 4), tensors(second, 4))


@pytest.mark.parametrize(
    "override", ["target.dtype=bfloat16", "train.feature_dtype=bfloat16", "drafter.feature_layers=[0, 3, 5]"]
)
def test_features_of_another_precision_or_layer_are_computed_anew(stored, tmp_path, override):
    train(again(stored, tmp_path / "a", "train.steps=1", "train.features=files"))
    online = train(again(stored, tmp_path / "b", "train.steps=1", override))
    files = train(again(stored, tmp_path / "c", "train.steps=1", "train.features=files", override))
    assert lines(online) == lines(files)
    assert len(list(stored.store.glob("features-*"))) == 2


# what stops a run


def test_nan_in_features_stops_the_run_with_the_row_named_and_no_checkpoint_of_it(stored, tmp_path, monkeypatch):
    config = again(stored, tmp_path, "train.steps=8", "train.log_every=8", "train.checkpoint_every=2")
    loader = Loader(Store(stored.store), row_tokens=128, anchors=16, block_size=4, seed=0)
    bad = loader.row(4)
    real = FeatureExtractor.row

    def spoilt(self, row):
        features = real(self, row)
        if (row.epoch, row.index) == (bad.epoch, bad.index):
            features[int(row.anchors[0]) - 1, 3] = math.nan
        return features

    with monkeypatch.context() as patch:
        patch.setattr(FeatureExtractor, "row", spoilt)
        with pytest.raises(
            FloatingPointError, match=f"step 5: features of epoch {bad.epoch}, row {bad.index} hold NaN"
        ):
            train(config)
    (run,) = attempts(config.runs_dir, "tiny")
    assert [p.name for p in loop.checkpoint.listed(run)] == ["step_00000002", "step_00000004"]
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
    resumed = train(config, resume="auto")  # the fault mended, it goes on from what was good
    assert [line["step"] for line in lines(resumed)] == [5, 6, 7, 8]


def test_a_gradient_that_is_not_finite_stops_the_run(stored, tmp_path, monkeypatch):
    real = RowStep.run

    def spoilt(self, row, blocks, features):
        sums = real(self, row, blocks, features)
        if row.index == 1:
            sums.weighted.register_hook(lambda grad: grad * math.inf)
        return sums

    monkeypatch.setattr(RowStep, "run", spoilt)
    with pytest.raises(FloatingPointError, match=r"the gradient's norm (nan|inf) on rows \(epoch, row\) \[\(0, 1\)\]"):
        train(again(stored, tmp_path, "train.checkpoint_every=1"))


def test_a_gradient_that_is_not_finite_is_that_of_any_drafters_rows():
    """After the sum nobody knows whose: all rows of the step are named, alike on all."""

    class Second(World):
        def gather(self, key, value, ranks):
            return [[[0, 4], [1, 0]], value] if key == "not finite" else []

        def sum_host(self, values):
            return [2 * value for value in values]

    one, fine = torch.ones(3), torch.ones(1, dtype=torch.bool)
    sums = StepSums(6, ((0, 3),), 1.0, one[0], one, one, one, torch.tensor(math.inf), fine, fine, 1, 1, 0.1)
    with pytest.raises(FloatingPointError, match=r"step 7: .* norm inf on rows .* \[\(0, 3\), \(0, 4\), \(1, 0\)\]"):
        flush(None, [sums], None, Second(rank=1, drafters=2, index=1))


def test_inputs_that_cannot_be_trained_on_are_refused_before_a_folder_is_made(stored, tmp_path, target_folder):
    def refused(match: str, *overrides: str, model: Path = target_folder) -> None:
        config = make_config(model, tmp_path / "r", f"data_dir={stored.data}", *overrides)
        with pytest.raises(InputError, match=match):
            train(config)
        assert not config.runs_dir.exists()

    refused("drafter.block_size 64 is larger than any training answer", "drafter.block_size=64")
    refused("store manifest", f"data_dir={tmp_path}/nowhere")
    refused("--resume|no complete|attention=flex", "train.attention=flex")
    other = write_target(tmp_path / "other")
    text = json.loads((other / "tokenizer_config.json").read_text())
    text["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (other / "tokenizer_config.json").write_text(json.dumps(text))
    refused("made with another tokenizer or chat template", model=other)
    with pytest.raises(InputError, match="no complete checkpoint"):
        train(make_config(target_folder, tmp_path / "r", f"data_dir={stored.data}"), resume="auto")


def test_without_held_out_documents_it_trains_and_says_so_or_is_told(tmp_path, target_folder):
    config = make_config(target_folder, tmp_path, "tokenize.heldout_fraction=0", "train.steps=1")
    write_conversations(config.conversations)
    tokenize(config)
    with pytest.raises(InputError, match=r"holds nothing out: raise tokenize\.heldout_fraction"):
        train(again(config, tmp_path / "a", "train.heldout_every=1"))
    run = train(again(config, tmp_path / "b", "train.steps=1"))
    assert "nothing is held out" in run.log.read_text() and not lines(run, kind="heldout")


# what is written


def test_metrics_hold_every_step_held_out_and_accepted_lines_where_they_are_due(stored, tmp_path):
    config = again(
        stored, tmp_path, "train.steps=5", "train.heldout_every=2", "train.accept_every=3", "train.accept_prompts=2",
        "train.log_every=3", "train.rows_per_step=2",
    )  # fmt: skip
    run = train(config)
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines(run, kind="heldout")] == [2, 4, 5]
    assert [line["step"] for line in lines(run, kind="accepted")] == [3, 5]
    assert [line["step"] for line in lines(run, kind="rate")] == [3, 5]
    first = lines(run)[0]
    assert set(first) == {
        "step",
        "kind",
        "loss",
        "lr",
        "grad_norm",
        "anchors",
        "accuracy",
        "cross_entropy",
        "accuracy_by_slot",
    }
    assert len(first["accuracy_by_slot"]) == 3 and first["loss"] == pytest.approx(math.log(272), rel=0.2)
    held = lines(run, kind="heldout")[-1]
    assert set(held) == {"step", "kind", "loss", "accuracy", "cross_entropy", "accuracy_by_slot"}
    accepted = lines(run, kind="accepted")[-1]
    assert set(accepted["accepted_length"]) == {"mean_of_answers", "per_request", "pooled", "full_rounds"}
    assert 1 <= accepted["accepted_length"]["pooled"] <= 4 and len(accepted["by_slot"]) == 3
    weights = load_file(run.checkpoint(5) / "drafter.safetensors")
    log = run.log.read_text()
    assert f"{sum(v.numel() for v in weights.values()) / 1e6:.1f}M parameters, 5 steps of 2 x 128 tokens" in log
    assert "attention sdpa, torch.float32, features online" in log


def test_epochs_become_steps(stored, tmp_path):
    rows = len(Loader(Store(stored.store), row_tokens=128, anchors=16, block_size=4, seed=0).plan(0))
    config = again(stored, tmp_path, "train.steps=null", "train.epochs=1.5", "train.rows_per_step=2")
    assert loop.prepare(config).steps == math.ceil(1.5 * rows / 2)


def test_heldout_rows_are_the_same_whatever_the_run_has_done(whole):
    """Their anchors belong to epoch 0: held-out losses of different steps are comparable."""
    plan = loop.prepare(whole[0])
    assert all(row.epoch == 0 for row in plan.heldout_rows)
    store = Store(whole[0].store)
    assert all(store.heldout[n] for row in plan.heldout_rows for n in row.samples)
    assert not any(store.heldout[n] for g in range(9) for n in plan.loader.row(g).samples)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        config = make_config(write_target(work / "model"), work, *GOLDEN_OVERRIDES)
        write_conversations(config.conversations)
        tokenize(config)
        GOLDEN.parent.mkdir(exist_ok=True)
        losses = [round(x, 7) for x in curve(config)]
        GOLDEN.write_text(json.dumps({"torch": torch.__version__, "losses": losses}, indent=1) + "\n")
        print(GOLDEN.read_text())
