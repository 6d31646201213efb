"""Environment variables are set and read here and nowhere else, before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from draftsmith.errors import InputError


def prepare() -> None:
    """Settings that must be in place before torch starts its threads; what the user has set stays.

    Passive waiting: OpenMP's spinning makes two threads on two busy cores 3 to 13 times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(32, cores // beside))))
    if launched():  # torch's own lines about sockets, between ours about the same
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _one_gpu()


def gpu_is_shared() -> bool:
    """Does this machine have fewer GPUs than processes of the run?  NCCL refuses that.  Set by launch.py."""
    return os.environ.get("DRAFTSMITH_GPU_IS_SHARED") == "1"


def compile_cache(folder: Path) -> None:
    """Where torch and Triton keep what they compile, from the next compilation on."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def _one_gpu() -> None:
    """Under torchrun: this process sees its own GPU alone, because the device index is part of torch's compile-cache
    key and one cache is to serve all processes of a machine."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else None
    os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(local) % len(cards)] if cards else local


def demo_size() -> str:
    """DEMO: full (default) or small.  Raises InputError for anything else."""
    size = os.environ.get("DEMO", "full")
    if size not in ("full", "small"):
        raise InputError(f"DEMO={size!r}: it must be full or small")
    return size


def world() -> tuple[int, int]:
    """(rank, world size) as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> tuple[int, int]:
    """(rank, number of processes) on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def meeting_place() -> tuple[str, int, bool]:
    """Host and port of the store where all processes meet, and whether torchrun keeps it (else rank 0 does).

    Raises InputError where MASTER_ADDR or MASTER_PORT does not say.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}: RANK is set, so they must name rank 0's host and a port"
        )
    return host, int(port), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def cache_dir() -> Path:
    """Where digests and the masking salt of this user are kept: XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "draftsmith"


def launched() -> bool:
    """Was this process started as one of several (torchrun, or launch.py)?"""
    return "RANK" in os.environ


def hub_cache() -> Path:
    """Where the Hugging Face hub keeps what it has downloaded."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def offline_tracking(folder: Path) -> None:
    """For the trackers that only listen to the environment: nothing leaves this machine."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ["TRACKIO_DIR"] = str((folder / "trackio").absolute())
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a database would be one more dependency
    folder.mkdir(parents=True, exist_ok=True)
