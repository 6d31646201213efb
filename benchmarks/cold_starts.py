"""Cold starts of drafter processes at once, three unless told: no crash, no hang, no fallback.

    python benchmarks/cold_starts.py [--device cpu|cuda] [--starts N] [--warm N] [--together N] [--processes N]

Each start has a compile cache of its own, empty; every process compiles target and drafter and trains a few steps.
`--warm` of them are followed, at the end, by a second start on the cache they left.  `--together` cold starts run side
by side.  `--processes` of as many GPUs have one each.  Writes results/cold_starts_{cpu,cpu_xN,h200,h200_xN}.json (of
other than three processes on one GPU, or one on each of several: ..._shared_by_N), with $OUT as they end, in their order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, STORED, at_least_one, kind_of, write_result

SHAPES = {
    "cpu": ["--geometry", "tiny", "--row-tokens", "256", "--anchors", "16", "--block-size", "8", "--layers", "1"],
    "cuda": ["--geometry", "small", "--row-tokens", "1024", "--anchors", "64", "--layers", "1"],
}


def start(device: str, processes: int, cache: Path, limit: float) -> dict[str, Any]:
    """One start: {"how": ok, crash, hang or fallback, "seconds": whole, "first_step_s": of the slowest process}."""
    out = cache.parent / "found.json"
    out.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "draftsmith.cli", "bench", *SHAPES[device], "--device", device, "--rows-per-step", str(processes),
        "--steps", "2", "--json", str(out), f"placement.drafters={processes}", "compile.enabled=true",
        "target.forward=packed", f"compile.cache_dir={cache}",
    ]  # fmt: skip
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()  # the processes it started end with it
        return {"how": "hang", "seconds": time.monotonic() - begin, "said": process.communicate()[0][-2000:]}
    seconds = time.monotonic() - begin
    if process.returncode or not out.is_file():
        how = "fallback" if "compiled anew" in said or "uncompiled" in said or "since the warm-up" in said else "crash"
        return {"how": how, "seconds": seconds, "said": said[-2000:]}
    facts = json.loads(out.read_text())["processes"].values()
    fell_back = [p for p in facts if p["compiled"]["target"] != "compiled" or "warning" in str(p["said"])]
    return {
        "how": "fallback" if fell_back else "ok",
        "seconds": seconds,
        "first_step_s": max(p["first_step_s"] for p in facts),
        "cache": sorted({p["compiled"]["cache"] for p in facts}),
        **({"said": fell_back} if fell_back else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--starts", type=at_least_one, default=20)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--processes", type=at_least_one, default=3)
    parser.add_argument("--together", type=at_least_one, default=1, help="cold starts side by side")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a start counts as hanging")
    args = parser.parse_args()
    each: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as pool:
        for kind, count in (("cold", args.starts), ("warm", min(args.warm, args.starts))):
            # a warm one alone, as the cold ones have made their caches by then
            numbers = range(count)
            run = partial(numbered, args, Path(folder))
            for found in pool.map(run, numbers) if kind == "cold" else map(run, numbers):
                each[kind].append(found)
                if RESULTS != STORED:
                    write_result(result_name(args), summary(args, each))
    print(write_result(result_name(args), summary(args, each)))


def numbered(args: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    cache = folder / str(number) / "cache"
    cache.parent.mkdir(exist_ok=True)
    found = start(args.device, args.processes, cache, args.limit)
    print(number, json.dumps(found), flush=True)
    return found


def summary(args: argparse.Namespace, each: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    cold, warm = each["cold"], each["warm"]
    every = [*cold, *warm]
    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "together": args.together,
        "processes": args.processes,
        "shape": SHAPES[args.device],
        "starts": len(cold),
        **{f"{how}s" if how != "crash" else "crashes": sum(s["how"] == how for s in every)
           for how in ("crash", "hang", "fallback")},
        "cold_s": statistics.median([s["first_step_s"] for s in cold if "first_step_s" in s] or [0.0]) or None,
        "warm_s": max((s["first_step_s"] for s in warm if "first_step_s" in s), default=None),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "each": each,
    }  # fmt: skip


def result_name(args: argparse.Namespace) -> str:
    if args.device == "cpu":
        return "cold_starts_cpu" + ("" if args.processes == 3 else f"_x{args.processes}")
    gpus = torch.cuda.device_count()
    usual = args.processes == (3 if gpus == 1 else gpus)
    many = "" if gpus == 1 else f"_x{gpus}"
    return f"cold_starts_{kind_of('cuda')}{many}" + ("" if usual else f"_shared_by_{args.processes}")


if __name__ == "__main__":
    main()
