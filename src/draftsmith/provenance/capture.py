"""What one process was made of, at three moments: start, after the models are built, end.

Standard library only; torch is asked only if it is loaded already.  A part that fails is recorded as unknown with the
reason, and the run goes on.  Also a command, which is what the stand-alone file runs:

    python -m draftsmith.provenance.capture OUT.json [--load torch,vllm] [--kind serving] [--model F] [--store F]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith import env
from draftsmith.files import write_text
from draftsmith.provenance import artifacts, caches, gpu, host, packages, patches, source, torchstate
from draftsmith.provenance.facts import attempt, unknown, why_unknown
from draftsmith.provenance.masking import masker

SCHEMA = 1
"""Raised when a reader of the old form would misread the new one; additions do not raise it."""
MOMENTS = ("start", "built", "end")

Readers = dict[str, Callable[[], Any]]


def at_start(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Before models are loaded: everything that is there without them."""
    return _manifest(kind, "start", _machine(config))


def at_build(
    kind: str, facts: dict[str, Any], model: Path | None, store: Path | None, generation: int | None = None
) -> dict[str, Any]:
    """After models, optimizer and compiled functions are made.  facts: what only the caller knows about them."""
    return _manifest(kind, "built", {**_process(), **_files(model, store, generation), "built": lambda: facts})


def at_end(kind: str, outcome: dict[str, Any], samples: Any) -> dict[str, Any]:
    """After the last step, however it ended.  samples: what the heartbeat saw of the GPUs meanwhile."""
    return _manifest(
        kind,
        "end",
        {
            "compile_cache_end": caches.read_caches,
            "counters": torchstate.read_counters,
            "patches": patches.read_patches,
            "gpu_samples": lambda: samples,
            "outcome": lambda: outcome,
        },
    )


def right_now(
    kind: str, config: dict[str, Any], model: Path | None = None, store: Path | None = None, every_file: bool = False
) -> dict[str, Any]:
    """All that can be said of this process in one go; for `runs check`, serving processes and benchmarks."""
    parts = {**_machine(config), **_process(), **_files(model, store)}
    if every_file:
        parts["packages"] = lambda: packages.read_packages(every_file=True)
    return _manifest(kind, "now", parts)


@functools.cache
def packages_once() -> Any:
    """Once a process: what it has imported does not change when the disk does."""
    return attempt(packages.read_packages)


@functools.cache
def source_once() -> Any:
    found = packages_once()
    return attempt(source.read_source, {} if why_unknown(found) else packages.editables(found))


def _machine(config: dict[str, Any]) -> Readers:
    return {
        "config": lambda: config,
        "packages": packages_once,
        "code": source_once,
        "python": host.read_python,
        "host": host.read_host,
        "gpu": gpu.read_gpus,
        "environment": host.read_environment,
        "compile_cache": caches.read_caches,
    }


def _process() -> Readers:
    return {
        "environment": host.read_environment,
        "imported": lambda: packages.imported(packages_once()),
        "torch": torchstate.read_torch,
        "switches": torchstate.read_switches,
        "libraries": host.read_libraries,
        "patches": patches.read_patches,
    }


def _files(model: Path | None, store: Path | None, generation: int | None = None) -> Readers:
    readers: Readers = {}
    if model is not None:
        readers["target"] = lambda: artifacts.read_target(model)
    if store is not None:
        readers["data"] = lambda: artifacts.read_store(store, generation)
    return readers


def _manifest(kind: str, moment: str, readers: Readers) -> dict[str, Any]:
    begin = time.monotonic()
    rank, world = env.world()
    process = attempt(host.read_process, list(sys.argv))
    out: dict[str, Any] = {
        "schema": SCHEMA, "kind": kind, "moment": moment, "rank": rank, "world": world, "clock": host.clock(),
        "process": process,
    }  # fmt: skip
    seconds = {}
    for name, read in readers.items():
        since = time.monotonic()
        out[name] = attempt(read)
        seconds[name] = round(time.monotonic() - since, 4)
    masked: dict[str, Any] = _masked(out)
    masked["seconds"] = {"total": round(time.monotonic() - begin, 4), **seconds}
    return masked


def _masked(manifest: dict[str, Any]) -> Any:
    """The manifest without secrets."""
    mask = masker()
    out = {k: mask.tree(v, k, by_name=k in ("environment", "config")) for k, v in manifest.items()}
    process = manifest["process"]
    if why_unknown(process) is None:
        out["process"]["command"] = mask.arguments(process["command"])
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="capture", description="Write what this Python environment is made of.")
    parser.add_argument("output", type=Path, help="the manifest to write, JSON")
    parser.add_argument("--load", default="", metavar="A,B", help="modules to import first, so that they can be asked")
    parser.add_argument("--kind", default="serving", help="what the process is (default: serving)")
    parser.add_argument("--model", type=Path, help="the target's folder")
    parser.add_argument("--store", type=Path, help="the store's folder")
    parser.add_argument("--config", type=Path, help="a resolved config, JSON, to put into the manifest")
    parser.add_argument("--all-files", action="store_true", help="hash every file of every package, not only .py")
    args = parser.parse_args(argv)
    failed = {}
    for name in filter(None, args.load.split(",")):
        result = attempt(importlib.import_module, name)
        if why_unknown(result):
            failed[name] = result["unknown"]
    config = json.loads(args.config.read_text(encoding="utf-8")) if args.config else {}
    manifest = right_now(args.kind, config, args.model, args.store, args.all_files)
    for name, why in failed.items():
        if name == "torch":
            manifest["torch"] = unknown(f"torch cannot be imported: {why}")
    manifest["not_loaded"] = failed
    write_text(args.output, json.dumps(manifest, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
