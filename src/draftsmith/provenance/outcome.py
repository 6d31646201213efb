"""How a run came out, from its own metrics.jsonl: steps, losses, throughput, memory."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

from draftsmith.provenance import torchstate
from draftsmith.provenance.facts import attempt


def read_outcome(metrics: Path, fallbacks: list[str]) -> dict[str, Any]:
    """fallbacks: what the run had to fall back from, in words.  None where a run has no such figure."""
    last: dict[str, dict[str, Any]] = {}
    rates: list[float] = []
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []:
        try:
            value = json.loads(line)
        except ValueError:  # a last line cut short
            continue
        last[value.get("kind", "")] = value
        if value.get("kind") == "rate":
            rates.append(float(value["tokens_per_s"]))
    loss = last.get("train", {}).get("loss")
    return {
        "steps": last.get("train", {}).get("step", 0),
        "loss": loss,
        "loss_finite": isinstance(loss, (int, float)) and math.isfinite(loss),
        "heldout_loss": last.get("heldout", {}).get("loss"),
        "accepted_length": last.get("accepted", {}).get("accepted_length", {}).get("pooled"),
        "tokens_per_s": percentiles(rates[1:] or rates),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_bytes": attempt(torchstate.peak_gpu_bytes),
        "fallbacks": fallbacks,
    }


def percentiles(values: list[float]) -> dict[str, float] | None:
    """10th, 50th and 90th of the values, nearest rank."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))] for p in (10, 50, 90)}
