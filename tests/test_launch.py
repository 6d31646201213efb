"""The launcher without processes: what it starts again with, its exit code, and children that outlive nobody."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial

import pytest

from draftsmith import launch as launching
from draftsmith.config import PlacementConfig
from draftsmith.errors import NOT_FINITE
from draftsmith.rundir import create

TWICE = PlacementConfig(drafters=2, max_restarts=2)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """`started(arguments, codes)`: with what each start was made.  An earlier run has a checkpoint; each start makes an
    attempt, and the last but one saves."""
    runs = tmp_path / "runs"
    monkeypatch.setattr(launching.signal, "signal", lambda *args: None)

    def run(arguments: list[str], codes: tuple[int, ...], saves: int = 99) -> list[list[str]]:
        seen: list[list[str]] = []
        create(runs, "x", new_attempt=True).checkpoint(100).mkdir(parents=True)

        def once(arguments, *rest):
            seen.append(arguments[1:])
            attempt = create(runs, "x", new_attempt=True)
            if len(seen) > saves:
                attempt.checkpoint(4).mkdir(parents=True)
            return codes[len(seen) - 1]

        monkeypatch.setattr(launching, "_once", once)
        assert launching.launch(arguments, TWICE, 0, run=(runs, "x")) == codes[len(seen) - 1]
        return seen

    return run


@pytest.mark.parametrize(
    "given", [["--new-attempt"], ["--resume", "runs/x/attempt_1/checkpoints/step_00000100"], ["--resume", "auto"], []]
)
def test_started_again_it_does_the_same_until_it_has_a_checkpoint_of_its_own(started, given):
    first = ["c.yaml", "a=b", *given]
    again = first if "--new-attempt" in first else [*first, "--new-attempt"]
    assert started(first, (1, 1, 0)) == [first, again, again]
    *_, last = started(first, (1, 1, 0), saves=1)
    assert sorted(last) == sorted(["c.yaml", "a=b", "--resume", "auto", "--new-attempt"])
    assert last[last.index("--resume") + 1] == "auto"


@pytest.mark.parametrize("code", [0, 2, 3, NOT_FINITE])
def test_what_would_end_alike_is_not_started_again(started, code):
    assert len(started(["c.yaml"], (code,))) == 1


def test_a_signal_before_it_is_listened_for_is_an_exit_code_like_any_other():
    class Child:
        def poll(self) -> int:
            return -signal.SIGTERM

    stop = type("Stop", (), {"received": signal.SIGTERM})()
    assert launching._watch([Child(), Child()], TWICE, stop) == 143


def test_a_child_whose_launcher_is_gone_does_not_start():
    for launcher, code in ((os.getpid(), 0), (os.getpid() + 1, 1)):
        assert subprocess.Popen(["true"], preexec_fn=partial(launching._die_with_parent, launcher)).wait() == code
