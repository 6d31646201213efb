"""The wish to stop, from a signal or the throughput floor, and that all drafters follow it after the same step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import TOO_SLOW
from draftsmith.train.dist import World


@dataclass
class StopRequest:
    """Set by SIGINT or SIGTERM, or by the throughput floor; looked at between steps."""

    signal: int | None = None
    slow: bool = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()

    def note(number: int, frame: Any) -> None:
        request.signal = number

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agree_to_stop(world: World, stop: StopRequest) -> int | None:
    """The exit code to stop with, the same on every drafter after the same step; None: go on."""
    wishes = (stop.signal == signal.SIGTERM, stop.signal == signal.SIGINT, stop.slow)
    terminates, interrupts, slow = world.sum_host([float(wish) for wish in wishes])
    if terminates or interrupts:
        return 128 + (signal.SIGTERM if terminates else signal.SIGINT)
    return TOO_SLOW if slow else None
