"""The order of a capture and what it counts, with a stand-in for the device; tests/gpu has real ones."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from draftsmith import cuda_graphs


@pytest.fixture
def events(monkeypatch):
    """What happened, in order; every capture reserves 50 bytes."""
    said, reserved = [], [100]
    monkeypatch.setattr(cuda_graphs, "kept_bytes", {})

    class Stream:
        wait_stream = lambda self, other: said.append("wait")

    class Graph:
        replay = lambda self: said.append("launch")

    @contextlib.contextmanager
    def graph(it, capture_error_mode):
        said.append(capture_error_mode)
        reserved[0] += 50
        yield

    stands_in = dict(
        Stream=Stream, current_stream=Stream, stream=lambda s: contextlib.nullcontext(), CUDAGraph=Graph, graph=graph,
        synchronize=lambda: said.append("synchronize"), empty_cache=lambda: said.append("empty"),
        memory_reserved=lambda device: reserved[0], max_memory_allocated=lambda device: 7, current_device=lambda: 0,
    )  # fmt: skip
    with mock.patch.multiple(torch.cuda, **stands_in):
        yield said


def test_a_function_runs_twice_outside_the_graph_then_inside_and_later_as_a_launch(events):
    again, results = cuda_graphs.one_launch(lambda: events.append("run") or 5, torch.device("cuda"))
    assert events == ["wait", "run", "run", "wait", "synchronize", "empty", "thread_local", "run"] and results == 5
    again()
    assert events[-1] == "launch" and events.count("run") == 3


def test_only_what_is_kept_counts_in_the_peak(events):
    device = torch.device("cuda")
    cuda_graphs.one_launch(lambda: None, device)
    assert cuda_graphs.peak_bytes(device) == 7
    cuda_graphs.one_launch(lambda: None, device, kept=True)
    cuda_graphs.one_launch(lambda: None, torch.device("cuda:1"), kept=True)
    assert [cuda_graphs.peak_bytes(torch.device(d)) for d in ("cuda", "cuda:0", "cuda:1")] == [57, 57, 57]
    cuda_graphs.one_launch(lambda: None, device, kept=True)
    assert cuda_graphs.kept_bytes == {0: 100, 1: 50}
