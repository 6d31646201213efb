"""A log point: what the steps since the last one left on the devices, read back and written down."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from draftsmith.cuda_graphs import peak_bytes
from draftsmith.tracking import Tracker
from draftsmith.train.dist import World
from draftsmith.train.floor import Interval
from draftsmith.train.roles import Clock, who_waits
from draftsmith.train.step import StepSums, by_slot


def flush(tracker: Tracker, waiting: list[StepSums], clock: Clock, world: World) -> tuple[Interval, str]:
    """Read the steps since the last log point back from the device, over all drafters, and write a line for each.
    Returns where the time went, and the note for the progress line.

    Raises FloatingPointError, on all drafters, naming step and row if features, loss or gradient are not finite.
    """

    def told_by_all(value: Any) -> list[Any]:
        told = world.gather("not finite", value, range(world.drafters))
        world.leave(range(world.drafters))
        return told

    with world.waiting("the device to finish its steps"):
        found = not_finite(waiting)
    if any(world.sum_host([float(found is not None)])):
        told = told_by_all(found)
        first = min(step for step, _ in filter(None, told))  # what follows has it from there
        raise FloatingPointError(
            "; ".join(f"step {first}: {text}" for step, text in filter(None, told) if step == first)
        )
    values = torch.stack([torch.cat([s.weighted[None], s.ce_B, s.correct_B, s.count_B]) for s in waiting])
    values_device = values.device
    values = world.sum_device(values).cpu()
    size = len(waiting[0].ce_B)
    counted = world.sum_host([x for s in waiting for x in (s.tokens, s.anchors, len(s.rows))])
    for i, sums in enumerate(waiting):
        loss = float(values[i, 0]) / sums.denominator if sums.denominator else 0.0
        norm = float(sums.grad_norm)
        if not (isfinite(loss) and isfinite(norm)):  # of a sum over all drafters: any of their rows may be the cause
            rows_of_all = sorted((epoch, row) for rows in told_by_all(sums.rows) for epoch, row in rows)
            raise FloatingPointError(
                f"step {sums.step + 1}: the loss is {loss}, the gradient's norm {norm} on rows (epoch, row) "
                f"{rows_of_all}"
            )
        slots = by_slot(*values[i, 1:].split(size))
        tracker.record(
            sums.step + 1, kind="train", loss=loss, lr=sums.rate, grad_norm=norm,
            anchors=int(counted[3 * i + 1]), **slots,
        )  # fmt: skip
    tokens, anchors, rows = (sum(counted[k::3]) for k in range(3))
    parts, checkpoints, waits = clock.read(len(waiting) * len(waiting[0].rows))
    interval = Interval(rows, parts, checkpoints)
    seconds = interval.training
    memory = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if values_device.type == "cuda":
        memory["peak_gpu_bytes"] = peak_bytes(values_device)
    tracker.record(
        waiting[-1].step + 1, kind="rate", **interval.line(), tokens_per_s=tokens / seconds,
        anchors_per_s=anchors / seconds, **waits, **memory,
    )  # fmt: skip
    note = f"loss {loss:.3f}  accuracy {slots['accuracy']:.3f}  {tokens / seconds:.0f} tokens/s"
    return interval, f"{note}  {who_waits(parts, waits)}"


def not_finite(waiting: Sequence[StepSums]) -> tuple[int, str] | None:
    """The first step and row of this process's own whose features or loss are not finite."""
    for sums in waiting:
        flags = zip(sums.rows, sums.finite.tolist(), sums.finite_loss.tolist(), strict=True)
        for (epoch, index), features, loss in flags:
            if not features:
                return sums.step + 1, f"features of epoch {epoch}, row {index} hold NaN or Inf"
            if not loss:
                return sums.step + 1, (
                    f"the loss of epoch {epoch}, row {index} is NaN or Inf (where a logit is 120 above its label, as "
                    f"our kernel has it: set loss.softmax=torch)"
                )
    return None
