"""Processes, roles and collectives.  Only this file and transport.py set up groups and communicate.

Ranks 0..N-1 are drafters (colocated: they hold the target too), ranks N..N+M-1 are targets.  Started by torchrun or by
launch.py; a single process needs neither and sets up nothing.  Collectives between drafters go over NCCL on GPUs and
gloo on CPUs; numbers that live on the host (denominators, the wish to stop) always go over gloo.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith import env
from draftsmith.config import PlacementConfig
from draftsmith.errors import InputError, RunError, SaidElsewhere
from draftsmith.train.waiting import MOMENT, Waiting, within

BUCKET_BYTES = 128 * 2**20
"""Gradients are reduced in pieces of about this size."""
ALIGNED = 16
"""Numbers, of float32 or wider: in such a piece a gradient begins at a multiple, as in memory of its own, which is what
optim_kernels.aligned asks and kernels are compiled for."""


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
    waits: Waiting | None = None
    staged: bool = False
    """Rows go through host memory: a GPU is shared by several processes, which NCCL does not do."""

    @property
    def size(self) -> int:
        return self.drafters + self.targets

    @property
    def first(self) -> bool:
        """The one process that writes the run folder's metrics and checkpoints."""
        return self.rank == 0

    def name(self, rank: int | None = None) -> str:
        return role_name(self.rank if rank is None else rank, self.targets, self.drafters)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around every call that ends only when another process does something: at most `timeout` seconds."""
        return self.waits.on(what) if self.waits else nullcontext()

    # ---- all processes, through the store

    def publish(self, key: str, value: Any) -> None:
        if self.store is not None:
            with self.waiting(f"the store of {self.name(0)}"):
                self.store.set(key, json.dumps(value))

    def read(self, key: str, who: int = 0) -> Any:
        """Wait for a published value.  Raises PeerError if `who` did not publish it in time."""
        with self.waiting(f"{self.name(who)} to say {key!r}"):
            return json.loads(self.store.get(key))

    def gather(self, key: str, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Every rank's JSON-able value, on each of them."""
        self.publish(f"{key}/{self.rank}", value)
        return [value if r == self.rank else self.read(f"{key}/{r}", r) for r in ranks]

    @contextmanager
    def together(self, stage: str) -> Iterator[None]:
        """What one process refuses inside, all refuse.  Raises InputError on every process; it names those that have a
        problem, unless all do."""
        problem = ""
        try:
            yield
        except InputError as error:
            problem = str(error)
            if self.store is None:
                raise
        except (MemoryError, RuntimeError) as error:
            problem = out_of_memory(error)
            if not problem or self.store is None:
                raise
        if self.store is not None:
            problems = self.gather(f"refuses/{stage}", problem, range(self.size))
            lines = [f"{self.name(r)}: {text}" for r, text in enumerate(problems) if text]
            if lines:
                self.leave(range(self.size))
                raise refusal(problems[0] if all(problems) else "; ".join(lines))

    def leave(self, ranks: Sequence[int]) -> None:
        """Rank 0, which keeps the store, stays until the others have read what is in it."""
        self.gather("leaves", True, ranks if self.first else [self.rank])

    def stop(self) -> None:
        """Tell the targets that the drafters have stopped.  They also notice when the store is gone."""
        if self.waits:
            self.waits.say("stopped", str(self.rank))

    def from_first(self, key: str, value: Any) -> Any:
        """Rank 0's JSON-able value, on every process."""
        if self.store is None:
            return value
        if self.first:
            self.publish(key, value)
            return value
        return self.read(key)

    def first_alone(self, key: str, work: Callable[[Callable[[], None]], None]) -> None:
        """Rank 0 does what takes longer than a wait may: the others wait as long as it calls what `work` is given."""
        count, told = itertools.count(), time.monotonic()

        def tell() -> None:
            nonlocal told
            if time.monotonic() - told > self.timeout / 4:
                told = time.monotonic()
                self.publish(f"{key}/{next(count)}", False)

        if self.first:
            work(tell)
            self.publish(f"{key}/{next(count)}", True)
            return
        while not self.read(f"{key}/{next(count)}"):
            pass

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
        with self.waiting("the sums of all drafters"):
            dist.all_reduce(tensor, group=self.host_group)
        return tensor.tolist()

    def sum_device(self, tensor: Tensor) -> Tensor:
        """Sums over the drafters, in place."""
        if self.device_group is not None:
            with self.waiting("the sums of all drafters"):
                dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Gradients summed over the drafters, once a step, in pieces.  A parameter without a gradient counts as zero,
        so that a process whose rows had no anchor takes part like the others."""
        if self.device_group is None:
            return
        for piece in _pieces(parameters):
            parts = []
            for p in piece:
                parts.append((torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1))
                parts.append(parts[-1].new_zeros(-p.numel() % ALIGNED))
            flat = torch.cat(parts)
            with self.waiting("the gradients of all drafters"):
                dist.all_reduce(flat, group=self.device_group)
            for p, summed in zip(piece, flat.split([len(part) for part in parts])[::2], strict=True):
                p.grad = summed.view_as(p)


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


def role_name(rank: int, targets: int, drafters: int) -> str:
    if rank < drafters:
        return f"{'drafter' if targets else 'process'} {rank} (rank {rank})"
    return f"target {rank - drafters} (rank {rank})"


def refusal(text: str) -> InputError:
    """For bad input that all processes have found: one of each machine says it."""
    return InputError(text) if env.local_rank()[0] == 0 else SaidElsewhere(text)


@contextmanager
def world(placement: PlacementConfig, device_type: str) -> Iterator[World]:
    """Join the other processes; leave at the end.

    Raises InputError if the number of processes is not what the placement says, or if they do not all arrive in
    `placement.timeout_seconds`; RunError if they are lost while they meet, or if memory runs out.
    """
    rank, size = env.world()
    n, m = placement.drafters, placement.targets
    if size != n + m:
        what = f"{m} targets + {n} drafters" if m else f"{n} processes"
        raise refusal(f"placement asks for {what}, {size} were started (WORLD_SIZE): make the two agree")
    role = "both" if m == 0 else ("drafter" if rank < n else "target")
    alone = World(rank, m, n, role, rank if rank < n else rank - n, placement.timeout_seconds)
    try:
        if size == 1:
            yield alone
            return
        joined = _join(alone, gpu=device_type == "cuda")
        yield joined
    except (MemoryError, RuntimeError) as error:
        problem = out_of_memory(error)
        if not problem or isinstance(error, RunError):
            raise
        raise RunError(f"{alone.name()}: {problem}") from error
    # only at a good end: in any other case peers may be gone, and the process is about to end anyway
    if joined.waits:
        joined.waits.finish()
    dist.destroy_process_group()


def out_of_memory(error: BaseException) -> str:
    """What to say of an allocation that failed; "" for any other error."""
    said = ("allocate memory", "out of memory", "can't start new thread")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in said):
        return ""
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    return f"out of memory ({first[:200]}): lower train.row_tokens, train.anchors or placement.run_ahead"


def _join(alone: World, *, gpu: bool) -> World:
    """Meet at the store, then make the groups."""
    nccl = gpu and not env.gpu_is_shared()
    store = _meet(alone)
    names = [alone.name(rank) for rank in range(alone.size)]
    timeout = datetime.timedelta(seconds=alone.timeout)
    later = timeout + datetime.timedelta(seconds=60)  # where Waiting comes first: it says who
    host = device = None
    n, inside = alone.drafters, alone.role != "target"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo", store=dist.PrefixStore("torch", store), rank=alone.rank,
            world_size=alone.size, timeout=later,
        )  # fmt: skip
        if n > 1:  # every process must take part in making a group, also those that are not in it
            host = dist.new_group(list(range(n)), backend="gloo", timeout=timeout)
            device = dist.new_group(
                list(range(n)), backend="nccl" if nccl else "gloo", timeout=later if nccl else timeout
            )
        if nccl:  # NCCL connects all ranks of a group in its first call, which must be one that all of them make
            dist.all_reduce(torch.zeros(1, device="cuda"))
            if n > 1 and inside:
                dist.all_reduce(torch.zeros(1, device="cuda"), group=device)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"{alone.name()} met the others but could not connect to them ({str(error).splitlines()[0][:200]}): do the "
            f"machines reach each other on every port (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)?"
        ) from error
    return dataclasses.replace(
        alone, host_group=host if inside else None, device_group=device if inside else None, store=store,
        waits=Waiting(store, alone.rank, names, alone.timeout), staged=gpu and not nccl,
    )  # fmt: skip


def _meet(alone: World) -> Any:
    """The store of all processes, once all have arrived.  Raises InputError that names those that have not."""
    host, port, kept = env.meeting_place()
    where, me, rank, seconds = f"{host}:{port}", alone.name(), alone.rank, alone.timeout

    def reach() -> tuple[Any, int]:
        tcp = _beside_agent(host, port, seconds, rank) if kept else _tcp_store(host, port, seconds, serves=rank == 0)
        store = dist.PrefixStore("draftsmith", tcp)
        return store, store.add(f"here/{rank}", 1)

    try:
        store, times = within(seconds + MOMENT, reach)  # another program may listen there and never answer
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if "EADDRINUSE" in text:
            raise InputError(f"{me} cannot listen at {where}: the port is in use, set MASTER_PORT") from error
        raise RunError(
            f"{me} found no run at {where} within {seconds:g} s: did {alone.name(0)} start there (MASTER_ADDR, "
            f"MASTER_PORT), and is the port not another program's? ({text[:120]})"
        ) from error
    if times > 1:
        raise InputError(f"{me} has already arrived at {where}: another run uses the port, set MASTER_PORT")
    if rank == 0:
        deadline = time.monotonic() + seconds
        while missing := [r for r in range(alone.size) if not store.check([f"here/{r}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        store.set("missing", json.dumps(missing))
    else:
        try:
            missing = json.loads(store.get("missing"))
        except RuntimeError as error:
            raise RunError(f"{me} arrived at {where}, but {alone.name(0)} did not say who else has") from error
    if missing:
        if rank == 0:
            time.sleep(MOMENT)  # the others read it too
        names = ", ".join(alone.name(r) for r in missing)
        raise refusal(f"not all have arrived at {where} within {seconds:g} s: {names} missing")
    return store


def _tcp_store(host: str, port: int, seconds: float, *, serves: bool) -> Any:
    timeout = datetime.timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)


def _beside_agent(host: str, port: int, seconds: float, rank: int) -> Any:
    """Under torchrun: rank 0's own store, whose port it puts into that of torchrun's agent.

    The agent's outlives processes that torchrun starts again, with all that they wrote; how often it has started them
    is not the same number on all machines.  At a port that the last rank 0 has left nobody listens.
    """
    agent = _tcp_store(host, port, seconds, serves=False)
    if rank == 0:
        own = _tcp_store(host, 0, seconds, serves=True)
        agent.set("draftsmith's port", str(own.port))
        return own
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = _tcp_store(host, int(agent.get("draftsmith's port")), min(seconds, MOMENT), serves=False)
            found.set_timeout(datetime.timedelta(seconds=seconds))
            return found
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


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
        world.leave(range(world.size))
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise refusal(f"the processes do not run the same thing: {shown}")
