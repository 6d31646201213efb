"""Alive or dead, judged from another process: real processes that finish, stop, crash, are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.provenance import heartbeat, host
from draftsmith.provenance.heartbeat import Heartbeat, run_state, write_exit
from draftsmith.rundir import RunDir, create

PROCESS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)   # a background job of a shell starts with it ignored
from pathlib import Path
from draftsmith.provenance import recorder, capture
from draftsmith.provenance.recorder import Recorder
from draftsmith.rundir import RunDir
capture.packages_once = lambda: {"installed": {}, "shadowed": [], "startup": {}}   # not what this is about
from draftsmith.errors import Interrupted
run = RunDir(Path(sys.argv[1]))
r = Recorder("train", {"name": "x"})
with r.recording(run):
    r.built({}, None, None)
    r.at(7)
    r.heart.beat()
    print("ready", flush=True)
    exec(sys.argv[2])
"""


@pytest.fixture
def run(tmp_path):
    return create(tmp_path, "x")


def start(run: RunDir, body: str, rank: int = 0) -> subprocess.Popen:
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PROCESS, str(run.path), body]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def after(run: RunDir, body: str):
    """The state once a process with this body has ended."""
    process = start(run, body)
    process.communicate(timeout=30)
    return process.returncode, run_state(run)


def test_running_then_finished(run):
    process = start(run, "time.sleep(60)")
    state = run_state(run)
    assert (
        state.how == "running"
        and f"pid {process.pid} on" in state.detail
        and "at step 7" in state.detail
        and not state.over
    )
    assert not (run.alive / "rank_0.exit.json").exists()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert run_state(run).how == "interrupted"


def test_finished(run):
    assert after(run, "pass") == (0, heartbeat.State("finished"))
    assert json.loads(run.manifest("end").read_text())["outcome"]["how"] == "finished"


def test_interrupted_says_by_what(run):
    code, state = after(run, "raise Interrupted(143, 'SIGTERM: saved at step 7')")
    assert code == 1 and (state.how, state.detail) == ("interrupted", "SIGTERM: saved at step 7")


def test_crashed_with_the_last_traceback_and_without_secrets(run):
    _, state = after(run, "raise ValueError('no such layer, token hf_AbCdEfGhIjKlMnOpQrStUvWxYz')")
    assert state.how == "crashed" and state.detail.startswith("ValueError: no such layer")
    assert "Traceback (most recent call last)" in state.traceback and "hf_AbCd" not in state.traceback + state.detail


def test_kill_9_leaves_a_silently_dead_run(run):
    process = start(run, "time.sleep(60)")
    process.kill()
    process.communicate(timeout=30)
    state = run_state(run)
    assert state.how == "dead" and "gone without a word" in state.detail and "step 7" in state.detail and state.over


def test_os_exit_is_silent_too(run):
    code, state = after(run, "os._exit(3)")
    assert (code, state.how) == (3, "dead")


def test_a_fatal_signal_leaves_its_traceback(run):
    code, state = after(run, "os.kill(os.getpid(), 11)")
    assert code == -11 and state.how == "crashed"
    assert state.detail == "Fatal Python error: Segmentation fault" and "most recent call first" in state.traceback


def test_one_dead_process_of_two(run):
    alive = start(run, "time.sleep(60)", rank=0)
    dead = start(run, "time.sleep(60)", rank=1)
    try:
        assert run_state(run).how == "running"
        dead.kill()
        dead.communicate(timeout=30)
        state = run_state(run)
        assert state.how == "dead" and state.detail.startswith("rank 1:") and "(the others: running)" in state.detail
    finally:
        alive.kill()
        alive.communicate(timeout=30)


def sign(run: RunDir, **changes: object) -> None:
    """A sign of life of this living process, changed."""
    heart = Heartbeat(run, 0)
    run.alive.mkdir(exist_ok=True)
    heart.beat()
    values = json.loads(run.sign_of_life().read_text())
    run.sign_of_life().write_text(json.dumps({**values, **changes}))


def test_start_time_is_what_the_kernel_says():
    begun = time.time()
    code = "from draftsmith.provenance import host; print(host.process_began())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert begun - 2 < float(done.stdout) < time.time() + 2


def test_a_process_that_nobody_waited_for_is_no_living_one():
    process = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert host.start_ticks(process.pid) is None
    process.wait()


def test_after_a_reboot(run):
    """The pid may well be somebody else's by then."""
    sign(run, boot_id="of the boot before", beat=time.time() - 60)
    state = run_state(run)
    assert state.how == "dead" and "was rebooted since its last sign of life" in state.detail


def test_a_pid_used_again_by_another_process(run):
    sign(run, started_ticks=host.start_ticks(os.getpid()) - 1)
    assert run_state(run).how == "dead"


@pytest.mark.parametrize(("silence", "how"), [(5, "running"), (3600, "dead")])
def test_on_another_host_silence_decides(run, silence, how):
    sign(run, boot_id="another", host="node-9", beat=time.time() - silence)
    state = run_state(run)
    assert state.how == how and ("nothing heard from node-9 for 60 minutes" in state.detail) == (how == "dead")


def test_in_another_container_silence_decides(run):
    sign(run, pid_namespace="pid:[1]", pid=2**22 - 1)
    assert run_state(run).how == "running", "its pid means nothing here"


def test_alive_but_stuck_says_since_when(run):
    sign(run, beat=time.time() - 900)
    state = run_state(run)
    assert state.how == "running" and "last sign of life 900 s ago" in state.detail


def test_a_folder_without_any_sign(run):
    assert run_state(run).how == "unknown"
    run.alive.mkdir()
    run.sign_of_life().write_text("{cut")
    assert run_state(run).how == "unknown"


def test_worst_process_speaks_for_the_run(run):
    sign(run)
    for rank, how in ((0, "finished"), (1, "crashed")):
        write_exit(run, rank, how, detail=how)
        run.sign_of_life(rank).write_text(run.sign_of_life(0).read_text())
    assert run_state(run).how == "crashed" and "rank 1: crashed (the others: finished)" in run_state(run).detail


def test_processes_that_fared_alike_need_no_telling_apart(run):
    sign(run)
    for rank in (0, 1):
        write_exit(run, rank, "finished")
        run.sign_of_life(rank).write_text(run.sign_of_life(0).read_text())
    assert run_state(run) == heartbeat.State("finished")


def test_it_beats_by_itself_and_costs_next_to_nothing(run):
    heart = Heartbeat(run, 0, seconds=0.05, sample=lambda before: (before or 0) + 1)
    heart.start()
    first = json.loads(run.sign_of_life().read_text())["beat"]
    time.sleep(0.5)
    heart.stop()
    beats = heart.samples
    assert json.loads(run.sign_of_life().read_text())["beat"] > first and beats >= 4
    assert heart.cpu_seconds / beats / heartbeat.SECONDS < 0.001, "share of a core at the real interval"
    assert not list(Path(run.path).rglob("*.tmp")) and not heart.thread.is_alive()


def test_a_sample_that_fails_does_not_stop_the_heart(run):
    heart = Heartbeat(run, 0, seconds=0.02, sample=lambda before: 1 / 0)
    heart.start()
    time.sleep(0.2)
    assert heart.thread.is_alive() and heart.samples == {"unknown": "ZeroDivisionError: division by zero"}
    heart.stop()
