"""What this machine reaches: layers of the target and of the drafter, a chunk of the loss and the optimizer are run on
rows of the store, one and two layers deep, so that what a layer costs and what comes on top are known apart.

Where processes will share cores, several measure at once, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.cards import Rates
from draftsmith.config import Config
from draftsmith.drafter.attention import pick_attention
from draftsmith.drafter.loss import drafter_loss, pick_chunk
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.predict import Geometry, Settings, head_flops, target_flops, trunk_flops
from draftsmith.records import DrafterSpec, PackedRow
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.model import Target
from draftsmith.target.packed import register
from draftsmith.train import compile as compiling
from draftsmith.train.optim import OnePassAdamW, clip_factor, make_optimizer
from draftsmith.train.step import Frozen, RowStep

GPU_LINK, GPU_REDUCE = 323e9, 341e9
"""Bytes a second between two H200 over NVLink, measured; they cannot be measured with one GPU at hand."""
CPU_LINK, CPU_REDUCE = 2e9, 1.5e9
"""gloo over loopback, two processes, 8 to 64 MB, measured."""
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
VOCAB = 8
"""Rows of the stand-ins for embedding and head, which are measured apart."""
PASSES, LONG = 8, 3.0
"""How often a thing is timed; after so many seconds, two times are enough."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is planned: everything that `measure` and `predict` start from.  target: on the meta device."""

    config: Config
    target: Target
    spec: DrafterSpec
    geometry: Geometry
    settings: Settings
    rows: Sequence[PackedRow]
    row_seconds: float
    """To make a row in the loader."""


def measure(work: Work, device: torch.device) -> Rates:
    """Rates of this process, as it is, alone or beside others."""
    timer = _Timer(device)
    geometry, spec, settings = work.geometry, work.spec, work.settings
    dtype = DTYPES[settings.compute_bytes]
    rows = [_stand_in(row) for row in work.rows]
    target_speed, target_fixed = 1.0, 0.0
    if not settings.files:
        extractors, depth = target_layers(work, device)
        one, two = timer.each([partial(_all, e.row, rows) for e in extractors])
        layer = max(two - one, one * 0.05) / depth / len(rows)
        target_speed = target_flops(geometry, settings) / (layer * geometry.layers)
        target_fixed = max(0.0, one / len(rows) - layer * depth)
    speed, fixed, drafter = _trunk(work, rows, device, dtype, timer)
    chunk = min(settings.chunk_rows, max(1, round(settings.trained)))
    compiled = compiling.wanted(work.config, device)
    head = timer.once(loss_chunk(spec, chunk, device, dtype, compiled, work.config.loss.softmax)) / chunk
    optimizer = make_optimizer(drafter, work.config.train, one_pass=compiled)
    parameters = list(drafter.parameters())

    def update() -> None:
        if isinstance(optimizer, OnePassAdamW):
            gradients = {p: p.grad for p in parameters if p.grad is not None}
            optimizer.update(gradients, {}, clip_factor(list(gradients.values()), 1.0, device)[1])
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

    update_seconds = timer.once(update)
    source = torch.randn(2**23, device=device)
    other = torch.empty_like(source)
    gpu = device.type == "cuda"
    return Rates(
        target_flops=target_speed,
        drafter_flops=speed,
        head_flops=head_flops(spec, settings) / (head * settings.trained),
        optimizer=sum(p.numel() for p in parameters) / update_seconds,
        copy=2 * source.numel() * 4 / timer.once(lambda: other.copy_(source)),
        link=GPU_LINK if gpu else CPU_LINK,
        reduce=GPU_REDUCE if gpu else CPU_REDUCE,
        target_fixed=target_fixed,
        drafter_fixed=fixed + work.row_seconds,
    )


def _trunk(
    work: Work, rows: Sequence[PackedRow], device: torch.device, dtype: torch.dtype, timer: _Timer
) -> tuple[float, float, DFlashDrafter]:
    """FLOP/s of the drafter's layers, seconds a row beside them, and a drafter with gradients."""
    spec, settings = work.spec, work.settings
    steps = [drafter_row(work, depth, device, dtype) for depth in (1, 2)]
    one, two = timer.each([partial(_all, run, rows) for run, _ in steps])
    flops = [trunk_flops(_deep(spec, depth), settings) for depth in (1, 2)]
    whole = trunk_flops(spec, settings)
    layer = max(two - one, one * 0.05) / len(rows)
    speed = (flops[1] - flops[0]) / layer
    seconds = one / len(rows) + layer * (spec.num_layers - 1)
    return speed, seconds - whole / speed, steps[0][1]


def target_layers(work: Work, device: torch.device) -> tuple[list[FeatureExtractor], int]:
    """Extractors over one and two times `depth` layers of the target's class and geometry, random weights."""
    text = work.target.text_config
    kinds = getattr(text, "layer_types", None) or ["all"]
    depth = next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    out = []
    for layers in (depth, 2 * depth):
        config = copy.deepcopy(work.target.model.config)
        small = config.get_text_config()
        small.num_hidden_layers, small.vocab_size = layers, VOCAB
        small.pad_token_id = small.bos_token_id = small.eos_token_id = None
        if getattr(small, "layer_types", None):
            small.layer_types = [kinds[i % depth] for i in range(layers)]
        sdpa = register() if compiling.wanted(work.config, device) else "sdpa"
        config._attn_implementation = sdpa if type(work.target.model)._supports_sdpa else "eager"
        dtype = DTYPES[work.settings.target_bytes]
        with torch.device(device):
            model = type(work.target.model)(config).to(dtype).eval().requires_grad_(False)
        target = dataclasses.replace(
            work.target, model=model, device=device, dtype=dtype,
            forward="packed" if work.settings.packed else "per_document",
        )  # fmt: skip
        out.append(FeatureExtractor(target, [layers - 1], dtype))
        if compiling.wanted(work.config, device):
            out[-1].compile(attention=work.config.train.attention)
    return out, depth


def _deep(spec: DrafterSpec, layers: int) -> DrafterSpec:
    types = tuple(spec.layer_types[i % spec.num_layers] for i in range(layers))
    return dataclasses.replace(spec, num_layers=layers, layer_types=types)


def drafter_row(
    work: Work, layers: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[PackedRow], Any], DFlashDrafter]:
    """One row of training, as the loop does it, through a drafter of so many layers and a head of few words."""
    spec = dataclasses.replace(_deep(work.spec, layers), mask_token_id=1, vocab_size=VOCAB)
    drafter = DFlashDrafter(spec).initialize(0).to(device)
    if dtype == torch.float64:
        drafter.double()
    small = torch.randn(VOCAB, spec.hidden_size, device=device, dtype=dtype)
    train = work.config.train
    width = len(spec.feature_layers) * spec.hidden_size
    features = torch.randn(train.row_tokens, width, device=device, dtype=dtype)

    class Source:
        def row(self, row: PackedRow) -> Tensor:
            return features

    kind = pick_attention(train.attention, device, spec.head_dim, dtype)
    step = RowStep(
        drafter, Frozen(small, small), Source(), train, work.config.loss, attention=kind, compute_dtype=dtype,
        compiled=compiling.wanted(work.config, device),
    )  # fmt: skip
    fresh = train.rows_per_step // work.config.placement.drafters <= 1

    def run(row: PackedRow) -> None:
        if fresh:
            step.clear()
        fine = torch.isfinite(torch.stack(torch.aminmax(features))).all()
        if device.type == "cpu":
            bool(fine)
        step.run(row, step.blocks(row), features).weighted.backward()

    return run, drafter


def _all(run: Callable[[PackedRow], Any], rows: Sequence[PackedRow]) -> None:
    for row in rows:
        run(row)


def loss_chunk(
    spec: DrafterSpec,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
    softmax: str = "auto",
) -> Callable[[], Any]:
    head = torch.randn(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
    hidden = torch.randn(rows, spec.hidden_size, device=device, dtype=dtype)
    where = torch.arange(rows, device=device)
    weights = torch.ones(-(-rows // spec.block_size), spec.block_size, device=device)
    chunk = pick_chunk(softmax, spec, device, dtype, compiled)
    return lambda: drafter_loss(
        hidden, where * 0, where, weights, head, spec, kind="decay", chunk_rows=rows, chunk=chunk
    )


def _stand_in(row: PackedRow) -> PackedRow:
    """The same row in a vocabulary of a few words."""
    return dataclasses.replace(row, tokens=row.tokens % VOCAB)


def made_up_row(config: Config) -> PackedRow:
    """A row that one document fills, all of it written by the target: where there is no store yet."""
    t, a = config.train.row_tokens, config.train.anchors
    anchors = np.unique(np.linspace(0, t - 2, a).astype(np.int64))
    return PackedRow(
        epoch=0, index=0, tokens=np.zeros(t, np.int64), positions=np.arange(t), document=np.zeros(t, np.int32),
        supervised=np.ones(t, bool), samples=(0,), starts=(0, t), anchors=np.resize(anchors, a),
        anchor_count=len(anchors),
    )  # fmt: skip


class _Timer:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _seconds(self, run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def once(self, run: Callable[[], Any]) -> float:
        return self.each([run])[0]

    def each(self, runs: Sequence[Callable[[], Any]]) -> list[float]:
        """Mean seconds of each, after one call to warm up; in turn, so that the machine's pace meets all alike."""
        for run in runs:
            run()
        times: list[list[float]] = []
        begin = time.perf_counter()
        while len(times) < 2 or (len(times) < PASSES and time.perf_counter() - begin < LONG):
            times.append([self._seconds(run) for run in runs])
        return [statistics.mean(t) for t in zip(*times, strict=True)]


def measure_together(config: Config, count: int) -> Rates:
    """Mean rates of `count` processes of this machine that measure at the same time.

    Raises RuntimeError with what a process said if it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config.dump())
        file.flush()
        command = [sys.executable, "-m", "draftsmith.rates", file.name]
        children = [
            subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(count)
        ]
        try:
            for child in children:
                assert child.stdout is not None
                while (line := child.stdout.readline()) and line.strip() != "ready":
                    pass
            with contextlib.suppress(BrokenPipeError):  # one that has failed is reported below
                for child in children:
                    assert child.stdin is not None
                    child.stdin.write("go\n")
                    child.stdin.flush()
            said = [child.communicate() for child in children]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
    for child, (_, complaint) in zip(children, said, strict=True):
        if child.returncode:
            raise RuntimeError(f"a process that measured beside others failed: {complaint.strip()[-400:]}")
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    return Rates(**{name: statistics.mean(f[name] for f in found) for name in found[0]})


def _beside(path: Path) -> None:
    """One of the processes of `measure_together`: get ready, wait for the word, measure, print the rates."""
    from draftsmith.config import load_config
    from draftsmith.plan import prepare

    work = prepare(load_config(path))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(dataclasses.asdict(measure(work, torch.device("cpu")))), flush=True)


if __name__ == "__main__":
    from draftsmith import env

    env.prepare()
    _beside(Path(sys.argv[1]))
