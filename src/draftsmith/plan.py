"""`draftsmith plan`: what a run will need and how fast it will be, before anything of its size is allocated.

The models' shapes come from their configs, on the meta device; how full rows are from the store, if there is one; the
speed from a few layers that are run here (rates.py) or from a table of GPUs (cards.py); predict.py does the sums.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftsmith.cards import CARDS, Rates, card_rates
from draftsmith.config import Config
from draftsmith.data.store import Store
from draftsmith.drafter.attention import heads_fit
from draftsmith.drafter.loss import default_chunk_rows, our_softmax, why_not_ours
from draftsmith.errors import InputError
from draftsmith.predict import (
    GIB,
    Geometry,
    Prediction,
    Settings,
    memory,
    predict,
    resized,
    smaller_rows,
    too_little,
)
from draftsmith.rates import Work, made_up_row, measure, measure_together
from draftsmith.records import DrafterSpec, PackedRow
from draftsmith.target.model import Target, drafter_spec, load_meta, pick_device
from draftsmith.train.dist import out_of_memory

ROWS = 2
"""Rows of the store that are looked at and measured with."""


@dataclass(frozen=True)
class Machine:
    """Where the run would be.  devices: bytes free on each GPU, or of the one memory of a machine without."""

    name: str
    devices: tuple[float, ...]
    gpu: bool
    here: bool


@dataclass(frozen=True)
class Planned:
    machine: Machine
    work: Work
    processes: int
    prediction: Prediction
    notes: tuple[str, ...]


def plan(config: Config, gpus: int | None = None, gpu: str | None = None) -> Planned:
    """Measure and predict.  gpus: plan for so many processes, one GPU each; gpu: a card of the table, need not be here.

    Raises InputError for a number or a card that makes no plan.
    """
    if gpus is not None and gpus < 1:
        raise InputError(f"--gpus {gpus}: a plan needs at least one")
    if gpu is not None and gpu not in CARDS:
        raise InputError(f"--gpu {gpu}: this table knows {', '.join(CARDS)}")
    processes = gpus or config.placement.processes
    found = machine(config, processes, gpu)
    if gpus and not found.gpu:
        raise InputError(f"--gpus {gpus}: no GPU is here, so say which with --gpu ({', '.join(CARDS)})")
    work = prepare(config, as_gpu=found.gpu)
    crowd, notes = None, _notes(config, gpu)
    if gpu is not None:
        rates = card_rates(CARDS[gpu])
    else:
        device = pick_device(config.device)
        together = min(processes, len(os.sched_getaffinity(0)))
        try:
            rates = measure(work, device)
            if together > 1 and not found.gpu:
                crowd = together, measure_together(config, together)
        except (MemoryError, RuntimeError) as error:  # a row through one layer is too much: sizes can still be told
            if not out_of_memory(error):
                raise
            rates = card_rates(CARDS["h200"])
            notes.append("measuring ran out of memory: rows/s and tokens/s are an H200's")
    prediction = predict(work.geometry, work.spec, work.settings, rates, processes, found.devices, crowd=crowd)
    if gpu is not None and (advice := graphs_advice(config, work, rates, prediction)):
        notes.append(advice)
    return Planned(found, work, processes, prediction, tuple(notes))


def _notes(config: Config, gpu: str | None) -> list[str]:
    notes = []
    if not (config.store / "manifest.json").is_file():
        notes.append("no store yet: rows are taken to be full, one document each")
    if config.train.accept_every:
        notes.append("train.accept_every must be 0 in a split")
    if gpu is not None:
        basis = "measured" if CARDS[gpu].measured else "from its data sheet, times what an H200 reached of its own"
        notes.append(f"{gpu}: product and copy rates {basis}; efficiencies as measured with Qwen3-8B widths")
    return notes


def machine(config: Config, processes: int, gpu: str | None) -> Machine:
    """The GPUs of the table, or what is here and free."""
    if gpu is not None:
        return Machine(f"{processes} x {gpu}", (CARDS[gpu].memory_gib * GIB,) * processes, gpu=True, here=False)
    if pick_device(config.device).type == "cuda":
        count = torch.cuda.device_count()
        free = tuple(float(torch.cuda.mem_get_info(i)[0]) for i in range(count))
        return Machine(f"{count} x {torch.cuda.get_device_name()}", free, gpu=True, here=True)
    return Machine(f"{len(os.sched_getaffinity(0))} CPUs", (float(available_memory()),), gpu=False, here=True)


def available_memory() -> int:
    """Bytes that this machine can still give, or its control group if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return free


def prepare(config: Config, *, as_gpu: bool | None = None) -> Work:
    """Shapes and averages; nothing of the models' size.  as_gpu: on GPUs, wherever this runs."""
    gpu = pick_device(config.device).type == "cuda" if as_gpu is None else as_gpu
    target = load_meta(config.target)
    spec = drafter_spec(config.drafter, target)
    rows, seconds = sample_rows(config)
    settings = row_settings(config, spec, rows, gpu)
    return Work(config, target, spec, geometry_of(target, spec), settings, rows, seconds)


def geometry_of(target: Target, spec: DrafterSpec) -> Geometry:
    """Counts of a model on the meta device.  Of experts, the share that a token visits is active."""
    text = target.text_config
    count = spec.feature_layers[-1] + 1
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    visited = getattr(text, "num_experts_per_tok", None) or 1
    needed = active = 0.0
    for layer in target.layers[:count]:
        for name, p in layer.named_parameters():
            needed += p.numel()
            active += p.numel() * (visited / experts if ".experts." in f".{name}" else 1)
    heads = text.num_attention_heads
    return Geometry(
        parameters=sum(p.numel() for p in target.model.parameters()),
        needed_parameters=int(needed),
        active_parameters=int(active),
        layers=count,
        hidden=spec.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * spec.hidden_size,
        attention_width=heads * (getattr(text, "head_dim", None) or spec.hidden_size // heads),
        tied=bool(target.head is target.embedding),
    )


def sample_rows(config: Config) -> tuple[list[PackedRow], float]:
    """Rows spread over the first epoch, and seconds to make one; a made-up row where there is no store."""
    if not (config.store / "manifest.json").is_file():
        return [made_up_row(config)], 0.0
    from draftsmith.train.loop import make_loader

    loader = make_loader(config, Store(config.store), heldout=False)
    total = len(loader.plan(0))
    at = sorted({round(i * (total - 1) / max(ROWS - 1, 1)) for i in range(ROWS)})
    loader.row(0)
    begin = time.perf_counter()
    rows = [loader.row(g) for g in at]
    seconds = (time.perf_counter() - begin) / len(at)
    return [r for r in rows if r.anchor_count] or [made_up_row(config)], seconds


def row_settings(config: Config, spec: DrafterSpec, rows: list[PackedRow], gpu: bool) -> Settings:
    train = config.train
    compiled = gpu if config.compile.enabled is None else config.compile.enabled
    wide = {"float32": 4, "bfloat16": 2, "float64": 8, "auto": 2 if gpu else 4}
    packed = config.target.forward == "packed" or (config.target.forward == "auto" and gpu)
    lengths, graphs = [np.diff(r.starts) for r in rows], gpu and config.compile.graphs
    slots = train.anchors * (spec.block_size - 1)
    return Settings(
        row_tokens=train.row_tokens,
        anchors=train.anchors,
        rows_per_step=train.rows_per_step,
        chunk_rows=config.loss.chunk_rows or default_chunk_rows(train.anchors, spec.block_size, compiled),
        run_ahead=config.placement.run_ahead,
        tokens=float(statistics.mean(n.sum() for n in lengths)),
        used=statistics.mean(r.anchor_count for r in rows),
        trained=statistics.mean(slots if graphs else _trained(r, spec.block_size) for r in rows),
        squares=float(statistics.mean((n.astype(np.float64) ** 2).sum() for n in lengths)),
        target_bytes=wide[config.target.dtype],
        compute_bytes=wide[train.compute_dtype],
        feature_bytes=wide[train.feature_dtype],
        gpu=gpu,
        packed=packed,
        files=train.features == "files",
        distinct_windows=len(set(spec.windows())),
        muon=train.optimizer == "muon",
        one_pass=compiled and train.optimizer == "adamw",
        in_place=gpu
        and our_softmax(config.loss.softmax, compiled)
        and why_not_ours(spec) is None
        and wide[train.compute_dtype] <= 4,
        graphs=graphs,
    )


def _trained(row: PackedRow, block_size: int) -> int:
    """Slots that count: inside the anchor's document and written by the target."""
    anchors = row.anchors[: row.anchor_count]
    at = anchors[:, None] + np.arange(1, block_size)
    inside = at < len(row.tokens)
    at = np.where(inside, at, 0)
    return int((inside & row.supervised[at] & (row.document[at] == row.document[anchors][:, None])).sum())


def as_json(planned: Planned, config: Config) -> dict[str, Any]:
    prediction, work = planned.prediction, planned.work
    geometry = dataclasses.asdict(work.geometry)
    return {
        "machine": planned.machine.name,
        "device_gib": [d / GIB for d in planned.machine.devices],
        "processes": planned.processes,
        "target": geometry,
        "drafter_parameters": prediction.drafter_parameters,
        "row": dataclasses.asdict(work.settings),
        "target_flops_per_row": prediction.target_flops,
        "drafter_flops_per_row": prediction.drafter_flops,
        "target_seconds_per_row": prediction.target_seconds,
        "drafter_seconds_per_row": prediction.drafter_seconds,
        "memory_gib": {
            role: {part: value / GIB for part, value in parts.items()} for role, parts in prediction.memory.items()
        },
        "placements": [
            {
                "name": p.name, "mode": p.mode, "targets": p.targets, "drafters": p.drafters,
                "rows_per_s": p.rows_per_s, "tokens_per_s": p.rows_per_s * work.settings.tokens,
                "need_gib": [n / GIB for n in p.need], "fits": p.fits,
            }
            for p in prediction.placements
        ],
        "recommended": prediction.recommended,
        "notes": list(planned.notes),
        "does_not_fit": does_not_fit(planned, config),
    }  # fmt: skip


def render(planned: Planned, config: Config) -> str:
    """The plan as tables."""
    prediction, work = planned.prediction, planned.work
    console = Console(width=110, record=True, file=io.StringIO())
    table = Table(title=f"{planned.processes} process{'es' * (planned.processes > 1)} on {planned.machine.name}")
    for name in ("placement", "rows/s", "tokens/s", "most on a device, GiB", ""):
        table.add_column(name, justify="right" if "s" in name[-2:] or "GiB" in name else "left")
    for p in sorted(prediction.placements, key=lambda p: -p.rows_per_s):
        verdict = "recommended" if p.name == prediction.recommended else "" if p.fits else "does not fit"
        rate = p.rows_per_s
        table.add_row(p.name, f"{rate:.3g}", f"{rate * work.settings.tokens:.0f}", f"{max(p.need) / GIB:.1f}", verdict)
    console.print(table)
    roles = ["colocated"] if planned.processes == 1 or work.settings.files else list(prediction.memory)
    sizes = Table(title="memory of one process, GiB")
    sizes.add_column("")
    for role in roles:
        sizes.add_column(role, justify="right")
    parts = dict.fromkeys(part for role in roles for part in prediction.memory[role] if part != "peak")
    for part in [*parts, "peak"]:
        values = [prediction.memory[role].get(part, 0.0) / GIB for role in roles]
        if max(values) >= 0.005 or part == "peak":
            sizes.add_row(part, *(f"{v:.2f}" if v else "" for v in values))
    console.print(sizes)
    geometry = work.geometry
    lines = [
        f"target: {geometry.parameters / 1e6:.1f}M parameters, {geometry.needed_parameters / 1e6:.1f}M in the "
        f"{geometry.layers} layers that are needed; {prediction.target_flops / 1e12:.3g} TFLOP and "
        f"{prediction.target_seconds:.3g} s a row",
        f"drafter: {prediction.drafter_parameters / 1e6:.1f}M parameters; {prediction.drafter_flops / 1e12:.3g} TFLOP "
        f"and {prediction.drafter_seconds:.3g} s a row",
        f"recommended: {prediction.recommended or 'none fits'}",
        *planned.notes,
    ]
    return console.export_text() + "\n".join(lines)


def does_not_fit(planned: Planned, config: Config) -> str | None:
    """One line if the config's placement (for another number of processes: every placement) does not fit."""
    placements, place = planned.prediction.placements, config.placement
    same = [p for p in placements if (p.mode, p.targets, p.drafters) == (place.mode, place.targets, place.drafters)]
    asked = same or [p for p in placements if planned.prediction.recommended is None]
    if not asked or asked[0].fits:
        return None
    devices = planned.machine.devices
    over = min(asked, key=lambda p: max(n - d for n, d in zip(p.need, devices, strict=True)))
    work = planned.work
    return too_little(work.geometry, work.spec, work.settings, over, devices, placements)


def graphs_advice(config: Config, work: Work, rates: Rates, said: Prediction) -> str | None:
    """One line if, at a card's rates, `compile.graphs` would at least double the rows/s of the config's placement.

    Half again would not do: of small widths the table has kernels take half of what they do.
    """
    settings, place = work.settings, config.placement
    asked = [
        p for p in said.placements if (p.mode, p.targets, p.drafters) == (place.mode, place.targets, place.drafters)
    ]
    narrow = torch.bfloat16 if max(settings.compute_bytes, settings.target_bytes) == 2 else torch.float32
    ours = config.train.attention in ("auto", "triton") and heads_fit(work.spec.head_dim, narrow)
    if settings.graphs or config.compile.enabled is False or not (ours and settings.packed and asked):
        return None
    slots = float(settings.anchors * (work.spec.block_size - 1))  # all go through the head then
    graphed = dataclasses.replace(settings, graphs=True, trained=slots)
    processes = asked[0].targets + asked[0].drafters
    others = predict(work.geometry, work.spec, graphed, rates, processes, (math.inf,) * processes).placements
    (faster,) = (p for p in others if p.name == asked[0].name)
    if faster.rows_per_s < 2 * asked[0].rows_per_s:
        return None
    role = "colocated" if place.mode == "colocated" else "drafter"
    more = memory(work.geometry, work.spec, graphed, place.drafters)[role]["graphs"] / GIB
    return (
        f"compile.graphs=true may be faster: {asked[0].rows_per_s:.3g} rows/s is as fast as the host asks for so small "
        f"a model's kernels; it takes about {more:.2g} GiB more a drafter"
    )


def what_fits(config: Config, spec: DrafterSpec, target: Target, role: str, row: PackedRow, has: float) -> str:
    """After a process ran out of memory: what it needs by these sums, and the largest rows that fit `has` bytes.

    role: of memory().  The sums hold within 20%: where they say that the row should have fitted, a fifth of it must go.
    """
    settings = row_settings(config, spec, [row], target.device.type == "cuda")
    geometry = geometry_of(target, spec)

    def need(changed: Settings) -> float:
        return memory(geometry, spec, changed, config.placement.drafters)[role]["peak"]

    whole, least = need(settings), need(resized(settings, row_tokens=64, anchors=8))
    most = min(has, least + 0.8 * (whole - least))
    ways = smaller_rows(settings, lambda changed: need(changed) <= most)
    size = f"about {whole / GIB:.3g} GiB needed by the sums of `draftsmith plan`, {has / GIB:.3g} GiB there"
    return f"{size}; " + (f"what should fit: {', or '.join(ways)}" if ways else "shorter rows would not fit either")
