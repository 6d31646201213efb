"""Training by the command with targets and drafters apart, beside one process: losses, and processes that are killed.

    python benchmarks/split_runs.py CONFIG [a.b=c ...] [--targets 5] [--drafters 3] [--steps 50] [--noise a.b=c ...]
        [--together 2] [--limit 280]

Runs of the same rows: one process; one process with `--noise`, settings that change how numbers are rounded and nothing
else, for what that does by itself; as many colocated processes as there are drafters; the split.  Then the split twice
more, a drafter and a target killed after the first checkpoint.  With as many GPUs as processes over NCCL, with fewer on
shared ones over gloo: that shows losses and recovery, and no speed.  `--together` runs at once.
Writes results/split_runs_{cpu,h200_xN}.json, with $OUT as runs end.
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
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _common import RESULTS, STORED, at_least_one, kind_of, write_result
from flow.test_placements import processes_of, start

from draftsmith.config import Config, load_config
from draftsmith.errors import InputError
from draftsmith.files import write_text
from draftsmith.target.model import pick_device
from draftsmith.tracking import read_metrics


def configured(args: argparse.Namespace, work: Path, name: str, *overrides: str) -> tuple[Path, Config]:
    rows = (
        [] if any(f.startswith("train.rows_per_step=") for f in args.fields) else [f"rows_per_step={2 * args.drafters}"]
    )
    settings = [
        "epochs=null",
        f"steps={args.steps}",
        "log_every=1",
        f"checkpoint_every={every(args.steps)}",
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


def placement(targets: int, drafters: int, restarts: int = 0) -> list[str]:
    """All of it, whatever the config has."""
    values = {
        "mode": "split" if targets else "colocated",
        "targets": targets,
        "drafters": drafters,
        "max_restarts": restarts,
    }
    return [f"placement.{key}={value}" for key, value in values.items()]


def every(steps: int) -> int:
    """Steps from a checkpoint to the next."""
    return max(1, steps // 5)


def told(config: Config, most: int | None = None) -> dict[int, list[float]]:
    """The losses of each step, attempt by attempt: a step after the last checkpoint is told again by the next one.

    most: of so many attempts, the first ones.
    """
    found: dict[int, list[float]] = {}
    for attempt in attempts(config)[:most]:
        for line in read_metrics(attempt / "metrics.jsonl"):
            if line["kind"] == "train":
                found.setdefault(line["step"], []).append(line["loss"])
    return found


def attempts(config: Config) -> list[Path]:
    return sorted(p.parent for p in (config.runs_dir / config.name).glob("attempt_*/metrics.jsonl"))


def said_by(process: subprocess.Popen[str]) -> Callable[[float], str]:
    """Reads what it says all the while, so that it never waits to be read; what there is, after so many seconds at the
    most (a process that outlives it keeps its output open)."""
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()

    def read(seconds: float) -> str:
        reader.join(seconds)
        return "".join(lines)

    return read


def trained(path: Path, config: Config, limit: float, victim: str = "", rank: int = -1) -> dict[str, Any]:
    """The run by the command.  victim: what the process of that rank is, which gets SIGKILL after the first checkpoint."""
    begin = time.monotonic()
    process = start(path)
    output = said_by(process)
    kill: dict[str, Any] = {}
    if victim:
        checkpoints = config.runs_dir / config.name
        while process.poll() is None and not list(checkpoints.glob("attempt_*/checkpoints/step_*")):
            if time.monotonic() - begin > limit:
                break
            time.sleep(0.02)
        else:
            pid = dict(processes_of(config)).get(rank)
            kill = {"killed": pid is not None, "killed_after_s": time.monotonic() - begin}
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended since: nobody will name it
                    os.kill(pid, signal.SIGKILL)
        kill = {"victim": victim, "rank": rank, "killed": False, **kill}
    late = ""
    try:
        process.wait(max(1.0, limit - (time.monotonic() - begin)))
    except subprocess.TimeoutExpired:
        process.kill()  # the processes it started end with it
        process.wait()
        late = f"longer than {limit:.0f} s"
    said = output(10) + late
    whole, deadline = time.monotonic() - begin, time.monotonic() + 10
    while (orphans := len(processes_of(config))) and time.monotonic() < deadline:
        time.sleep(0.1)
    steps = told(config)
    twice = [values for values in steps.values() if len(values) > 1]
    if victim:
        kill |= {
            "said": [line for line in said.splitlines() if "SIGKILL" in line], "steps": len(steps),
            "steps_before": len(told(config, 1)), "attempts": len(attempts(config)), "told_twice": len(twice),
            "apart_where_told_twice": max((abs(v[0] / v[-1] - 1) for v in twice), default=None),
        }  # fmt: skip
    return {
        **kill, "exit_code": process.returncode, "orphans": orphans, "whole_s": whole,
        "losses": [steps[s][-1] for s in sorted(steps)], **({"log": said[-3000:]} if process.returncode else {}),
    }  # fmt: skip


def recovered(run: dict[str, Any], steps: int) -> bool:
    """Killed, named, and gone on with to the end from a checkpoint: a fresh start would tell all steps again."""
    named = any(f"{run['victim']} " in line and f"(rank {run['rank']}," in line for line in run["said"])
    resumed = run["attempts"] == 2 and run["told_twice"] < run.get("steps_before", every(steps))
    return bool(run["killed"] and named and resumed and run["exit_code"] == 0 and run["steps"] == steps)


def apart(a: list[float], b: list[float]) -> dict[str, Any] | None:
    """How far two curves are from each other, relatively: at most, and on average over the steps."""
    if not a or len(a) != len(b):
        return None
    steps = [abs(x / y - 1) for x, y in zip(a, b, strict=True)]
    return {"most": max(steps), "mean": sum(steps) / len(steps), "bit_for_bit": a == b}


def summary(runs: dict[str, Any], steps: int) -> dict[str, Any]:
    """Curves beside one process's, the split's beside as many colocated drafters', and what became of the kills."""
    curves = {name: run["losses"] for name, run in runs.items()}
    one, split = curves.get("one", []), curves.get("split", [])
    kills = {name: run for name, run in runs.items() if "victim" in run}
    return {
        "beside_one_process": {n: apart(curves[n], one) for n in ("noise", "colocated", "split") if n in curves},
        "split_beside_colocated": apart(split, curves.get("colocated", [])),
        "kills_beside_split": {n: apart(curves[n], split) for n in kills},
        "kills": len(kills),
        "recovered": sum(recovered(k, steps) for k in kills.values()),
        "orphans": sum(run["orphans"] for run in runs.values()),
        "failed": [n for n, run in runs.items() if run["exit_code"] != 0 or len(run["losses"]) != steps],
    }  # fmt: skip


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("fields", nargs="*", metavar="a.b=c")
    parser.add_argument("--targets", type=at_least_one, default=5)
    parser.add_argument("--drafters", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=50)
    parser.add_argument("--noise", nargs="+", default=[], metavar="a.b=c")
    parser.add_argument("--together", type=at_least_one, default=2, help="runs at once")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds of a run")
    args = parser.parse_args()
    split = placement(args.targets, args.drafters)
    settings = {
        "one": placement(0, 1), "colocated": placement(0, args.drafters), "split": split,
        **({"noise": [*placement(0, 1), *args.noise]} if args.noise else {}),
    }  # fmt: skip
    victims = {"drafter": args.drafters - 1, "target": args.drafters}
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as pool:
        work = Path(folder)
        try:
            wanted = {n: (*configured(args, work, n, *o), args.limit) for n, o in settings.items()}
            for victim, rank in victims.items():
                path, config = configured(args, work, f"kill_{victim}", *placement(args.targets, args.drafters, 1))
                wanted[f"kill_{victim}"] = path, config, args.limit, victim, rank
        except InputError as error:
            parser.error(str(error))
        device = pick_device(config.device).type
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        name = f"split_runs_{kind_of(device)}" + (f"_x{gpus}" if gpus else "")
        tasks = {pool.submit(trained, *what): n for n, what in wanted.items()}
        for task in as_completed(tasks):
            found, error = None, task.exception()
            found = {"exit_code": repr(error), "orphans": 0, "losses": []} if error else task.result()
            runs[tasks[task]] = found
            print(tasks[task], json.dumps({k: v for k, v in found.items() if k != "losses"}), flush=True)
            out = {
                "device": torch.cuda.get_device_name() if gpus else "cpu", "gpus": gpus, "together": args.together,
                "placement": f"{args.targets}+{args.drafters}", "config": args.config.name, "fields": args.fields,
                "noise": args.noise, "steps": args.steps, **summary(runs, args.steps),
                "runs": {n: runs[n] for n in wanted if n in runs},
            }  # fmt: skip
            if RESULTS != STORED:
                write_result(name, out)
    print(write_result(name, out), json.dumps({k: v for k, v in out.items() if k != "runs"}))
    sys.exit(int(bool(out["failed"]) or out["recovered"] < len(victims)))


if __name__ == "__main__":
    main()
