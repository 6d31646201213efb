"""Processes, roles and collectives.  Only this file and transport.py set up groups and communicate.

Ranks 0..N-1 are drafters (colocated: they hold the target too), ranks N..N+M-1 are targets.  Started by torchrun or by
launch.py; a single process needs neither and sets up nothing.  Collectives between drafters go over NCCL on GPUs and
gloo on CPUs; numbers that live on the host (denominators, the wish to stop) always go over gloo.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith import env
from draftsmith.config import PlacementConfig
from draftsmith.errors import InputError

BUCKET_BYTES = 128 * 2**20
"""Gradients are reduced in pieces of about this size."""


@dataclass(frozen=True)
class World:
    """This process's place.  `role`: both (holds target and drafter), target or drafter; `index` within the role."""

    rank: int = 0
    targets: int = 0
    drafters: int = 1
    role: str = "both"
    index: int = 0
    timeout: float = 600.0
    host_group: Any = None
    """gloo, drafters only; None with one drafter."""
    device_group: Any = None
    """NCCL or gloo, drafters only; None with one drafter."""
    store: Any = None
    """The key-value store of all processes; None with one process."""

    @property
    def size(self) -> int:
        return self.drafters + self.targets

    @property
    def first(self) -> bool:
        """The one process that writes the run folder's metrics and checkpoints."""
        return self.rank == 0

    def name(self, rank: int | None = None) -> str:
        rank = self.rank if rank is None else rank
        if rank < self.drafters:
            return f"{'process' if self.targets == 0 else 'drafter'} {rank} (rank {rank})"
        return f"target {rank - self.drafters} (rank {rank})"

    # ---- all processes, through the store

    def publish(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def read(self, key: str, who: int = 0) -> Any:
        """Wait for a published value.  Raises RuntimeError naming the rank that did not publish it in time."""
        try:
            return json.loads(self.store.get(key))
        except (RuntimeError, dist.DistError) as error:
            raise RuntimeError(f"{self.name(who)} did not say {key!r} within {self.timeout:g} s") from error

    def from_first(self, key: str, value: Any) -> Any:
        """Rank 0's JSON-able value, on every process."""
        if self.store is None:
            return value
        if self.first:
            self.publish(key, value)
            return value
        return self.read(key)

    def said(self, key: str) -> bool:
        """Has anybody published this?  Also True when the store is gone, and rank 0 with it."""
        try:
            return bool(self.store.check([key]))
        except (RuntimeError, dist.DistError):
            return True

    # ---- drafters, by collectives

    def sum_host(self, values: Sequence[float]) -> list[float]:
        """Sums over the drafters, in float64."""
        if self.host_group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.host_group)
        return tensor.tolist()

    def sum_device(self, tensor: Tensor) -> Tensor:
        """Sums over the drafters, in place."""
        if self.device_group is not None:
            dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Gradients summed over the drafters, once a step, in pieces.  A parameter without a gradient counts as zero,
        so that a process whose rows had no anchor takes part like the others."""
        if self.device_group is None:
            return
        for piece in _pieces(parameters):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in piece])
            dist.all_reduce(flat, group=self.device_group)
            at = 0
            for p in piece:
                p.grad = flat[at : at + p.numel()].view_as(p)
                at += p.numel()

    def barrier(self) -> None:
        if self.host_group is not None:
            dist.barrier(group=self.host_group)


def _pieces(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    piece: list[torch.nn.Parameter] = []
    size = 0
    for p in parameters:
        piece.append(p)
        size += p.numel() * p.element_size()
        if size >= BUCKET_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


@contextmanager
def world(placement: PlacementConfig, device_type: str) -> Iterator[World]:
    """Join the other processes; leave at the end.

    Raises InputError if the number of processes is not what the placement says, or if they do not all arrive in
    `placement.timeout_seconds`.
    """
    rank, size = env.world()
    n, m = placement.drafters, placement.targets
    if size != n + m:
        what = f"{m} targets + {n} drafters" if m else f"{n} processes"
        raise InputError(f"placement asks for {what}, {size} were started (WORLD_SIZE): make the two agree")
    role = "both" if m == 0 else ("drafter" if rank < n else "target")
    index = rank if rank < n else rank - n
    if size == 1:
        yield World(timeout=placement.timeout_seconds)
        return
    gpu = device_type == "cuda"
    timeout = datetime.timedelta(seconds=placement.timeout_seconds)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timeout)
    except (RuntimeError, ValueError, dist.DistError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"rank {rank} of {size} could not join the others at {where} within {placement.timeout_seconds:g} s "
            f"({str(error).splitlines()[0][:200]}): is the port in use, did every rank start?"
        ) from error
    try:
        host = device = None
        if n > 1:  # every process must take part in making a group, also those that are not in it
            host = dist.new_group(list(range(n)), backend="gloo", timeout=timeout)
            device = dist.new_group(list(range(n)), backend="nccl" if gpu else "gloo", timeout=timeout)
        inside = role != "target"
        yield World(
            rank, m, n, role, index, placement.timeout_seconds, host if inside else None, device if inside else None,
            dist.distributed_c10d._get_default_store(),
        )  # fmt: skip
    finally:
        dist.destroy_process_group()


def agree(world: World, facts: dict[str, Any]) -> None:
    """Every process must run the same config, code and packages.  Raises InputError on all, with what differs."""
    if world.store is None:
        return
    world.publish(f"facts/{world.rank}", facts)
    differences: list[str] = []
    if world.first:
        for rank in range(1, world.size):
            theirs = world.read(f"facts/{rank}", rank)
            for key in sorted(facts.keys() | theirs.keys()):
                if facts.get(key) != theirs.get(key):
                    differences.append(f"{key}: {world.name(rank)} has {theirs.get(key)!r}, rank 0 {facts.get(key)!r}")
    differences = world.from_first("differences", differences)
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise InputError(f"the processes do not run the same thing: {shown}")
