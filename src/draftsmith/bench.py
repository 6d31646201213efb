"""`draftsmith bench`: how fast this machine trains, part by part, against what its arithmetic and memory allow.

Random weights of a named geometry, made on the device: nothing is downloaded.  The same RowStep, FeatureExtractor and
warm-up as training are timed.  The floor of a part is its matrix products at the measured product rate plus the
optimizer's traffic at the measured copy rate; attention and everything else counts as overhead.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftsmith.config import parse_config
from draftsmith.cuda_graphs import peak_bytes
from draftsmith.drafter.attention import pick_attention
from draftsmith.drafter.blocks import build_blocks
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.geometry import GEOMETRIES, RandomRows, Shape, drafter_spec, random_row, random_target, work
from draftsmith.records import PackedRow
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.features import FeatureSource, TimedFeatures
from draftsmith.target.model import pick_device
from draftsmith.train import compile as compiling
from draftsmith.train import graphed
from draftsmith.train.dist import World
from draftsmith.train.optim import make_optimizer
from draftsmith.train.roles import Clock
from draftsmith.train.schedule import rows_of_drafter, rows_of_target
from draftsmith.train.step import Frozen, RowStep
from draftsmith.train.transport import ReceiveRows, SendRows, serve_rows

STEPS_TOGETHER = 5
"""Steps between two readings of the clock on a GPU: the host prepares a step while the device works on the last."""


def timed(run: Callable[[], Any], device: torch.device, repeats: int = 10, warm: int = 3, calls: int = 1) -> float:
    """Median milliseconds of a call; on a GPU by events.  calls: how many follow one another without waiting for the
    device in between, as steps of training do."""
    values = []
    for i in range(warm + repeats):
        if device.type == "cuda":
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for _ in range(calls):
                run()
            done.record()
            done.synchronize()
            milliseconds = begun.elapsed_time(done) / calls
        else:
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            milliseconds = (time.perf_counter() - begin) / calls * 1e3
        if i >= warm:
            values.append(milliseconds)
    return statistics.median(values)


def roofline(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured ceilings: matrix products in TFLOP/s (the better of two shapes), copies in TB/s (read + written)."""
    size = 8192 if device.type == "cuda" else 512
    best = 0.0
    for m, k, n in ((size, size, size), (size, size // 2, size * 3 // 2)):
        a, b = (torch.randn(s, device=device, dtype=dtype) for s in ((m, k), (k, n)))
        best = max(best, 2 * m * k * n / timed(lambda a=a, b=b: a @ b, device) / 1e9)  # type: ignore[misc]
    source = torch.empty(2**32 if device.type == "cuda" else 2**26, device=device, dtype=torch.uint8)
    other = torch.empty_like(source)
    copy = 2 * source.numel() / timed(lambda: other.copy_(source), device) / 1e9
    return {"gemm_tflops": best, "copy_tb_per_s": copy}


class Bench:
    """One geometry and shape on this device; `run` gives the figures."""

    def __init__(
        self, geometry: str, shape: Shape, device: str = "auto", *, rows_per_step: int = 1, fields: Sequence[str] = (),
        world: World | None = None,
    ) -> None:  # fmt: skip
        """fields: overrides of the config, as on the command line.  Raises InputError for an unknown geometry."""
        self.world = world or World()
        if geometry not in GEOMETRIES:
            raise InputError(f"unknown geometry {geometry!r}: choose from {', '.join(GEOMETRIES)}")
        self.name, self.geometry, self.shape = geometry, GEOMETRIES[geometry], shape
        self.device = pick_device(device)
        gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if gpu else torch.float32
        self.spec = drafter_spec(self.geometry, shape)
        self.rows_per_step = rows_per_step
        self.config = parse_config(
            json.dumps({
                "name": "bench",
                "device": self.device.type,
                "target": {"model": geometry, "forward": "packed" if gpu else "auto"},
                "drafter": {"block_size": shape.block_size},
                "tokenize": {"max_tokens": shape.row_tokens},
                "train": {
                    "row_tokens": shape.row_tokens, "anchors": shape.anchors, "rows_per_step": rows_per_step,
                    "steps": 1000,
                },
            }),
            "bench",
            fields,
        )  # fmt: skip
        compiling.check_fp8(self.config, self.device)
        self.attention = pick_attention(self.config.train.attention, self.device, self.spec.head_dim, self.dtype)
        graphed.check(self.config, self.device, self.attention, compiling.wanted(self.config, self.device))
        self.rows = [random_row(shape, self.geometry.vocab, seed) for seed in range(4)]
        blocks = [build_blocks(row, shape.block_size, 0, 1.0, trim=False) for row in self.rows]
        self.trained = float(np.mean([b.counts.sum() for b in blocks]))
        self.work = work(self.geometry, self.spec, shape, self.trained)
        self.born = time.monotonic()
        self.said: list[str] = []
        self.compiler: compiling.Compiler | None = None

    def build(self, *, target: bool = True, drafter: bool = True) -> None:
        """Make what is timed, and compile it where training would."""
        begin = time.monotonic()
        layers = self.spec.feature_layers[-1] + 1 if target else 1
        self.target = random_target(self.geometry, layers, self.device, self.dtype)
        self.extract = FeatureExtractor(self.target, self.spec.feature_layers, self.dtype) if target else None
        self.step: RowStep | None = None
        self.source: FeatureSource | None = self.extract
        compiled = compiling.wanted(self.config, self.device)
        if compiled:
            self.compiler = compiling.Compiler(
                self.config, self.world, self.spec, self.target, self.said.append, self.said.append
            )
        if drafter:
            with self.device:
                model = DFlashDrafter(self.spec)
            generator = torch.Generator(self.device).manual_seed(3)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(0, 0.02, generator=generator)
                    elif name.endswith("bias"):
                        parameter.zero_()
            frozen = Frozen(self.target.embedding, self.target.head)
            self.step = RowStep(
                model, frozen, self.extract, self.config.train, self.config.loss,  # type: ignore[arg-type]
                attention=self.attention,
                compute_dtype=self.dtype,
                compiled=compiled, world=self.world, graphs=self.config.compile.graphs,
            )  # fmt: skip
            self.optimizer = make_optimizer(model, self.config.train, one_pass=compiled)
        self.built_seconds = time.monotonic() - begin
        if self.compiler is not None:
            self.compiler.warm_up(self.step, self.extract, self.optimizer if self.step else None)
            self.compiler.arm()
            self.source = self.compiler.source or self.extract
        if self.step is not None and self.source is not None:
            self.step.source = self.source

    def time_target(self) -> float:
        """Milliseconds a row."""
        assert self.source is not None
        source, rows = self.source, self._endless()
        calls = STEPS_TOGETHER if self.device.type == "cuda" else 1
        return timed(lambda: source.row(next(rows)), self.device, calls=calls)

    def time_drafter(self) -> dict[str, float]:
        """Milliseconds of a step of one row on given features, whole and (a graph has none) by part, and its peak
        memory."""
        step, device = self.step, self.device
        assert step is not None
        width = len(self.spec.feature_layers) * self.spec.hidden_size
        features = torch.randn(self.shape.row_tokens, width, device=device, dtype=self.dtype)
        source, step.source = step.source, _Always(features)
        rows = self._endless()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        calls = STEPS_TOGETHER if device.type == "cuda" else 1
        whole = timed(lambda: step.step(0, [next(rows)], self.optimizer, 1e-4), device, calls=calls)
        out = {"step_ms": whole}
        if device.type == "cuda":
            out["peak_gib"] = peak_bytes(device) / 2**30
        if step.graph is not None:
            step.source = source
            return out
        row = self.rows[0]
        blocks = step.blocks(row)
        out["forward_loss_ms"] = timed(lambda: step.run(row, blocks, features), device, calls=calls)

        def both() -> None:
            (step.run(row, blocks, features).weighted / 1e4).backward()
            step.clear()

        out["backward_ms"] = timed(both, device, calls=calls) - out["forward_loss_ms"]
        out["optimizer_ms"] = whole - out["forward_loss_ms"] - out["backward_ms"]
        step.source = source
        return out

    def time_end_to_end(self, steps: int = 12) -> float:
        """Tokens a second of target and drafter together, wall time over whole steps."""
        step = self.step
        assert step is not None
        rows = self._endless()

        def some(count: int) -> float:
            begin = time.perf_counter()
            for number in range(count):
                step.step(number, [next(rows) for _ in range(self.rows_per_step)], self.optimizer, 1e-4)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        some(3)
        return steps * self.rows_per_step * self.shape.row_tokens / some(steps)

    def run_together(self, steps: int) -> dict[str, Any]:
        """This process's part of a placement: whole steps over rows that only depend on their number.  On rank 0 the
        figures; elsewhere nothing."""
        self.build(target=self.world.role != "drafter", drafter=self.world.role != "target")
        with self.guard():
            return self._steps(steps)

    def _steps(self, steps: int) -> dict[str, Any]:
        world, step_rows = self.world, self.rows_per_step
        rows = RandomRows(self.shape, self.geometry.vocab)
        run_ahead = self.config.placement.run_ahead
        # in a split the targets run ahead of what is timed at its end too, as at its beginning
        ready = run_ahead * (world.targets + world.drafters) + world.targets if world.targets else 0
        warm, tail = (4 if world.targets else 2), -(-ready // step_rows)
        last = (warm + steps + tail) * step_rows
        if world.role == "target":
            assert self.extract is not None
            mine = rows_of_target(0, last, world.targets, world.index)
            timed = TimedFeatures(self.extract, self.device)
            serve_rows(SendRows(world, run_ahead), ((g, rows.row(g)) for g in mine), timed)
            world.publish(f"facts/{world.rank}", {"peak_gib": self._peak_gib()})
            return {}
        step = self.step
        assert step is not None
        source: Any = self.source
        if world.role == "drafter":
            shape = (self.shape.row_tokens, self.shape.features * self.geometry.hidden)
            asked = (g for s in range(warm + steps + tail) for g in self._mine(s))
            source = ReceiveRows(world, asked, shape, self.dtype, self.device, run_ahead)
        clock = Clock(world, source, self.device)
        step.source = clock.features
        sums = []
        for number in range(warm + steps + tail):
            if number == warm:
                self._wait()
                clock.start()
                begin = time.monotonic()
            with clock.part("data"):
                batch = [rows.row(g) for g in self._mine(number)]
            sums.append(step.step(number, batch, self.optimizer, 1e-4))
            if number == 0:
                self._wait()
                first_step_seconds = time.monotonic() - self.born
            if number == warm + steps - 1:
                self._wait()
                seconds = time.monotonic() - begin
                parts, _, waits = clock.read(steps * len(self._mine(0)))
        values = world.sum_device(torch.stack([s.weighted for s in sums])).tolist()
        facts = {"peak_gib": self._peak_gib(), "first_step_s": first_step_seconds, **self.compiled_facts()}
        world.publish(f"facts/{world.rank}", facts)
        if not world.first:
            return {}
        # what was ready when the clock started was not made in this time
        taken, served = steps * step_rows, clock.rows_served
        rate = (taken if served is None else min(taken, served)) / seconds
        return {
            "geometry": self.name,
            "placement": self.config.placement.model_dump(),
            "rows_per_step": step_rows,
            "rows_timed": taken,
            "rows_served": served,
            "seconds": seconds,
            "shape": asdict(self.shape),
            "rows_per_s": rate,
            "tokens_per_s": rate * self.shape.row_tokens,
            "supervised_tokens_per_s": rate * self.trained,
            "seconds_by_part": parts,
            "waits": waits,
            "advice": clock.advice(step_rows) if world.targets else None,
            "processes": {world.name(r): world.read(f"facts/{r}", r) if world.store else facts
                          for r in range(world.size)},
            "losses": [v / s.denominator for v, s in zip(values, sums, strict=True)],
            "environment": environment(),
        }  # fmt: skip

    def compiled_facts(self) -> dict[str, Any]:
        """What was compiled, and what was said of it."""
        return {"compiled": self.compiler.facts if self.compiler else None, "said": self.said}

    def _mine(self, step: int) -> list[int]:
        world = self.world
        return list(rows_of_drafter(step * self.rows_per_step, self.rows_per_step, world.drafters, world.index))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.world.sum_host([0.0])  # all drafters are here

    def _peak_gib(self) -> float | None:
        return peak_bytes(self.device) / 2**30 if self.device.type == "cuda" else None

    def _endless(self) -> Any:
        while True:
            yield from self.rows

    def run(self) -> dict[str, Any]:
        """Every figure, with the ratio to the floor."""
        ceilings = roofline(self.device, self.dtype)
        self.build()
        with self.guard():
            target, drafter = self.time_target(), self.time_drafter()
            rate = self.time_end_to_end()
        return self.report(ceilings, target, drafter, rate)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """As in training: whatever is timed was compiled before, all of it."""
        if self.compiler is None:
            yield
            return
        with self.compiler.guarded(0):
            yield
        self.compiler.check(0)

    def report(
        self, ceilings: dict[str, float], target: float, drafter: dict[str, float], rate: float
    ) -> dict[str, Any]:
        per_ms = ceilings["gemm_tflops"] * 1e9
        copy_ms = self.work.optimizer_bytes / (ceilings["copy_tb_per_s"] * 1e9)
        floors = {"target_ms": self.work.target / per_ms, "drafter_step_ms": self.work.drafter / per_ms + copy_ms}
        both = (self.work.target + self.work.drafter) / per_ms + copy_ms / self.rows_per_step
        floor_rate = self.shape.row_tokens / both * 1e3
        rows = rate / self.shape.row_tokens
        gpu = self.device.type == "cuda"
        return {
            "geometry": self.name,
            "shape": asdict(self.shape),
            "rows_per_step": self.rows_per_step,
            "device": torch.cuda.get_device_name() if gpu else platform.machine(),
            **ceilings,
            "target_ms": target,
            "drafter_step_ms": drafter["step_ms"],
            "drafter_parts_ms": {k: v for k, v in drafter.items() if k.endswith("_ms") and k != "step_ms"},
            "drafter_peak_gib": drafter.get("peak_gib"),
            "floor_ms": floors,
            "end_to_end_tokens_per_s": rate,
            "end_to_end_floor_tokens_per_s": floor_rate,
            "share_of_floor": {
                "target": floors["target_ms"] / target,
                "drafter_step": floors["drafter_step_ms"] / drafter["step_ms"],
                "end_to_end": rate / floor_rate,
            },
            "supervised_tokens_per_s": rows * self.trained,
            "anchors_per_s": rows * self.shape.anchors,
            "mfu": rows * (self.work.target + self.work.drafter) / (ceilings["gemm_tflops"] * 1e12),
            **self.compiled_facts(),
            "environment": environment(),
        }


class _Always:
    def __init__(self, features: torch.Tensor) -> None:
        self.features = features

    def row(self, row: PackedRow) -> torch.Tensor:
        return self.features


def environment() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "packages": packages,
            "cuda": torch.version.cuda, "machine": platform.machine()}  # fmt: skip


def render(found: dict[str, Any]) -> str:
    """The figures as a table."""
    table = Table(title=f"{found['geometry']} on {found['device']}, T={found['shape']['row_tokens']} "
                        f"A={found['shape']['anchors']} B={found['shape']['block_size']}")  # fmt: skip
    for column in ("part", "measured", "floor", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    shares, floors = found["share_of_floor"], found["floor_ms"]
    table.add_row(
        "target, ms a row", f"{found['target_ms']:.1f}", f"{floors['target_ms']:.1f}", f"{shares['target']:.0%}"
    )
    table.add_row(
        "drafter step, ms", f"{found['drafter_step_ms']:.1f}", f"{floors['drafter_step_ms']:.1f}",
        f"{shares['drafter_step']:.0%}",
    )  # fmt: skip
    for name, value in found["drafter_parts_ms"].items():
        table.add_row(f"  {name.removesuffix('_ms').replace('_', ' + ')}", f"{value:.1f}", "", "")
    table.add_row(
        "end to end, tokens/s", f"{found['end_to_end_tokens_per_s']:.0f}",
        f"{found['end_to_end_floor_tokens_per_s']:.0f}", f"{shares['end_to_end']:.0%}",
    )  # fmt: skip
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    memory = f", drafter peak {found['drafter_peak_gib']:.1f} GiB" if found["drafter_peak_gib"] else ""
    return console.export_text() + (
        f"products {found['gemm_tflops']:.3g} TFLOP/s, copies {found['copy_tb_per_s']:.3g} TB/s, "
        f"MFU {found['mfu']:.0%}; "
        f"{found['supervised_tokens_per_s']:.0f} supervised tokens/s, {found['anchors_per_s']:.0f} anchors/s{memory}"
    )
