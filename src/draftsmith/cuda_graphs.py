"""Functions as one launch, and the memory that they keep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

kept_bytes: dict[int, int] = {}
"""By GPU, the memory of all graphs that this process keeps to its end."""


def one_launch(
    function: Callable[[], Any], device: torch.device, *, kept: bool = False
) -> tuple[Callable[[], None], Any]:
    """(the function as one launch, its results, which every launch overwrites).  It reads and writes memory that
    stays where it is.  kept: to the end of the process, so that its memory counts in `peak_bytes`.  Raises whatever
    the function does that a capture does not allow."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries set themselves up outside the graph
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks its events meanwhile
        results = function()
    if kept:
        at = _index(device)
        kept_bytes[at] = kept_bytes.get(at, 0) + torch.cuda.memory_reserved(device) - before
    return graph.replay, results


def peak_bytes(device: torch.device) -> int:
    """Most memory of a GPU that was in use at once: what graphs keep does not count as allocated once captured."""
    return torch.cuda.max_memory_allocated(device) + kept_bytes.get(_index(device), 0)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
