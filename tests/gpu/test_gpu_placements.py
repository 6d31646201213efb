"""Placements on GPUs, by the command: one process, both roles apart, two drafters; and one that is killed.

With two GPUs over NCCL and one card each; with one, both on it over gloo.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from conftest import make_config, write_conversations
from flow.test_placements import SPLITS, finish, losses, processes_of, settings, start, wait_for_checkpoint

from draftsmith.data.tokenize import tokenize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = 50
DEVICE = "cuda"


@pytest.fixture(scope="module")
def work(target_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_placements")
    config = make_config(target_folder, folder)
    write_conversations(config.conversations, count=24)
    tokenize(config)
    return folder


def setup(target_folder, work, name, *overrides):
    return settings(
        target_folder, work, name, f"device={DEVICE}", f"train.steps={STEPS}", "train.compute_dtype=bfloat16",
        "target.dtype=bfloat16", "train.feature_dtype=bfloat16", f"compile.cache_dir={work}/compiled",
        "train.checkpoint_every=10", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def curves(target_folder, work):
    out = {}
    for name in ("single", "split_1_1", "colocated_2"):
        path, config = setup(target_folder, work, name, *SPLITS.get(name, ()))
        finish(start(path))
        out[name] = losses(config)
    return out


@pytest.mark.parametrize("name", ["split_1_1", "colocated_2"])
def test_placements_train_alike_within_bf16_noise(curves, name):
    """Sums of gradients in another order differ by float32 rounding (1e-7); bf16 weights and products turn that into a
    bf16 rounding here and there (2^-9 = 2e-3), which a loss averages over thousands of slots."""
    assert len(curves["single"]) == STEPS and curves["single"][-1] < curves["single"][0]
    assert curves[name] == pytest.approx(curves["single"], rel=2e-3)


@pytest.mark.parametrize("victim", ["drafter", "target"])
def test_a_lost_process_ends_all_and_the_run_goes_on(target_folder, work, curves, victim):
    path, config = setup(target_folder, work, f"kill_{victim}", *SPLITS["split_1_1"], "placement.max_restarts=1")
    process = start(path)
    wait_for_checkpoint(config)
    os.kill(dict(processes_of(config))[{"drafter": 0, "target": 1}[victim]], signal.SIGKILL)
    out = finish(process)
    assert f"{victim} 0 (rank" in out and "SIGKILL" in out
    assert losses(config, 2e-3) == pytest.approx(curves["single"], rel=2e-3)
    assert processes_of(config) == []


HEADERLESS = "#!/bin/sh\necho 'x.c:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_a_triton_that_cannot_compile_is_one_clear_line(target_folder, work, tmp_path, missing):
    path, _ = setup(target_folder, work, f"no_{missing}", f"compile.cache_dir={tmp_path}/compiled")
    tools = tmp_path / "tools"
    tools.mkdir()
    environment = {"PATH": str(tools), "TRITON_CACHE_DIR": f"{tmp_path}/triton"}
    if missing == "headers":
        environment["CC"] = environment["CXX"] = str(tools / "gcc")
        (tools / "gcc").write_text(HEADERLESS)
        (tools / "gcc").chmod(0o755)
    line = finish(start(path, **environment), 2).strip().splitlines()[-1]
    assert line.startswith("draftsmith train: compile: this machine cannot compile (")
    assert "install a C++ compiler and Python's headers" in line
