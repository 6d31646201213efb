"""What a run needs and how fast it will be, as one pure function of plain numbers: `predict`.  No torch, no files.

T row tokens, A anchor slots, B block size, Q = A * B block tokens, K feature layers, H hidden size, V vocabulary,
L drafter layers, M targets, N drafters, R rows a step.  FLOPs count multiplications and additions; bytes are bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.cards import Rates
from draftsmith.errors import InputError
from draftsmith.records import DrafterSpec

GIB = 2**30
BUCKET_BYTES = 128 * 2**20
"""As train/dist.py reduces gradients."""
RUNTIME_BYTES = {"cpu": 0.5 * GIB, "gpu": 0.8 * GIB}
"""Of a process that holds nothing yet: interpreter and libraries; on a GPU its context and buffers to communicate."""


@dataclass(frozen=True)
class Geometry:
    """What the target costs.  Made by plan.py from a config, or by hand."""

    parameters: int
    """All that is loaded, the embedding (and a head of its own) too."""
    needed_parameters: int
    """Of the decoder layers up to the last feature layer."""
    active_parameters: int
    """Of those, what one token is multiplied with (fewer in a mixture of experts)."""
    layers: int
    """Decoder layers that are needed."""
    hidden: int
    intermediate: int
    attention_width: int
    """Query heads times head size."""
    tied: bool


def dense_geometry(
    *, layers: int, needed: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    tied: bool,
) -> Geometry:  # fmt: skip
    """Of a dense model of Qwen3's kind: gated MLP, a norm on queries and keys, no biases."""
    layer = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * intermediate + 2 * head_dim + 2 * hidden
    whole = layers * layer + (1 if tied else 2) * vocab * hidden + hidden
    return Geometry(whole, needed * layer, needed * layer, needed, hidden, intermediate, heads * head_dim, tied)


@dataclass(frozen=True)
class Settings:
    """What the config and the store say about a row."""

    row_tokens: int
    anchors: int
    rows_per_step: int
    chunk_rows: int
    run_ahead: int
    tokens: float
    """Real tokens in a row, on average."""
    used: float
    """Anchor slots in use, on average."""
    trained: float
    """Slots that reach the head, on average."""
    squares: float
    """Sum of the squared lengths of a row's documents, on average."""
    target_bytes: int
    """Of one number: 2 or 4."""
    compute_bytes: int
    feature_bytes: int
    gpu: bool
    """Every row has the same shape, block masks are sparse, the drafter is compiled.  Else: unused anchors are left
    out, attention multiplies every query with every key."""
    packed: bool
    """The target runs over a whole row at once."""
    files: bool = False
    """Features are read from files: no target runs."""
    distinct_windows: int = 1
    muon: bool = False
    one_pass: bool = True
    """The optimizer reads a single row's gradients as they come; else they become float32 first."""
    in_place: bool = False
    """The gradient of a chunk's logits takes their memory."""
    graphs: bool = False
    """The host asks for a row's kernels at once."""

    @property
    def slots(self) -> float:
        return self.anchors if self.gpu else self.used


@dataclass(frozen=True)
class Placement:
    """One way to share out the processes."""

    name: str
    mode: str
    targets: int
    drafters: int
    rows_per_s: float
    need: tuple[float, ...]
    """Bytes on each device."""
    fits: bool


@dataclass(frozen=True)
class Prediction:
    """Everything `draftsmith plan` says.  memory: bytes by role and part, in the recommended placement (none fits: in
    the first); `peak` is less than their sum where parts do not live at the same time."""

    drafter_parameters: int
    target_flops: float
    drafter_flops: float
    target_seconds: float
    drafter_seconds: float
    """Of one row in a process with the hardware to itself, the optimizer's share included."""
    memory: dict[str, dict[str, float]]
    placements: tuple[Placement, ...]
    recommended: str | None
    """The fastest that fits; None: none does."""


def drafter_parameters(spec: DrafterSpec) -> int:
    h, d = spec.hidden_size, spec.head_dim
    wide, narrow = spec.num_heads * d, spec.num_kv_heads * d
    bias = wide + 2 * narrow + h if spec.attention_bias else 0
    layer = _layer_matrices(spec) + bias + 2 * d + 2 * h
    return spec.num_layers * layer + len(spec.feature_layers) * h * h + 2 * h


def _layer_matrices(spec: DrafterSpec) -> int:
    h, d = spec.hidden_size, spec.head_dim
    return 2 * h * d * (spec.num_heads + spec.num_kv_heads) + 3 * h * spec.intermediate_size


def target_flops(geometry: Geometry, settings: Settings) -> float:
    """Of one row, forward, up to the last feature layer; attention looks back over half of a document on average."""
    tokens = settings.row_tokens if settings.packed else settings.tokens
    return 2 * geometry.active_parameters * tokens + 2 * geometry.layers * geometry.attention_width * settings.squares


def trunk_flops(spec: DrafterSpec, settings: Settings) -> float:
    """Of one row, forward and backward, without the head."""
    h, d, b = spec.hidden_size, spec.head_dim, spec.block_size
    queries, context = settings.slots * b, settings.row_tokens
    pairs = 0.0
    for window in spec.windows():
        seen = settings.squares / (2 * max(settings.tokens, 1))
        near = min(seen, window) if window else seen
        pairs += queries * (near + b if settings.gpu else context + queries)
    matrices = 6 * spec.num_layers * (_layer_matrices(spec) * queries + 2 * h * d * spec.num_kv_heads * context)
    return matrices + 4 * len(spec.feature_layers) * h * h * context + 12 * spec.num_heads * d * pairs


def head_flops(spec: DrafterSpec, settings: Settings) -> float:
    """Two products of the trained slots with the frozen head."""
    return 4 * settings.trained * spec.hidden_size * spec.vocab_size


def memory(geometry: Geometry, spec: DrafterSpec, settings: Settings, drafters: int) -> dict[str, dict[str, float]]:
    """Bytes that one process of each role holds, by part, and `peak`.  drafters: how many share the rows of a step."""
    row = settings.row_tokens * spec.hidden_size * len(spec.feature_layers) * settings.feature_bytes
    runtime = RUNTIME_BYTES["gpu" if settings.gpu else "cpu"]
    target = _target_memory(geometry, settings, row)
    drafter = _drafter_memory(geometry, spec, settings, drafters)
    ahead = settings.run_ahead * row
    alone = {**target, "features in flight": ahead, "runtime": runtime}
    trains = {**drafter, "features in flight": ahead + row, "runtime": runtime}
    borrowed = 0.0 if settings.target_bytes == settings.compute_bytes else drafter["embedding and head"]
    both = {**drafter, **{k: v for k, v in target.items() if k != "activations"}, "embedding and head": borrowed}
    both |= {"target activations": target["activations"], "runtime": runtime}
    if settings.files:
        both |= {"features": 2 * row}
    if settings.graphs:  # with memory of their own, beside what held-out rows use
        for parts in (trains, both):
            parts["graphs"] = drafter["activations"] + drafter["loss chunk"] + row
        if not settings.files:
            both["graphs"] += target["activations"]
    out = {"target": alone, "drafter": trains, "colocated": both}
    one_row = settings.rows_per_step // drafters <= 1
    for role, parts in out.items():
        peak = sum(parts.values())
        if role != "target":
            # the target has finished when the drafter's activations come to be; they go while the gradients of the
            # step's only row come
            passing = [parts["activations"] + parts["loss chunk"], parts.get("target activations", 0.0)]
            kept = parts["gradients"]
            peak -= sum(passing) + kept
            peak += max(max(passing), kept + parts["gradient sum"]) if one_row else max(passing) + kept
        parts["peak"] = peak
    return out


def _target_memory(geometry: Geometry, settings: Settings, row: float) -> dict[str, float]:
    t, wide = settings.row_tokens, settings.target_bytes
    parts = t * (4 * geometry.hidden + 3 * geometry.intermediate + 4 * geometry.attention_width) * wide
    mask = t * t if settings.packed else 0.0  # bool, which keeps packed documents apart
    return {"weights": geometry.parameters * wide, "activations": parts + mask, "features": 2 * row}


def _drafter_memory(
    geometry: Geometry, spec: DrafterSpec, settings: Settings, drafters: int
) -> dict[str, float]:  # fmt: skip
    count, c = drafter_parameters(spec), settings.compute_bytes
    h, v = spec.hidden_size, spec.vocab_size
    frozen = (1 if geometry.tied else 2) * v * h
    copies = settings.target_bytes + (c if c != settings.target_bytes else 0)
    wide = max(c, 4)  # masters, moments and the gradients that are summed up
    compiled = c if settings.in_place else 2 * c  # logits, then their gradient
    logits = compiled if settings.gpu else c + (4 + c if c < 4 else 0)
    alone = settings.rows_per_step == 1 and drafters == 1  # else bf16 gradients are summed up in float32
    kept = not alone or (settings.graphs and not settings.one_pass)  # those of a graph stay where they are
    return {
        "embedding and head": frozen * copies,
        "masters": count * wide,
        "moments": count * (1 if settings.muon else 2) * wide,  # Muon: one of matrices; the few vectors do not count
        "gradients": count * (wide if c != 2 else 6 if kept else 2 if settings.one_pass else 4),
        "bf16 weights": count * 2 if c == 2 else 0.0,
        "activations": _activations(spec, settings),
        "loss chunk": settings.chunk_rows * v * logits + 2 * settings.trained * h * c,
        "gradient sum": min(BUCKET_BYTES, count * wide) if drafters > 1 else 0.0,
    }


def muon_flops(spec: DrafterSpec) -> float:
    """Of a step of Muon: five rounds of three products, for every matrix."""
    h, wide, narrow = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = [(h, wide), (h, narrow), (h, narrow), (h, wide), *[(h, spec.intermediate_size)] * 3]
    matrices = [*layer * spec.num_layers, (h, h * len(spec.feature_layers))]
    sizes = [(min(m), max(m)) for m in matrices]
    return float(sum(5 * (4 * rows**2 * columns + 2 * rows**3) for rows, columns in sizes))


def _activations(spec: DrafterSpec, settings: Settings) -> float:
    """Kept for the backward pass.  Eager: every norm keeps its input, its quotient and its output; compiled: what
    matrix products and attention read."""
    h, i, d, c = spec.hidden_size, spec.intermediate_size, spec.head_dim, settings.compute_bytes
    wide, narrow = spec.num_heads * d, spec.num_kv_heads * d
    q, t = settings.slots * spec.block_size, settings.row_tokens
    s = t + q
    if settings.gpu:
        query = c * (4 * h + 5 * wide + 2 * narrow + 3 * i)  # keys and values repeated for their query heads
        context = c * (2 * wide + narrow)
        masks = settings.distinct_windows * 24 * q * s / 128
        shared = 0.0
    else:
        query = 2 * (8 + c) * h + (8 + c) * (wide + narrow) + c * (3 * wide + narrow) + 4 * c * i
        context = (8 + 2 * c) * narrow
        shared = s * (2 * narrow + (2 * wide if wide > narrow else 0)) * c + q * s * c  # GQA spelled out; the mask
        masks = settings.distinct_windows * q * s
    features = t * ((8 + c) * h + len(spec.feature_layers) * h * (c if c != settings.feature_bytes else 0))
    return spec.num_layers * (q * query + t * context + shared) + masks + features


def choices(processes: int, rows_per_step: int, *, files: bool = False) -> list[tuple[str, int, int]]:
    """(mode, targets, drafters) of every placement that a config can have: the drafters must divide the rows of a step,
    and where features come from files there is nothing to split.

    Raises InputError where there is none.
    """
    if processes < 1:
        raise InputError(f"a plan needs at least one process or GPU, not {processes}")
    found = [("colocated", 0, processes)] if rows_per_step % processes == 0 else []
    if not files:
        found += [("split", processes - n, n) for n in range(1, processes) if rows_per_step % n == 0]
    if not found:
        raise InputError(
            f"train.rows_per_step {rows_per_step} cannot be shared by {processes} processes, and with "
            f"train.features=files there is no split: set it to a multiple of {processes}"
        )
    return found


@dataclass(frozen=True)
class _Seconds:
    """Of one row in one process."""

    target: float
    served: float
    """Of a target of a split, which runs without graphs."""
    drafter: float
    """Without what is paid once a step."""
    step: float


def _seconds(geometry: Geometry, spec: DrafterSpec, settings: Settings, rates: Rates) -> _Seconds:
    target = target_flops(geometry, settings) / rates.target_flops + rates.target_fixed
    served = max(target, rates.target_host * geometry.layers)
    drafter = trunk_flops(spec, settings) / rates.drafter_flops + head_flops(spec, settings) / rates.head_flops
    if not settings.graphs:
        target, drafter = served, max(drafter, rates.drafter_host * spec.num_layers)
    if settings.files:
        target = 3 * settings.tokens * spec.hidden_size * len(spec.feature_layers) * settings.feature_bytes / rates.copy
    step = drafter_parameters(spec) / rates.optimizer + rates.step_fixed
    if settings.muon and rates.muon_flops:
        step += muon_flops(spec) / rates.muon_flops
    return _Seconds(target, served, drafter + rates.drafter_fixed, step)


def predict(
    geometry: Geometry,
    spec: DrafterSpec,
    settings: Settings,
    rates: Rates,
    processes: int,
    devices: Sequence[float],
    *,
    crowd: tuple[int, Rates] | None = None,
) -> Prediction:
    """Memory, FLOPs and rows a second of every placement of `processes`.

    devices: bytes of each GPU, or of the one memory that all processes share; rank r is on device r mod their number.
    crowd: where processes share cores, how many ran side by side and what each then reached.  Raises InputError where
    there is nothing to plan.
    """
    if not devices:
        raise InputError("a plan needs at least one device")
    alone = _seconds(geometry, spec, settings, rates)
    beside = (crowd[0], _seconds(geometry, spec, settings, crowd[1])) if crowd else None
    placements = []
    for mode, m, n in choices(processes, settings.rows_per_step, files=settings.files):
        parts = memory(geometry, spec, settings, n)
        roles = ["colocated"] * n if mode == "colocated" else ["drafter"] * n + ["target"] * m
        need = [0.0] * len(devices)
        for rank, role in enumerate(roles):
            need[rank % len(devices)] += parts[role]["peak"]
        places = len(devices) if settings.gpu else processes
        rate = _rows_per_second(m, n, places, alone, beside, spec, settings, rates)
        name = f"colocated x{n}" if mode == "colocated" else f"split {m} + {n}"
        fits = all(a <= b for a, b in zip(need, devices, strict=True))
        placements.append(Placement(name, mode, m, n, rate, tuple(need), fits))
    fitting = [p for p in placements if p.fits]
    best = max(fitting, key=lambda p: p.rows_per_s) if fitting else None
    return Prediction(
        drafter_parameters=drafter_parameters(spec),
        target_flops=0.0 if settings.files else target_flops(geometry, settings),
        drafter_flops=trunk_flops(spec, settings) + head_flops(spec, settings),
        target_seconds=alone.served if best and best.mode == "split" else alone.target,
        drafter_seconds=alone.drafter + alone.step / settings.rows_per_step,
        memory=memory(geometry, spec, settings, (best or placements[0]).drafters),
        placements=tuple(placements),
        recommended=best.name if best else None,
    )


def _rows_per_second(
    m: int,
    n: int,
    places: int,
    alone: _Seconds,
    beside: tuple[int, _Seconds] | None,
    spec: DrafterSpec,
    settings: Settings,
    rates: Rates,
) -> float:
    """What the slower role allows, or the fullest of the `places` where processes run (one after the other, if there
    are several at one).  On shared cores a process is slowed by those that are busy at the same time: of a split, the
    faster role only part of it."""
    share = settings.rows_per_step / n
    gradients = max(settings.compute_bytes, 4) * drafter_parameters(spec)
    send = settings.row_tokens * spec.hidden_size * len(spec.feature_layers) * settings.feature_bytes / rates.link
    reduce = 2 * (n - 1) / n * gradients / rates.reduce

    def by_row(one: _Seconds) -> tuple[float, float]:
        drafter = one.drafter + (one.step + reduce) / share
        if m == 0:
            return 0.0, one.target + drafter
        if settings.gpu:  # transfers run beside compute
            return max(one.served, send), max(drafter, send)
        return one.served + send, drafter + send

    def slower(one: _Seconds) -> float:
        target, drafter = by_row(one)
        load = [0.0] * places
        for rank in range(n + m):
            load[rank % places] += drafter / n if rank < n else target / m
        return max(load)

    row = slower(alone)
    if beside is None:
        return 1 / row
    busy = sum(by_row(alone)) / row
    many, crowded = beside
    if busy > many:
        return many / busy / slower(crowded)
    return 1 / (row + (slower(crowded) - row) * max(0.0, busy - 1) / max(many - 1, 1))


def too_little(
    geometry: Geometry,
    spec: DrafterSpec,
    settings: Settings,
    placement: Placement,
    devices: Sequence[float],
    others: Sequence[Placement],
) -> str:
    """One line for a placement that does not fit: which device and role, by how much, and what would fit."""
    over = [need - has for need, has in zip(placement.need, devices, strict=True)]
    worst = max(range(len(over)), key=lambda d: over[d])
    kinds = ["colocated"] if placement.mode == "colocated" else ["drafter", "target"]
    ranks = range(worst, placement.targets + placement.drafters, len(devices))
    role = {("colocated" if placement.mode == "colocated" else "drafter" if r < placement.drafters else "target")
            for r in ranks}  # fmt: skip
    who = " and ".join(k for k in kinds if k in role)
    where = f"GPU {worst}" if settings.gpu else "this machine"
    several = [d for d in range(len(over)) if over[d] > 0]
    if len(several) > 1:
        where += f" (and {len(several) - 1} more)"
    line = (
        f"{placement.name} does not fit: {where} needs {placement.need[worst] / GIB:.1f} GiB for its {who} "
        f"process{'es' if len(ranks) > 1 else ''} and has {devices[worst] / GIB:.1f} GiB, "
        f"{over[worst] / GIB:.1f} GiB too little"
    )
    ways = [f"{p.name} ({p.rows_per_s:.3g} rows/s)" for p in sorted(others, key=lambda p: -p.rows_per_s) if p.fits][:1]

    def fits(changed: Settings) -> bool:
        parts = memory(geometry, spec, changed, placement.drafters)
        need = [0.0] * len(devices)
        for rank in range(placement.targets + placement.drafters):
            kind = "colocated" if placement.targets == 0 else "drafter" if rank < placement.drafters else "target"
            need[rank % len(devices)] += parts[kind]["peak"]
        return all(a <= b for a, b in zip(need, devices, strict=True))

    if placement.targets and (n := _largest(settings.run_ahead, 1, lambda x: fits(resized(settings, run_ahead=x)))):
        ways.append(f"placement.run_ahead={n} instead of {settings.run_ahead}")
    ways += smaller_rows(settings, fits)
    nothing = "; neither another placement nor shorter rows would"
    return line + (f"; what fits: {', or '.join(ways)}" if ways else nothing)


def smaller_rows(settings: Settings, fits: Callable[[Settings], bool]) -> list[str]:
    """The most row tokens, and the most anchors, that fit while all else stays, in words."""
    ways = []
    if t := _largest(settings.row_tokens, 64, lambda x: fits(resized(settings, row_tokens=x))):
        ways.append(f"train.row_tokens={t} instead of {settings.row_tokens}")
    if a := _largest(settings.anchors, 8, lambda x: fits(resized(settings, anchors=x))):
        ways.append(f"train.anchors={a} instead of {settings.anchors}")
    return ways


def resized(settings: Settings, *, row_tokens: int = 0, anchors: int = 0, run_ahead: int = 0) -> Settings:
    """The same data in rows of other size, or fewer rows in flight."""
    share = row_tokens / settings.row_tokens if row_tokens else 1.0
    slots = anchors / settings.anchors if anchors else 1.0
    return dataclasses.replace(
        settings,
        row_tokens=row_tokens or settings.row_tokens,
        anchors=anchors or settings.anchors,
        run_ahead=run_ahead or settings.run_ahead,
        tokens=settings.tokens * share,
        squares=settings.squares * share,
        used=settings.used * slots,
        trained=settings.trained * slots,
    )


def _largest(most: int, unit: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple of `unit` below `most` that fits; 0: none."""
    low, high = 0, -(-most // unit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit
