"""The training loop: what happens, in order, on one process or on this process's part of several."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch

from draftsmith import rundir
from draftsmith.config import Config
from draftsmith.data.loader import Loader
from draftsmith.data.store import Document, Store, find_content, read_manifest
from draftsmith.data.tokenize import fingerprint
from draftsmith.drafter.attention import pick_attention
from draftsmith.drafter.loss import pick_chunk
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import TOO_SLOW, InputError, Interrupted
from draftsmith.evaluate.acceptance import evaluation_prompts, measure, measure_replayed
from draftsmith.evaluate.replay import greedy_answers
from draftsmith.export import read_drafter
from draftsmith.files import write_text
from draftsmith.progress import Progress
from draftsmith.provenance.artifacts import altered_shards
from draftsmith.provenance.recorder import Recorder
from draftsmith.records import DrafterSpec, GreedyAnswer, PackedRow
from draftsmith.rundir import RunDir
from draftsmith.sinks import check, open_sinks
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.features import FeatureSource, FileFeatures, TimedFeatures, features_folder, write_features
from draftsmith.target.model import (
    Target,
    drafter_spec,
    load_borrowed,
    load_target,
    model_folder,
    pick_device,
    weights_fingerprint,
)
from draftsmith.tracking import Tracker
from draftsmith.train import checkpoint, graphed
from draftsmith.train import compile as compiling
from draftsmith.train.dist import World, agree
from draftsmith.train.dist import world as join
from draftsmith.train.flush import flush
from draftsmith.train.memory import check_rows_fit
from draftsmith.train.optim import make_optimizer, rate, set_rate
from draftsmith.train.roles import Clock, KnownRows, serve, with_anchors
from draftsmith.train.schedule import rows_of_drafter
from draftsmith.train.step import Frozen, RowStep, StepSums
from draftsmith.train.stopping import agree_to_stop, stop_on_signals
from draftsmith.train.transport import ReceiveRows, receive_heldout
from draftsmith.train.watch import Watch


@dataclass(frozen=True)
class Plan:
    """Everything that was checked before anything was written."""

    target: Target
    store: Store
    spec: DrafterSpec
    loader: Loader
    heldout_rows: list[PackedRow]
    prompts: list[Document]
    answers: list[GreedyAnswer]
    """The target's own to the prompts, where accepted length is measured by replay."""
    steps: int
    attention: str
    compute_dtype: torch.dtype
    feature_dtype: torch.dtype
    pins: dict[str, str]
    notes: list[str] = field(default_factory=list)


def prepare(
    config: Config, target: Target | None = None, world: World | None = None, content: str | None = None
) -> Plan:
    """Load and check.  Raises InputError for whatever cannot be trained on.

    content: fingerprint of the store's generation to train on; default: the newest.
    """
    settings, world = config.train, world or World()
    store = Store(config.store, fingerprint=content)
    load = load_borrowed if world.role == "drafter" else load_target
    target = target or load(config.target, config.device)
    if store.manifest.tokenizer != fingerprint(target.tokenizer):
        raise InputError(
            f"{store.path} was made with another tokenizer or chat template than {config.target.model}'s: set "
            f"target.model to the one that it was made with, or data_dir to a new folder and tokenize again"
        )
    spec = drafter_spec(config.drafter, target)
    loader = make_loader(config, store, heldout=False)
    notes = [f"{loader.left_out} training documents without an anchor left out"] if loader.left_out else []
    if (newest := read_manifest(store.path).generation) > store.manifest.generation:
        notes.append(
            f"{store.path} has grown to generation {newest}: this run stays with generation "
            f"{store.manifest.generation}, with which it began"
        )
    heldout_rows: list[PackedRow] = []
    if store.heldout.any():
        held = make_loader(config, store, heldout=True)
        heldout_rows = [held.row(g) for g in range(min(settings.heldout_rows, len(held.plan(0))))]
    elif settings.heldout_every or settings.accept_every:
        raise InputError(f"{store.path} holds nothing out: raise tokenize.heldout_fraction, or set heldout_every=0")
    else:
        notes.append("nothing is held out, so no held-out loss")
    steps = settings.steps or ceil((settings.epochs or 0) * len(loader.plan(0)) / settings.rows_per_step)
    compiling.check_fp8(config, target.device)
    if compiling.wanted(config, target.device):
        compiling.cache_folder(config, compiling.parts(config, spec, target))
    prompts: list[Document] = []
    if settings.accept_every and world.first:
        count = config.evaluate.prompts if config.evaluate.replay else settings.accept_prompts
        prompts = evaluation_prompts(config, store, target.tokenizer, count)
    gpu = target.device.type == "cuda"
    compute = settings.compute_dtype if settings.compute_dtype != "auto" else ("bfloat16" if gpu else "float32")
    # refuses before there is a run
    pick_chunk(config.loss.softmax, spec, target.device, getattr(torch, compute), compiled=False)
    attention = pick_attention(settings.attention, target.device, spec.head_dim, getattr(torch, compute))
    graphed.check(config, target.device, attention, compiling.wanted(config, target.device))
    stored = settings.feature_dtype if settings.feature_dtype != "auto" else ("bfloat16" if gpu else "float32")
    return Plan(
        target=target,
        store=store,
        spec=spec,
        loader=loader,
        heldout_rows=heldout_rows,
        prompts=prompts,
        answers=[],
        steps=steps,
        attention=attention,
        compute_dtype=getattr(torch, compute),
        feature_dtype=getattr(torch, stored),
        pins={
            "target_weights": weights_fingerprint(config.target),
            "store": store.manifest.fingerprint,
            "tokenizer": store.manifest.tokenizer,
            "feature_layers": str(list(spec.feature_layers)),
            "block_size": str(spec.block_size),
            "rows": f"T={settings.row_tokens} A={settings.anchors} R={settings.rows_per_step} seed={settings.seed}",
            "schedule": f"{settings.schedule} steps={steps} lr={settings.learning_rate}",
            "precision": f"target={target.dtype} compute={compute} features={stored}",
            "loss": f"{config.loss.kind} gamma={config.loss.gamma} alpha={config.loss.dpace_alpha}",
        },
        notes=notes,
    )


def train(
    config: Config, *, resume: str | None = None, new_attempt: bool = False, target: Target | None = None,
    run: RunDir | None = None,
) -> RunDir:  # fmt: skip
    """Train a drafter, as one process or as this process's part of several.  Returns the run folder.

    resume: "auto" or a checkpoint folder; "auto" with new_attempt starts afresh where there is nothing to resume, and
    where nothing is left to train says so and returns the checkpoint's run.  Raises Interrupted after a signal (a
    checkpoint has been saved), FloatingPointError when features or loss stop being finite.
    """
    recorder = Recorder("train", config.model_dump(mode="json"))
    with join(config.placement, pick_device(config.device).type) as world:
        agree(world, {**identity(config), "--resume": resume, "--new-attempt": new_attempt})
        start = checkpoint.Start()
        with world.together("prepare"):
            if resume is not None and world.first:
                start = checkpoint.find_start(config.runs_dir, config.name, resume, new_attempt)
            # that which the run began with (another store is refused below), or the newest
            manifest = find_content(config.store, start.store) or read_manifest(config.store)
        # everywhere what rank 0 found
        found = [manifest.fingerprint, str(start.checkpoint or ""), start.state.step if start.state else 0]
        content, path, done = world.from_first("start", found)
        with world.together("load"):
            if path and world.role != "target" and not world.first:
                start = checkpoint.Start(Path(path), checkpoint.read_state(Path(path)))
            plan = prepare(config, target, world, content)
            rows = plan.steps * config.train.rows_per_step
            check_rows_fit(world, config.placement.run_ahead, rows, row_bytes(config, plan), plan.target.device)
        notes: list[str] = []
        goes_on = resume == "auto" and new_attempt  # as whoever starts again writes it, not knowing how far the run got
        with world.together("start"):
            if world.role != "target":
                notes = [*plan.notes, *start.notes, *check_start(config, plan, start, may_be_complete=goes_on)]
                check_files(config, plan, start.checkpoint)
        if goes_on and path and done >= plan.steps:
            world.leave(range(world.size))
            if world.first:
                print(f"nothing is left to train: {path} is at step {done} of {plan.steps}", flush=True)
            return RunDir(Path(path).parents[1])
        if config.train.accept_every and config.evaluate.replay:  # may take longer than the others wait

            def answer(tell: Callable[[], None]) -> None:
                plan.answers.extend(greedy_answers(config, plan.target, plan.prompts, tell))

            world.first_alone("greedy", answer)
        with world.together("folder"):
            if world.first:
                check(config.tracking.wanted)
                run = run or rundir.create(config.runs_dir, config.name, new_attempt=new_attempt or resume is not None)
                write_text(run.config, config.dump())
        if world.role == "target":
            extract = FeatureExtractor(plan.target, plan.spec.feature_layers, plan.feature_dtype)
            compiler = make_compiler(config, plan, world, print if world.index == 0 else lambda message: None, recorder)
            if compiler is not None:
                compiler.warm_up(None, extract)
                compiler.arm()
            source = extract if compiler is None else compiling.Guarded(extract, compiler)
            begin = world.read("begin")
            served = RunDir(Path(begin["run"]))
            with recorder.recording(served):
                facts = {"role": "target", "pins": plan.pins, "compiled": compiler.facts if compiler else None}
                recorder.built(facts, model_folder(config.target), config.store, plan.store.manifest.generation)
                all_taken = serve(
                    world, plan.loader, TimedFeatures(source, plan.target.device), plan.heldout_rows, begin,
                    config.placement.run_ahead,
                )  # fmt: skip
                if compiler is not None:
                    compiler.check(plan.steps)
            if not all_taken:  # rows that nobody will take are under way; their threads cannot be ended otherwise
                os._exit(0)
            return served
        run = RunDir(Path(world.from_first("run", str(run.path) if run else "")))
        sinks = open_sinks(config.tracking.wanted if world.first else (), run, config.model_dump(mode="json"))
        with recorder.recording(run), closing(Tracker(run, quiet=not world.first, sinks=sinks)) as tracker:
            for note in notes:
                tracker.say(note)
            try:
                _run(config, plan, run, tracker, recorder, start.checkpoint, world)
            finally:
                world.stop()
    return run


def make_compiler(
    config: Config, plan: Plan, world: World, say: Callable[[str], None], recorder: Recorder
) -> compiling.Compiler | None:
    """None where nothing is compiled."""
    if not compiling.wanted(config, plan.target.device):
        return None
    with world.together("compile cache"):
        return compiling.Compiler(config, world, plan.spec, plan.target, say, recorder.fell_back)


def row_bytes(config: Config, plan: Plan) -> int:
    """Of the features of one row."""
    values = config.train.row_tokens * len(plan.spec.feature_layers) * plan.spec.hidden_size
    return values * plan.feature_dtype.itemsize


def check_start(config: Config, plan: Plan, start: checkpoint.Start, *, may_be_complete: bool) -> list[str]:
    """What changed since the checkpoint.  Raises InputError if it does not fit, or (unless it may be complete) nothing
    is left to train."""
    path, state = start.checkpoint, start.state
    if path is None or state is None:
        return []
    notes = checkpoint.check_pins(state, plan.pins, plan.spec, path)
    if altered := altered_shards(config.store):
        raise InputError(f"cannot resume from {path}: {config.store / altered[0]} does not hold what was written to it")
    if state.step >= plan.steps and not may_be_complete:
        raise InputError(
            f"nothing is left to train: {path} is at step {state.step} of {plan.steps} (train.steps or train.epochs): "
            f"raise them to go on"
        )
    return notes


def identity(config: Config) -> dict[str, Any]:
    """What every process of a run must have alike."""
    packages = {f"package {d.name}": d.version for d in importlib.metadata.distributions()}
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        source.update(file.read_bytes())
    settings = {f"config {k}": v for k, v in config.model_dump(mode="json").items()}
    return {**settings, **packages, "draftsmith's source": source.hexdigest()[:16]}


def check_files(config: Config, plan: Plan, resume_from: Path | None) -> None:
    """Open what the run would start from, so that damage is refused before there is a run folder."""
    if resume_from is not None:
        read_drafter(resume_from)
    folder, pins = features_place(plan)
    if config.train.features == "files" and folder.exists():
        FileFeatures(folder, plan.store, pins, plan.target.device)


def _run(
    config: Config, plan: Plan, run: RunDir, tracker: Tracker, recorder: Recorder, resume_from: Path | None,
    world: World,
) -> None:  # fmt: skip
    settings = config.train
    drafter = DFlashDrafter(plan.spec).initialize(settings.seed).to(plan.target.device)
    if plan.compute_dtype == torch.float64:
        drafter.double()
    compiled = compiling.wanted(config, plan.target.device)
    optimizer = make_optimizer(drafter, settings, one_pass=compiled)
    first, rows_before = 0, 0
    if resume_from is not None:
        state = checkpoint.restore(resume_from, drafter, optimizer)
        first, rows_before = state.step, state.rows_done
        tracker.say(f"resumed from {resume_from} at step {first}")
    end = rows_before + (plan.steps - first) * settings.rows_per_step
    frozen = Frozen(plan.target.embedding.to(plan.compute_dtype), plan.target.head.to(plan.compute_dtype))
    compiler = make_compiler(config, plan, world, tracker.say, recorder)
    guard = contextlib.nullcontext if compiler is None else compiler.guarded
    row_step = RowStep(
        drafter, frozen, KnownRows([], plan.target.device), settings, config.loss, attention=plan.attention,
        compute_dtype=plan.compute_dtype, world=world, compiled=compiled, graphs=config.compile.graphs,
    )  # fmt: skip
    extract = None
    if world.role == "both":
        extract = FeatureExtractor(plan.target, plan.spec.feature_layers, plan.feature_dtype)
    if compiler is not None:
        compiler.warm_up(row_step, extract if settings.features == "online" else None, optimizer)
        compiler.arm(run if world.first else None)
    if world.first:
        world.publish("begin", {"run": str(run.path), "first": rows_before, "last": end})
    online = extract if compiler is None else compiler.source or extract
    source, heldout_source = feature_sources(config, plan, tracker, world, online, extract, first, rows_before)
    clock = Clock(world, source, plan.target.device)
    row_step.source = clock.features
    parameters = sum(p.numel() for p in drafter.parameters())
    facts = {
        "parameters": parameters,
        "dtypes": dtype_counts(drafter),
        "target_dtypes": dtype_counts(plan.target.model),
        "attention": plan.attention,
        "target_attention": plan.target.model.config._attn_implementation,
        "target_forward": plan.target.forward,
        "compute_dtype": str(plan.compute_dtype),
        "device": str(plan.target.device),
        "steps": plan.steps,
        "placement": config.placement.model_dump(),
        "compiled": compiler.facts if compiler is not None else None,
        "resumed_from": str(resume_from) if resume_from else None,
        "pins": plan.pins,
    }
    if plan.target.device.type == "cuda" and config.target.forward == "auto" and plan.target.forward == "per_document":
        recorder.fell_back("the target runs one document at a time: packed documents would see each other")
    recorder.built(facts, model_folder(config.target), config.store, plan.store.manifest.generation)
    if resume_from is not None:
        for line in recorder.changed_since(RunDir(resume_from.parents[1])):
            tracker.say(line)
    tracker.say(
        f"training: {parameters / 1e6:.1f}M parameters, {plan.steps} steps of {settings.rows_per_step} x "
        f"{settings.row_tokens} tokens, attention {plan.attention}, {plan.compute_dtype}, features {settings.features}"
    )

    waiting: list[StepSums] = []
    saver = checkpoint.Saver(run, settings.keep_checkpoints)
    watch = Watch(config, run, tracker, recorder, active=world.first)
    clock.start()
    with (
        stop_on_signals() as stop,
        closing(saver),
        Progress("training", plan.steps - first, "steps", quiet=not world.first) as progress,
    ):
        for step in range(first, plan.steps):
            set_rate(optimizer, rate(step, plan.steps, settings))
            begin = rows_before + (step - first) * settings.rows_per_step
            with clock.part("data"):
                mine = rows_of_drafter(begin, settings.rows_per_step, world.drafters, world.index)
                rows = [plan.loader.row(g) for g in mine]
            with guard(step):
                waiting.append(row_step.step(step, rows, optimizer, optimizer.param_groups[0]["lr"]))
            done = step + 1
            recorder.at(done)
            last = done == plan.steps
            stopped = agree_to_stop(world, stop)  # once, so that all of the step goes by the same answer
            saving = last or _due(done, settings.checkpoint_every) or stopped
            if saving or done % settings.log_every == 0:  # no checkpoint before its steps are known to be finite
                interval, note = flush(tracker, waiting, clock, world)
                if compiler is not None:
                    compiler.check(done)
                waiting = []
                note = f"{note}  {watch.beside(interval)}"
                stop.slow = watch.too_slow(interval) or stop.slow
                progress.advance(done - first - progress.done, note)
            if world.first and plan.heldout_rows and (last or _due(done, settings.heldout_every)):
                with clock.part("evaluation"), guard(step):
                    held = row_step.heldout(plan.heldout_rows, heldout_source)
                tracker.record(done, kind="heldout", **held)
                tracker.say(f"step {done}: held-out loss {held['loss']:.3f}, accuracy {held['accuracy']:.3f}")
            if world.first and plan.prompts and (last or _due(done, settings.accept_every)):
                with clock.part("evaluation"):
                    accepted_length(config, plan, drafter, tracker, done)
            if saving and world.first:
                with clock.part("checkpoint"):
                    path = saver.save(done, begin + settings.rows_per_step, drafter, optimizer, plan.pins)
            if stopped and not last:
                saver.wait()
                name = "throughput floor" if stopped == TOO_SLOW else signal.Signals(stopped - 128).name
                message = f"{name}: saved at step {done}; go on with --resume auto"
                if world.first:
                    message = f"{name}: saved {path} at step {done}; go on with --resume auto"
                tracker.say(message)
                raise Interrupted(stopped, message)
    if world.targets and world.first:
        tracker.say(clock.advice(settings.rows_per_step))
    tracker.say(f"trained: {plan.steps} steps, {run.path}")


def features_place(plan: Plan) -> tuple[Path, dict[str, str]]:
    """The folder of `features: files`, and what those features depend on."""
    pins = {k: plan.pins[k] for k in ("target_weights", "store", "feature_layers")}
    pins |= {"target_dtype": str(plan.target.dtype), "dtype": str(plan.feature_dtype)}
    return features_folder(plan.store, pins), pins


def feature_sources(
    config: Config, plan: Plan, tracker: Tracker, world: World, online: FeatureSource | None,
    extract: FeatureExtractor | None, first: int, rows_before: int,
) -> tuple[FeatureSource, FeatureSource]:  # fmt: skip
    """Where the features of training rows and of held-out rows come from: this process's own target, files beside the
    store (computed once, by rank 0, if they are not there yet), or the targets of a split placement."""
    settings = config.train
    if extract is None:
        device = plan.target.device
        shape = (settings.row_tokens, len(plan.spec.feature_layers) * plan.spec.hidden_size)
        held = KnownRows([], device)
        if world.first:
            count = sum(row.anchor_count > 0 for row in plan.heldout_rows)
            held.features = receive_heldout(world, count, shape, plan.feature_dtype, device)
        steps = range(plan.steps - first)
        per_step = settings.rows_per_step
        mine = (
            g for s in steps
            for g in rows_of_drafter(rows_before + s * per_step, per_step, world.drafters, world.index)
        )  # fmt: skip
        rows = (g for g, _ in with_anchors(plan.loader, mine))
        return ReceiveRows(world, rows, shape, plan.feature_dtype, device, config.placement.run_ahead), held
    if settings.features == "online":
        return online or extract, extract
    folder, pins = features_place(plan)

    def compute(tell: Callable[[], None]) -> None:
        if not folder.exists():
            tracker.say(f"computing the features of {len(plan.store)} documents into {folder}")
            write_features(folder, plan.store, extract, pins, tell)

    world.first_alone("features", compute)
    files = FileFeatures(folder, plan.store, pins, plan.target.device)
    return files, files


def accepted_length(config: Config, plan: Plan, drafter: DFlashDrafter, tracker: Tracker, done: int) -> None:
    """Accepted length of the drafter as it is now, by the serving loop or by replay."""
    dtype = next(drafter.parameters()).dtype
    serving = (
        drafter if dtype == plan.target.dtype else DFlashDrafter(plan.spec).to(plan.target.device, plan.target.dtype)
    )
    if serving is not drafter:
        serving.load_state_dict(drafter.state_dict())
    label, limit = f"step {done}", config.evaluate.max_new_tokens
    if plan.answers:
        result = measure_replayed(label, plan.target, serving, plan.answers, limit).result
    else:
        result = measure(label, plan.target, serving, plan.prompts, None, max_new_tokens=limit).result
    tracker.record(
        done, kind="accepted", accepted_length=result["accepted_length"], by_slot=result["acceptance_by_slot"],
        by_category=result["by_category"], spread=result["spread"],
    )  # fmt: skip
    tracker.say(f"step {done}: accepted length {result['accepted_length']['pooled']:.3f} (pooled)")


def dtype_counts(module: torch.nn.Module) -> dict[str, int]:
    """Parameters by dtype."""
    counts: Counter[str] = Counter()
    for parameter in module.parameters():
        counts[str(parameter.dtype)] += parameter.numel()
    return dict(counts)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def make_loader(config: Config, store: Store, *, heldout: bool) -> Loader:
    return Loader(
        store,
        row_tokens=config.train.row_tokens,
        anchors=config.train.anchors,
        block_size=config.drafter.block_size,
        seed=config.train.seed,
        heldout=heldout,
    )
