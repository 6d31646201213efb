"""Placements on the GPUs of one machine: rates, waits, memory, scaling, losses.  One table at the end.

    python benchmarks/placements_gpu.py [--table FILE] [--only SUBSTRING ...] [--fresh] [--seconds 520] [--limit 240]
        [--cache DIR] [--tiny]

The list depends on the number of GPUs, the 27B stand-in's best split first; runs of few GPUs go beside each other, and
say so.  Runs that would not end within `--seconds` are left for the next call, which goes on from what is in
results/placements_h200_x<N>.json (or $OUT; `--fresh`: only from there).  `--tiny` rehearses it on a CPU
as if it had two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from _common import RESULTS, commit, gpus, write_result

from draftsmith.cards import CARDS, card_rates
from draftsmith.config import parse_config
from draftsmith.geometry import GEOMETRIES, Shape, drafter_spec, random_row
from draftsmith.plan import row_settings
from draftsmith.predict import GIB, dense_geometry, predict
from draftsmith.train.roles import rows_per_second

STORED = Path(__file__).parent / "results"
RUNS = (("dense-27b", 3072), ("qwen3-8b", 3072), ("small", 3072), ("dense-27b", 8192), ("qwen3-8b", 8192))
TINY = ["--device", "cpu", "--anchors", "16", "--block-size", "8", "--layers", "1"]


def placements(count: int) -> list[tuple[str, list[str]]]:
    """(name, overrides): colocated on one and on all, and the splits."""
    splits = {2: [(1, 1)], 4: [(3, 1), (2, 2)], 8: [(5, 3), (6, 2), (4, 4)]}.get(count, [])
    out = [(f"split {m}+{n}", [f"placement.targets={m}", f"placement.drafters={n}", "placement.mode=split"])
           for m, n in splits]  # fmt: skip
    out.append((f"colocated x{count}", [f"placement.drafters={count}"]))
    return [*out, ("colocated x1", ["placement.drafters=1"])]


def one(
    geometry: str, tokens: int, overrides: list[str], rows: int, steps: int, cache: Path, limit: float, cards: list[str]
) -> dict[str, Any]:
    """One placement by the command line on those GPUs; what it found, or how it failed (where each process was, if it hung)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable, "-m", "draftsmith.cli", "bench", "--geometry", geometry, "--row-tokens", str(tokens),
            "--rows-per-step", str(rows), "--steps", str(steps), "--json", str(out), f"compile.cache_dir={cache}",
            *(TINY if geometry == "tiny" else []), *overrides,
        ]  # fmt: skip
        begin = time.monotonic()
        where = {"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards[0] else {}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **where},
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return {"failed": f"longer than {limit:.0f} s", "said": process.communicate()[0][-12000:]}
        if process.returncode or not out.is_file():
            return {"failed": f"exit code {process.returncode}", "said": said[-1500:]}
        return {**json.loads(out.read_text()), "whole_s": time.monotonic() - begin}


def size(overrides: list[str]) -> int:
    """GPUs that a placement takes."""
    return sum(
        int(o.partition("=")[2]) for o in overrides if o.startswith(("placement.targets=", "placement.drafters="))
    )


def packed(
    needs: dict[str, int], cards: list[str], run: Callable[[str, list[str]], dict[str, Any]],
    done: Callable[[str, dict[str, Any]], None], go_on: Callable[[], bool] = lambda: True,
) -> list[str]:  # fmt: skip
    """Run each on as many GPUs as it needs, the first that fits in what is free first, until `go_on` says no; what is
    left.  `done` gets what each found, with the names of those that ran beside it for a while."""
    waiting, free = list(needs), list(cards)
    running: dict[Future[dict[str, Any]], str] = {}
    taken: dict[str, list[str]] = {}
    beside: dict[str, set[str]] = {}
    with ThreadPoolExecutor(len(cards)) as pool:
        while waiting or running:
            for key in list(waiting):
                if needs[key] <= len(free) and go_on():
                    taken[key], free = free[: needs[key]], free[needs[key] :]
                    beside[key] = set(running.values())
                    for other in running.values():
                        beside[other].add(key)
                    running[pool.submit(run, key, taken[key])] = key
                    waiting.remove(key)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key, error = running.pop(future), future.exception()
                free += taken[key]
                result = {"failed": repr(error), "said": ""} if error else future.result()
                done(key, {**result, "beside": sorted(beside[key])})
    return waiting


def predicted(run: dict[str, Any]) -> float:
    """Rows a second that `draftsmith plan` expects of the placement, by its table of GPUs."""
    shape = Shape(**run["shape"])
    geometry = GEOMETRIES[run["geometry"]]
    spec = drafter_spec(geometry, shape)
    rows = [random_row(shape, geometry.vocab, seed) for seed in range(2)]
    placement = run["placement"]
    fields = {
        "name": "plan", "device": "cpu", "target": {"model": "random", "forward": "packed", "dtype": "bfloat16"},
        "tokenize": {"max_tokens": shape.row_tokens}, "placement": placement,
        "train": {
            "row_tokens": shape.row_tokens, "anchors": shape.anchors, "rows_per_step": run["rows_per_step"],
            "steps": 1, "compute_dtype": "bfloat16", "feature_dtype": "bfloat16",
        },
    }  # fmt: skip
    settings = row_settings(parse_config(json.dumps(fields), "plan"), spec, rows, gpu=True)
    target = dense_geometry(
        layers=geometry.layers, needed=spec.feature_layers[-1] + 1, hidden=geometry.hidden,
        intermediate=geometry.intermediate, heads=geometry.heads, kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim, vocab=geometry.vocab, tied=False,
    )  # fmt: skip
    count = placement["targets"] + placement["drafters"]
    card = CARDS["h200"]
    said = predict(target, spec, settings, card_rates(card), count, (card.memory_gib * GIB,) * count)
    asked = [p for p in said.placements if (p.targets, p.drafters) == (placement["targets"], placement["drafters"])]
    return asked[0].rows_per_s


def allowed(run: dict[str, Any]) -> float | None:
    """Rows a second that the slower role of a split would reach if it never waited, by the time that each role's GPUs
    were busy in this run."""
    targets, drafters = run["placement"]["targets"], run["placement"]["drafters"]
    if not targets or "target_seconds_per_row" not in run["waits"] or "rows_timed" not in run:
        return None
    drafter = drafters * run["seconds_by_part"]["compute"] / run["rows_timed"]
    return rows_per_second(targets, drafters, run["waits"]["target_seconds_per_row"], drafter)


def busy(run: dict[str, Any]) -> str:
    """Seconds that the GPU of each role is busy for a row."""
    if "rows_timed" not in run:
        return " | "
    parts, count, placement = run["seconds_by_part"], run["rows_timed"], run["placement"]
    target = run["waits"].get("target_seconds_per_row", parts["wait"] * placement["drafters"] / count)
    return f"{target:.4f} | {parts['compute'] * placement['drafters'] / count:.4f}"


def table(found: dict[str, Any]) -> str:
    columns = (
        "run", "rows/s", "plan said", "tokens/s", "supervised/s", "drafters wait", "targets wait", "peak GiB",
        "first step s", "vs x1", "of its slower role", "target s/row", "drafter s/row", "loss vs x1", "beside",
    )  # fmt: skip
    lines = [" | ".join(columns)]
    for name, run in found.items():
        if "failed" in run:
            lines.append(f"{name} | failed: {run['failed']}")
            continue
        alone = found.get(name.rsplit(",", 1)[0] + ", colocated x1", {})
        gain = f"{run['rows_per_s'] / alone['rows_per_s']:.2f}" if "rows_per_s" in alone else ""
        limit = allowed(run)
        share = f"{run['rows_per_s'] / limit:.0%}" if limit else ""
        off = max((abs(a / b - 1) for a, b in zip(run["losses"], alone.get("losses", []), strict=False)), default=0.0)
        waits, processes = run["waits"], run["processes"].values()
        firsts = [p["first_step_s"] for p in processes if "first_step_s" in p]
        lines.append(
            f"{name} | {run['rows_per_s']:.2f} | {predicted(run):.2f} | {run['tokens_per_s']:.0f} | {run['supervised_tokens_per_s']:.0f} | "
            f"{waits.get('drafters_waited', 0):.0%} | {waits.get('targets_waited', 0):.0%} | "
            f"{max(p['peak_gib'] or 0 for p in processes):.1f} | {max(firsts):.1f} | {gain} | {share} | {busy(run)} | {off:.0e} | {len(run.get('beside', []))}"
        )
    return "\n".join(lines)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, help="print the table of such a result, and run nothing")
    parser.add_argument("--only", action="append", default=[], help="names that contain this")
    parser.add_argument("--fresh", action="store_true", help="without what is in results/")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds a run may take, start and compilation included"
    )
    parser.add_argument(
        "--rows", type=int, help="a step: default 8, on eight GPUs 24, so that three drafters share them"
    )
    parser.add_argument("--steps", type=int, help="timed: default 10, on eight GPUs 4; half of it at T=8192")
    parser.add_argument("--cache", type=Path, help="folder of the compile cache: default a fresh one")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["runs"]))
        return
    begin, cards = time.monotonic(), ["", ""] if args.tiny else gpus()
    name = f"placements_{'tiny' if args.tiny else 'h200'}_x{len(cards)}"
    device = "cpu" if args.tiny else torch.cuda.get_device_name()
    found: dict[str, Any] = {}
    rows, steps = ((args.rows or 24), (args.steps or 4)) if len(cards) == 8 else ((args.rows or 8), (args.steps or 10))
    cases: dict[str, tuple[str, int, int, list[str]]] = {}
    if args.fresh and RESULTS == STORED:
        parser.error("--fresh: set OUT to another folder, or what is in results/ would be lost")
    for folder in () if args.tiny else (STORED, RESULTS)[args.fresh :]:
        if (folder / f"{name}.json").is_file():
            found = json.loads((folder / f"{name}.json").read_text())["runs"]
    for geometry, tokens in (("tiny", 256),) if args.tiny else RUNS:
        for placement, overrides in placements(len(cards)):
            key = f"{geometry}, T={tokens}, {placement}"
            count = 50 if geometry == "small" else steps if tokens < 8192 else (steps + 1) // 2  # 50 for its losses
            there = found.get(key, {})
            # others of the geometry are held against it: as many rows a step
            if (not args.only or any(o in key for o in args.only)) and (
                (there.get("rows_per_step"), there.get("rows_timed")) != (rows, count * rows)
            ):
                cases[key] = geometry, tokens, count, overrides
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or Path(folder)

        def run(key: str, mine: list[str]) -> dict[str, Any]:
            geometry, tokens, count, overrides = cases[key]
            return one(geometry, tokens, overrides, rows, count, cache, args.limit, mine)

        def done(key: str, result: dict[str, Any]) -> None:
            if "rows_per_s" in result or "rows_per_s" not in found.get(key, {}):  # a failure takes no result's place
                found[key] = {**result, "commit": commit()}
            print(f"{time.monotonic() - begin:.0f} s", key, json.dumps(result)[:700], flush=True)
            write_result(name, {"device": device, "gpus": len(cards), "runs": found})

        left = packed(
            {key: size(overrides) for key, (*_, overrides) in cases.items()}, cards, run, done,
            lambda: time.monotonic() - begin <= args.seconds - args.limit,
        )  # fmt: skip
    if left:
        print("left for the next call:", "; ".join(left))
    print(table(found))


if __name__ == "__main__":
    main()
