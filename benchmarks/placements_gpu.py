"""Placements on the GPUs of one machine: rates, waits, memory, scaling, losses.  One table at the end.

    python benchmarks/placements_gpu.py [--table FILE] [--only SUBSTRING] [--seconds 520] [--limit 170]

The list depends on the number of GPUs, the 27B stand-in's best split first; runs that would not end within `--seconds`
are left for the next call, which goes on from what is in results/placements_h200_x<N>.json (or $OUT).
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
from pathlib import Path
from typing import Any

from _common import RESULTS, write_result

from draftsmith.config import parse_config
from draftsmith.geometry import GEOMETRIES, Shape, drafter_spec, random_row
from draftsmith.plan import row_settings
from draftsmith.predict import CARDS, GIB, card_rates, dense_geometry, predict

STORED = Path(__file__).parent / "results"


def placements(gpus: int) -> list[tuple[str, list[str]]]:
    """(name, overrides): colocated on one and on all, and the splits."""
    splits = {2: [(1, 1)], 4: [(3, 1), (2, 2)], 8: [(5, 3), (6, 2), (4, 4)]}.get(gpus, [])
    out = [(f"split {m}+{n}", [f"placement.targets={m}", f"placement.drafters={n}", "placement.mode=split"])
           for m, n in splits]  # fmt: skip
    out.append((f"colocated x{gpus}", [f"placement.drafters={gpus}"]))
    return [*out, ("colocated x1", ["placement.drafters=1"])]


def one(
    geometry: str, tokens: int, overrides: list[str], rows: int, steps: int, cache: Path, limit: float
) -> dict[str, Any]:
    """One placement by the command line; what it found, or how it failed (where each process was, if it hung)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable, "-m", "draftsmith.cli", "bench", "--geometry", geometry, "--row-tokens", str(tokens),
            "--rows-per-step", str(rows), "--steps", str(steps), "--json", str(out), f"compile.cache_dir={cache}",
            *overrides,
        ]  # fmt: skip
        begin = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
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
    size = placement["targets"] + placement["drafters"]
    card = CARDS["h200"]
    said = predict(target, spec, settings, card_rates(card), size, (card.memory_gib * GIB,) * size)
    asked = [p for p in said.placements if (p.targets, p.drafters) == (placement["targets"], placement["drafters"])]
    return asked[0].rows_per_s


def table(found: dict[str, Any]) -> str:
    columns = (
        "run", "rows/s", "plan said", "tokens/s", "supervised/s", "drafters wait", "targets wait", "peak GiB",
        "first step s", "vs x1", "loss vs x1",
    )  # fmt: skip
    lines = [" | ".join(columns)]
    for name, run in found.items():
        if "failed" in run:
            lines.append(f"{name} | failed: {run['failed']}")
            continue
        alone = found.get(name.rsplit(",", 1)[0] + ", colocated x1", {})
        gain = f"{run['rows_per_s'] / alone['rows_per_s']:.2f}" if "rows_per_s" in alone else ""
        off = max((abs(a / b - 1) for a, b in zip(run["losses"], alone.get("losses", []), strict=False)), default=0.0)
        waits, processes = run["waits"], run["processes"].values()
        firsts = [p["first_step_s"] for p in processes if "first_step_s" in p]
        lines.append(
            f"{name} | {run['rows_per_s']:.2f} | {predicted(run):.2f} | {run['tokens_per_s']:.0f} | {run['supervised_tokens_per_s']:.0f} | "
            f"{waits.get('drafters_waited', 0):.0%} | {waits.get('targets_waited', 0):.0%} | "
            f"{max(p['peak_gib'] for p in processes):.1f} | {max(firsts):.1f} | {gain} | {off:.0e}"
        )
    return "\n".join(lines)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, help="print the table of such a result, and run nothing")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument(
        "--limit", type=float, default=170.0, help="seconds a run may take, start and compilation included"
    )
    parser.add_argument("--rows", type=int, default=8, help="rows a step")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["runs"]))
        return
    begin, gpus = time.monotonic(), torch.cuda.device_count()
    name = f"placements_h200_x{gpus}"
    found: dict[str, Any] = {}
    for folder in (STORED, RESULTS):
        if (folder / f"{name}.json").is_file():
            found = json.loads((folder / f"{name}.json").read_text())["runs"]
    with tempfile.TemporaryDirectory() as cache:
        for geometry, tokens in (
            ("dense-27b", 3072), ("qwen3-8b", 3072), ("small", 3072), ("dense-27b", 8192), ("qwen3-8b", 8192)
        ):  # fmt: skip
            for placement, overrides in placements(gpus):
                key = f"{geometry}, T={tokens}, {placement}"
                if args.only not in key or "rows_per_s" in found.get(key, {}):
                    continue
                if time.monotonic() - begin > args.seconds - args.limit:
                    print("left for the next call:", key)
                    continue
                # every placement of a geometry has as many rows a step, so that their losses can be compared
                steps = 50 if geometry == "small" else args.steps  # for its losses
                found[key] = one(geometry, tokens, overrides, args.rows, steps, Path(cache), args.limit)
                print(key, json.dumps(found[key])[:700], flush=True)
                write_result(name, {"device": torch.cuda.get_device_name(), "gpus": gpus, "runs": found})
    print(table(found))


if __name__ == "__main__":
    main()
