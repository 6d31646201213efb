"""What every benchmark script shares: where results go, and the facts that belong beside a figure."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "results"
RESULTS = Path(os.environ.get("OUT") or STORED)


def write_result(name: str, values: dict[str, Any]) -> Path:
    """benchmarks/results/<name>.json: the values, then date, machine, versions and commit."""
    environment: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "platform": platform.system() + " " + platform.machine(),
        "packages": {p: _version(p) for p in ("torch", "triton", "transformers", "tokenizers", "numpy", "pyarrow")},
        "commit": commit(),
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**values, "environment": environment}, indent=2) + "\n", encoding="utf-8")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit, marked where the source has changed since; unknown outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "../src"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" + changes" if changed.strip() else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def at_least_one(text: str) -> int:
    """For argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of at least 1")
    return int(text)


def kind_of(device: str) -> str:
    """What files are called after: cpu, h200 ..."""
    import torch

    return "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [""] without any."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())] or [""]
