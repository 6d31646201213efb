"""What `draftsmith plan` says against what short real runs do: rows a second, side by side on the same machine.

    python benchmarks/plan_cpu.py [--only NAME ...] [--seconds 400]     writes results/plan_cpu.json

--only renews the entries of these targets.

Random targets of two sizes made on the spot, and SmolLM2-135M where SMOLLM2 names its folder.  Plans and runs take
turns until there are enough of each, or the time is up.  The machine is shared and its pace varies twofold within seconds.
So each waits a while for a quiet moment, and the share of its life that it had a core when it wanted one (`pace`, by the
kernel's count of run and wait) is divided out of both, plans and runs.  As they came is recorded beside (`ratio_as_timed`).
A run's rate is that of its log intervals without the first two (warm-up, rows made ahead) and the last (targets have
finished).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _common import RESULTS, write_result
from conftest import make_config, write_target

from draftsmith.config import Config
from draftsmith.data.tokenize import tokenize

RUN_SECONDS = 10
QUIET = 0.1
"""Share of the machine that other programs may take in a quiet moment."""
PATIENCE = 8
"""Seconds to wait for one."""
TOLERANCE = (0.75, 1.25)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SIZES = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 10, "vocab_size": 4096, "head_dim": 64},
    "medium": {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16, "vocab_size": 16384, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.02,
    },
}  # fmt: skip
COMMON = (
    "tokenize.heldout_fraction=0", "train.rows_per_step=2", "placement.run_ahead=2", "train.checkpoint_every=100000",
    "placement.timeout_seconds=120",
)  # fmt: skip
SHAPES = {
    "small": ("train.row_tokens=512", "train.anchors=64", "drafter.block_size=8", "drafter.num_layers=3"),
    "medium": ("train.row_tokens=768", "train.anchors=48", "drafter.block_size=16", "drafter.num_layers=5"),
    "smollm2": ("train.row_tokens=512", "train.anchors=64", "drafter.block_size=8", "drafter.mask_token_id=4"),
}
PLACEMENTS = {
    "colocated x1": (),
    "colocated x2": ("placement.drafters=2",),
    "split 1 + 1": ("placement.mode=split", "placement.targets=1", "placement.drafters=1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SHAPES), nargs="+")
    parser.add_argument("--seconds", type=float, default=400, help="begin no further round after so many, by target")
    args = parser.parse_args()
    before = RESULTS / "plan_cpu.json"
    results = json.loads(before.read_text())["targets"] if args.only and before.is_file() else {}
    smollm2 = os.environ.get("SMOLLM2")
    for name in args.only or SHAPES:
        if name == "smollm2" and not smollm2:
            print("SMOLLM2 is not set: left out")
            continue
        work = Path(tempfile.mkdtemp(prefix="plan-"))
        target = Path(smollm2 or "") if name == "smollm2" else write_target(work / "target", **SIZES[name])
        results[name] = compare(name, target, work, args.seconds)
        ratios = [p["ratio"] for target in results.values() for p in target["placements"].values()]
        low, high = TOLERANCE
        inside = sum(low <= r <= high for r in ratios)
        summary = {"threads_per_process": 1, "tolerance": TOLERANCE, "inside": inside, "of": len(ratios)}
        print(write_result("plan_cpu", {**summary, "targets": results}), summary, flush=True)


def compare(name: str, target: Path, work: Path, seconds: float) -> dict:
    end = time.monotonic() + seconds
    config = make_config(target, work, *COMMON, *SHAPES[name])
    conversations(config.conversations)
    tokenize(config)
    said = [watched(lambda: plan(target, work, name))]
    runs: dict[str, list[dict]] = {placement: [] for placement in PLACEMENTS}
    for number in itertools.count():
        for placement in PLACEMENTS:
            steps = max(14, math.ceil(RUN_SECONDS * rates(said[-1])[placement] / config.train.rows_per_step))
            label = f"{name}-{number}"
            runs[placement].append(watched(lambda p=placement, n=steps, at=label: run(target, work, at, name, p, n)))
            said.append(watched(lambda: plan(target, work, name)))
        if time.monotonic() > end:
            break
    out = {}
    for placement, found in runs.items():
        timed = [rates(one)[placement] for one in said], [one["rows_per_s"] for one in found]
        given = [one["pace"] for one in said], [one["pace"] for one in found]
        raw = [statistics.mean(t) for t in timed]
        predicted, measured = (
            statistics.mean(t / g for t, g in zip(*both, strict=True)) for both in zip(timed, given, strict=True)
        )
        out[placement] = {
            "predicted": predicted, "measured": measured, "ratio": predicted / measured,
            "ratio_as_timed": raw[0] / raw[1], "runs": found,
        }  # fmt: skip
        print(name, placement, out[placement], flush=True)
    plans = [{"rows_per_s": rates(one), "pace": one["pace"], "recommended": one["recommended"]} for one in said]
    print(name, plans, flush=True)
    return {"settings": [*COMMON, *SHAPES[name]], "row": said[0]["row"], "placements": out, "plans": plans,
            "memory_gib": said[0]["memory_gib"]}  # fmt: skip


def watched(work: Callable[[], dict]) -> dict:
    """The result of `work` after a wait for a quiet moment, with its processes' `pace`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before = busy()
        time.sleep(1.0)
        if (busy() - before) / os.cpu_count() <= QUIET:
            break
    counts: dict[int, tuple[int, int]] = {}
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(counts, over))
    watcher.start()
    try:
        found = work()
    finally:
        over.set()
        watcher.join()
    ran, waited = (sum(c[i] for c in counts.values()) for i in (0, 1))
    found = {**found, "pace": round(ran / (ran + waited), 3)}
    print({k: found[k] for k in ("pace", "rows_per_s", "placements") if k in found}, flush=True)
    return found


def watch(counts: dict[int, tuple[int, int]], over: threading.Event) -> None:
    """Note nanoseconds run and waited for a core of the main thread of all processes below this one, until `over`."""
    while not over.wait(0.2):
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):  # gone meanwhile
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        for pid in parents:
            up = pid
            while up in parents and up != os.getpid():
                up = parents[up]
            if up == os.getpid() and pid != up:
                with contextlib.suppress(OSError, ValueError):
                    ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
                    counts[pid] = int(ran), int(waited)


def busy() -> float:
    """Seconds that all cores together have worked since the machine was started."""
    user, nice, system, _, _, interrupts, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def written(target: Path, work: Path, shape: str, *overrides: str) -> tuple[Path, Config]:
    config = make_config(target, work, *COMMON, *SHAPES[shape], *overrides)
    path = work / f"{config.name}.json"
    path.write_text(config.dump())
    return path, config


def plan(target: Path, work: Path, shape: str) -> dict:
    """The plan for two processes; what it measures of one process alone is the prediction for one."""
    path, _ = written(target, work, shape, "placement.drafters=2")
    command = [sys.executable, "-m", "draftsmith.cli", "plan", str(path), "--json"]
    return json.loads(subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE).stdout)


def rates(planned: dict) -> dict[str, float]:
    alone = 1 / (planned["target_seconds_per_row"] + planned["drafter_seconds_per_row"])
    return {"colocated x1": alone, **{p["name"]: p["rows_per_s"] for p in planned["placements"]}}


def run(target: Path, work: Path, label: str, shape: str, placement: str, steps: int) -> dict:
    label = f"{label}-{placement.replace(' ', '').replace('+', '-')}"
    every = f"train.log_every={max(1, steps // 8)}"
    path, config = written(target, work, shape, f"name={label}", f"train.steps={steps}", every, *PLACEMENTS[placement])
    command = [sys.executable, "-m", "draftsmith.cli", "train", str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    metrics = config.runs_dir / label / "attempt_1" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "rate"]
    kept = found[2:-1]
    return {
        "rows_per_s": sum(i["rows"] for i in kept) / sum(i["seconds"] for i in kept),
        "rows": sum(i["rows"] for i in kept),
        "peak_rss_gib": max(i["peak_rss_bytes"] for i in found) / 2**30,
        "intervals": [round(i["rows_per_s"], 3) for i in found],
    }


def conversations(path: Path, count: int = 300) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as out:
        for i in range(count):
            answer = " ".join(f"Step {k} of answer {i} says {(i * 7 + k * 13) % 97}." for k in range(2 + i * 5 % 9))
            messages = [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": answer}]
            out.write(
                json.dumps({"id": f"p{i}", "messages": messages, "finish_reason": "stop", "completion_tokens": 9})
                + "\n"
            )


if __name__ == "__main__":
    main()
