"""Whether the rows that are under way at once fit into memory, before the first is computed."""

from __future__ import annotations

from pathlib import Path

import torch

from draftsmith import env
from draftsmith.errors import InputError
from draftsmith.predict import RUNTIME_BYTES
from draftsmith.train.dist import World

SHARE = 0.8
"""Of the free memory that rows may take."""
GROUP = Path("/sys/fs/cgroup")


def check_rows_fit(world: World, run_ahead: int, rows: int, row_bytes: int, device: torch.device) -> None:
    """Refuse a placement.run_ahead whose rows do not fit what is free now.

    rows: of the whole run.  row_bytes: features of one row.  A target holds run_ahead rows that nobody has taken and
    the one it computes; a drafter as many that it has asked for and the one it trains on.  Raises InputError with the
    figure that would fit.
    """
    if not world.targets:
        return
    gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if gpu else available_memory()
    processes = 1 if gpu else env.local_rank()[1]
    each = min(run_ahead, rows) + 1
    if each * row_bytes * processes <= SHARE * free:
        return
    fits = int(SHARE * free) // (row_bytes * processes) - 1
    advice = (
        f"placement.run_ahead={fits} would fit"
        if fits > 0
        else "not even placement.run_ahead=1 fits: lower train.row_tokens"
    )
    where = "on this GPU" if gpu else f"in the {processes} processes of this machine"
    raise InputError(
        f"placement.run_ahead={run_ahead}: rows under way {where} need {size(each * row_bytes * processes)} "
        f"({size(row_bytes)} a row), {SHARE:.0%} of the free {size(free)} are for them: {advice}"
    )


def available_memory() -> int:
    """Bytes that this machine, or this process's control group, can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        used, limit = ((GROUP / name).read_text().strip() for name in ("memory.current", "memory.max"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def process_memory(device: torch.device) -> float:
    """Bytes that this process may have in all, what it holds already included; on a GPU, its context too."""
    if device.type != "cuda":
        return available_memory()
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(allowed, free + torch.cuda.memory_reserved(device)) + RUNTIME_BYTES["gpu"]


def size(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**28 else f"{count / 2**20:.3g} MiB"
