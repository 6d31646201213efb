"""What goes wrong on real processes: each case is one line that names the culprit, in bounded time, and nobody is left."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_config, write_conversations
from safetensors.torch import load_file, save_file
from test_placements import SPLITS, finish, losses, processes_of, settings, start, wait_for_checkpoint, wait_for_steps

from draftsmith.cli import main
from draftsmith.data.store import Store
from draftsmith.data.tokenize import tokenize
from draftsmith.errors import NOT_FINITE
from draftsmith.rundir import RunDir
from draftsmith.target.model import load_tokenizer
from draftsmith.train import checkpoint
from draftsmith.train.loop import make_loader, train


@pytest.fixture(scope="module")
def work(target_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    config = make_config(target_folder, folder)
    write_conversations(config.conversations, count=24)
    tokenize(config)
    return folder


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rank_of(path: Path, rank: int, size: int, port: str) -> subprocess.Popen[str]:
    """One rank as another launcher would start it."""
    return start(path, RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def test_a_process_that_hangs_is_named_and_all_end(target_folder, work):
    """Stopped processes answer nothing; one run loses its target so, the other the drafter that keeps the store."""
    seconds = 8
    runs = {}
    for victim, rank in (("target 0 (rank 1)", 1), ("drafter 0 (rank 0)", 0)):
        path, config = settings(
            target_folder, work, f"hang_{rank}", *SPLITS["split_1_1"], "train.steps=5000",
            "train.checkpoint_every=5000", f"placement.timeout_seconds={seconds}",
        )  # fmt: skip
        runs[victim] = rank, config, start(path)
    for rank, config, _ in runs.values():
        wait_for_steps(config)
        os.kill(dict(processes_of(config))[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    for victim, (_, config, process) in runs.items():
        lines = [line for line in finish(process, 1).splitlines() if "waited" in line]
        assert len(lines) == 1 and f"{victim}" in lines[0].split(":", 2)[2] and "row" in lines[0], lines
        assert processes_of(config) == []
    assert time.monotonic() - stopped < seconds + 20


def test_processes_that_do_not_meet_say_why(target_folder, work, monkeypatch, capfd):
    """One rank of several, in this process: none of these gets beyond the store."""
    wait = "placement.timeout_seconds=1"
    pair, _ = settings(target_folder, work, "pair", *SPLITS["split_1_1"], wait)
    many, _ = settings(target_folder, work, "many", *SPLITS["split_1_2"], wait)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for path, rank, size, at, code, said in (
            (many, 0, 3, free_port(), 2, "within 1 s: drafter 1 (rank 1), target 0 (rank 2) missing"),
            (many, 0, 2, free_port(), 2, "placement asks for 1 targets + 2 drafters, 2 were started"),
            (pair, 0, 2, port, 2, f"drafter 0 (rank 0) cannot listen at 127.0.0.1:{port}: the port is in use"),
            (pair, 1, 2, port, 1, f"target 0 (rank 1) found no run at 127.0.0.1:{port} within 1 s"),
            (pair, 1, 2, free_port(), 1, "target 0 (rank 1) found no run at"),
            (pair, 1, 2, "x", 2, "MASTER_PORT='x'"),
        ):
            values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": at}
            for key, value in {**values, "TORCH_CPP_LOG_LEVEL": "FATAL"}.items():
                monkeypatch.setenv(key, str(value))
            begin = time.monotonic()
            assert main(["train", str(path)]) == code
            out = capfd.readouterr().err  # with torch's own lines, which a process that starts like this is spared
            (line,) = (line for line in out.splitlines() if line.startswith("draftsmith"))
            assert said in line
            assert time.monotonic() - begin < 20


def test_more_rows_under_way_than_memory_are_refused_with_the_figure_that_fits(target_folder, work):
    huge = ("placement.run_ahead=1000000000", "train.steps=1000000000")
    path, config = settings(target_folder, work, "rows", *SPLITS["split_1_1"], *huge)
    out = finish(start(path), 2)
    assert len(out.splitlines()) == 1 and "2 processes of this machine" in out and "0.0938 MiB a row" in out
    assert re.search(r"placement.run_ahead=[1-9][0-9]* would fit", out)
    assert not (config.runs_dir / "rows").exists()


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before_and_the_run_goes_on_from_it(target_folder, work):
    """Full for rank 0: no file may grow beyond 50 kB, which is less than the weights."""
    path, config = settings(target_folder, work, "full", *SPLITS["split_1_1"], "train.steps=40")
    process = start(path)
    wait_for_checkpoint(config)
    resource.prlimit(dict(processes_of(config))[0], resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    out = finish(process, 2)
    run = RunDir(config.runs_dir / "full" / "attempt_1")
    (line,) = (line for line in out.splitlines() if line.startswith("draftsmith train: checkpoint"))
    assert "could not be written" in line and "free space" in line and "--resume auto" in line
    assert "Traceback" not in out and processes_of(config) == []
    saved = checkpoint.listed(run)
    last = checkpoint.read_state(saved[-1]).step
    assert 4 <= last < 40 and not [p for p in run.path.rglob("*") if p.name.endswith(".tmp")]
    _, alone = settings(target_folder, work, "full", "train.steps=40")
    train(alone, resume="auto")
    assert len(losses(config)) == 40


def test_rows_that_are_not_finite_are_named_as_one_process_names_them(target_folder, work, tmp_path):
    """One character of one document has an embedding that overflows in the feature dtype; its row is the second
    drafter's."""
    config = make_config(target_folder, work)
    row = make_loader(config, Store(config.store), heldout=False).row(3)
    number = re.search(r"Question (\d+)\?", load_tokenizer(config.target).decode(row.tokens)).group(1)
    model = shutil.copytree(target_folder, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][load_tokenizer(config.target).convert_tokens_to_ids("~")] = 3.402e38
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    text = config.conversations.read_text().splitlines()
    text = [x.replace("abcdefgh", "~bcdefgh", 1) if json.loads(x)["id"] == f"p{number}" else x for x in text]
    overflow = ("train.feature_dtype=bfloat16", f"data_dir={tmp_path}/data")
    path, config = settings(model, tmp_path, "nan", *SPLITS["split_1_2"], *overflow, "placement.max_restarts=1")
    config.conversations.parent.mkdir()
    config.conversations.write_text("\n".join(text))
    tokenize(config)
    said = f"step 1: features of epoch 0, row {row.index} hold NaN or Inf"
    out = finish(start(path), NOT_FINITE)
    assert sum(line == f"draftsmith train: {said}" for line in out.splitlines()) == 1, out
    assert "Traceback" not in out and processes_of(config) == []
    _, single = settings(model, tmp_path, "single", *overflow)
    with pytest.raises(FloatingPointError, match=f"^{said}$"):
        train(single)


LIMITED = """
import resource, sys, torch.distributed, transformers
from draftsmith import cli
import draftsmith.train.loop
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20,) * 2)
cli.end(cli.main(sys.argv[1:]))
"""


def test_a_process_that_cannot_allocate_is_named_and_the_others_end(target_folder, work):
    """The target may take 150 MiB more than its libraries have: less than its threads want."""
    path, config = settings(target_folder, work, "memory", *SPLITS["split_1_1"], "placement.timeout_seconds=20")
    port = free_port()
    drafter = rank_of(path, 0, 2, port)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    target = subprocess.Popen(
        [sys.executable, "-c", LIMITED, "train", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**environment, "MASTER_PORT": port},
    )  # fmt: skip
    for process in (target, drafter):
        out, _ = process.communicate(timeout=60)
        assert process.returncode in (1, 2) and len(out.splitlines()) == 1 and "target 0 (rank 1)" in out, out
        assert process is drafter or "can't start new thread" in out or "out of memory" in out, out
    assert processes_of(config) == []
