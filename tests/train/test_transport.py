"""Transfers, meeting and agreeing without other processes: what one side does when the other is slow, gone or different."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from draftsmith.config import PlacementConfig
from draftsmith.errors import InputError, PeerError
from draftsmith.target.features import TimedFeatures
from draftsmith.train import transport, waiting
from draftsmith.train.dist import World, _meet, agree
from draftsmith.train.dist import world as join
from draftsmith.train.transport import ReceiveRows, SendRows, Stopped, receive_heldout, send_heldout, serve_rows
from draftsmith.train.waiting import Waiting

NAMES = ["drafter 0 (rank 0)", "target 0 (rank 1)"]
ROW = torch.zeros(2, 3)
CPU = torch.device("cpu")


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(waiting, "LEAVE", 1e9)  # this process goes on
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=5), wait_for_workers=False)


def place(store, rank: int, seconds: float = 60) -> World:
    """In a split of one drafter and one target."""
    role = ("drafter", "target")[rank]
    return World(rank, 1, 1, role, 0, seconds, store=store, waits=Waiting(store, rank, NAMES, seconds))


class Source:
    def row(self, row):
        return ROW


def replace_transfers(monkeypatch, begin) -> None:
    monkeypatch.setattr(transport.dist, "P2POp", lambda *args, **options: None)
    monkeypatch.setattr(transport.dist, "batch_isend_irecv", begin)


def lost(*args):
    raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer")


CALLS = {
    "send": (1, lambda world: SendRows(world, 2).send(0, ROW)),
    "send held-out": (1, lambda world: send_heldout(world, [ROW])),
    "ask": (0, lambda world: ReceiveRows(world, iter([0]), (2, 3), ROW.dtype, CPU, 1)),
    "ask for held-out": (0, lambda world: receive_heldout(world, 1, (2, 3), ROW.dtype, CPU)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_peer_that_is_gone_when_a_transfer_begins_is_named(store, monkeypatch, capfd, call):
    replace_transfers(monkeypatch, lost)
    rank, begin = CALLS[call]
    world = place(store, rank)
    with pytest.raises(PeerError, match=r"row 0: the connection is lost \(Connection closed"):
        begin(world)
    assert NAMES[1 - rank] in capfd.readouterr().err


@pytest.mark.parametrize("call", ["send", "send held-out"])
def test_a_peer_that_has_stopped_is_no_failure(store, monkeypatch, call):
    replace_transfers(monkeypatch, lost)
    world = place(store, 1)
    world.stop()
    with pytest.raises(Stopped):
        CALLS[call][1](world)


def test_a_store_that_has_gone_with_the_drafters_is_no_failure(store, monkeypatch, capfd):
    replace_transfers(monkeypatch, lambda ops: [Taken()])
    monkeypatch.setattr(World, "publish", lost)
    world = place(store, 1)
    world.stop()
    with pytest.raises(Stopped):
        serve_rows(SendRows(world, 2), iter([(0, None)]), TimedFeatures(Source(), CPU))
    assert capfd.readouterr().err == ""


class Taken:
    """A transfer that ends when it is allowed to."""

    def __init__(self, allowed: threading.Semaphore | None = None, taken: list | None = None) -> None:
        self.allowed, self.taken = allowed, taken

    def wait(self) -> None:
        if self.allowed is not None:
            self.allowed.acquire()
            self.taken.append(1)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_a_target_is_never_more_than_run_ahead_rows_before_who_takes_them(store, monkeypatch, run_ahead):
    allowed, taken, begun, most = threading.Semaphore(0), [], [], []

    def begin(ops):
        begun.append(1)
        most.append(len(begun) - len(taken))
        return [Taken(allowed, taken)]

    replace_transfers(monkeypatch, begin)
    rows = iter([(g, None) for g in range(9)])
    thread = threading.Thread(
        target=serve_rows, args=(SendRows(place(store, 1), run_ahead), rows, TimedFeatures(Source(), CPU))
    )
    thread.start()
    for done in range(9):
        until = time.monotonic() + 10
        while len(begun) < min(9, done + run_ahead) and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(0.02)  # in which it could begin one more
        assert len(begun) == min(9, done + run_ahead)
        allowed.release()
    thread.join(10)
    assert not thread.is_alive() and len(taken) == 9 and max(most) == run_ahead


def test_the_rows_a_target_counts_are_those_its_gpu_has_ended(store, monkeypatch):
    """Of a row that the GPU still has to do neither the row nor its seconds count."""
    waited = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            waited.append(1)

        def elapsed_time(self, other):
            return 250.0

    said = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(World, "publish", lambda world, key, value: said.append((value["rows"], value["compute"])))
    replace_transfers(monkeypatch, lambda ops: [Taken()])
    source = TimedFeatures(Source(), torch.device("cuda"))
    source.row(None)
    source.take()  # a held-out row, before
    serve_rows(SendRows(place(store, 1), 2), ((g, None) for g in range(3)), source)
    assert said == [(0, 0.0), (1, 0.25), (2, 0.5)] and len(waited) == 3


def in_two(store, first, second, seconds: float = 60) -> None:
    """Rank 0 in a thread, rank 1 here."""
    store.set_timeout(datetime.timedelta(seconds=min(seconds, 5)))
    thread = threading.Thread(target=first, args=(place(store, 0, seconds),))
    thread.start()
    second(place(store.clone(), 1, seconds))
    thread.join(10)
    assert not thread.is_alive()


def test_work_of_the_first_may_take_longer_than_a_wait_while_it_goes_on(store):
    seconds, done = 0.5, []

    def work(tell) -> None:
        until = time.monotonic() + 3 * seconds
        while time.monotonic() < until:
            time.sleep(0.01)
            tell()
        done.append(1)

    def wait(world: World) -> None:
        world.first_alone("features", work)
        assert done

    in_two(store, lambda world: world.first_alone("features", work), wait, seconds)


@pytest.mark.parametrize("key", ["draftsmith's source", "package torch", "--new-attempt"])
def test_a_difference_is_refused_on_all_with_both_values(store, key):
    facts, said = {"package numpy": "1", "draftsmith's source": "a", "package torch": "2", "--new-attempt": "no"}, []

    def one(world: World) -> None:
        with pytest.raises(InputError) as caught:
            agree(world, facts if world.first else {**facts, key: "other"})
        said.append(str(caught.value))

    in_two(store, one, one)
    (line,) = set(said)
    assert line.endswith(f"same thing: {key}: {NAMES[1]} has 'other', rank 0 {facts[key]!r}")


def test_those_that_torchrun_starts_again_do_not_meet_those_it_has_ended(store, monkeypatch):
    """Its agent's store outlives them.  One of two that starts again alone waits for the other."""
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores: list = []
    for restart in range(2):
        first, second = (
            threading.Thread(target=lambda rank: stores.append(_meet(World(rank, 0, 2, timeout=20))), args=(rank,))
            for rank in range(2)
        )
        if restart == 0:
            first.start()
        second.start()
        if restart == 1:
            time.sleep(0.5)
            assert second.is_alive() and not stores
            first.start()
        for thread in (first, second):
            thread.join(20)
        assert len(stores) == 2
        assert not stores[0].check(["stopped"])
        stores[0].set("stopped", "0")
        stores.clear()  # rank 0's store ends with it


def test_one_process_needs_no_store():
    done = []
    with join(PlacementConfig(), "cpu") as world:
        world.first_alone("features", lambda tell: (tell(), done.append(1)))
    assert done


def test_asking_far_ahead_ends_at_the_last_row(store, monkeypatch):
    monkeypatch.setattr(transport, "_start", lambda *args: None)
    rows = transport.ReceiveRows(place(store, 0), iter([0, 1]), (2, 3), torch.float32, torch.device("cpu"), 10**12)
    assert [g for _, _, g in rows.flying] == [0, 1]


class EndsWith:
    """A transfer that ends when the next row's compute has begun, and not before."""

    def __init__(self, begun: list[int], number: int) -> None:
        self.begun, self.number = begun, number

    def is_completed(self) -> bool:
        return len(self.begun) > self.number + 1 or len(self.begun) == 4

    def wait(self) -> None:
        assert self.is_completed()


def test_a_row_is_sent_while_the_next_one_is_computed(store, monkeypatch):
    begun: list[int] = []
    sent: list[int] = []

    class Counted(Source):
        def row(self, row):
            begun.append(row)
            return ROW

    def begin(*args):
        sent.append(len(sent))
        return EndsWith(begun, sent[-1])

    monkeypatch.setattr(transport, "_start", begin)
    source = TimedFeatures(Counted(), CPU)
    serve_rows(SendRows(place(store, 1, seconds=3), 2), ((g, g) for g in range(4)), source)  # else no answer in 3 s
    assert begun == sent == [0, 1, 2, 3]


def test_rows_are_asked_for_before_they_are_needed(store, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(transport, "_start", lambda what, buffer, rank, tag: asked.append(tag) or EndsWith([0] * 4, 0))
    rows = ReceiveRows(place(store, 0), iter(range(5)), (2, 3), ROW.dtype, CPU, 2)
    for taken in range(5):
        assert asked == list(range(min(taken + 2, 5)))  # this one and the next are under way
        rows.row(None)
