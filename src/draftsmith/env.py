"""Environment variables are set and read here and nowhere else, before torch is imported."""

from __future__ import annotations

import os


def prepare() -> None:
    """Settings that must be in place before torch starts its threads; what the user has set stays.

    Passive waiting: OpenMP's spinning makes two threads on two busy cores 3 to 13 times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def demo_size() -> str:
    """DEMO: full (default) or small.  Raises ValueError for anything else."""
    size = os.environ.get("DEMO", "full")
    if size not in ("full", "small"):
        raise ValueError(f"DEMO={size!r}: it must be full or small")
    return size


def world() -> tuple[int, int]:
    """(rank, world size) as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
