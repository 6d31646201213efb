"""The report: a real run's verdict and numbers, seen by a real browser, with nothing fetched from anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_config, write_conversations

from draftsmith.cli import main
from draftsmith.config import Config
from draftsmith.data.tokenize import tokenize
from draftsmith.rundir import RunDir
from draftsmith.tracking import read_metrics
from draftsmith.train.loop import train

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PLOTS = {"loss", "accuracy", "accuracy_by_slot", "throughput", "time_shares", "accepted_length", "memory"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> tuple[Config, RunDir, RunDir]:
    """A good run, and one with another learning rate."""
    work = tmp_path_factory.mktemp("report")
    settings = ("train.heldout_every=3", "train.accept_every=3", "train.accept_prompts=2")
    config = make_config(target_folder, work, *settings, "name=good")
    write_conversations(config.conversations)
    tokenize(config)
    other = make_config(target_folder, work, *settings, "name=other", "train.learning_rate=2e-3")
    return config, train(config), train(other)


@pytest.fixture
def runs(two, tmp_path) -> tuple[RunDir, RunDir]:
    """Copies, so that what one test writes is not there for another."""
    shutil.copytree(two[0].runs_dir, tmp_path / "runs")
    return RunDir(tmp_path / "runs/good/attempt_1"), RunDir(tmp_path / "runs/other/attempt_1")


def seen(html: Path, tmp_path: Path) -> str:
    """The page as Chromium builds it."""
    if not CHROMIUM.exists():
        pytest.skip("needs the Debian package chromium")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", html.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def texts(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html.split("</style>")[1]).split())


def test_one_run_in_a_browser(runs, tmp_path, capsys):
    run = runs[1]
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.report}\n"
    html = seen(run.report, tmp_path)
    said = texts(html)
    assert "other/attempt_1 against the last good run" in said
    assert "1 change can affect loss, 0 can affect speed" in said
    assert "config.train.learning_rate" in said and "was 0.001" in said and "is 0.002" in said
    assert "packages: identical" in said
    lines = read_metrics(run.metrics)
    last = {kind: [x for x in lines if x["kind"] == kind][-1] for kind in ("train", "heldout", "accepted", "rate")}
    assert f"loss {last['train']['loss']:.4f}" in said
    assert f"held-out loss {last['heldout']['loss']:.4f}" in said
    assert f"accepted length {last['accepted']['accepted_length']['pooled']:.4f}" in said
    assert f"peak memory, host {last['rate']['peak_rss_bytes'] / 2**30:.2f} GiB" in said
    for slot, value in enumerate(last["heldout"]["accuracy_by_slot"], 1):
        assert f"slot {slot} {value:.4f}" in said
    assert "rows/s, median" in said and "time: compute" in said and "time: checkpoint" in said
    assert "state finished" in said and "steps 6" in said
    assert "data.samples" in said or "data." in said
    assert html.count('src="data:image/png;base64,') == len(PLOTS)
    assert {p.stem for p in run.plots.glob("*.png")} == PLOTS
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in run.plots.iterdir())
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//|url\(|@import|<script|<link|<iframe""", html)


def test_two_side_by_side_in_a_browser(runs, tmp_path):
    output = tmp_path / "both.html"
    good, other = runs
    assert (
        main(["report", "good", "other/attempt_1", "--runs-dir", str(good.path.parents[1]), "--output", str(output)])
        == 0
    )
    html = seen(output, tmp_path)
    said = texts(html)
    assert said.index("other/attempt_1 against good/attempt_1") < said.index("good/attempt_1 against the last good run")
    losses = [f"{[x for x in read_metrics(r.metrics) if x['kind'] == 'train'][-1]['loss']:.4f}" for r in runs]
    assert f"loss {losses[0]} {losses[1]}" in said
    assert {p.stem for p in other.plots.glob("*.png")} == {f"{p}_against_good_attempt_1" for p in PLOTS}
    assert not good.plots.exists() and not good.report.exists()


def test_what_was_recorded_cannot_become_markup(runs, capsys):
    run = runs[1]
    manifest = run.manifest("start")
    manifest.write_text(manifest.read_text().replace(str(Path(sys.prefix)), "<script>alert(1)</script><b>"))
    exit_file = run.exit()
    exit_file.write_text(
        json.dumps({"how": "crashed", "detail": "<img src=//evil>", "traceback": "<script>x</script>"})
    )
    assert main(["report", str(run.path)]) == 0
    html = run.report.read_text()
    assert "<script" not in html and "<img src=//" not in html
    assert 'state</td><td class="n">crashed, &lt;img src=//evil&gt;' in html and "&lt;script&gt;x" in html


def cut(run: RunDir, keep: int) -> None:
    """As if the process were still at it: half a line at the end of the metrics, no end of any kind."""
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:keep]) + (lines[keep][:20] if keep < len(lines) else ""))
    shutil.rmtree(run.alive)
    run.manifest("end").unlink()


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_a_run_still_being_written(runs, keep):
    cut(runs[1], keep)
    assert main(["report", str(runs[1].path)]) == 0
    html = runs[1].report.read_text()
    assert "can affect loss" in html and ("none yet" in html) == (keep == 0)


def test_no_manifest_yet_is_said(runs):
    shutil.rmtree(runs[1].manifests)
    assert main(["report", str(runs[1].path)]) == 0
    assert "cannot tell what changed: run folder" in runs[1].report.read_text()
    runs[1].metrics.unlink()
    assert main(["report", str(runs[1].path)]) == 0
    assert "nothing measured yet" in runs[1].report.read_text()


def test_no_last_good_is_said(runs):
    shutil.rmtree(runs[0].path)
    assert main(["report", str(runs[1].path)]) == 0
    assert "there is no last good run of the same target" in runs[1].report.read_text()


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_a_run_that_is_not_there(tmp_path, capsys, name):
    assert main(["report", name, "--runs-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("draftsmith report: there is no run ") and error.count("\n") == 1


def test_an_output_that_cannot_be_written(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(runs[1].path), "--output", str(tmp_path / "file" / "r.html")]) == 2
    assert "report" in capsys.readouterr().err


def test_a_damaged_metrics_file(runs, capsys):
    runs[1].metrics.write_text('{"kind": "train"\n{"kind": "rate"}\n')
    assert main(["report", str(runs[1].path)]) == 2
    assert "metrics.jsonl:1: not JSON" in capsys.readouterr().err


def test_without_torch(runs, tmp_path):
    for name in ("torch", "transformers"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text(f"raise ImportError('{name} is broken here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}
    command = [sys.executable, "-m", "draftsmith.cli", "report", str(runs[1].path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 change can affect loss" in runs[1].report.read_text()
