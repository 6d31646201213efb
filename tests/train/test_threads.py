"""Why drafters are processes: beside a trace in another thread a compiled flex_attention fails, or runs dense in silence.

On torch 2.11 every compile is such a trace; on 2.13 those outside a Dynamo compile are (make_fx, flex's own autograd).
From 2.14 the flag that the call reads belongs to a thread and this fault is gone; others of the kind are not (the
patched nn.Module.__call__ is still one for all threads), so the arrangement stays and is tested on every version.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
CHILD = Path(__file__).with_name("tracing_peers.py")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("g++") is None or not torch.cpu._is_avx2_supported(),
        reason="torch.compile of flex_attention on a CPU needs g++ and AVX2",
    ),
]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Processes first, on an empty compile cache, then threads, which find it full: the fault is in the call."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    found = {}
    for arrangement in ("processes", "threads"):
        done = subprocess.run(
            [sys.executable, str(CHILD), arrangement], env=environment, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, f"{arrangement}: {done.stderr[-4000:]}"
        found[arrangement] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_fused(seen: dict) -> None:
    assert "raised" not in seen, seen
    assert seen["fused"] and not seen["dense"] and seen["error"] < 1e-5, seen


@pytest.mark.skipif(VERSION >= (2, 14), reason="from torch 2.14 the flag belongs to a thread: this fault is gone")
def test_a_compiled_call_beside_another_threads_trace_raises(observed):
    _, beside, _ = observed["threads"]
    message = "Detected that you are using FX to symbolically trace a dynamo-optimized function"
    assert message in beside["check on"]["raised"]


@pytest.mark.skipif(VERSION >= (2, 14), reason="from torch 2.14 the flag belongs to a thread: this fault is gone")
def test_with_the_error_switched_off_it_runs_dense_without_a_word(observed):
    """The right numbers, several times slower, although compiled with fullgraph=True."""
    alone, beside, _ = observed["threads"]
    seen = beside["check off"]
    assert "raised" not in seen and seen["dense"] and not seen["fused"] and seen["error"] < 1e-5, seen
    assert seen["seconds"] > 2 * alone["check off"]["seconds"]  # 14 times, measured


def test_the_same_call_is_fused_before_and_after_the_trace(observed):
    before, _, after = observed["threads"]
    for seen in (*before.values(), *after.values()):
        assert_fused(seen)


@pytest.mark.skipif(VERSION < (2, 14), reason="before torch 2.14 one flag serves all threads: the tests above show it")
def test_from_2_14_the_call_beside_a_trace_is_fused(observed):
    for seen in observed["threads"][1].values():
        assert_fused(seen)


def test_processes_that_compile_at_once_and_trace_in_turn_always_run_fused(observed):
    """Our arrangement, on the same torch: neither the error nor the dense fallback."""
    assert len(observed["processes"]) == 4  # two processes, beside the other's trace and after it
    for seen in observed["processes"]:
        assert_fused(seen["check on"])
        assert_fused(seen["check off"])
