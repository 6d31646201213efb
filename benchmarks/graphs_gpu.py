"""A small model's step with and without CUDA graphs: milliseconds of a step beside those its kernels need.

    python benchmarks/graphs_gpu.py [--tiny]

Random weights of SmolLM2-135M's widths, rows of 4,096 tokens, one a step.  `--tiny` rehearses it on a CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import statistics
import tempfile
import time
from typing import Any

from _common import write_result

STEPS, ROUNDS = 20, 5
SETTINGS = ((2048, 8), (1024, 5))
"""Anchors a row and features: those of examples/smollm2-135m-gpu.yaml, and of the arms it is compared with."""


def timed(anchors: int, features: int, graphs: bool, tiny: bool, cache: str) -> dict[str, Any]:
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from draftsmith.bench import Bench
    from draftsmith.geometry import Shape

    shape = Shape(256, 16, 8, 2, 3, documents=2) if tiny else Shape(4096, anchors, 16, 5, features, documents=12)
    fields = ["train.optimizer=muon", f"compile.graphs={str(graphs).lower()}", f"compile.cache_dir={cache}"]
    bench = Bench("tiny" if tiny else "smollm2-135m", shape, "cpu" if tiny else "cuda",
                  fields=[*fields, *(["compile.enabled=true", "target.forward=packed"] if tiny else [])])  # fmt: skip
    gc.collect()  # a bench before
    if not tiny:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bench.build()
    assert bench.step is not None
    wait = (lambda: None) if tiny else torch.cuda.synchronize
    number = 0

    def step() -> Any:
        nonlocal number
        number += 1
        return bench.step.step(number, [bench.rows[number % 4]], bench.optimizer, 1e-3)

    losses = [float(s.weighted) / s.denominator for s in (step() for _ in range(6))]
    each = []
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        each.append((time.perf_counter() - begin) / STEPS * 1e3)
    activities = [ProfilerActivity.CPU, *([] if tiny else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as seen:
        for _ in range(3):
            step()
        wait()
    events = seen.events() or []
    # a range that the program names is on the device's line too, over the kernels in it
    device = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    return {
        "anchors": anchors, "features": features, "graphs": graphs, "step_ms": statistics.median(each), "each_ms": each,
        "kernels_ms": sum(e.time_range.elapsed_us() for e in device) / 3e3,
        "launches": sum("LaunchKernel" in e.name or "GraphLaunch" in e.name for e in events) / 3,
        "reserved_gib": None if tiny else torch.cuda.max_memory_reserved() / 2**30,
        "losses": losses, "target": bench.target.forward, "attention": bench.attention,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(400, exit=True)
    from draftsmith import env

    env.prepare()
    import torch

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for anchors, features in SETTINGS:
            for graphs in (False, True):
                key = f"{anchors} anchors, {features} features, graphs {'on' if graphs else 'off'}"
                found[key] = timed(anchors, features, graphs, args.tiny, cache)
                print(key, found[key], flush=True)
                torch._dynamo.reset()
                torch._dynamo.config.error_on_recompile = False
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(write_result("graphs_tiny" if args.tiny else "graphs_h200", {"device": device, "runs": found}))


if __name__ == "__main__":
    main()
