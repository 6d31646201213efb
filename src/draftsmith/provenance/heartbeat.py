"""Alive or dead: what a process leaves behind so that another one can tell, also after kill -9 or a reboot.

alive/rank_<r>.json        pid, boot id, start time, last sign of life; rewritten every few seconds by a thread
alive/rank_<r>.exit.json   how it ended, written by the process itself as its last word
alive/rank_<r>.fault.txt   the traceback of a fatal signal (segmentation fault, abort), written by faulthandler
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.files import write_text
from draftsmith.provenance import host
from draftsmith.provenance.facts import attempt
from draftsmith.rundir import RunDir

SECONDS = 10.0
"""Between two signs of life."""
SILENT_SECONDS = 120.0
"""A process that cannot be looked up (another host, another container) counts as dead after so much silence."""


class Heartbeat:
    """A thread that says "alive" until `stop`.  It touches neither torch nor the loop; `step` is set by the loop.

    sample: asked at every beat (GPU temperatures and throttling); its last result is kept in `last_sample`.
    """

    def __init__(
        self, run: RunDir, rank: int, *, seconds: float = SECONDS, sample: Callable[[Any], Any] | None = None
    ) -> None:
        self.path, self.fault = run.sign_of_life(rank), run.fault(rank)
        self.seconds, self.sample, self.samples = seconds, sample, None
        self.identity = host.identity()
        self.begun = time.time()
        self.step: int | None = None
        self.step_time: float | None = None
        self.cpu_seconds = 0.0
        """CPU time this thread has used so far."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)
        self._fault_file: Any = None

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.beat()
        self.thread.start()
        if not faulthandler.is_enabled():  # else somebody else wants the traceback
            self._fault_file = open(self.fault, "w", encoding="utf-8")  # noqa: SIM115 (open for the run's life)
            faulthandler.enable(self._fault_file)

    def at(self, step: int) -> None:
        self.step, self.step_time = step, time.time()

    def beat(self) -> None:
        """One sign of life, written whole; not flushed to the disk, which can take long."""
        values = {**self.identity, "begun": self.begun, "beat": time.time(), "every": self.seconds}
        values |= {"step": self.step, "step_time": self.step_time}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # a full disk must not end the run; silence says it all
            temporary.write_text(json.dumps(values), encoding="utf-8")
            os.replace(temporary, self.path)

    def stop(self) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join(self.seconds)
        if self._fault_file is not None:
            faulthandler.disable()
            self._fault_file.close()
            self.fault.unlink(missing_ok=True)

    def _loop(self) -> None:
        while not self.over.wait(self.seconds):
            if self.sample is not None:
                self.samples = attempt(self.sample, self.samples)
            self.beat()
            self.cpu_seconds = time.thread_time()


def write_exit(run: RunDir, rank: int, how: str, **facts: Any) -> None:
    """The last word of a process: finished, interrupted or crashed."""
    write_text(run.exit(rank), json.dumps({"how": how, "time": time.time(), **facts}, indent=1))


@dataclass(frozen=True)
class State:
    """What became of a run, or of one process of it."""

    how: str
    """running, finished, interrupted, crashed, dead (it ended without a word) or unknown."""
    detail: str = ""
    traceback: str | None = None

    @property
    def over(self) -> bool:
        return self.how != "running"


WORST_FIRST = ("crashed", "dead", "unknown", "interrupted", "running", "finished")


def run_state(run: RunDir) -> State:
    """The state of a run: that of the process that fared worst."""
    names = (re.fullmatch(r"rank_(\d+)\.json", p.name) for p in run.alive.glob("rank_*.json"))
    ranks = sorted(int(m[1]) for m in names if m)
    if not ranks:
        return State("unknown", "it left no sign of life: nothing was recorded, or by an older version")
    states = {rank: rank_state(run, rank) for rank in ranks}
    rank = min(ranks, key=lambda r: WORST_FIRST.index(states[r].how))
    state = states[rank]
    if len(ranks) == 1 or all(s == state for s in states.values()):
        return state
    others = sorted({s.how for r, s in states.items() if r != rank})
    return State(state.how, f"rank {rank}: {state.detail} (the others: {', '.join(others)})", state.traceback)


def rank_state(run: RunDir, rank: int) -> State:
    """The state of one process, judged from its own last word, else from the machine's process table."""
    try:
        return _rank_state(run, rank)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return State("unknown", f"its sign of life is damaged ({type(error).__name__}: {error})")


def _rank_state(run: RunDir, rank: int) -> State:
    last = _read(run.exit(rank))
    if last is not None:
        return State(str(last["how"]), str(last.get("detail", "")), last.get("traceback"))
    sign = _read(run.sign_of_life(rank))
    if sign is None:
        return State("unknown", f"{run.sign_of_life(rank)} cannot be read")
    why = _why_dead(sign)
    if why is None:
        return State("running", _progress(sign))
    fault = run.fault(rank).read_text(errors="replace").strip() if run.fault(rank).is_file() else ""
    if fault:
        return State("crashed", fault.splitlines()[0], fault)
    return State("dead", f"{why}; {_progress(sign)}")


def _why_dead(sign: dict[str, Any]) -> str | None:
    """Why the process that gave this sign cannot be alive, or None if it is, as far as can be told."""
    mine = host.identity()
    if (sign["boot_id"], sign["pid_namespace"]) == (mine["boot_id"], mine["pid_namespace"]):
        if host.start_ticks(sign["pid"]) == sign["started_ticks"]:
            return None
        return f"process {sign['pid']} is gone without a word (killed, or out of memory)"
    # another boot, host or container: its process table is out of reach, so silence decides
    silence = time.time() - sign["beat"]
    if sign["host"] == mine["host"] and sign["boot_id"] != mine["boot_id"] and silence > 3 * sign["every"]:
        return f"{sign['host']} was rebooted since its last sign of life"
    if silence > max(SILENT_SECONDS, 5 * sign["every"]):
        return f"nothing heard from {sign['host']} for {silence / 60:.0f} minutes"
    return None


def _progress(sign: dict[str, Any]) -> str:
    silence = time.time() - sign["beat"]
    step = f", then at step {sign['step']}" if sign["step"] is not None else ""
    return f"pid {sign['pid']} on {sign['host']}, last sign of life {silence:.0f} s ago{step}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
