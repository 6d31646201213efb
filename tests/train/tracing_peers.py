"""What test_threads.py starts: drafters that attend by compiled flex_attention while one of them traces.

    python tracing_peers.py threads      a thread of the same process traces
    python tracing_peers.py processes    a process each, on one compile cache; they compile at once and trace in turn

Prints one JSON line.  Inference only: flex_attention has no backward on a CPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from draftsmith.drafter.attention import attend, build_masks

LIMIT = 240.0
"""Seconds after which a process that hangs prints its threads' stacks and ends."""
DRAFTERS = 2
CONTEXT, ANCHORS, BLOCK = 1024, 32, 8


class Drafter:
    """One attention layer's work on a row of four documents, compiled by its first call."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        high = np.arange(ANCHORS) * (CONTEXT // ANCHORS) + 8
        low = high // (CONTEXT // 4) * (CONTEXT // 4)
        self.masks = {
            kind: build_masks(kind, low, high, CONTEXT, BLOCK, [None], torch.device("cpu"))[0]
            for kind in ("flex", "dense")
        }
        queries = ANCHORS * BLOCK
        self.qkv = [
            torch.randn(heads, n, 32, generator=generator)
            for heads, n in ((4, queries), (2, CONTEXT + queries), (2, CONTEXT + queries))
        ]
        self()

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        return attend(*self.qkv, self.masks["flex"])

    def observe(self) -> dict[str, Any]:
        """Error message of one call, or what the profiler saw of it, the fastest of some calls, and the result's error."""
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                out = self()
        except RuntimeError as error:
            return {"raised": str(error)}
        names = {event.key for event in profile.key_averages()}
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            self()
            seconds.append(time.perf_counter() - begin)
        return {
            "dense": "aten::_softmax" in names,
            "fused": any("CompiledFxGraph" in name for name in names),
            "seconds": min(seconds),
            "error": float((out - attend(*self.qkv, self.masks["dense"])).abs().max()),
        }


@contextlib.contextmanager
def trace_held_open() -> Iterator[None]:
    """While the body runs, a thread of this process is inside make_fx, as AOTAutograd and flex's own autograd often are."""
    inside, release = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        release.wait(LIMIT)
        return x + 1

    tracer = threading.Thread(target=lambda: make_fx(traced)(torch.ones(2)))
    tracer.start()
    try:
        assert inside.wait(LIMIT)
        yield
    finally:
        release.set()
        tracer.join()


def observe_both(drafter: Drafter) -> dict[str, Any]:
    """With torch's check as it comes, and switched off, as some do to be rid of the error."""
    found = {}
    for check in (True, False):
        torch._dynamo.config.error_on_nested_fx_trace = check
        found["check on" if check else "check off"] = drafter.observe()
    return found


def threads() -> list[dict[str, Any]]:
    """Alone, beside a trace, and after it."""
    drafter = Drafter()
    found = [observe_both(drafter)]
    with trace_held_open():
        found.append(observe_both(drafter))
    return [*found, observe_both(drafter)]


def processes() -> list[dict[str, Any]]:
    """Of all processes: beside the trace of each other one, and at the end."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(DRAFTERS), context.SimpleQueue()
    others = [context.Process(target=one_process, args=(rank, barrier, results)) for rank in range(1, DRAFTERS)]
    for process in others:
        process.start()
    one_process(0, barrier, results)
    return [found for _ in range(DRAFTERS) for found in results.get()]


def one_process(rank: int, barrier: Any, results: Any) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    barrier.wait(LIMIT)
    drafter = Drafter()
    found = []
    for tracer in range(DRAFTERS):
        with trace_held_open() if tracer == rank else contextlib.nullcontext():
            barrier.wait(LIMIT)
            if tracer != rank:
                found.append(observe_both(drafter))
            barrier.wait(LIMIT)
    found.append(observe_both(drafter))
    results.put(found)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    print(json.dumps(threads() if sys.argv[1] == "threads" else processes()))
