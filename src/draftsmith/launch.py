"""Starts the processes of one machine, watches them, and leaves none behind.  The same processes torchrun would start.

If one is lost, all are stopped: a training step needs every one of them.  With `placement.max_restarts` they are
started again, from the last complete checkpoint that they wrote.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.config import PlacementConfig
from draftsmith.errors import NOT_FINITE, TOO_SLOW
from draftsmith.rundir import attempts

GRACE = 30.0
"""Seconds between asking a process to stop and killing it."""
BAD_INPUT = 2
SAID = (BAD_INPUT, TOO_SLOW, NOT_FINITE)
"""Exit codes of a process that has said why, in one line; it would do so again."""
PR_SET_PDEATHSIG = 1


def launch(
    arguments: Sequence[str], placement: PlacementConfig, gpus: int, command: str = "train",
    run: tuple[Path, str] | None = None,
) -> int:  # fmt: skip
    """Run `draftsmith COMMAND ARGUMENTS` in every process of the placement; the exit code of the whole.

    arguments: as given to the command.  gpus: GPUs of this machine; each process sees one of them alone.  run: its
    folder and name; None: what is started again begins anew.
    """
    stop = _StopSignals()
    before = len(attempts(*run)) if run else 0
    code = 1
    for attempt in range(placement.max_restarts + 1):
        code = _once([command, *arguments], placement, gpus, stop)
        if code in (0, *SAID) or stop.received:
            break
        if attempt < placement.max_restarts:
            where = "as at first"
            made = attempts(*run)[before:] if run else []
            if any(p.is_dir() for one in made for p in one.checkpoints.glob("step_*")):
                where, arguments = "from the last checkpoint", [*_without_resume(arguments), "--resume", "auto"]
            if run and "--new-attempt" not in arguments:
                arguments = [*arguments, "--new-attempt"]
            print(f"starting again {where} ({attempt + 1} of {placement.max_restarts})", flush=True)
    return code


class _StopSignals:
    """Remembers SIGINT and SIGTERM, which are handed on to the children."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received = self.received or number


def _once(arguments: Sequence[str], placement: PlacementConfig, gpus: int, stop: _StopSignals) -> int:
    size, port, die_with_parent = placement.processes, _free_port(), partial(_die_with_parent, os.getpid())
    children = []
    for rank in range(size):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size), "DRAFTSMITH_GPU_IS_SHARED": str(int(0 < gpus < size)),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:  # else env.py picks from it
            environment["CUDA_VISIBLE_DEVICES"] = str(rank % gpus)
        command = [sys.executable, "-m", "draftsmith.cli", *arguments]
        children.append(subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, start_new_session=True))
    try:
        return _watch(children, placement, stop)
    finally:
        _end(children)


def _watch(children: list[subprocess.Popen[bytes]], placement: PlacementConfig, stop: _StopSignals) -> int:
    """Wait until all have ended well, one has not, or a signal was handed on and answered."""
    handed_on = 0.0
    while True:
        codes = [c.poll() for c in children]
        if stop.received and not handed_on:
            handed_on = time.monotonic()
            for child in children[: placement.drafters]:  # targets end when the drafters have
                if child.poll() is None:
                    child.send_signal(stop.received)
        drafters = codes[: placement.drafters]
        if handed_on:
            if all(c is not None for c in drafters):
                code = int(drafters[0] or 0)
                return 128 - code if code < 0 else code  # a signal that came before it was listened for
            if time.monotonic() - handed_on > 10 * GRACE:
                return 128 + int(stop.received or signal.SIGTERM)
        else:
            lost = [(rank, c) for rank, c in enumerate(codes) if c not in (None, 0)]
            if lost:
                return _report(lost, children, placement)
            if all(c == 0 for c in codes):
                return 0
        time.sleep(0.05)


def _report(
    lost: Sequence[tuple[int, int | None]], children: list[subprocess.Popen[bytes]], placement: PlacementConfig
) -> int:
    """Say who was lost first; a process that ended with an error of its own explains those that lost their peer."""
    time.sleep(1.0)  # the others notice within moments: whoever died by a signal or said 2 (bad input) goes first
    ended: Sequence[tuple[int, int | None]] = [(r, c.returncode) for r, c in enumerate(children) if c.poll()] or lost
    rank, code = min(((r, int(c or 1)) for r, c in ended), key=lambda e: _explains(e[1]))
    if code in SAID:
        return code
    n = placement.drafters
    who = f"target {rank - n}" if rank >= n else ("process" if placement.targets == 0 else "drafter") + f" {rank}"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"{who} (rank {rank}, pid {children[rank].pid}) {how}: stopping the others", file=sys.stderr, flush=True)
    return 1


def _explains(code: int) -> int:
    """How far down the chain of consequences an exit code stands: what was killed or refused comes before what then
    lost its peer, an error of its own before the abort of a communication thread."""
    if code < 0 and code != -signal.SIGABRT:
        return 0
    if code in SAID:
        return 1
    return 2 if code > 0 else 3


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """No orphans: ask, wait, kill; what has been stopped cannot hear."""
    for child in children:
        if child.poll() is None:
            child.kill() if _is_stopped(child.pid) else child.terminate()
    deadline = time.monotonic() + GRACE / 3
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _die_with_parent(launcher: int) -> None:
    """In the child, before it starts: the kernel kills it should the launcher be killed, or it ends now if that was."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _without_resume(arguments: Sequence[str]) -> list[str]:
    """As cli.py writes them: `--resume` and its value are two."""
    if "--resume" not in arguments:
        return list(arguments)
    at = list(arguments).index("--resume")
    return [*arguments[:at], *arguments[at + 2 :]]
