"""Warm-up and guard: a compiled run trains like an eager one, starts warm from its bundle, and never falls back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_config, write_conversations
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch.nn.attention.flex_attention import flex_attention

from draftsmith.data.tokenize import tokenize
from draftsmith.errors import FallbackError, InputError
from draftsmith.plan import geometry_of, row_settings
from draftsmith.predict import memory
from draftsmith.rundir import attempts
from draftsmith.target.model import drafter_spec
from draftsmith.train import compile as compiling
from draftsmith.train import graphed
from draftsmith.train.dist import World
from draftsmith.train.loop import train


@pytest.fixture
def made(target, target_folder, tmp_path):
    """make(*overrides) -> (Compiler, what it said, what it recorded as a fallback)"""
    before = list(warnings.filters)

    def make(*overrides: str):
        said: list[str] = []
        recorded: list[str] = []
        config = make_config(target_folder, tmp_path, f"compile.cache_dir={tmp_path}/cache", *overrides)
        spec = drafter_spec(config.drafter, target)
        compiler = compiling.Compiler(config, World(), spec, target, said.append, recorded.append)
        return compiler, said, recorded

    environment = dict(os.environ)
    yield make
    os.environ.clear()
    os.environ.update(environment)
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    torch._dynamo.reset()
    warnings.filters[:] = before


def doubled(x):
    return x * 2


def test_a_new_shape_after_the_warm_up_stops_the_run_with_the_cause(made):
    compiler, _, _ = made()
    double = torch.compile(doubled, backend="eager", fullgraph=True, dynamic=False)
    double(torch.ones(3))
    compiler.arm()
    with compiler.guarded(0):
        double(torch.ones(3))
    with pytest.raises(FallbackError, match=r"step 8 would have been compiled anew: .*") as caught, compiler.guarded(7):
        double(torch.ones(4))
    assert "size" in str(caught.value)


def test_warn_goes_on_and_records_it(made):
    compiler, said, recorded = made("compile.on_fallback=warn")
    double = torch.compile(doubled, backend="eager", fullgraph=True, dynamic=False)
    double(torch.ones(3))
    compiler.arm()
    with compiler.guarded(0):
        double(torch.ones(4))
    compiler.check(1)
    assert len(recorded) == 1 and "step 1: 1 new graphs since the warm-up" in recorded[0]
    assert said[-1] == f"warning: {recorded[0]}"
    compiler.check(2)
    assert len(recorded) == 1


def test_attention_that_was_not_compiled_stops_the_run(made, monkeypatch):
    import torch.nn.attention.flex_attention as module

    compiler, _, _ = made()
    compiler.arm()
    x = torch.randn(1, 1, 8, 4)
    for name in ("_WARNINGS_SHOWN", "_warned"):  # torch says it once a process
        if hasattr(module, name):
            getattr(module, name).clear()
    with pytest.raises(FallbackError, match="step 1 would have run uncompiled: flex_attention"), compiler.guarded(0):
        flex_attention(x, x, x)


def test_warn_tells_dense_attention_from_other_warnings_every_time(made):
    compiler, _, recorded = made("compile.on_fallback=warn")
    compiler.arm()
    x = torch.randn(1, 1, 8, 4)
    for step in range(2):
        with pytest.warns(UserWarning, match="something else"), compiler.guarded(step):
            flex_attention(x, x, x)
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert len(recorded) == 2 and all("ran uncompiled: flex_attention" in text for text in recorded)


def test_what_is_compiled_for_the_first_time_after_the_warm_up_stops_the_run_too(made):
    compiler, _, _ = made()
    compiler.arm()
    torch.compile(doubled, backend="eager")(torch.ones(3))  # new code: no recompile, but nothing training had compiled
    with pytest.raises(FallbackError, match="step 5: 1 new graphs since the warm-up"):
        compiler.check(5)


def test_a_second_run_in_the_same_process_warms_up_again(made):
    double = torch.compile(doubled, backend="eager", fullgraph=True, dynamic=False)
    for size in (3, 4):
        compiler, _, _ = made()
        compiler._compile_all = lambda *args, size=size: double(torch.ones(size))
        compiler.warm_up(None, None)
        compiler.arm()


@pytest.mark.parametrize("there", [2**30, 2**40])
def test_a_row_that_does_not_fit_is_one_line_with_what_would(made, monkeypatch, there):
    """Also where the sums say that it should have: then a fifth less."""
    monkeypatch.setattr(compiling, "process_memory", lambda device: there)
    compiler, _, _ = made("train.row_tokens=8192", "train.anchors=4096")
    with pytest.raises(InputError) as caught, compiler._explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
    line = str(caught.value)
    assert line.startswith(
        "a row of train.row_tokens=8192 with train.anchors=4096 does not fit the memory (CUDA out of"
    )
    assert f"{there / 2**30:.3g} GiB there; what should fit: " in line and "\n" not in line
    fits = int(line.split("train.anchors=")[-1].split()[0])

    def need(anchors: int, tokens: int = 8192) -> float:
        config = make_config(Path(compiler.config.target.model), Path("/"), f"train.row_tokens={tokens}",
                             f"train.anchors={anchors}", "loss.chunk_rows=512")  # fmt: skip
        row = compiling.made_up_row(config, compiler.spec.block_size)
        settings = row_settings(config, compiler.spec, [row], gpu=False)
        return memory(geometry_of(compiler.target, compiler.spec), compiler.spec, settings, 1)["colocated"]["peak"]

    most = min(there, need(8, 64) + 0.8 * (need(4096) - need(8, 64)))
    assert need(fits) <= most < 1.01 * need(fits + 16)


CPP = "/tmp/x.cpp:1:10: fatal error: {}: No such file or directory\n    1 | #include <{}>\ncompilation terminated."


@pytest.mark.parametrize(
    ("fault", "cause", "advice"),
    [
        (CppCompileError(["c++"], CPP.format("Python.h", "Python.h")), "Python.h: No such file", "Python's headers"),
        (CppCompileError(["c++"], CPP.format("omp.h", "omp.h")), "omp.h: No such file", "install a C++ compiler"),
        (PermissionError(errno.EACCES, "Permission denied", "/c++"), "PermissionError", "install a C++ compiler"),
        (InvalidCxxCompiler(), "No working C++ compiler", "install a C++ compiler"),
        (
            CppCompileError(["c++"], "x.s: fatal error: No space left on device"),
            "No space left",
            "free space in compile",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "No space left on device",
            "free space in compile.cache_dir",
        ),
    ],
)
def test_what_the_machine_lacks_is_one_line_whoever_is_compiled(made, fault, cause, advice):
    def fail(row):
        raise InductorError(fault, None)

    compiler, _, recorded = made()
    extract = SimpleNamespace(compile=lambda **how: None, deviation=fail, target=compiler.target, intervals=None)
    with pytest.raises(InputError) as caught, compiler._explained():
        compiler._target(extract, None)
    assert str(caught.value).startswith("compile: this machine cannot compile (")
    assert cause in str(caught.value) and advice in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InductorError, match="other"), compiler._explained():
        raise InductorError(RuntimeError("other"), None)
    assert not recorded


@pytest.mark.parametrize(
    ("dtype", "fields", "right", "wrong"),
    [
        (torch.float32, (), 4e-7, 2e-4),
        (torch.float32, (), 4e-7, float("nan")),
        (torch.bfloat16, (), 9e-3, 3e-2),
        (torch.bfloat16, ("train.fp8=drafter",), 9e-3, 3e-2),
        (torch.bfloat16, ("train.fp8=both",), 0.12, 0.26),
    ],
)
def test_a_target_whose_compiled_layers_differ_by_more_than_rounding_runs_uncompiled(made, dtype, fields, right, wrong):
    compiler, said, _ = made(*fields)
    target = SimpleNamespace(dtype=dtype)
    extract = SimpleNamespace(compile=lambda **how: None, compiled="layers", target=target, intervals=None)
    extract.deviation = lambda row: right
    compiler._target(extract, None)
    assert compiler.facts["target"] == "compiled" and extract.compiled and not said
    extract.deviation = lambda row: wrong
    compiler._target(extract, None)
    assert compiler.facts["target"].startswith("one of its layers then differs from single documents by ")
    assert extract.compiled is None and said == [f"the target is not compiled: {compiler.facts['target']}"]


@pytest.mark.parametrize("fault", [ValueError("queries of 192 numbers"), 0.5])
def test_a_target_that_our_kernels_do_not_fit_is_compiled_with_flex(made, fault):
    compiler, said, recorded = made()
    extract = SimpleNamespace(compiled="layers", target=SimpleNamespace(dtype=torch.bfloat16))

    def build(*, fp8, attention):
        extract.intervals = None if attention == "flex" else {}

    def deviation(row):
        if extract.intervals is None:
            return 5e-3
        if isinstance(fault, Exception):
            raise fault
        return fault

    extract.compile, extract.deviation = build, deviation
    compiler._target(extract, None)
    assert compiler.facts["target"] == "compiled" and compiler.facts["target_attention"] == "flex"
    (line,) = said
    assert line.startswith("the target does not attend by our kernels: ") and line.endswith("flex_attention is tried")
    assert compiler.facts["our_kernels_refused"] in line and compiler.facts["target_apart"] == 5e-3
    assert extract.compiled and recorded == ([] if isinstance(fault, Exception) else [line])  # wrong numbers are no fit
    compiler, _, _ = made("train.attention=triton")  # asked for: not replaced
    compiler._target(extract, None)
    assert compiler.facts["target"] != "compiled" and "target_attention" not in compiler.facts


@pytest.mark.parametrize(("start", "waits"), [("auto", True), ("first", True), ("together", False)])
def test_on_a_cpu_all_but_the_first_wait_unless_told_otherwise(made, monkeypatch, start, waits):
    asked = []

    class Second(World):
        def read(self, key, owner=0):
            asked.append(key)
            return "cold"

    compiler, _, _ = made(f"compile.start={start}")
    monkeypatch.setenv("LOCAL_RANK", "1")
    compiler.world, compiler._compile_all = Second(rank=1), lambda *args: asked.append("compiled")
    compiler.warm_up(None, None)
    assert asked == ["compile/warm/0", "compiled"] if waits else ["compiled"]


def test_a_cache_that_cannot_be_written_is_refused_before_there_is_a_run(stored, tmp_path):
    (tmp_path / "file").touch()
    compile_settings = stored.compile.model_copy(update={"enabled": True, "cache_dir": tmp_path / "file"})
    config = stored.model_copy(update={"compile": compile_settings})
    with pytest.raises(InputError, match=r"compile\.cache_dir: .* cannot be written"):
        train(config)
    assert not config.runs_dir.exists()


def test_the_profiled_step_must_have_run_fused_attention_both_ways():
    forward, backward = "triton_tem_fused_flex_attention_1", "triton_tem_fused_flex_attention_backward_2"
    compiling.check_kernels({forward: 5, backward: 5, "other": 90}, "flex")
    compiling.check_kernels({"other": 90}, "dense")
    compiling.check_kernels({forward: 5, backward: 5, "_softmax_rows_kernel": 4}, "flex", "triton")
    with pytest.raises(FallbackError, match="did not run our softmax"):
        compiling.check_kernels({forward: 5, backward: 5}, "flex", "triton")
    for missing in ({forward: 5}, {backward: 5}, {"softmax_kernel": 5}):
        with pytest.raises(FallbackError, match="no fused attention kernels"):
            compiling.check_kernels(missing, "flex")


@pytest.mark.parametrize("fields", [(), ("compile.enabled=true",), ("train.features=files",)])
def test_fp8_is_refused_where_there_is_none(target_folder, tmp_path, fields):
    config = make_config(target_folder, tmp_path, "train.fp8=target", *fields)
    with pytest.raises(InputError, match=r"train\.fp8=target: .*: set it to"):
        compiling.check_fp8(config, torch.device("cpu"))
    compiling.check_fp8(make_config(target_folder, tmp_path), torch.device("cpu"))


def test_graphs_are_refused_where_nothing_is_compiled_or_masks_change_their_shape(target_folder, tmp_path):
    config = make_config(target_folder, tmp_path, "compile.graphs=true")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    graphed.check(config, cpu, "sdpa", True)
    graphed.check(config, gpu, "triton", True)
    graphed.check(make_config(target_folder, tmp_path), gpu, "flex", False)
    with pytest.raises(InputError, match=r"compile\.graphs: .* this run has train\.attention=flex"):
        graphed.check(config, gpu, "flex", True)
    with pytest.raises(InputError, match=r"compile\.graphs: nothing is compiled here"):
        graphed.check(config, cpu, "sdpa", False)


@pytest.mark.parametrize("captured", [True, False])
def test_a_target_without_a_graph_is_said_and_recorded_on_a_gpu(made, monkeypatch, captured):
    compiler, said, recorded = made("compile.graphs=true")
    extract, step = object(), object()
    monkeypatch.setattr(graphed, "capture_all", lambda *given: "source" if captured and given[1] is extract else None)
    monkeypatch.setattr(compiling.Compiler, "device", torch.device("cuda"))
    compiler._as_graphs(step, extract)
    assert compiler.facts["cuda_graphs"] == {"drafter": True, "target": captured}
    assert len(recorded) == (0 if captured else 1) and said[0] == "rows run as CUDA graphs"
    assert all("the target runs without a CUDA graph" in line for line in (*recorded, *said[1:]))
    recorded.clear()
    compiler._as_graphs(step, None)  # a drafter of a split
    assert recorded == [] and compiler.source is None


def test_the_fingerprint_follows_what_compiled_code_depends_on(target_folder, tmp_path, target):
    def parts(*overrides: str) -> dict[str, str]:
        config = make_config(target_folder, tmp_path, *overrides)
        return compiling.parts(config, drafter_spec(config.drafter, target), target)

    same = parts()
    assert parts("train.learning_rate=1e-5", "name=other") == same
    for override in ("train.anchors=8", "drafter.num_layers=1", "train.compute_dtype=bfloat16", "loss.chunk_rows=7"):
        assert parts(override) != same, override


def run(path: Path, *overrides: str, code: int = 0, **environment: str) -> str:
    command = [sys.executable, "-m", "draftsmith.cli", "train", str(path), *overrides]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def work(target_folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("compiled")
    config = make_config(
        target_folder, work, "train.rows_per_step=2", "train.steps=3", f"compile.cache_dir={work}/cache",
        "drafter.num_layers=1", "target.forward=packed", "placement.drafters=2", "compile.enabled=true",
    )  # fmt: skip
    write_conversations(config.conversations)
    tokenize(config)
    path = work / "config.yaml"
    path.write_text(config.dump())
    return work, path, config


def facts(run, rank: int = 0) -> dict:
    return json.loads(run.manifest("built", rank).read_text())["built"]["compiled"]


def curve(run) -> torch.Tensor:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return torch.tensor([line["loss"] for line in lines if line["kind"] == "train"])


@pytest.fixture(scope="module")
def eager(work):
    _, path, config = work
    run(path, "name=eager", "compile.enabled=false")
    return curve(attempts(config.runs_dir, "eager")[0])


def test_two_processes_start_cold_then_from_the_bundle_and_train_like_eager_ones(work, eager):
    folder, path, config = work
    out = run(path)
    assert "compiling the target 1/2" in out and "compiling the drafter 2/2" in out
    first = attempts(config.runs_dir, config.name)[0]
    cold = facts(first)
    assert cold["cache"] == "cold" and cold["target"] == "compiled" and cold["graph_breaks"] == 0
    assert (first.compile_cache / "bundle.tar").is_file()
    shutil.rmtree(folder / "cache")
    out = run(path, "--new-attempt")
    assert "compile cache restored from" in out
    again = attempts(config.runs_dir, config.name)[1]
    warm = facts(again)
    assert warm["cache"] == "restored" and warm["cache_misses"] == 0 and warm["cache_hits"] > 0
    assert curve(first).tolist() == curve(again).tolist()
    torch.testing.assert_close(curve(first), eager, rtol=1e-4, atol=0)


def test_two_processes_whose_rows_run_as_graphs_train_like_eager_ones(work, eager, tmp_path):
    _, path, _ = work
    out = run(path, "compile.graphs=true", "compile.enabled=false", f"runs_dir={tmp_path}/none", code=2)
    assert "compile.graphs: nothing is compiled here: set it to false, or compile.enabled=true" in out
    assert not (tmp_path / "none").exists()
    out = run(path, "compile.graphs=true", f"runs_dir={tmp_path}/runs")
    assert "compiling the drafter 2/2" in out
    ended = attempts(tmp_path / "runs", "tiny")[0]
    assert "on a CPU rows use fixed memory, without a graph" in out
    assert facts(ended)["cuda_graphs"] == {"drafter": False, "target": False}
    torch.testing.assert_close(curve(ended), eager, rtol=1e-4, atol=0)


def test_a_split_that_compiles_together_on_an_empty_cache_trains_like_eager_processes(work, eager, tmp_path):
    _, path, _ = work
    out = run(path, "placement.mode=split", "placement.targets=1", "placement.drafters=1", "compile.start=together",
              f"runs_dir={tmp_path}/runs", f"compile.cache_dir={tmp_path}/cache")  # fmt: skip
    assert "compiling the target 1/1" in out and "compiling the drafter 1/1" in out
    split = attempts(tmp_path / "runs", "tiny")[0]
    drafter, target = facts(split), facts(split, 1)
    assert drafter["cache"] == target["cache"] == "cold" and drafter["fingerprint"] == target["fingerprint"]
    assert target["target"] == "compiled" and "target" not in drafter
    assert all(f["graphs"] > 0 and f["graph_breaks"] == 0 for f in (drafter, target))
    torch.testing.assert_close(curve(split), eager, rtol=1e-4, atol=0)


def test_without_a_compiler_there_is_one_clear_line(work, tmp_path):
    _, path, _ = work
    out = run(path, "--new-attempt", "placement.drafters=1", f"compile.cache_dir={tmp_path}", code=2, CXX="/none/g++")
    line = out.strip().splitlines()[-1]
    assert (
        line.startswith("draftsmith train: compile: this machine cannot compile (") and "compile.enabled=false" in line
    )
