"""Steps on one GPU, part by part, beside the floor and beside vLLM's speculators, in one run.

    python benchmarks/step_gpu.py [SECTION ...]    writes results/step_h200.json, or into $OUT where that is set

Sections run in processes of their own, each with a time limit; the compile cache is a fresh folder, so that the first
starts cold and the next warm.  Steps are timed as training runs them: five follow one another before the clock is read.
The peer is PyPI speculators 0.9.0, its flex attention and its eager loss (the fused one fails on torch 2.11), and must
be importable: PYTHONPATH=.peers/speculators.  It compiles for minutes (its cache is kept in $STEP_GPU_PEER_CACHE): it
starts first, and is timed between ours.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIMITS = {
    "peer": 480,
    "drafter": 110,
    "drafter_flex": 110,
    "end_to_end": 150,
    "end_to_end_flex": 150,
    "drafter_again": 70,
    "plan": 200,
    "fp8": 200,
    "long": 200,
}
"""Seconds a section may take."""
GEOMETRY = "qwen3-8b"


def drafter(*fields: str) -> dict[str, Any]:
    """The drafter alone on given features: time by part, peak memory, ceilings of the same process."""
    from draftsmith.bench import Bench, roofline
    from draftsmith.geometry import Shape

    begin = time.monotonic()
    bench = Bench(GEOMETRY, Shape(), "cuda", fields=[*_fields(), *fields])
    bench.build(target=False)
    assert bench.compiler is not None
    start = time.monotonic() - begin
    before = roofline(bench.device, bench.dtype)
    found: dict[str, Any] = {}
    with card_read(found):
        found |= bench.time_drafter()
    after = roofline(bench.device, bench.dtype)
    found["kernels_ms"] = kernel_times(bench)
    floor = (
        bench.work.drafter / before["gemm_tflops"] / 1e9 + bench.work.optimizer_bytes / before["copy_tb_per_s"] / 1e9
    )
    return {**found, "ceilings": [before, after], "floor_ms": floor, "start_s": start, "compiled": bench.compiler.facts}


drafter_again = drafter


FLEX = ("train.attention=flex", "loss.softmax=torch")


def drafter_flex() -> dict[str, Any]:
    """Without our own kernels in attention and loss."""
    return drafter(*FLEX)


def end_to_end_flex() -> dict[str, Any]:
    """Without our own kernels in attention and loss."""
    return end_to_end(*FLEX)


def kernel_times(bench: Any, most: int = 60) -> dict[str, list[float]]:
    """Milliseconds and calls a step of the kernels of steps in a row on given features, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from draftsmith.bench import STEPS_TOGETHER, _Always

    width = len(bench.spec.feature_layers) * bench.spec.hidden_size
    bench.step.source = _Always(torch.randn(bench.shape.row_tokens, width, device=bench.device, dtype=bench.dtype))

    def steps() -> None:
        for number in range(STEPS_TOGETHER):
            bench.step.step(number, bench.rows[:1], bench.optimizer, 1e-4)

    for _ in range(3):
        steps()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        steps()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    found = {
        e.key[:110]: [e.self_device_time_total / 1e3 / STEPS_TOGETHER, e.count / STEPS_TOGETHER] for e in events[:most]
    }
    every = sum(e.self_device_time_total for e in events) / 1e3 / STEPS_TOGETHER
    return {"all": [every, sum(e.count for e in events) / STEPS_TOGETHER], **found}


@contextlib.contextmanager
def card_read(found: dict[str, Any]) -> Iterator[None]:
    """Meanwhile the card's clock, power, temperature and reasons to slow down are read four times a second."""
    fields = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "250"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.terminate()
        lines = [line.split(", ") for line in process.communicate()[0].splitlines()]
        read = list(zip(*[line for line in lines if len(line) == 4 and "N/A" not in str(line)], strict=True))
        if read:
            numbers = (statistics.median(map(float, column)) for column in read[:3])
            reasons = {reason: read[3].count(reason) for reason in set(read[3])}
            found["card"] = dict(zip(("sm_mhz", "watts", "celsius"), numbers, strict=True)) | {"reasons": reasons}


def end_to_end(*fields: str) -> dict[str, Any]:
    """Target and drafter in one process."""
    from draftsmith.bench import Bench, render
    from draftsmith.geometry import Shape

    begin = time.monotonic()
    bench = Bench(GEOMETRY, Shape(), "cuda", fields=[*_fields(), *fields])
    found = bench.run()
    print(render(found), flush=True)
    assert bench.step is not None
    bench.target = bench.extract = bench.step.source = None  # type: ignore[assignment]
    alone = bench.time_drafter()
    return {**found, "drafter_alone": alone, "built_s": bench.built_seconds, "all_s": time.monotonic() - begin}


def long() -> dict[str, Any]:
    """Rows of 65,536 tokens with 1,536 anchors, target and drafter in one process: does it fit?"""
    import torch

    from draftsmith.bench import Bench
    from draftsmith.geometry import Shape

    bench = Bench(GEOMETRY, Shape(65536, 1536), "cuda", fields=_fields())
    bench.build()
    assert bench.step is not None
    seconds = []
    for number in range(3):
        begin = time.monotonic()
        bench.step.step(number, bench.rows[:1], bench.optimizer, 1e-4)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - begin)
    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "step_s": min(seconds), "said": bench.said}


def plan() -> dict[str, Any]:
    """What `draftsmith plan` says of the same target and row: by a few layers that it times here, and by its table."""
    import torch
    from transformers import Qwen3ForCausalLM

    from draftsmith import plan as planning
    from draftsmith.bench import Bench
    from draftsmith.cards import CARDS, card_rates
    from draftsmith.geometry import Shape, model_config
    from draftsmith.predict import GIB, predict
    from draftsmith.rates import Work, measure
    from draftsmith.target.model import Target

    bench = Bench(GEOMETRY, Shape(), "cuda", fields=_fields())
    with torch.device("meta"):
        model = Qwen3ForCausalLM(model_config(bench.geometry, bench.geometry.layers))
    target = Target("random", model, None, torch.device("meta"), bench.dtype, (0,), 0, "packed")
    geometry = planning.geometry_of(target, bench.spec)
    settings = planning.row_settings(bench.config, bench.spec, bench.rows[:1], gpu=True)
    work = Work(bench.config, target, bench.spec, geometry, settings, bench.rows[:1], 0.0)
    out = {}
    for name, rates in (("timed_here", measure(work, bench.device)), ("by_table", card_rates(CARDS["h200"]))):
        said = predict(geometry, bench.spec, settings, rates, 1, (139.0 * GIB,))
        out[name] = {
            "target_ms": said.target_seconds * 1e3, "drafter_step_ms": said.drafter_seconds * 1e3,
            "tokens_per_s": said.placements[0].rows_per_s * bench.shape.row_tokens,
            "drafter_peak_gib": said.memory["drafter"]["peak"] / GIB,
        }  # fmt: skip
    return out


def fp8() -> dict[str, Any]:
    """The linear layers of both in 8 bits: an experiment."""
    from draftsmith.bench import Bench
    from draftsmith.geometry import Shape

    bench = Bench(GEOMETRY, Shape(), "cuda", fields=[*_fields(), "train.fp8=both"])
    bench.build()
    return {"target_ms": bench.time_target(), "drafter": bench.time_drafter(), "said": bench.said,
            "tokens_per_s": bench.time_end_to_end()}  # fmt: skip


def peer() -> dict[str, Any]:
    """The same step by speculators: same widths, row, number of anchors, loss weights, AdamW, bf16 over fp32 masters."""
    import numpy as np
    import torch
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.train.optimizers import build_optimizers
    from transformers import Qwen3Config

    from draftsmith.bench import STEPS_TOGETHER, roofline, timed
    from draftsmith.geometry import GEOMETRIES, Shape, drafter_spec, random_row

    shape, geometry = Shape(), GEOMETRIES[GEOMETRY]
    spec, device = drafter_spec(geometry, shape), torch.device("cuda")
    layers = Qwen3Config(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, rms_norm_eps=spec.rms_norm_eps, max_position_embeddings=40960,
        tie_word_embeddings=False, layer_types=["full_attention"] * spec.num_layers,
    )  # fmt: skip
    layers._attn_implementation = "simple_flex_attention"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=spec.vocab_size, block_size=spec.block_size,
        aux_hidden_state_layer_ids=list(spec.feature_layers), mask_token_id=spec.mask_token_id,
    )  # fmt: skip
    with device:
        model = DFlashDraftModel(config).train()
    with torch.no_grad():
        for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
            getattr(model, name).weight.normal_(0, 0.02)
        model.verifier_norm.weight.fill_(1.0)
    for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
        getattr(model, name).requires_grad_(False)
    row = random_row(shape, spec.vocab_size, 0)
    width = len(spec.feature_layers) * spec.hidden_size
    batch = {
        "hidden_states": torch.randn(1, shape.row_tokens, width, device=device, dtype=torch.bfloat16),
        "verifier_last_hidden_states": torch.randn(
            1, shape.row_tokens, spec.hidden_size, device=device, dtype=torch.bfloat16
        ),
        "input_ids": torch.from_numpy(row.tokens)[None].to(device),
        "loss_mask": torch.from_numpy(row.supervised)[None].to(device),
        "document_ids": torch.from_numpy(row.document.astype(np.int64))[None].to(device),
        "position_ids": torch.from_numpy(row.positions)[None].to(device),
    }
    settings, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce", loss_implementation="eager", max_anchors=shape.anchors,
        per_position_loss_weight="fixed-exp-decay", dflash_decay_gamma=7.0,
    )  # fmt: skip
    optimizers = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=1e-4, weight_decay=0.0))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch, **settings)[1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    begin = time.monotonic()
    step()
    torch.cuda.synchronize()
    first = time.monotonic() - begin
    go = Path(os.environ["STEP_GPU_GO"])
    go.with_suffix(".ready").touch()
    while not go.exists():
        time.sleep(0.2)
    before = roofline(device, torch.bfloat16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = timed(step, device, calls=STEPS_TOGETHER)
    return {"step_ms": milliseconds, "one_at_a_time_ms": timed(step, device), "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "ceilings": [before],
            "first_step_s": first}  # fmt: skip


def _fields() -> list[str]:
    return [f"compile.cache_dir={os.environ['STEP_GPU_CACHE']}"]


class Section:
    """One section in a process of its own."""

    def __init__(self, name: str, cache: Path) -> None:
        self.name, self.out, self.begun = name, cache / f"{name}.json", time.monotonic()
        environment = {**os.environ, "STEP_GPU_CACHE": str(cache), "STEP_GPU_GO": str(cache / "go")}
        if name == "peer" and "STEP_GPU_PEER_CACHE" in os.environ:
            environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ["STEP_GPU_PEER_CACHE"]
        self.process = subprocess.Popen([sys.executable, __file__, name, str(self.out)], env=environment)

    def found(self) -> dict[str, Any]:
        """What it found, or why it did not."""
        try:
            code = self.process.wait(max(1.0, LIMITS[self.name] - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return {"failed": f"took longer than {LIMITS[self.name]} s"}
        return dict(json.loads(self.out.read_text())) if self.out.is_file() else {"failed": f"exit code {code}"}


def main() -> None:
    import torch
    from _common import RESULTS, write_result

    wanted = sys.argv[1:] or list(LIMITS)
    stored = RESULTS / "step_h200.json"
    found = json.loads(stored.read_text())["sections"] if sys.argv[1:] and stored.is_file() else {}

    def keep(name: str, section: Section) -> None:
        found[name] = {**section.found(), "at": time.strftime("%Y-%m-%d %H:%M:%S")}
        print(name, json.dumps(found[name])[:1500], flush=True)
        write_result("step_h200", summary(torch.cuda.get_device_name(), found))

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        other = Section("peer", cache) if "peer" in wanted else None
        for name in [n for n in LIMITS if n in wanted and n != "peer"] + ["the end"]:
            if other is not None and (name == "the end" or (cache / "go.ready").exists()):
                (cache / "go").touch()
                keep("peer", other)
                other = None
            if name != "the end":
                keep(name, Section(name, cache))
    print(stored)


def summary(device: str, found: dict[str, Any]) -> dict[str, Any]:
    whole, other = found.get("end_to_end", {}), found.get("peer", {})
    every = [found.get("drafter", {}), found.get("drafter_again", {}), whole.get("drafter_alone", {})]
    steps = [s["step_ms"] for s in every if "step_ms" in s]
    steps += [whole["drafter_step_ms"]] if "drafter_step_ms" in whole else []  # beside the target
    # of the drafter alone, as the peer's: beside a target the process holds both
    peaks = [s["peak_gib"] for s in every[:2] if "peak_gib" in s]
    return {
        "device": device,
        "geometry": GEOMETRY,
        "drafter_step_ms": statistics.median(steps) if steps else None,
        "drafter_step_ms_each": steps,
        "drafter_peak_gib": max(peaks, default=None),
        "target_ms": whole.get("target_ms"),
        "end_to_end_tokens_per_s": whole.get("end_to_end_tokens_per_s"),
        "floor_ms": whole.get("floor_ms"),
        "gemm_tflops": whole.get("gemm_tflops"),
        "peer_speculators_ms": other.get("step_ms"),
        "peer_speculators_gib": other.get("peak_gib"),
        "peer_ratio": other["step_ms"] / statistics.median(steps) if steps and "step_ms" in other else None,
        "cold_start_s": found.get("drafter", {}).get("start_s"),
        "warm_start_s": found.get("drafter_again", {}).get("start_s"),
        "sections": found,
    }


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in LIMITS and sys.argv[2] not in LIMITS:
        faulthandler.dump_traceback_later(LIMITS[sys.argv[1]] - 5, exit=True)
        from draftsmith import env

        env.prepare()
        Path(sys.argv[2]).write_text(json.dumps(globals()[sys.argv[1]]()))
    else:
        main()
