"""Training by the command with targets and drafters apart, beside one process: losses, and processes that are killed.

    python benchmarks/split_runs.py CONFIG [a.b=c ...] [--targets 5] [--drafters 3] [--steps 50] [--noise a.b=c ...]
        [--together 2] [--limit 280]

Four runs of the same rows: one process; one process with `--noise`, settings that change the order of sums and nothing
else, for what rounding does by itself; as many colocated processes as there are drafters; the split.  Then the split
twice more, a drafter and a target killed after the first checkpoint.  With as many GPUs as processes over NCCL, with
fewer on shared ones over gloo: that shows losses and recovery, and no speed.  `--together` runs at once.
Writes results/split_runs_{cpu,h200_xN}.json as they end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _common import write_result
from flow.test_placements import processes_of, start

from draftsmith.config import Config, load_config
from draftsmith.files import write_text
from draftsmith.tracking import read_metrics


def configured(args: argparse.Namespace, work: Path, name: str, *overrides: str) -> tuple[Path, Config]:
    rows = (
        [] if any(f.startswith("train.rows_per_step=") for f in args.fields) else [f"rows_per_step={2 * args.drafters}"]
    )
    settings = [
        f"steps={args.steps}",
        "log_every=1",
        f"checkpoint_every={max(1, args.steps // 5)}",
        "accept_every=0",
        *rows,
    ]
    config = load_config(args.config, [
        *(f"train.{s}" for s in settings), *args.fields, f"name={name}", f"runs_dir={work}/runs",
        f"compile.cache_dir={work}/compiled", *overrides,
    ])  # fmt: skip
    path = work / f"{name}.yaml"
    write_text(path, config.dump())
    return path, config


def told(config: Config) -> dict[int, list[float]]:
    """The losses of each step, attempt by attempt: a step after the last checkpoint is told again by the next one."""
    found: dict[int, list[float]] = {}
    for attempt in sorted((config.runs_dir / config.name).glob("attempt_*")):
        for line in read_metrics(attempt / "metrics.jsonl"):
            if line["kind"] == "train":
                found.setdefault(line["step"], []).append(line["loss"])
    return found


def ended(process: subprocess.Popen[str], config: Config, limit: float) -> tuple[str, int]:
    """What it said, and how many of its processes are there ten seconds after its end."""
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()[0] + f"\nlonger than {limit:.0f} s"
    deadline = time.monotonic() + 10
    while (left := len(processes_of(config))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return said, left


def trained(args: argparse.Namespace, work: Path, name: str, *overrides: str) -> dict[str, Any]:
    path, config = configured(args, work, name, *overrides)
    begin = time.monotonic()
    process = start(path)
    said, orphans = ended(process, config, args.limit)
    steps = told(config)
    return {
        "overrides": overrides, "exit_code": process.returncode, "orphans": orphans, "whole_s": time.monotonic() - begin,
        "losses": [steps[s][-1] for s in sorted(steps)], **({"said": said[-3000:]} if process.returncode else {}),
    }  # fmt: skip


def killed(args: argparse.Namespace, work: Path, victim: str, rank: int, *overrides: str) -> dict[str, Any]:
    """The run, of which that process gets SIGKILL after the first checkpoint, and which starts again by itself."""
    path, config = configured(args, work, f"kill_{victim}", *overrides, "placement.max_restarts=1")
    begin = time.monotonic()
    process = start(path)
    attempts = config.runs_dir / config.name
    while process.poll() is None and not list(attempts.glob("attempt_*/checkpoints/step_*")):
        if time.monotonic() - begin > args.limit:
            break
        time.sleep(0.02)
    at = time.monotonic() - begin
    if (pid := dict(processes_of(config)).get(rank)) is not None:
        os.kill(pid, signal.SIGKILL)
    said, orphans = ended(process, config, args.limit)
    steps = told(config)
    lines = [line for line in said.splitlines() if "SIGKILL" in line]
    return {
        "victim": victim, "rank": rank, "killed": pid is not None, "killed_after_s": at, "exit_code": process.returncode,
        "orphans": orphans, "whole_s": time.monotonic() - begin, "said": lines, "steps": len(steps),
        "told_twice": sum(len(values) > 1 for values in steps.values()), "attempts": len(list(attempts.glob("attempt_*"))),
        "losses": [steps[s][-1] for s in sorted(steps)],
        "apart_where_told_twice": max((abs(v[0] / v[-1] - 1) for v in steps.values()), default=None),
        **({"log": said[-3000:]} if process.returncode else {}),
    }  # fmt: skip


def apart(a: list[float], b: list[float]) -> dict[str, Any] | None:
    """How far two curves are from each other, relatively: at most, and on average over the steps."""
    if not a or len(a) != len(b):
        return None
    steps = [abs(x / y - 1) for x, y in zip(a, b, strict=True)]
    return {"most": max(steps), "mean": sum(steps) / len(steps), "bit_for_bit": a == b}


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Curves beside one process's, the split's beside as many colocated drafters', and what became of the kills."""
    curves = {name: run["losses"] for name, run in runs.items()}
    one, split = curves.get("one", []), curves.get("split", [])
    kills = {name: run for name, run in runs.items() if "victim" in run}
    return {
        "beside_one_process": {n: apart(curves[n], one) for n in ("noise", "colocated", "split") if n in curves},
        "split_beside_colocated": apart(split, curves.get("colocated", [])),
        "kills_beside_split": {n: apart(curves[n], split) for n in kills},
        "kills": len(kills),
        "recovered": sum(k["killed"] and k["exit_code"] == 0 and k["steps"] == len(split) for k in kills.values()),
        "orphans": sum(run["orphans"] for run in runs.values()),
    }  # fmt: skip


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("fields", nargs="*", metavar="a.b=c")
    parser.add_argument("--targets", type=int, default=5)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--noise", nargs="+", default=[], metavar="a.b=c")
    parser.add_argument("--together", type=int, default=2, help="runs at once")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds of a run")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    split = ["placement.mode=split", f"placement.targets={args.targets}", f"placement.drafters={args.drafters}"]
    settings = {"one": [], "noise": args.noise, "colocated": [f"placement.drafters={args.drafters}"], "split": split}
    victims = {"drafter": args.drafters - 1, "target": args.drafters}
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as pool:
        work = Path(folder)
        tasks = {
            name: pool.submit(trained, args, work, name, *over)
            for name, over in settings.items()
            if over or name == "one"
        }
        for victim, rank in victims.items():
            tasks[f"kill_{victim}"] = pool.submit(killed, args, work, victim, rank, *split)
        for name, task in tasks.items():
            runs[name] = task.result()
            print(name, json.dumps({k: v for k, v in runs[name].items() if k != "losses"}), flush=True)
            kind = f"h200_x{gpus}" if gpus else "cpu"
            out = {
                "device": torch.cuda.get_device_name() if gpus else "cpu", "gpus": gpus, "together": args.together,
                "placement": f"{args.targets}+{args.drafters}", "config": args.config.name, "fields": args.fields,
                **summary(runs), "runs": runs,
            }  # fmt: skip
            path = write_result(f"split_runs_{kind}", out)
    print(path, json.dumps({k: v for k, v in out.items() if k != "runs"}))


if __name__ == "__main__":
    main()
