"""`draftsmith plan`: what a run will need and how fast it will be, before anything of its size is allocated.

Sizes follow from the configs.  Speed is measured, not guessed: one target layer, one drafter layer forward and
backward, and one chunk of the loss, of the real geometry, on this machine; a row is then so many of each.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftsmith.config import Config
from draftsmith.data.store import Store
from draftsmith.drafter.attention import build_masks, pick_attention
from draftsmith.drafter.loss import drafter_loss
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.records import DrafterSpec
from draftsmith.target.model import Target, drafter_spec, load_borrowed, pick_device
from draftsmith.train.roles import rows_per_second

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Counts of one run.  Bytes are what one process of the role holds."""

    drafter_parameters: int
    target_parameters: int
    """Of the layers that are needed, with the embedding."""
    tokens: float
    """Real tokens in a row, on average."""
    queries: float
    """Block tokens in a row, on average."""
    trained: float
    """Slots that reach the head."""
    target_flops: float
    drafter_flops: float
    drafter_bytes: float
    target_bytes: float


def plan(config: Config) -> dict[str, Any]:
    """Measure and predict.  Returns sizes, seconds a row by role, rows/s of every placement of as many processes, and
    the recommendation.  Raises InputError if a role does not fit the memory of its device."""
    device = pick_device(config.device)
    target = load_borrowed(config.target, "cpu")
    spec = drafter_spec(config.drafter, target)
    sizes = count(config, spec, target)
    target_seconds, drafter_seconds = measure(config, spec, target, sizes, device)
    processes = max(2, config.placement.processes)
    placements = predict(processes, config.train.rows_per_step, target_seconds, drafter_seconds)
    limit = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else host_memory()
    best = max(placements, key=lambda name: placements[name])
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "drafter_parameters": sizes.drafter_parameters,
        "target_parameters": sizes.target_parameters,
        "target_flops_per_row": sizes.target_flops,
        "drafter_flops_per_row": sizes.drafter_flops,
        "memory_gib": {
            "target": sizes.target_bytes / GIB,
            "drafter": sizes.drafter_bytes / GIB,
            "colocated": (sizes.target_bytes + sizes.drafter_bytes) / GIB,
            "device": limit / GIB,
        },
        "target_seconds_per_row": target_seconds,
        "drafter_seconds_per_row": drafter_seconds,
        "single_rows_per_s": 1 / (target_seconds + drafter_seconds),
        "processes": processes,
        "rows_per_s": placements,
        "recommended": best,
    }


def count(config: Config, spec: DrafterSpec, target: Target) -> Sizes:
    """Parameters, FLOPs and bytes; the store, where there is one, says how full rows are."""
    h, v, d = spec.hidden_size, spec.vocab_size, spec.head_dim
    row, slots, b = config.train.row_tokens, config.train.anchors, spec.block_size
    filled, used = fill(config)
    with torch.device("meta"):
        drafter = sum(p.numel() for p in DFlashDrafter(spec).parameters())
    layers = spec.feature_layers[-1] + 1
    layer = sum(p.numel() for p in target.layers[0].parameters())
    tokens, queries = row * filled, slots * used * b
    trained = queries * (b - 1) / b
    layer_matrices = 2 * h * d * (spec.num_heads + spec.num_kv_heads) + 3 * h * spec.intermediate_size
    context = spec.num_layers * 2 * h * d * spec.num_kv_heads + len(spec.feature_layers) * h * h
    wide = 2 if device_is_gpu(config) else 4
    sample = 4 * tokens / 2  # attention looks back over half of a document on average
    return Sizes(
        drafter_parameters=drafter,
        target_parameters=layers * layer + v * h,
        tokens=tokens,
        queries=queries,
        trained=trained,
        target_flops=layers * (2 * layer * tokens + sample * tokens * h),
        drafter_flops=6 * (layer_matrices * spec.num_layers * queries + context * row) + 4 * trained * h * v,
        drafter_bytes=sum(
            (
                drafter * 16,  # float32 weights, gradients, two moments
                2 * v * h * wide,  # embedding and head
                queries * h * wide * (8 + 14 * spec.num_layers),  # activations kept for the backward pass
                3 * (config.loss.chunk_rows or 512) * v * 4,
                (1 + config.placement.run_ahead) * row * h * len(spec.feature_layers) * wide,
            )
        ),
        target_bytes=(layers * layer + v * h) * wide + row * h * wide * 20,
    )  # fmt: skip


def fill(config: Config) -> tuple[float, float]:
    """Share of a row that holds tokens, and of the anchor slots that are used: from the store, else 1 and 1."""
    if not (config.store / "manifest.json").is_file():
        return 1.0, 1.0
    from draftsmith.train.loop import make_loader

    loader = make_loader(config, Store(config.store), heldout=False)
    rows = [loader.row(g) for g in range(min(8, len(loader.plan(0))))]
    return (
        statistics.mean(r.starts[-1] for r in rows) / config.train.row_tokens,
        statistics.mean(r.anchor_count for r in rows) / config.train.anchors,
    )


def device_is_gpu(config: Config) -> bool:
    return pick_device(config.device).type == "cuda"


def host_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's if that is less."""
    import os
    from pathlib import Path

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    text = group.read_text().strip() if group.is_file() else "max"
    return total if text == "max" else min(total, int(text))


def measure(
    config: Config, spec: DrafterSpec, target: Target, sizes: Sizes, device: torch.device
) -> tuple[float, float]:
    """Seconds a row of target and of drafter, from one layer of each and a part of the loss."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = spec.feature_layers[-1] + 1
    length = document_length(config)
    forward = target_layer(target, length, device, dtype)
    target_seconds = timed(forward, device) * layers * sizes.tokens / length
    small = max(1, min(config.train.anchors, round(sizes.queries / spec.block_size)))
    one = drafter_layer(config, spec, small, device, dtype)
    loss_rows = min(config.loss.chunk_rows or 512, max(1, round(sizes.trained)))
    loss = loss_chunk(spec, loss_rows, device, dtype)
    optimizer = sizes.drafter_parameters * 28 / copy_speed(device) / config.train.rows_per_step
    drafter_seconds = timed(one, device) * spec.num_layers + timed(loss, device) * sizes.trained / loss_rows + optimizer
    return (0.0 if config.train.features == "files" else target_seconds) or 1e-9, drafter_seconds


def document_length(config: Config) -> int:
    """Tokens of one target forward: a mean document where they run one by one, a row where they are packed."""
    if device_is_gpu(config) or not (config.store / "manifest.json").is_file():
        return config.train.row_tokens
    return max(1, int(np.mean(Store(config.store).lengths)))


def target_layer(target: Target, tokens: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    """One decoder layer of the target's class and geometry, random weights, forward."""
    import copy

    config = copy.deepcopy(target.model.config)
    config.get_text_config().num_hidden_layers = 1
    config.get_text_config().vocab_size = 8
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = type(target.model)(config).to(dtype).eval().requires_grad_(False)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)

    @torch.no_grad()
    def run() -> Any:
        return model.get_decoder()(input_ids=ids, use_cache=False)

    return run


def drafter_layer(
    config: Config, spec: DrafterSpec, anchors: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Any]:
    """A drafter of one layer, forward and backward, over one row."""
    import dataclasses

    one = dataclasses.replace(spec, num_layers=1, layer_types=spec.layer_types[:1], feature_layers=(0,))
    drafter = DFlashDrafter(one).to(device)
    row, q = config.train.row_tokens, anchors * spec.block_size
    high = np.linspace(1, row - 1, anchors).astype(np.int64)
    kind = pick_attention(config.train.attention, device)
    masks = build_masks(kind, high * 0, high, row, spec.block_size, one.windows(), device)
    features = torch.randn(row, spec.hidden_size, device=device, dtype=dtype)
    x, positions = torch.randn(q, spec.hidden_size, device=device, dtype=dtype), torch.arange(q, device=device)

    def run() -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = drafter(features, torch.arange(row, device=device), x, positions, masks)
        out.sum().backward()

    return run


def loss_chunk(spec: DrafterSpec, rows: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    head = torch.randn(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
    hidden = torch.randn(rows, spec.hidden_size, device=device, dtype=dtype)
    where = torch.arange(rows, device=device)
    weights = torch.ones(-(-rows // spec.block_size), spec.block_size, device=device)
    return lambda: drafter_loss(hidden, where * 0, where, weights, head, spec, kind="decay", chunk_rows=rows)


def copy_speed(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.randn(2**24, device=device)
    other = torch.empty_like(source)
    return 2 * source.numel() * 4 / timed(lambda: other.copy_(source), device)


def timed(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a call, after one to warm up."""
    seconds = []
    for i in range(repeats + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def predict(processes: int, rows_per_step: int, target_seconds: float, drafter_seconds: float) -> dict[str, float]:
    """Rows a second of every placement of `processes`, on hardware of their own."""
    out = {}
    if rows_per_step % processes == 0:
        out[f"colocated x{processes}"] = processes / (target_seconds + drafter_seconds)
    for drafters in range(1, processes):
        if rows_per_step % drafters == 0:
            targets = processes - drafters
            out[f"split {targets} + {drafters}"] = rows_per_second(targets, drafters, target_seconds, drafter_seconds)
    return out


def render(found: dict[str, Any]) -> str:
    """The plan as a table."""
    table = Table(title=f"plan for {found['processes']} processes on {found['device']}")
    table.add_column("placement")
    table.add_column("rows/s", justify="right")
    for name, rate in sorted(found["rows_per_s"].items(), key=lambda item: -item[1]):
        table.add_row(name, f"{rate:.3g}" + (" *" if name == found["recommended"] else ""))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    memory = found["memory_gib"]
    return console.export_text() + (
        f"drafter {found['drafter_parameters'] / 1e6:.1f}M parameters, target {found['target_parameters'] / 1e6:.1f}M "
        f"(layers that are needed)\n"
        f"memory a process, GiB: target {memory['target']:.1f}, drafter {memory['drafter']:.1f}, both "
        f"{memory['colocated']:.1f}; the device has {memory['device']:.1f}\n"
        f"a row: target {found['target_seconds_per_row']:.3g} s, drafter {found['drafter_seconds_per_row']:.3g} s; one "
        f"process alone {found['single_rows_per_s']:.3g} rows/s\n"
        f"recommended: {found['recommended']}"
    )


def check_fits(found: dict[str, Any], config: Config) -> None:
    """Raises InputError naming the role that does not fit its device, and by how much."""
    memory = found["memory_gib"]
    roles = ("target", "drafter") if config.placement.mode == "split" else ("colocated",)
    for role in roles:
        if memory[role] > memory["device"]:
            short = memory[role] - memory["device"]
            raise InputError(
                f"placement: a {role} process needs {memory[role]:.1f} GiB, its device has {memory['device']:.1f}, "
                f"{short:.1f} too little: lower train.row_tokens or train.anchors, or set placement.mode=split"
            )
