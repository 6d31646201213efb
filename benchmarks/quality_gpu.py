"""Quality of drafters by recipe, at equal tokens: many arms on a GPU or several, each a training run measured by replay.

    python benchmarks/quality_gpu.py CONFIG [a.b=c ...] [--seconds 520] [--beside 4] [--only SUBSTRING ...]
        [--add 'NAME: a.b=c a.b=c'] [--seeds NAME ...] [--alone NAME ...] [--cache DIR] [--tiny]
    python benchmarks/quality_gpu.py serve NAME CONFIG [a.b=c ...] [--prompts 24] [--keep]
    python benchmarks/quality_gpu.py tables        what is in results/quality_smollm2.json, as docs/quality.md has it

Arms run as `draftsmith train` with overrides, `--beside` of them at once on each GPU; those that share compiled code
start when the first of them has compiled.  What would not end within `--seconds` is left for the next call, which goes on from what is
in results/quality_smollm2.json (or $OUT).  The peer (peer_speculators.py) needs PYTHONPATH=.peers/speculators,
also to be served.  Of two calls on GPUs of one host each is told of the other's by `--others 1`.
`--alone` runs arms again, one at a time on a GPU, for their seconds.  `serve` does so with one, measured more often, and decodes
with it at batch 1: speed-up at temperature 0 and 1, in bfloat16 and, lossless, in float32; `--keep` writes the exported
drafter beside the results, its weights in parts.  `--tiny` rehearses all of it on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import RESULTS, commit, gpus, write_result
from peer_speculators import kept

from draftsmith.export import export_folder
from draftsmith.tracking import read_metrics

NAME = "quality_smollm2"
STORED = Path(__file__).parent / "results"
ALONE, SEED = ", alone", ", seed "
STEPS = 1220
"""Of an arm that says nothing else."""
LIMIT, PEER_LIMIT, PEER_COMPILE, PEER_NEEDS = 330.0, 450.0, 220.0, 250.0
"""Seconds an arm of 1,220 steps may take, start and compilation included; the peer; until its first step is done; left to begin it."""
SHAPES = ("drafter.", "train.row_tokens", "train.anchors", "train.fp8")
"""Overrides with which other code is compiled."""
TINY = (
    "device=cpu", "train.row_tokens=1024", "train.anchors=12", "train.steps=4", "train.log_every=2",
    "train.accept_every=2", "train.heldout_rows=1", "evaluate.prompts=4", "evaluate.max_new_tokens=12",
    "compile.graphs=false",
)  # fmt: skip
PART = 15 << 20
"""Bytes of a part of the kept weights."""
SLOW = ["train.optimizer=adamw", "train.learning_rate=1e-3"]
REPEATED = re.compile(r"CUDA warning|coredump:")
FEW, ALL = "train.anchors=512", ["drafter.num_features=8", "train.anchors=2048"]
BASE = ("drafter.num_features=5", "train.anchors=1024", "train.schedule=cosine", "compile.graphs=false")
"""What arms have where they do not say otherwise; the rest is the config's."""
WSD, GRAPHS = "train.schedule=wsd", "compile.graphs=true"
BOTH = "8 features, 2048 anchors"
CHOSEN = f"{BOTH}, WSD"
"""The arm that examples/smollm2-135m-gpu.yaml is, but for its graphs, which change seconds and memory."""
SERVED = f"{BOTH}, three times the tokens"
"""The best drafter that was served: its speed-ups stand at the top of the file."""
PEERS_BESIDE = 2
"""Of the peer's arms on a GPU: of those that ran beside five others most were lost, in a kernel of cuBLAS."""
PEER = "peer, its own recipe, 1024 anchors"
ARMS: dict[str, list[str]] = {
    "base": [],
    f"{CHOSEN}, graphs": [*ALL, WSD, GRAPHS],
    f"{CHOSEN}, graphs, three times the tokens": [
        *ALL,
        WSD,
        GRAPHS,
        "train.steps=3660",
        "train.accept_every=1220",
        "train.log_every=122",
    ],
    SERVED: [*ALL, "train.steps=3660", "train.accept_every=1220", "train.log_every=122"],
    "peer, its own recipe, 8 features, 2048 anchors": ["peer", "own", *ALL],
    "peer, our recipe, 8 features, 2048 anchors": ["peer", "ours", *ALL],
    f"peer, its own recipe, 2048 anchors{SEED}1": ["peer", "own", "train.anchors=2048", "train.seed=1"],
    f"peer, its own recipe, 8 features, 2048 anchors{SEED}1": ["peer", "own", *ALL, "train.seed=1"],
    "a quarter of the data": ["data_dir=data-quarter"],
    CHOSEN: [*ALL, WSD],
    f"{CHOSEN}{SEED}1": [*ALL, WSD, "train.seed=1"],
    f"{CHOSEN}{SEED}2": [*ALL, WSD, "train.seed=2"],
    "four times the tokens": ["train.steps=4880", "train.accept_every=1220", "train.log_every=244"],
    PEER: ["peer", "own"],
    f"{PEER}{SEED}1": ["peer", "own", "train.seed=1"],
    f"{PEER}{SEED}2": ["peer", "own", "train.seed=2"],
    BOTH: ALL,
    "8 features": ["drafter.num_features=8"],
    "2048 anchors": ["train.anchors=2048"],
    "peer, its own recipe, 2048 anchors": ["peer", "own", "train.anchors=2048"],
    "8 layers": ["drafter.num_layers=8"],
    "B = 8": ["drafter.block_size=8"],
    "3 features": ["drafter.num_features=3"],
    f"base{SEED}1": ["train.seed=1"],
    f"base{SEED}2": ["train.seed=2"],
    f"8 features{SEED}1": ["drafter.num_features=8", "train.seed=1"],
    f"8 features{SEED}2": ["drafter.num_features=8", "train.seed=2"],
    f"{BOTH}{SEED}1": [*ALL, "train.seed=1"],
    f"{BOTH}{SEED}2": [*ALL, "train.seed=2"],
    "FP8 drafter": ["train.fp8=drafter"],
    "WSD": [WSD],
    "sliding 128": ["drafter.layer_types=sliding", "drafter.sliding_window=128"],
    "3 layers": ["drafter.num_layers=3"],
    "peer, our recipe": ["peer", "ours"],
    "twice the tokens": ["train.steps=2440", "train.accept_every=1220", "train.log_every=122"],
    "256 anchors": ["train.anchors=256"],
    "learning rate 6e-3": ["train.learning_rate=6e-3"],
    "weight decay 0.1": ["train.weight_decay=0.1"],
    "peer, its own recipe": ["peer", "own", FEW],
    "512 anchors": [FEW],
    "causal in the block, 512 anchors": [FEW, "drafter.layer_types=sliding", "drafter.sliding_window=2048"],
    "8 features, 512 anchors": [FEW, "drafter.num_features=8"],
    "8 layers, 512 anchors": [FEW, "drafter.num_layers=8"],
    "learning rate 6e-3, 512 anchors": [FEW, "train.learning_rate=6e-3"],
    "learning rate 1e-2, 512 anchors": [FEW, "train.learning_rate=1e-2"],
    "decay, 512 anchors": [FEW, "loss.kind=decay"],
    "Muon 1e-3, decay, 512 anchors": [FEW, "train.learning_rate=1e-3", "loss.kind=decay"],
    "AdamW, 512 anchors": [FEW, *SLOW],
    "AdamW 4e-4, 512 anchors": [FEW, "train.optimizer=adamw", "train.learning_rate=4e-4"],
    "AdamW, decay, 512 anchors": [FEW, *SLOW, "loss.kind=decay"],
}
"""The most telling first."""


def from_base(fields: list[str]) -> list[str]:
    """The settings of BASE, then those that are given; each once."""
    settings = dict(f.split("=", 1) for f in (*BASE, *fields) if "=" in f)
    return [*(f for f in fields if "=" not in f), *("=".join(f) for f in settings.items())]


class Arm:
    """One training run in a process of its own."""

    def __init__(
        self, name: str, fields: list[str], args: argparse.Namespace, work: Path, share: int, gpu: str,
        export: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.begun, self.gpu, self.gpus = name, time.monotonic(), gpu, len(args.gpus) + args.others
        self.beside = 1
        """The most arms that were on its GPU at once while it ran, itself counted."""
        self.folder = work / f"{len(list(work.iterdir())):03d}"
        self.folder.mkdir()
        self.fields, self.peer, self.out = fields, fields[:1] == ["peer"], self.folder / "peer.json"
        overrides = [
            f for f in fields if "=" in f and not (args.tiny and f.startswith(("train.anchors=", "compile.graphs=")))
        ]
        common = [
            str(args.config),
            *args.fields,
            f"compile.cache_dir={args.cache or work.parent / 'cache'}",
            *overrides,
        ]
        if self.peer:
            attention = "sdpa" if args.tiny or "sdpa" in fields else "flex"
            command = [str(Path(__file__).with_name("peer_speculators.py")), *common, "--recipe", fields[1],
                       "--attention", attention, "--limit", str(PEER_LIMIT), "--out", str(self.out),
                       *(["--export", str(self.exported)] if export else [])]  # fmt: skip
        else:
            command = ["-m", "draftsmith.cli", "train", *common, f"runs_dir={self.folder}", "name=arm"]
        self.log = self.folder / "log"
        cores = max(1, (os.cpu_count() or 1) // (share * self.gpus))
        threads = {"OMP_NUM_THREADS": str(min(cores, 4)), "TORCHINDUCTOR_COMPILE_THREADS": str(cores)}
        where = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **threads, **where}
            )

    @property
    def limit(self) -> float:
        if self.peer:
            return PEER_LIMIT if self.compiled() else PEER_COMPILE
        return LIMIT * longer(self.fields)

    def compiled(self) -> bool:
        return self.process.poll() is not None or "compiled in" in self.log.read_text()

    def found(self) -> dict[str, Any] | None:
        """What it found, or how it failed; None while it runs."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.begun <= self.limit:
            return None
        if code is None:
            self.process.kill()
            self.process.wait()
        if code != 0:
            why = f"exit code {code}" if code is not None else f"longer than {self.limit:.0f} s"
            found = {"failed": why, "said": told(self.log.read_text())}
        else:
            found = json.loads(self.out.read_text()) if self.peer else read_run(self.run)
        return {**found, "whole_s": time.monotonic() - self.begun, "beside": self.beside, "gpus": self.gpus}

    @property
    def exported(self) -> Path:
        """Where a peer's drafter goes, if asked for."""
        return self.folder / "exported"

    @property
    def run(self) -> Path:
        return self.folder / "arm" / "attempt_1"


def longer(fields: list[str]) -> float:
    """How many times as long as the others an arm trains; 1 for shorter ones."""
    steps = [int(f.partition("=")[2]) for f in fields if f.startswith("train.steps=")]
    return max(1.0, steps[-1] / STEPS) if steps else 1.0


def told(log: str) -> str:
    """The end of a log, of paths the file's name, lines that differ in numbers only once: a lost GPU says the same of
    every event, and of a dump every processor and percent."""
    log = re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", log)
    lines: dict[str, str] = {}
    for number, line in enumerate(log.splitlines()):
        lines.setdefault(re.sub(r"\d+", "", line) if REPEATED.search(line) else str(number), line)
    return "\n".join(lines.values())[-4000:]


def read_run(run: Path) -> dict[str, Any]:
    """The curve of a run from its metrics: at each measurement tokens and seconds of training until then."""
    lines = read_metrics(run / "metrics.jsonl")
    rates = [line for line in lines if line["kind"] == "rate"]
    curve = []
    for line in lines:
        if line["kind"] != "accepted":
            continue
        before = [r for r in rates if r["step"] <= line["step"]]
        since = curve[-1]["step"] if curve else 0
        losses = [t["loss"] for t in lines if t["kind"] == "train" and since < t["step"] <= line["step"]]
        line["acceptance_by_slot"] = line["by_slot"]
        curve.append({
            "step": line["step"], "tokens": round(sum(r["tokens_per_s"] * r["seconds"] for r in before)),
            "seconds": sum(r["seconds"] for r in before), "loss": sum(losses) / len(losses), **kept(line),
        })  # fmt: skip
    held = [line for line in lines if line["kind"] == "heldout"]
    peak = max((r.get("peak_gpu_bytes", 0) for r in rates), default=0)
    return {"curve": curve, "heldout_loss": held[-1]["loss"] if held else None, "peak_gib": peak / 2**30}


def run_arms(
    arms: dict[str, list[str]], args: argparse.Namespace, work: Path, found: dict[str, Any], keep: dict[str, Any]
) -> None:
    """Run what is not there yet, as many at once as allowed, until the time is up.  Fills `found` as they end, and
    writes it, with `keep`."""
    begin = time.monotonic()
    print("arm | pooled | along the way | slots 1 2 3 5 7 11 15 | categories | tokens | training", flush=True)
    lost = [n for n in arms if "failed" in found.get(n, {}) and "sdpa" in arms[n]]  # nothing else to try
    if lost:
        print("failed uncompiled too, not tried again:", "; ".join(lost))
    waiting = [n for n in arms if "curve" not in found.get(n, {}) and n not in lost]
    running, compiled = list[Arm](), set[str]()
    took: dict[str, float] = {}
    """Seconds of the last arm of each shape that trained no longer than usual; later ones find more compiled."""
    usual = 60.0 if args.tiny else 90.0
    while waiting or running:
        for arm in running:
            if arm.compiled():
                compiled.add(shape(arms[arm.name]))
        left = args.seconds - (time.monotonic() - begin)
        for name in list(waiting):
            fields = arms[name]
            busy = {shape(arms[arm.name]) for arm in running if not arm.peer} - compiled
            on = {gpu: [arm.peer for arm in running if arm.gpu == gpu] for gpu in args.gpus}
            most = {True: PEERS_BESIDE, False: args.beside}[fields[:1] == ["peer"]]
            free = [g for g, peers in on.items() if len(peers) < args.beside and sum(peers) < most]
            if not free or shape(fields) in busy:
                continue
            gpu = min(free, key=lambda g: len(on[g]))
            needed = (
                PEER_NEEDS
                if fields[:1] == ["peer"] and not args.tiny
                else max([usual, *(t for s, t in took.items() if "peer" not in s)])
            )
            if left < took.get(shape(fields), needed) * longer(fields):
                continue
            running.append(Arm(name, fields, args, work, args.beside, gpu))
            waiting.remove(name)
        if not running:  # what waits needs more time than there is
            break
        for arm in running:
            arm.beside = max(arm.beside, sum(other.gpu == arm.gpu for other in running))
        time.sleep(0.5)
        for arm in list(running):
            result = arm.found()
            if result is None and left < 5:
                arm.process.kill()
                arm.process.wait()
                running.remove(arm)
                waiting.append(arm.name)
            elif result is not None:
                running.remove(arm)
                found[arm.name] = {"overrides": arms[arm.name], "commit": commit(), **result}
                if "curve" in result and longer(arm.fields) == 1:
                    took[shape(arm.fields)] = result["whole_s"]
                if (other := uncompiled(arm.name, found)) is not None:
                    arms.update(other)
                    waiting[:0] = [n for n in other if n not in waiting]
                print(f"{time.monotonic() - begin:4.0f} s  {line(arm.name, found[arm.name])}", flush=True)
                save(found, **keep)
    if waiting:
        print("left for the next call:", "; ".join(waiting))


def uncompiled(name: str, found: dict[str, Any]) -> dict[str, list[str]] | None:
    """The peer's arm that takes the place of one that failed: with attention that needs no compilation."""
    fields = found.get(name, {}).get("overrides", [])
    if "failed" not in found.get(name, {}) or fields[:1] != ["peer"] or "sdpa" in fields or name.endswith(ALONE):
        return None
    return {f"{name}, SDPA": [*fields, "sdpa"]}


def shape(fields: list[str]) -> str:
    return " ".join(sorted(f for f in fields if f in ("peer", "sdpa") or f.startswith(SHAPES)))


def save(found: dict[str, Any], **more: Any) -> Path:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return write_result(NAME, {**summary(found), **more, "device": device, "arms": found})


def seconds_to(curve: list[dict[str, Any]], value: float) -> float | None:
    """Seconds of training until accepted length (pooled) was `value`, between measurements in proportion."""
    points = [(0.0, 1.0), *((p["seconds"], p["accepted_length"]["pooled"]) for p in curve)]
    for (a, low), (b, high) in itertools.pairwise(points):
        if high >= value:
            return a + (b - a) * max(0.0, value - low) / max(high - low, 1e-9)
    return None


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Best of ours against the best of the peer's recipes on the same data, by the mean of an arm's seeds: the luckiest of
    several would say too much, so ours is one of three seeds where there are such.  Seconds of a run that was alone on the
    GPU where there is one, of the best recipe of ours that was (and that a run of the peer's can stand beside, if there is
    such), beside those of the peer's best run with as many others beside it, which need not be its best of all: ours has
    to reach the value of that one."""
    done = {name: arm for name, arm in found.items() if "curve" in arm}
    final = {name: arm["curve"][-1] for name, arm in done.items()}
    equal = [
        n for n, arm in done.items()
        if not n.endswith(ALONE) and SEED not in n
        and not any(f.startswith(("train.steps=", "data_dir=")) for f in arm["overrides"])
    ]  # fmt: skip
    ours, peers = ([n for n in equal if n.startswith("peer") == is_peer] for is_peer in (False, True))

    def of_seeds(name: str | None) -> list[float]:
        return [final[n]["accepted_length"]["pooled"] for n in final if name and is_seed(n, name)]

    def best(names: list[str]) -> str | None:
        return max(names, key=lambda n: statistics.mean(of_seeds(n)), default=None)

    def point(name: str | None) -> dict[str, Any]:
        return final[name] if name else {}

    def categories(name: str | None) -> dict[str, float]:
        seeds = [final[n]["by_category"] for n in final if name and is_seed(n, name)]
        return {c: statistics.mean(s[c]["pooled"] for s in seeds) for c in (seeds[0] if seeds else ())}

    def spread(name: str | None) -> float | None:
        """Over prompts, of one run, on average."""
        return statistics.mean(final[n]["spread"]["all"] for n in final if is_seed(n, name)) if name else None

    one, other = best([n for n in ours if len(of_seeds(n)) >= 3] or ours), best(peers)
    peer_runs = [n for n in final if n.removesuffix(ALONE) in peers]

    def beside_as_many(name: str) -> list[str]:
        return [n for n in peer_runs if all(done[n].get(k) == done[name].get(k) for k in ("beside", "gpus"))]

    alone = [n for n in ours if f"{n}{ALONE}" in done]
    alone = [n for n in alone if beside_as_many(f"{n}{ALONE}")] or alone
    timed = f"{one if one in alone else best(alone)}{ALONE}" if alone else one
    alike = beside_as_many(timed) if timed else []
    their_timed = max(alike, key=lambda n: final[n]["accepted_length"]["pooled"], default=None)
    mine, theirs = (statistics.mean(of_seeds(n)) if n else None for n in (one, other))
    return {
        "best": {"ours": one, "speculators": other},
        "accepted_length": {"ours": mine, "speculators": theirs},
        "accepted_length_of_seeds": {"ours": of_seeds(one), "speculators": of_seeds(other)},
        "spread": {"ours": spread(one), "speculators": spread(other)},
        "by_category": {"ours": categories(one), "speculators": categories(other)},
        "tokens": point(one).get("tokens"),
        "timed": {"ours": timed, "speculators": their_timed},
        "arms_at_once": done[timed]["beside"] if timed else None,
        "seconds": {"ours": point(timed).get("seconds"), "speculators": point(their_timed).get("seconds")},
        "seconds_to_peer_final": seconds_to(done[timed]["curve"], theirs) if their_timed else None,
    }  # fmt: skip


def is_seed(name: str, of: str) -> bool:
    return (name == of or name.startswith(f"{of}{SEED}")) and not name.endswith(ALONE)


def tables(found: dict[str, Any]) -> list[str]:
    """What docs/quality.md shows of the arms, as Markdown: those of several seeds, by arm, the best first, by category, and
    the curves that were measured often."""
    done = {name: arm for name, arm in found.items() if "curve" in arm}
    last = {name: arm["curve"][-1] for name, arm in done.items()}
    order = sorted(done, key=lambda n: -last[n]["accepted_length"]["pooled"])
    rows = ["| arm | mean | standard deviation | seeds |", "|---" * 4 + "|"]
    of_seeds = {n: [last[m]["accepted_length"]["pooled"] for m in done if is_seed(m, n)] for n in order}
    means = {n: statistics.mean(values) for n, values in of_seeds.items() if len(values) > 1}
    for name in sorted(means, key=lambda n: -means[n]):
        values = of_seeds[name]
        rows.append(
            f"| {name} | {means[name]:.3f} | {statistics.stdev(values):.3f} | {', '.join(f'{v:.3f}' for v in values)} |"
        )
    slots = (1, 2, 3, 5, 7)
    rows += [
        "",
        f"| arm | accepted length | {' | '.join(f'slot {k}' for k in slots)} | training, s (arms at once on a GPU, at most) | M tokens |",
        "|---" * (len(slots) + 4) + "|",
    ]
    for name in order:
        point, arm = last[name], done[name]
        by_slot = " | ".join(
            f"{point['by_slot'][k - 1] or 0:.2f}" if k <= len(point["by_slot"]) else "-" for k in slots
        )
        rows.append(
            f"| {name} | {point['accepted_length']['pooled']:.3f} +- {point['spread']['all']:.3f} | {by_slot} | "
            f"{point['seconds']:.0f} ({arm['beside']}) | {point['tokens'] / 1e6:.2f} |"
        )
    often = [n for n in order if len(done[n]["curve"]) >= 4 and (n.endswith(ALONE) or longer(done[n]["overrides"]) > 1)]
    rows += ["", "| arm | accepted length after so many M tokens |", "|---|---|"]
    for name in often:
        points = (f"{p['tokens'] / 1e6:.1f}: {p['accepted_length']['pooled']:.2f}" for p in done[name]["curve"])
        rows.append(f"| {name} | {', '.join(points)} |")
    categories = sorted({c for point in last.values() for c in point["by_category"]})
    rows += ["", f"| arm | {' | '.join(categories)} |", "|---" * (len(categories) + 1) + "|"]
    for name in order:
        values = (last[name]["by_category"].get(c, {}).get("pooled") for c in categories)
        rows.append(f"| {name} | {' | '.join(f'{v:.2f}' if v else '-' for v in values)} |")
    return rows


def line(name: str, arm: dict[str, Any]) -> str:
    if "curve" not in arm:
        return f"{name} | failed: {arm['failed']} | {arm['said'][-300:]!r}"
    last, slots = arm["curve"][-1], arm["curve"][-1]["by_slot"]
    shown = " ".join(f"{slots[k - 1] or 0:.2f}" for k in (1, 2, 3, 5, 7, 11, 15) if k <= len(slots))
    categories = " ".join(f"{c} {v['pooled'] or 0:.2f}" for c, v in last["by_category"].items())
    course = " ".join(f"{p['accepted_length']['pooled']:.2f}" for p in arm["curve"])
    return (
        f"{name} | {last['accepted_length']['pooled']:.3f} +- {last['spread']['all']:.3f} | {course} | {shown} | "
        f"{categories} | {last['tokens'] / 1e6:.2f}M | {last['seconds']:.1f} s of {arm['whole_s']:.0f}, x{arm['beside']}"
    )


def serve(
    name: str, fields: list[str], args: argparse.Namespace, work: Path, found: dict[str, Any], keep: dict[str, Any]
) -> dict[str, Any]:
    """Train the arm alone; then the serving loop at batch 1 with its exported folder, and the replay of the same prompts."""
    steps = int(STEPS * longer(fields))
    fields = [*fields, *([] if args.tiny else [f"train.accept_every={steps // 10}"])]
    arm = Arm(name, fields, args, work, 1, args.gpus[0], export=True)
    while (result := arm.found()) is None:
        time.sleep(0.5)
    found[f"{name}{ALONE}"] = {"overrides": fields, "commit": commit(), **result}
    print(line(f"{name}{ALONE}", found[f"{name}{ALONE}"]), flush=True)
    if "failed" in result:
        return {}
    drafter = arm.exported
    if not arm.peer:
        (trained,) = (arm.run / "checkpoints").iterdir()
        export_folder(trained, drafter, "SmolLM2-135M-Instruct")
    settings_of = [f for f in fields if "=" in f]
    out: dict[str, Any] = {"drafter": name}
    graphs = "true"
    wide, narrow = "target.dtype=float32", "target.dtype=bfloat16"
    # in float32 two at once, for they are not timed
    for together in (
        {"float32, T=0": [wide], "float32, T=0, replayed": [wide, "evaluate.replay=true"]},
        {"bfloat16, T=0": [narrow]},
        {"bfloat16, T=1": [narrow, "evaluate.temperature=1"]},
        {"bfloat16, T=1, reject": [narrow, "evaluate.temperature=1", "evaluate.rule=reject"]},
    ):
        started = {}
        for key, settings in together.items():
            folder = arm.folder / key
            command = [
                sys.executable, "-m", "draftsmith.cli", "evaluate", str(args.config), *args.fields, *settings_of,
                "evaluate.replay=false", f"evaluate.prompts={args.prompts}", f"evaluate.drafter={drafter}",
                f"evaluate.output={folder}", f"evaluate.graphs={graphs}", *settings,
            ]  # fmt: skip
            with open(f"{folder}.log", "w") as log:
                started[key] = folder, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        failed = False
        for key, (folder, process) in started.items():
            process.wait()
            said = Path(f"{folder}.log").read_text()
            files = list(folder.glob("*.json"))
            if files:
                out[key] = json.loads(files[0].read_text())["results"][0]
                del out[key]["rounds"]
                out[key] |= {"graphs": graphs, "beside": len(together)}
                if len(together) > 1:
                    for contended in ("wall_speedup", "seconds"):
                        out[key].pop(contended, None)
            else:
                out[key] = {"failed": f"exit code {process.returncode}", "said": told(said)[-1500:], "graphs": graphs}
                failed = failed or "replayed" not in key
            shown = {k: v for k, v in out[key].items() if k not in ("by_category", "spread")}
            print(key, process.returncode, shown, flush=True)
            save(found, **(keep | served_by(out, keep)))
        graphs = "false" if failed else graphs
    if args.keep:
        (RESULTS / f"{NAME}.drafter.json").write_text((drafter / "config.json").read_text())
        weights = (drafter / "model.safetensors").read_bytes()
        for number, start in enumerate(range(0, len(weights), PART)):
            (RESULTS / f"{NAME}.drafter.{number}").write_bytes(weights[start : start + PART])
    return out


def served_by(out: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What a call of `serve` adds to the file: the best drafter's figures stand at the top, those of others by name."""
    if out.get("drafter") in (SERVED, None):
        return {"serve": out, **served(out)} if out else {}
    return {"serve_others": {**before.get("serve_others", {}), out["drafter"]: {**out, **served(out)}}}


def served(out: dict[str, Any]) -> dict[str, Any]:
    """What of `serve` stands at the top of the file."""
    wide, narrow = (out.get(f"{dtype}, T=0", {}) for dtype in ("float32", "bfloat16"))
    warm, by_rejection = (out.get(f"bfloat16, T=1{rule}", {}) for rule in ("", ", reject"))
    parted = narrow.get("parted", [])
    return {
        "speedups_of": out.get("drafter"),
        "lossless": wide.get("lossless"),
        "parted_in_bfloat16": {
            "answers": len(parted), "within_2_steps": sum((p["gap"] or 0) <= 2 * (p["step"] or 0) for p in parted),
        },
        "wall_speedup": narrow.get("wall_speedup"), "passes_speedup": narrow.get("passes_speedup"),
        "wall_speedup_at_1": warm.get("wall_speedup"), "passes_speedup_at_1": warm.get("passes_speedup"),
        "wall_speedup_at_1_by_rejection": by_rejection.get("wall_speedup"),
        "passes_speedup_at_1_by_rejection": by_rejection.get("passes_speedup"),
    }  # fmt: skip


KEPT = ("note", "lost", "serve", "serve_others", "serve_on_a_cpu", *served({}))
"""What stands beside the arms and their summary."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+", metavar="[serve NAME] CONFIG a.b=c")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--beside", type=int, default=4, help="arms at once on a GPU")
    parser.add_argument("--others", type=int, default=0, help="GPUs of this host that other calls use meanwhile")
    parser.add_argument("--only", action="append", default=[], help="names that contain this")
    parser.add_argument("--add", action="append", default=[], help="another arm")
    parser.add_argument("--seeds", action="append", default=[], help="two more seeds of this arm")
    parser.add_argument("--alone", action="append", default=[], help="this arm again, alone on the GPU")
    parser.add_argument("--prompts", type=int, default=24, help="of serve")
    parser.add_argument("--keep", action="store_true", help="serve: the exported drafter beside the results")
    parser.add_argument("--cache", type=Path, help="folder of the compile cache: default a fresh one")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.what == ["tables"]:
        print("\n".join(tables(json.loads((STORED / f"{NAME}.json").read_text())["arms"])))
        return
    serving = args.what.pop(0) == "serve" if args.what[0] == "serve" else False
    name = args.what.pop(0) if serving else ""
    args.gpus = [""] if args.tiny else gpus()
    args.config, args.fields = Path(args.what[0]), [*args.what[1:], *(TINY if args.tiny else ())]
    found: dict[str, Any] = {}
    before: dict[str, Any] = {}
    for folder in (STORED, RESULTS):
        if (folder / f"{NAME}.json").is_file():
            before = json.loads((folder / f"{NAME}.json").read_text())
            found = before["arms"]
    added = {n.strip(): fields.split() for n, _, fields in (a.partition(":") for a in args.add)}
    for n, fields in added.items():
        known = found[n]["overrides"] if n in found else from_base(ARMS[n]) if n in ARMS else None
        if known not in (None, from_base(fields)):
            parser.error(f"--add {n!r}: there is such an arm, with {' '.join(known or [])}: choose another name")
    arms = {n: from_base(fields) for n, fields in {**added, **ARMS}.items()}
    arms |= {n: a["overrides"] for n, a in found.items() if not n.endswith(ALONE)}
    unknown = [n for n in (*args.seeds, *args.alone, *([name] if serving else [])) if n not in arms]
    if unknown:
        parser.error(f"no such arm: {'; '.join(unknown)}: there are {'; '.join(arms)}")
    for n in args.seeds:
        arms = {**{f"{n}{SEED}{s}": [*arms[n], f"train.seed={s}"] for s in (1, 2)}, **arms}
    named = dict(arms)
    for n in list(arms):
        if (other := uncompiled(n, found)) is not None:
            arms = {**other, **{m: f for m, f in arms.items() if m != n}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "arms"
        work.mkdir()
        keep = {k: v for k, v in before.items() if k in KEPT}
        if serving:
            keep |= served_by(serve(name, named[name], args, work, found, keep), keep)
        else:
            wanted = {n: f for n, f in arms.items() if not args.only or any(o in n for o in args.only)}
            if args.alone:
                args.beside, wanted = 1, {f"{n}{ALONE}": named[n] for n in args.alone}
            prepare(args)
            run_arms(wanted, args, work, found, keep)
        top = save(found, **keep)
    print(
        json.dumps(
            {
                k: v
                for k, v in json.loads(top.read_text()).items()
                if k not in ("arms", "serve", "serve_others", "lost", "environment")
            }
        )
    )
    print(top)


def prepare(args: argparse.Namespace) -> None:
    """The target's greedy answers, once, before several processes would want them."""
    code = (
        "import sys; from draftsmith import env; env.prepare()\n"
        "from pathlib import Path; from draftsmith.config import load_config\n"
        "from draftsmith.data.store import Store; from draftsmith.target.model import load_target\n"
        "from draftsmith.evaluate.acceptance import evaluation_prompts; from draftsmith.evaluate.replay import greedy_answers\n"
        "c = load_config(Path(sys.argv[1]), sys.argv[2:]); t = load_target(c.target, c.device)\n"
        "a = greedy_answers(c, t, evaluation_prompts(c, Store(c.store), t.tokenizer, c.evaluate.prompts))\n"
        "print('greedy answers:', len(a), 'prompts,', sum(x.length for x in a), 'tokens')"
    )
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code, str(args.config), *args.fields], check=True)
    args.seconds -= time.monotonic() - begin


if __name__ == "__main__":
    main()
