"""Drifts, staged: for real on a small machine made of files, by real training runs in this process, or as recorded
pairs of manifests (tests/golden/manifests).  Used by test_drifts.py and by benchmarks/drift_verdicts.py."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.provenance.heartbeat import State
from draftsmith.provenance.manifest import ProcessRecord, RunRecord, load_file, load_run
from draftsmith.provenance.standalone import write_standalone

GOLDEN = Path(__file__).parents[1] / "golden" / "manifests"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"

Pair = tuple[RunRecord, RunRecord]


@dataclass(frozen=True)
class Case:
    """A drift and what must come first in the verdict."""

    name: str
    stage: Callable[[Path], Pair]
    """Given an empty folder: the run before and the run after."""
    first: str
    effect: str
    back: str = ""
    """A part of how to put it back."""


# --- a small machine made of files


class Machine:
    """An environment with hand-made packages, a project in git, a target, a store and compile caches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv, self.project, self.model = folder / "venv", folder / "project", folder / "model"
        self.store, self.cache, self.home = folder / "store", folder / "cache", folder / "home"
        venv.create(self.venv, with_pip=False, symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = self.venv / "lib" / version / "site-packages"
        self.environ = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "USER": "ann", "LANG": "C.UTF-8",
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache), "OMP_NUM_THREADS": "8", "NCCL_DEBUG": "WARN",
        }  # fmt: skip
        self.home.mkdir()
        write_standalone(folder / "capture.pyz")
        self.install("torch", "2.11.0+cu128")
        self.install("nvidia-cublas-cu12", "12.8.4.1")
        self.install("transformers", "5.8.1")
        self.install("huggingface-hub", "1.32.0")
        self.make_project()
        self.make_model()
        self.make_store(902, "one")
        self.fill_cache(self.cache, 60, "this run")

    def install(self, name: str, version: str, **changes: str) -> None:
        """As pip leaves a package: modules, METADATA, INSTALLER, RECORD with digests."""
        module = name.replace("-", "_")
        self.uninstall(name)
        files = {
            f"{module}/__init__.py": f"__version__ = {version!r}\n",
            f"{module}/core.py": "def f(x):\n    return x\n",
        }
        info = f"{module}-{version}.dist-info"
        files |= {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n",
            f"{info}/INSTALLER": "pip\n",
        }
        files |= changes
        rows = []
        for path, text in files.items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(text)}")
        (self.site / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")

    def uninstall(self, name: str) -> None:
        module = name.replace("-", "_")
        for path in [self.site / module, *self.site.glob(f"{module}-*.dist-info")]:
            shutil.rmtree(path, ignore_errors=True)

    def make_project(self) -> None:
        (self.project / "pipeline").mkdir(parents=True)
        (self.project / "pipeline" / "__init__.py").write_text("RATE = 6e-4\n")
        (self.project / ".gitignore").write_text("__pycache__/\n")
        self.git("init", "-q", "-b", "main")
        self.commit("first")
        url = {"url": self.project.as_uri(), "dir_info": {"editable": True}}
        self.install("pipeline", "0.1", **{"pipeline-0.1.dist-info/direct_url.json": json.dumps(url)})
        shutil.rmtree(self.site / "pipeline")
        (self.site / "pipeline.pth").write_text(f"{self.project}\n")

    def git(self, *arguments: str) -> None:
        who = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        subprocess.run(["git", "-C", str(self.project), *arguments], check=True, env={**os.environ, **who})

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def make_model(self) -> None:
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": 10000.0}))
        (self.model / "tokenizer.json").write_text(json.dumps({"vocab": {"a": 0, "b": 1}}))
        (self.model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b", "chat_template": TEMPLATE}))
        (self.model / "model.safetensors").write_bytes(bytes(4096))

    def make_store(self, documents: int, content: str) -> None:
        digest = hashlib.sha256(content.encode()).hexdigest()
        shard = {
            "file": "shard-00000.arrow",
            "documents": documents,
            "tokens": documents * 1800,
            "supervised": documents * 1300,
        }
        manifest = {"schema": 1, "generation": 1, "tokenizer": "t", "eos_token_ids": [1], "sources": {}, "counts": {}}
        self.store.mkdir(exist_ok=True)
        (self.store / "manifest.json").write_text(json.dumps({**manifest, "shards": [{**shard, "sha256": digest}]}))

    def fill_cache(self, folder: Path, entries: int, whose: str) -> None:
        """An inductor cache of `entries` graphs; those of another run have other keys."""
        for i in range(entries):
            key = hashlib.sha256(f"{whose} {i}".encode()).hexdigest()
            path = folder / "fxgraph" / key[:2] / key / "graph"
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes(200 + i))

    def capture(self, label: str) -> RunRecord:
        """By the stand-alone file, in the environment's own Python."""
        output = self.folder / f"{label}.json"
        command = [self.venv / "bin" / "python", self.folder / "capture.pyz", output, "--kind", "train"]
        command += ["--load", "torch,transformers,huggingface_hub,nvidia_cublas_cu12,pipeline"]
        command += ["--model", self.model, "--store", self.store]
        subprocess.run(list(map(str, command)), check=True, env=self.environ, cwd=self.folder)
        return load_file(output)


def on_machine(drift: Callable[[Machine], None]) -> Callable[[Path], Pair]:
    def stage(folder: Path) -> Pair:
        machine = Machine(folder)
        before = machine.capture("before")
        drift(machine)
        return before, machine.capture("after")

    return stage


def write(path: str, text: str) -> Callable[[Machine], None]:
    return lambda machine: (machine.folder / path).write_text(text) and None


def variable(name: str, value: str) -> Callable[[Machine], None]:
    return lambda machine: machine.environ.__setitem__(name, value)


def new_cuda(machine: Machine) -> None:
    machine.install("torch", "2.11.0+cu130")
    machine.uninstall("nvidia-cublas-cu12")
    machine.install("nvidia-cublas", "13.1.0.3")


def patch_package(machine: Machine) -> None:
    (machine.site / "transformers" / "core.py").write_text("def f(x):\n    return x + 1\n")


def edit_source(machine: Machine) -> None:
    (machine.project / "pipeline" / "__init__.py").write_text("RATE = 6e-3\n")


def other_commit(machine: Machine) -> None:
    edit_source(machine)
    machine.commit("second")


def committed_later(folder: Path) -> Pair:
    """Trained with uncommitted edits that are committed since: the same source, so no change of it."""
    machine = Machine(folder)
    edit_source(machine)
    (machine.project / "pipeline" / "extra.py").write_text("X = 1\n")
    before = machine.capture("before")
    machine.commit("what ran before")
    return before, machine.capture("after")


def partial_cache(machine: Machine) -> None:
    for path in sorted(machine.cache.glob("fxgraph/*/*"))[4:]:
        shutil.rmtree(path)


def foreign_cache(machine: Machine) -> None:
    shutil.rmtree(machine.cache)
    machine.fill_cache(machine.cache, 60, "another run")


def move_home(machine: Machine) -> None:
    """The Triton cache lies under HOME unless a variable says otherwise."""
    machine.environ["HOME"] = str(machine.folder / "other-home")
    Path(machine.environ["HOME"]).mkdir()


def with_triton_cache(folder: Path) -> Pair:
    machine = Machine(folder)
    machine.fill_cache(machine.home / ".triton" / "cache", 20, "triton")
    before = machine.capture("before")
    move_home(machine)
    return before, machine.capture("after")


def weights_of_the_same_size(machine: Machine) -> None:
    (machine.model / "model.safetensors").write_bytes(bytes(4095) + b"\1")


REAL = [
    Case("transformers 5.8.1 -> 5.6.0", on_machine(lambda m: m.install("transformers", "5.6.0")),
         "packages.transformers", "loss", "pip install 'transformers==5.8.1'"),
    Case("torch of another CUDA", on_machine(new_cuda), "packages.torch", "loss", "pip install 'torch==2.11.0+cu128'"),
    Case("a floating dependency moved", on_machine(lambda m: m.install("huggingface-hub", "1.33.0")),
         "packages.huggingface-hub", "loss", "pip install 'huggingface-hub==1.32.0'"),
    Case("a package patched in place", on_machine(patch_package), "packages.files.transformers", "loss",
         "pip install --force-reinstall --no-deps 'transformers==5.8.1'"),
    Case("a file of a package lost", on_machine(lambda m: (m.site / "transformers" / "core.py").unlink()),
         "packages.files.transformers", "loss", "--force-reinstall"),
    Case("sitecustomize appeared", on_machine(lambda m: write(str(m.site / "sitecustomize.py"), "X = 1\n")(m)),
         "packages.startup.sitecustomize.py", "loss", "remove it"),
    Case("compile cache deleted", on_machine(lambda m: shutil.rmtree(m.cache)), "compile_cache.inductor", "speed", "copy"),
    Case("compile cache partial", on_machine(partial_cache), "compile_cache.inductor", "speed", "copy"),
    Case("compile cache of another run", on_machine(foreign_cache), "compile_cache.inductor", "speed", "copy"),
    Case("cache missed because HOME moved", with_triton_cache, "environment.HOME", "speed", "export HOME="),
    Case("cache missed because a variable moved it", on_machine(variable("TORCHINDUCTOR_CACHE_DIR", "/tmp/elsewhere")),
         "environment.TORCHINDUCTOR_CACHE_DIR", "speed", "export TORCHINDUCTOR_CACHE_DIR="),
    Case("source edited but not committed", on_machine(edit_source), "code.pipeline.edits", "loss", "runs restore"),
    Case("another commit", on_machine(other_commit), "code.pipeline.commit", "loss", "git checkout"),
    Case("an untracked source file", on_machine(write("project/pipeline/extra.py", "X = 1\n")),
         "code.pipeline.untracked", "loss", "runs restore"),
    Case("the store grew", on_machine(lambda m: m.make_store(1100, "two")), "data.store", "loss", "data_dir"),
    Case("chat template changed under the same name",
         on_machine(write("model/tokenizer_config.json", json.dumps({"eos_token": "b", "chat_template": TEMPLATE + " "}))),
         "target.chat_template", "loss", "tokenize anew"),
    Case("tokenizer changed", on_machine(write("model/tokenizer.json", json.dumps({"vocab": {"a": 1, "b": 0}}))),
         "target.tokenizer", "loss", "tokenize anew"),
    Case("target weights changed, same size", on_machine(weights_of_the_same_size), "target.weights", "loss", "weights"),
    Case("target config changed", on_machine(write("model/config.json", json.dumps({"hidden_size": 64, "rope_theta": 1e6}))),
         "target.config", "loss", "config.json"),
    Case("TF32 forced by a variable", on_machine(variable("NVIDIA_TF32_OVERRIDE", "1")),
         "environment.NVIDIA_TF32_OVERRIDE", "loss", "unset NVIDIA_TF32_OVERRIDE"),
    Case("fewer threads", on_machine(variable("OMP_NUM_THREADS", "1")), "environment.OMP_NUM_THREADS", "speed",
         "export OMP_NUM_THREADS='8'"),
]  # fmt: skip


# --- real training runs of the tiny target, in this process


@functools.cache
def workshop() -> Any:
    """(config, target) with a store, made once; its folder lives as long as this process."""
    from conftest import make_config, write_conversations, write_target

    from draftsmith.data.tokenize import tokenize
    from draftsmith.target.model import load_target

    keep = tempfile.TemporaryDirectory(prefix="staging-")
    folder = Path(keep.name)
    config = make_config(write_target(folder / "model"), folder, "train.steps=1")
    write_conversations(config.conversations)
    tokenize(config)
    return config, load_target(config.target, "cpu"), keep


def train_here(folder: Path, *overrides: str) -> RunRecord:
    from conftest import make_config

    from draftsmith.train.loop import train

    config, target, _ = workshop()
    more = ("train.steps=1", f"data_dir={config.data}", *overrides)
    return load_run(train(make_config(Path(config.target.model), folder, *more), target=target))


@contextmanager
def replaced_function() -> Iterator[None]:
    """What a hot fix in somebody's notebook does: a function of torch.fx replaced in memory."""
    import torch.fx._symbolic_trace as fx

    def is_fx_tracing() -> bool:
        return False

    original, fx.is_fx_tracing = fx.is_fx_tracing, is_fx_tracing
    try:
        yield
    finally:
        fx.is_fx_tracing = original


@contextmanager
def matmul_precision() -> Iterator[None]:
    import torch

    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def dynamo_switch() -> Iterator[None]:
    import torch._dynamo.config as config

    before, config.recompile_limit = config.recompile_limit, 1
    try:
        yield
    finally:
        config.recompile_limit = before


def in_training(change: Any = None, *overrides: str) -> Callable[[Path], Pair]:
    def stage(folder: Path) -> Pair:
        import torch._dynamo

        assert torch._dynamo  # loaded in both runs
        before = train_here(folder / "before")
        if change is None:
            return before, train_here(folder / "after", *overrides)
        with change():
            return before, train_here(folder / "after", *overrides)

    return stage


TRAINED = [
    Case("a function of torch.fx replaced at run time", in_training(replaced_function),
         "patches.torch.fx._symbolic_trace.is_fx_tracing", "loss", "do not import or call"),
    Case("matmul precision lowered", in_training(matmul_precision), "switches.torch.float32_matmul_precision", "loss"),
    Case("a switch of dynamo", in_training(dynamo_switch), "switches.dynamo.recompile_limit", "loss"),
    Case("feature layers changed in the config", in_training(None, "drafter.feature_layers=[0, 2, 4]"),
         "config.drafter.feature_layers", "loss", "drafter.feature_layers="),
    Case("learning rate changed", in_training(None, "train.learning_rate=0.01"), "config.train.learning_rate", "loss",
         "train.learning_rate=0.001"),
]  # fmt: skip


# --- recorded pairs


def recorded(case: dict[str, Any]) -> Callable[[Path], Pair]:
    base = json.loads((GOLDEN / "h200.json").read_text())

    def run(label: str, edits: list[Any], world: int = 8) -> RunRecord:
        ranks = {}
        for rank in range(world):
            facts = copy.deepcopy(base)
            for path, value in edits if case.get("rank") in (None, rank) else []:
                put(facts, path, value)
            if label == "after" and "keep_keys" in case:
                cache = facts["compile_cache"]["inductor"]
                kept = cache["keys"][: case["keep_keys"]]
                cache |= {"keys": kept, "entries": len(kept), "digest": "other"}
            sections = {
                k: v for k, v in facts.items() if k not in ("schema", "kind", "moment", "rank", "world", "seconds")
            }
            ranks[rank] = ProcessRecord(rank, world, ("start", "built", "end"), sections)
        return RunRecord(label, Path(label), "train", State("finished"), ranks)

    return lambda folder: (
        run("before", case.get("before", [])), run("after", case.get("after", []), case.get("world", 8))
    )  # fmt: skip


def put(facts: Any, path: list[Any], value: Any) -> None:
    """Set facts[path...] = value; "*" stands for every element."""
    head, *rest = path
    for key in range(len(facts)) if head == "*" else [head]:
        if rest:
            put(facts[key], rest, value)
        else:
            facts[key] = value


RECORDED = [
    Case(case["name"], recorded(case), case["first"], case["effect"], case.get("back", ""))
    for case in json.loads((GOLDEN / "cases.json").read_text())
]

CASES = [*REAL, *TRAINED, *RECORDED]


# --- run folders written from the recorded manifest, for tests of listing, last-good and bad input


def write_run(
    runs_dir: Path, name: str, *edits: tuple[list[Any], Any], begun: float = 1000.0, how: str = "finished",
    moments: tuple[str, ...] = ("start", "built", "end"),
) -> Path:  # fmt: skip
    """An attempt's folder as the recorder leaves it.  edits: (path, value) on the recorded facts."""
    from draftsmith import rundir
    from draftsmith.provenance import heartbeat

    facts = json.loads((GOLDEN / "h200.json").read_text())
    facts["clock"]["time"] = begun
    for path, value in edits:
        put(facts, path, value)
    at_end = ("compile_cache_end", "counters", "gpu_samples", "outcome")
    at_build = ("imported", "torch", "switches", "libraries", "patches", "target", "data", "built")
    header = {k: facts.pop(k) for k in ("schema", "kind", "rank", "world", "clock", "process", "seconds")}
    parts = {
        "start": {k: v for k, v in facts.items() if k not in (*at_build, *at_end)},
        "built": {k: v for k, v in facts.items() if k in at_build},
        "end": {k: v for k, v in facts.items() if k in at_end},
    }
    run = rundir.create(runs_dir, name, new_attempt=True)
    run.manifests.mkdir()
    for moment in moments:
        run.manifest(moment).write_text(json.dumps({**header, **parts[moment], "moment": moment}))
    heart = heartbeat.Heartbeat(run, 0)
    run.alive.mkdir()
    heart.beat()
    if how != "running":
        heartbeat.write_exit(run, 0, how)
    return run.path
