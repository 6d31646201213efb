"""Progress: a line per interval where there is no terminal, one line that is drawn over where there is one."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from draftsmith.progress import Progress

NOTE = "loss 3.210  accuracy 0.250  waits: features 40%, data 1%  12.5 rows/s (98% of last-good)"
DRAW = f"""
import time
from draftsmith.progress import Progress
with Progress("training", 4, "steps") as p:
    for _ in range(4):
        time.sleep(0.15)
        p.advance(1, {NOTE!r})
"""


def test_plain_lines_have_step_rate_eta_and_note(capsys):
    with Progress("training", 4, "steps", every_seconds=0.0) as progress:
        for _ in range(4):
            progress.advance(1, NOTE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for done, line in enumerate(lines, 1):
        assert re.fullmatch(rf"training: {done}/4 steps, \S+/s, ETA \d+ s  {re.escape(NOTE)}", line)


def test_lines_come_at_intervals_and_at_the_end(capsys):
    with Progress("training", 300, "steps", every_seconds=60.0) as progress:
        for _ in range(300):
            progress.advance()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_quiet_is_quiet(capsys):
    with Progress("training", 2, "steps", every_seconds=0.0, quiet=True) as progress:
        progress.advance(2, NOTE)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_line_that_is_drawn_over():
    mine, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "220", "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", DRAW], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    got = b""
    try:
        while piece := os.read(mine, 65536):
            got += piece
    except OSError:  # Linux: the other end was closed
        pass
    assert child.wait(60) == 0
    os.close(mine)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", got.decode())
    assert "4/4" in text and "ETA" in text
    for part in ("loss 3.210", "accuracy 0.250", "features 40%", "98% of last-good"):
        assert part in text
    assert b"\x1b[2K" in got and text.count("\n") <= 2
