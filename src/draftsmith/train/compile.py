"""torch.compile under a training run: the cache's place, the warm-up before step 0, and the guard from then on.

Every graph that training uses is compiled by `warm_up`, on a made-up row of the run's own shape.  From then on a
recompile, a graph break or uncompiled attention is an error (`compile.on_fallback: error`) or a recorded warning.
What torch does underneath, and why processes and not threads, is in docs/compile.md.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith import env
from draftsmith.config import Config
from draftsmith.drafter import fp8
from draftsmith.drafter.loss import triton_chunk
from draftsmith.errors import FallbackError, InputError
from draftsmith.provenance import gpu
from draftsmith.provenance.torchstate import read_counters
from draftsmith.records import DrafterSpec, PackedRow
from draftsmith.rundir import RunDir
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.model import Target
from draftsmith.train import compile_cache, graphed, optim
from draftsmith.train.dist import World, out_of_memory
from draftsmith.train.memory import process_memory
from draftsmith.train.optim import OnePassAdamW
from draftsmith.train.step import RowStep

DENSE = r"flex_attention called without torch\.compile"
TOOLS = (
    "C compiler",
    "C++ compiler",
    "CxxCompiler",
    "CppCompileError",
    "Python.h",
    "gcc",
    "g++",
    "CalledProcessError",
    "PermissionError",
    "ptxas",
    "libcuda",
)
"""Words by which a missing tool chain shows in torch's and Triton's errors."""
FULL = ("No space left on device", "Disk quota exceeded")


def wanted(config: Config, device: torch.device) -> bool:
    return device.type == "cuda" if config.compile.enabled is None else config.compile.enabled


def cache_folder(config: Config, parts: dict[str, str]) -> Path:
    """Raises InputError if it cannot be used."""
    return compile_cache.folder_for(config.compile.cache_dir or env.cache_dir() / "compile", parts)


def check_fp8(config: Config, device: torch.device) -> None:
    """Raises InputError where train.fp8 could not be done."""
    train = config.train
    if train.fp8 == "off":
        return
    if not (wanted(config, device) and fp8.available(device)):
        raise InputError(f"train.fp8={train.fp8}: it needs a compiled run on a GPU with 8-bit products: set it to off")
    if train.fp8 != "target" and train.anchors % 16:
        raise InputError(f"train.fp8={train.fp8}: 8-bit products take train.anchors={train.anchors} in multiples of 16")
    if train.features == "files" and train.fp8 != "drafter":
        raise InputError(f"train.fp8={train.fp8}: with train.features=files no target runs: set it to drafter or off")


def parts(config: Config, spec: DrafterSpec, target: Target) -> dict[str, str]:
    """Everything that compiled code depends on, in words."""
    source = hashlib.sha256()
    root = Path(__file__).parent.parent
    files = [
        *root.glob("drafter/*.py"),
        root / "target/packed.py",
        root / "train/step.py",
        *root.glob("train/optim*.py"),
    ]
    for file in sorted(files):
        source.update(file.read_bytes())
    cuda = target.device.type == "cuda"
    train = config.train
    text = target.text_config
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "cuda": str(torch.version.cuda),
        "driver": _driver() if cuda else "none",
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "code": source.hexdigest()[:16],
        "shapes": f"T={train.row_tokens} A={train.anchors} chunk={config.loss.chunk_rows} {spec}",
        "target": f"{text.model_type} {_digest(text.to_dict())} {target.dtype} forward={config.target.forward}",
        "settings": f"compute={train.compute_dtype} features={train.feature_dtype} attention={train.attention} "
        f"fp8={train.fp8} optimizer={train.optimizer} loss={config.loss.kind} softmax={config.loss.softmax}",
    }


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    return str(gpu.read_gpus().get("driver"))


@dataclass
class Compiler:
    """One process's compiled functions.  `say` prints and logs; `fell_back` marks the run's record."""

    config: Config
    world: World
    spec: DrafterSpec
    target: Target
    say: Callable[[str], None]
    fell_back: Callable[[str], None]
    parts: dict[str, str] = field(init=False)
    folder: Path = field(init=False)
    facts: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    source: graphed.GraphedFeatures | None = None
    """The target's features as a graph, after the warm-up, where compile.graphs is on."""

    def __post_init__(self) -> None:
        """Put the cache in its place and watch for dense attention: before anything is compiled or run."""
        self.parts = parts(self.config, self.spec, self.target)
        self.folder = cache_folder(self.config, self.parts)
        if self._local_first:
            state = compile_cache.restore(self.folder, self.parts, self.config.runs_dir, self.config.name, self.say)
            self.world.publish(self._key("cache"), state)
        else:
            state = self.world.read(self._key("cache"), self._leader)
        self.facts["cache"], self.facts["fingerprint"] = state, compile_cache.fingerprint(self.parts)
        env.compile_cache(self.folder)
        warnings.filterwarnings("error" if self._strict else "always", message=DENSE)
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def _strict(self) -> bool:
        return self.config.compile.on_fallback == "error"

    @property
    def _leader(self) -> int:
        """The rank that goes first on this machine."""
        return self.world.rank - env.local_rank()[0]

    @property
    def _local_first(self) -> bool:
        return env.local_rank()[0] == 0

    def _key(self, what: str) -> str:
        return f"compile/{what}/{self._leader}"

    def warm_up(
        self, step: RowStep | None, extract: FeatureExtractor | None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Compile everything this process will run, together with the others or after the machine's first process.

        Raises InputError if the row does not fit the device or the tools to compile are missing.
        """
        begin = time.monotonic()
        torch._dynamo.config.error_on_recompile = False  # as a run before in this process may have left it
        mode = self.config.compile.start
        turns = mode == "first" or (mode == "auto" and self.device.type == "cpu")
        if turns and not self._local_first:
            self.world.read(self._key("warm"), self._leader)
        with self.world.together("compile"):  # nobody communicates while another compiles
            try:
                with self._explained():
                    self._compile_all(step, extract)
                    if self.config.compile.graphs and step is not None:
                        self._as_graphs(step, extract)
                    if isinstance(optimizer, OnePassAdamW) and step is not None:
                        warm_optimizer(step, optimizer)
            finally:
                if self._local_first:
                    self.world.publish(self._key("warm"), True)
        self.facts |= {"seconds": time.monotonic() - begin, **read_counters()}
        self.say(
            f"compiled in {self.facts['seconds']:.1f} s (cache {self.facts['cache']}, "
            f"{self.facts.get('cache_hits', 0)} hits, {self.facts.get('cache_misses', 0)} misses)"
        )

    def _compile_all(self, step: RowStep | None, extract: FeatureExtractor | None) -> None:
        row = made_up_row(self.config, self.spec.block_size)
        total = (step is not None) + (extract is not None)
        if extract is not None:
            self.say(f"compiling the target 1/{total}")
            self._target(extract, row)
        if step is not None:
            self.say(f"compiling the drafter {total}/{total}")
            features = torch.zeros(
                len(row.tokens), len(self.spec.feature_layers) * self.spec.hidden_size,
                dtype=step.compute_dtype, device=self.device,
            )  # fmt: skip
            self._drafter(step, row, features)
            self.facts["softmax"] = "triton" if step.chunk is triton_chunk else "torch"
            if self.device.type == "cuda":
                self.facts["kernels"] = kernels_of(lambda: self._drafter(step, row, features))
                check_kernels(self.facts["kernels"], step.attention, self.facts["softmax"])

    def _as_graphs(self, step: RowStep, extract: FeatureExtractor | None) -> None:
        gpu = self.device.type == "cuda"
        self.source = graphed.capture_all(step, extract, made_up_row(self.config, self.spec.block_size))
        self.facts["cuda_graphs"] = {"drafter": gpu, "target": gpu and self.source is not None}
        self.say(
            "rows run as CUDA graphs" if gpu else "compile.graphs: on a CPU rows use fixed memory, without a graph"
        )
        if gpu and extract is not None and self.source is None:
            line = "the target runs without a CUDA graph: it is not compiled with our kernels"
            self.say(line)
            self.fell_back(line)

    def _target(self, extract: FeatureExtractor, row: PackedRow) -> None:
        asked = self.config.train.attention
        why, wrong = self._compiled(extract, row, asked)
        eight = self.config.train.fp8 in ("target", "both")
        if why is not None and extract.intervals is not None and asked == "auto" and not (wrong and eight):
            line = f"the target does not attend by our kernels: {why}: flex_attention is tried"
            self.say(line)
            self.facts["our_kernels_refused"] = why
            if wrong:
                self.fell_back(line)
            why, _ = self._compiled(extract, row, "flex")
        if why is not None:
            extract.compiled = None
            self.say(f"the target is not compiled: {why}")
            if self.device.type == "cuda":
                self.fell_back(f"the target is not compiled: {why}")
        self.facts["target"] = why or "compiled"
        if why is None:
            self.facts["target_attention"] = "flex" if extract.intervals is None else "triton"

    def _compiled(self, extract: FeatureExtractor, row: PackedRow, attention: str) -> tuple[str | None, bool]:
        """Compile the target's layers and hold them against the uncompiled ones.  None, or why they are not used; and
        whether that is that they differ."""
        eight = self.config.train.fp8 in ("target", "both")
        why = extract.compile(fp8=eight, attention=attention)
        if why is None:
            try:
                self.facts["target_apart"] = apart = extract.deviation(row)
                # of one layer.  bfloat16: a dozen roundings of 0.17% each, of either sign, make some 0.6% on each side;
                # sharp attention adds little, as a sum weighs the values by it.  e4m3: 3.7% a product, a handful
                bound = 0.14 if eight else 1e-4 if extract.target.dtype == torch.float32 else 2e-2
                if not apart < bound:
                    return (
                        f"one of its layers then differs from single documents by {apart:.1e} (bound {bound:g})",
                        True,
                    )
            except Exception as error:  # whatever torch says when a model's code does not compile
                why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
                if out_of_memory(error) or _machine_fault(error) is not None:
                    raise
        return why, False

    def _drafter(self, step: RowStep, row: PackedRow, features: Tensor) -> None:
        sums = step.run(row, step.blocks(row), features)
        (sums.weighted * 0.0).backward()
        step.clear()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UserWarning as error:
            raise FallbackError(f"the warm-up ran uncompiled attention: {_cause(error)}") from error
        except Exception as error:
            if out_of_memory(error):
                raise InputError(self._too_large(error)) from error
            what = _machine_fault(error)
            if what is None:
                raise
            advice = "install a C++ compiler and Python's headers, or set compile.enabled=false, train.attention=sdpa"
            if any(word in what for word in FULL):
                advice = f"free space in compile.cache_dir ({self.folder}) and in {tempfile.gettempdir()}"
            raise InputError(f"compile: this machine cannot compile ({what}): {advice}") from error

    def _too_large(self, error: Exception) -> str:
        from draftsmith.plan import what_fits  # which measures compiled layers, and so imports this file

        train, role = self.config.train, {"both": "colocated"}.get(self.world.role, self.world.role)
        row, has = made_up_row(self.config, self.spec.block_size), process_memory(self.device)
        where = "the GPU" if self.device.type == "cuda" else "the memory"
        return (
            f"a row of train.row_tokens={train.row_tokens} with train.anchors={train.anchors} does not fit {where} "
            f"({str(error).strip().splitlines()[0][:160]}): "
            f"{what_fits(self.config, self.spec, self.target, role, row, has)}"
        )

    def arm(self, run: RunDir | None = None) -> None:
        """From now on nothing may be compiled any more.  run: where the bundle is kept, on rank 0."""
        if run is not None:
            compile_cache.save(self.folder, self.parts, run)
        elif self._local_first:
            compile_cache.mark(self.folder, self.parts)
        torch._dynamo.config.error_on_recompile = self._strict
        self.graphs = read_counters()

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """Around a step.  Raises FallbackError naming the cause."""
        caught: list[warnings.WarningMessage] = []
        try:
            if self._strict:
                yield
            else:
                _forget_warnings()
                with warnings.catch_warnings(record=True) as caught:
                    yield
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise FallbackError(f"step {step + 1} would have been compiled anew: {_cause(error)}") from error
        except (UserWarning, torch._dynamo.exc.Unsupported) as error:
            raise FallbackError(f"step {step + 1} would have run uncompiled: {_cause(error)}") from error
        for warning in caught:
            if re.match(DENSE, str(warning.message)):
                self._warn(f"step {step + 1} ran uncompiled: {str(warning.message).splitlines()[0]}")
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def check(self, step: int) -> None:
        """At a log point: were graphs compiled since, also of functions that nobody had compiled before?"""
        now = read_counters()
        for what in ("graphs", "graph_breaks"):
            if now.get(what, 0) > self.graphs.get(what, 0):
                count = now.get(what, 0) - self.graphs.get(what, 0)
                text = (
                    f"step {step}: {count} new {what.replace('_', ' ')} since the warm-up: something else is compiled"
                )
                if self._strict:
                    raise FallbackError(text)
                self._warn(text)
        self.graphs = now

    def _warn(self, what: str) -> None:
        self.say(f"warning: {what}")
        self.fell_back(what)


@dataclass(frozen=True)
class Guarded:
    """A FeatureSource under the guard: a target that serves has no loop round it."""

    source: FeatureExtractor
    compiler: Compiler

    def row(self, row: PackedRow) -> Tensor:
        with self.compiler.guarded(row.index):
            return self.source.row(row)


def _machine_fault(error: Exception) -> str | None:
    """What the machine lacks, in the compiler's own words where one failed; None: the fault lies elsewhere."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    full, tools = ([line for line in lines if any(word in line for word in words)] for words in (FULL, TOOLS))
    if tools and not full:
        tools = [line for line in lines if "error: " in line] or tools
    found = full or tools
    return found[0].split("error: ", 1)[-1].strip()[:200] if found else None


def _forget_warnings() -> None:
    """torch says once a process that attention ran uncompiled; every step's is wanted."""
    module = sys.modules["torch.nn.attention.flex_attention"]
    getattr(module, "_WARNINGS_SHOWN", set()).clear()


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    guard = [line for line in lines if "expected" in line or "==" in line or "size mismatch" in line]
    return "; ".join([*lines[:1], *guard[:2]])[:400]


@torch.no_grad()
def warm_optimizer(step: RowStep, optimizer: OnePassAdamW) -> None:
    """Compile the optimizer's pass on scratch memory: for gradients as they come and as sums in float32."""

    def scratch(p: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        if not optim.by_kernels(step.device, p.dtype):
            return torch.zeros(p.numel(), device=step.device, dtype=dtype)
        from draftsmith.train import optim_kernels

        # kernels depend on how many tensors there are, and on whether 16 bytes of them can be read at once
        whole = optim_kernels.aligned(p, step.copies.get(p, p))
        return torch.zeros(16 if whole else 3, device=step.device, dtype=dtype)

    groups = [group["params"] for group in optimizer.param_groups]
    if not optim.by_kernels(step.device, groups[0][0].dtype):  # one tensor with a copy and one without stand for all
        chosen = [max(step.copies or step.drafter.parameters(), key=lambda p: p.numel())]
        chosen += [p for p in step.drafter.parameters() if p not in step.copies][:1] if step.copies else []
        groups = [chosen]
    for sums in (False, True):
        gradients = {
            p: scratch(p, p.dtype if sums or p not in step.copies else step.compute_dtype) for g in groups for p in g
        }
        _, factor = optim.clip_factor(list(gradients.values()), 1.0, step.device)
        for group in groups:
            masters, means, squares = ([scratch(p, p.dtype) for p in group] for _ in range(3))
            copies = [scratch(p, step.compute_dtype) if p in step.copies else None for p in group]
            found, numbers = [gradients[p] for p in group], np.ones(7, dtype=np.float32)
            optim.update(masters, means, squares, found, copies, numbers, factor)


def made_up_row(config: Config, block_size: int) -> PackedRow:
    """A row of the run's shape: three documents and a padded tail, every anchor slot in use."""
    tokens, slots = config.train.row_tokens, config.train.anchors
    length = max(block_size + 2, (tokens - tokens // 16) // 3)
    starts = tuple(s for s in (0, length, 2 * length, 3 * length) if s <= tokens)
    document, positions = np.full(tokens, -1, dtype=np.int32), np.zeros(tokens, dtype=np.int64)
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        document[start:end], positions[start:end] = i, np.arange(end - start)
    positions[starts[-1] :] = np.arange(tokens - starts[-1])
    inside = np.flatnonzero((document[:-1] >= 0) & (document[:-1] == document[1:]))
    anchors = np.zeros(slots, dtype=np.int64)
    count = min(slots, len(inside))
    anchors[:count] = inside[np.linspace(0, len(inside) - 1, count).astype(np.int64)]
    return PackedRow(
        epoch=0,
        index=0,
        tokens=np.arange(tokens, dtype=np.int64) % 97 + 3,
        positions=positions,
        document=document,
        supervised=document >= 0,
        samples=tuple(range(len(starts) - 1)),
        starts=starts,
        anchors=anchors,
        anchor_count=count,
    )


FUSED = {"flex": ("flex_attention", "flex_attention_backward"), "triton": ("_forward_kernel", "_key_gradient_kernel")}
"""By how a drafter attends: words in the names of kernels, forward and backward."""


def kernels_of(run: Callable[[], Any]) -> dict[str, int]:
    """Kernels that `run` launches on the GPU, with how often; attention and ours (_...) by name, the rest summed."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
            named = event.name.startswith("_") or any(word in event.name for word in ("attention", "softmax"))
            name = event.name if named else "other"
            counts[name] = counts.get(name, 0) + 1
    return counts


def check_kernels(kernels: dict[str, int], attention: str, softmax: str = "torch") -> None:
    """Raises FallbackError unless the fused kernels ran: attention forward and backward, our softmax if it was to."""
    if attention not in FUSED:
        return
    if softmax == "triton" and "_softmax_rows_kernel" not in kernels:
        raise FallbackError(f"the profiled step did not run our softmax: {sorted(kernels)}")
    forward, backward = FUSED[attention]
    back = [n for n in kernels if backward in n]
    if not back or not any(forward in n for n in kernels if n not in back):
        raise FallbackError(f"the profiled step ran no fused attention kernels: {sorted(kernels)}")
