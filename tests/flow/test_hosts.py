"""Two network namespaces joined by a cable stand for two machines: a target on one, a drafter on the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import make_config, write_conversations
from test_placements import losses, settings

from draftsmith.data.tokenize import tokenize

A, B = "draftsmith-a", "draftsmith-b"
HOST = "10.213.0.1"
SPLIT = ("placement.mode=split", "placement.targets=1", "placement.drafters=1", "placement.timeout_seconds=15")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def remove() -> None:
    for name in (A, B):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def cable():
    """Both ends up; skipped where namespaces cannot be made (no ip command, not root, a locked-down container)."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command: scripts/install_system_packages.sh")
    remove()
    try:
        for name in (A, B):
            ip("netns", "add", name)
        ip("link", "add", "veth-a", "netns", A, "type", "veth", "peer", "name", "veth-b", "netns", B)
        for name, end, address in ((A, "veth-a", HOST), (B, "veth-b", "10.213.0.2")):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove()
        pytest.skip(f"namespaces cannot be made here: {error.stderr.decode().strip()}")
    yield
    remove()


def start(namespace: str, end: str, rank: int, path) -> subprocess.Popen[str]:
    """One rank as `torchrun --nnodes` would start it."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOST,
        "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": end,
    }  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-m", "draftsmith.cli", "train", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


@pytest.fixture
def work(target_folder, tmp_path):
    config = make_config(target_folder, tmp_path)
    write_conversations(config.conversations, count=24)
    tokenize(config)
    return tmp_path


def test_split_across_two_hosts(target_folder, work, cable):
    path, config = settings(target_folder, work, "hosts", *SPLIT)
    ranks = [start(A, "veth-a", 0, path), start(B, "veth-b", 1, path)]
    outs = [r.communicate(timeout=180)[0] for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0], outs
    assert len(losses(config)) == 8


def test_a_cut_link_is_a_clear_error_in_bounded_time(target_folder, work, cable):
    path, config = settings(target_folder, work, "cut", *SPLIT, "train.steps=3000", "train.checkpoint_every=3000")
    ranks = [start(A, "veth-a", 0, path), start(B, "veth-b", 1, path)]
    metrics = config.runs_dir / "cut" / "attempt_1" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ip("-n", B, "link", "set", "veth-b", "down")
    begin = time.monotonic()
    outs = [rank.communicate(timeout=90)[0] for rank in ranks]  # each by itself: nobody can end the other
    assert [r.returncode for r in ranks] == [1, 1] and time.monotonic() - begin < 60, outs
    assert "drafter 0 (rank 0) waited" in outs[0] and "for target 0 (rank 1) to give row" in outs[0]
    assert "target 0 (rank 1) waited" in outs[1] and "drafter 0 (rank 0)" in outs[1]
    assert all(sum("waited" in line for line in out.splitlines()) == 1 for out in outs), outs
