"""How long a process waits for the others, and whom it names when that was too long.

Every process keeps in the common store what it waits for, if that takes longer than a moment.  When the time is over,
the peers that wait for nothing are those that hang.  Calls that never return (a store behind a cut link or in a
stopped process) are ended by a thread, with the process.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from draftsmith.errors import PeerError

MOMENT = 1.0
"""Seconds of waiting before the others are told; and that torch gets beyond the time to give up by itself."""
ASK = 2.0
"""Seconds that the store has to answer a question about the others."""
LEAVE = 10.0
"""Seconds between giving up and the end of the process, for what is still to be written."""


class Waiting:
    """names: of all ranks.  store: of all processes; used here through a connection of its own, since another call may
    hold the first.  seconds: how long a wait may take."""

    def __init__(self, store: Any, rank: int, names: Sequence[str], seconds: float) -> None:
        self.store, self.rank, self.names, self.seconds = store.clone(), rank, names, seconds
        self.wait: tuple[float, str] | None = None
        self.leave_at: float | None = None
        self.saying = threading.Lock()  # taken by who says the line, and never given back
        threading.Thread(target=self._tell, daemon=True).start()
        threading.Thread(target=self._end, daemon=True).start()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Waiting for `what`, as part of an outer wait if there is one.  Raises PeerError, and has then said why."""
        if self.wait is not None:
            yield
            return
        self.wait = (time.monotonic(), what)
        try:
            yield
        except RuntimeError as error:  # of torch.distributed: lost or too late
            if isinstance(error, PeerError):
                raise
            self.give_up(error)
        finally:
            self.wait = None

    def give_up(self, error: Exception | None = None) -> NoReturn:
        """Say in one line who did not answer; the process ends in bounded time, whatever still blocks it."""
        self.saying.acquire()
        line = self._line(error)
        self.leave_at = time.monotonic() + LEAVE
        print(line, file=sys.stderr, flush=True)
        raise PeerError(line) from error

    def _line(self, error: Exception | None) -> str:
        begun, what = self.wait or (time.monotonic(), "nothing")
        waited = time.monotonic() - begun
        start = f"draftsmith train: {self.names[self.rank]} waited {waited:.0f} s for {what}: "
        if error is not None and waited < 0.9 * self.seconds:
            first = re.sub(
                r"^\[\S+\] |\. This is typically.*", "", str(error).splitlines()[0]
            )  # gloo's source, its guess
            return f"{start}the connection is lost ({first[:120]})"
        try:
            silent = [name for name, told in self._others().items() if not told]
        except RuntimeError:
            return f"{start}{self.names[0]}, which keeps the store of all processes, does not answer"
        return start + (f"{', '.join(silent)} did not answer" if silent else "all others wait too")

    def say(self, key: str, value: str) -> None:
        """Publish something if the store can still be reached: nobody depends on it."""
        with suppress(RuntimeError):
            within(ASK, lambda: self.store.set(key, value))

    def finish(self) -> None:
        """Nobody is to wait for this process any more."""
        self.say(f"waits/{self.rank}", "nothing more")

    def _others(self) -> dict[str, str]:
        """What every other process waits for, "" for nothing.  Raises RuntimeError if the store does not answer."""

        def ask() -> dict[str, str]:
            keys = {name: f"waits/{r}" for r, name in enumerate(self.names) if r != self.rank}
            return {n: self.store.get(k).decode() if self.store.check([k]) else "" for n, k in keys.items()}

        return dict(within(ASK, ask))

    def _tell(self) -> None:
        """Tell the others what this process waits for.  Ends with the store."""
        told: tuple[float, str] | None = None
        while True:
            time.sleep(MOMENT / 4)
            wait = self.wait
            if wait is not None and time.monotonic() - wait[0] < min(MOMENT, self.seconds / 4):
                wait = None
            if wait != told:
                told = wait
                try:
                    self.store.set(f"waits/{self.rank}", wait[1] if wait else "")
                except RuntimeError:
                    return

    def _end(self) -> None:
        while True:
            time.sleep(MOMENT / 4)
            wait, now = self.wait, time.monotonic()
            if self.leave_at is not None:
                if now > self.leave_at:
                    os._exit(1)
            elif wait and now - wait[0] > self.seconds + MOMENT and self.saying.acquire(blocking=False):
                print(self._line(None), file=sys.stderr, flush=True)
                os._exit(1)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The answer of a call that may never return.  Raises RuntimeError, its own or for being too late."""
    found: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise errors[0] if errors else RuntimeError(f"no answer for {seconds:g} s")
    return found[0]
