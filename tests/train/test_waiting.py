"""Who is named when a wait takes too long, with a store in this process."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from draftsmith.errors import PeerError
from draftsmith.train import waiting
from draftsmith.train.waiting import Waiting, within

NAMES = ["drafter 0 (rank 0)", "drafter 1 (rank 1)", "target 0 (rank 2)"]


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=5), wait_for_workers=False)


def failed(waits: Waiting, seconds: float, message: str = "no answer") -> str:
    with pytest.raises(PeerError) as caught, waits.on("row 3"):
        time.sleep(seconds)
        raise RuntimeError(message)
    waits.leave_at = None  # this process goes on
    waits.saying.release()
    return str(caught.value)


def test_the_peers_that_wait_for_nothing_are_named(store, capfd, monkeypatch):
    monkeypatch.setattr(waiting, "MOMENT", 0.2)
    seconds = 0.8
    mine, other = Waiting(store, 0, NAMES, seconds), Waiting(store, 1, NAMES, 60)
    with other.on("the gradients"):
        line = failed(mine, seconds)
        assert line == f"draftsmith train: {NAMES[0]} waited 1 s for row 3: {NAMES[2]} did not answer"
        assert capfd.readouterr().err.splitlines() == [line]
        store.set("waits/2", "drafter 0")
        assert failed(mine, seconds).endswith("all others wait too")
    time.sleep(0.2)
    assert failed(mine, seconds).endswith(f"{NAMES[1]} did not answer"), "it does not wait any more"
    other.finish()
    assert failed(mine, seconds).endswith("all others wait too"), "it has ended"


def test_a_lost_connection_is_said_without_blaming_those_who_are_busy(store):
    waits = Waiting(store, 0, NAMES, 60)
    line = failed(waits, 0, "[/a/pair.cc:553] Connection closed by peer. This is typically the end.\nand more")
    assert line.endswith("waited 0 s for row 3: the connection is lost (Connection closed by peer)")


def test_an_inner_wait_counts_from_the_outer_and_other_errors_pass(store):
    waits = Waiting(store, 0, NAMES, 60)
    with waits.on("outer"):
        begun = waits.wait
        with waits.on("inner"):
            assert waits.wait == begun
        assert waits.wait == begun
    assert waits.wait is None
    with pytest.raises(ValueError, match="bad"), waits.on("x"):
        raise ValueError("bad")


def test_a_call_that_never_returns_is_given_up():
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no answer for 0\.2 s"):
        within(0.2, lambda: time.sleep(5))
    assert time.monotonic() - begin < 2
    assert within(1, lambda: 7) == 7
