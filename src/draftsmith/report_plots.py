"""The plots of a report: PNG by matplotlib, one run or two on the same axes.  Needs neither torch nor a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.train.floor import LABELS, from_line, together

COLORS = ("#1f5fa8", "#c8541b")
PART_COLORS = dict(
    zip(LABELS, ("#1f5fa8", "#c8541b", "#e0a030", "#3a8f4d", "#8a5fb0", "#777777", "#bbbbbb"), strict=True)
)


@dataclass(frozen=True)
class Series:
    """A run's metrics by kind of line.  Made by report.py."""

    label: str
    lines: Mapping[str, Sequence[Mapping[str, Any]]]

    def of(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values where the value is a number; what was not finite is a string and left out."""
        found = [(x["step"], x[key]) for x in self.lines.get(kind, ()) if isinstance(x.get(key), (int, float))]
        return [step for step, _ in found], [float(value) for _, value in found]


def draw(runs: Sequence[Series]) -> dict[str, bytes]:
    """Name -> PNG, of every plot there is something to show in."""
    made = {
        "loss": _curves(runs, "loss", (("train", "loss", "training"), ("heldout", "loss", "held-out"))),
        "accuracy": _curves(runs, "accuracy", (("train", "accuracy", "training"), ("heldout", "accuracy", "held-out"))),
        "accuracy_by_slot": _slots(runs),
        "throughput": _curves(runs, "rows/s", (("rate", "rows_per_s", "training"),), zero=True),
        "time_shares": _shares(runs),
        "accepted_length": _accepted(runs),
        "memory": _memory(runs),
    }
    return {name: png for name, png in made.items() if png is not None}


def _png(width: float, height: float, columns: int, fill: Callable[[Any], None]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    fill(figure.subplots(1, columns, squeeze=False, sharey=True)[0])
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _curves(
    runs: Sequence[Series], name: str, kinds: Sequence[tuple[str, str, str]], *, zero: bool = False, scale: float = 1.0
) -> bytes | None:
    """Values over steps; a colour for each run, a dash for each kind."""
    curves = []
    for color, run in zip(COLORS, runs, strict=False):
        for (kind, key, what), style in zip(kinds, ("-", "--o"), strict=False):
            steps, values = run.of(kind, key)
            if steps:
                label = what if len(runs) == 1 else f"{run.label} {what}"
                curves.append((steps, [v * scale for v in values], style, color, label))
    if not curves:
        return None

    def fill(axes: Any) -> None:
        for steps, values, style, color, label in curves:
            axes[0].plot(steps, values, style, color=color, label=label, markersize=4, linewidth=1.3)
        _finish(axes[0], "step", name, zero=zero)

    return _png(6.4, 3.4, 1, fill)


def _finish(axes: Any, x: str, y: str, *, zero: bool = False) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if zero:
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def last_slots(run: Series) -> list[float | None]:
    """Accuracy of slots 1..B-1: held-out at the end, else the mean of the last training steps."""
    held = run.lines.get("heldout", ())
    lines = held[-1:] if held else run.lines.get("train", ())[-20:]
    columns = zip(*(line["accuracy_by_slot"] for line in lines), strict=True)
    means = []
    for column in columns:
        known = [x for x in column if x is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _slots(runs: Sequence[Series]) -> bytes | None:
    slots = [last_slots(run) for run in runs]
    if not any(slots):
        return None

    def fill(axes: Any) -> None:
        width = 0.8 / len(runs)
        for i, (run, values, color) in enumerate(zip(runs, slots, COLORS, strict=False)):
            at = [k + 1 + (i - (len(runs) - 1) / 2) * width for k in range(len(values))]
            axes[0].bar(at, [v or 0.0 for v in values], width, color=color, label=run.label)
        _finish(axes[0], "slot of the block", "accuracy", zero=True)

    return _png(6.4, 3.4, 1, fill)


def _shares(runs: Sequence[Series]) -> bytes | None:
    """Shares of the time between log points, stacked; a panel for each run."""
    if not any(run.lines.get("rate") for run in runs):
        return None

    def fill(axes: Any) -> None:
        for one, run in zip(axes, runs, strict=True):
            lines = run.lines.get("rate", ())
            stack = max(1, len(lines) // 60)  # at most about sixty bars
            bars = [lines[i : i + stack] for i in range(0, len(lines), stack)]
            wholes = [together(map(from_line, bar)) for bar in bars]
            bottom = [0.0] * len(bars)
            for part, label in LABELS.items():
                heights = [whole.parts[part] / max(whole.wall, 1e-9) for whole in wholes]
                if any(heights):
                    one.bar(range(len(bars)), heights, 1.0, bottom, color=PART_COLORS[part], label=label)
                    bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
            ticks = range(0, len(bars), max(1, len(bars) // 5))
            one.set_xticks(list(ticks), [str(bars[i][-1]["step"]) for i in ticks])
            one.set_title(run.label if len(runs) > 1 else "", fontsize=9)
            _finish(one, "step", "share of the time")

    return _png(6.4 * len(runs), 3.4, len(runs), fill)


def _accepted(runs: Sequence[Series]) -> bytes | None:
    flat = [
        Series(
            run.label,
            {
                "accepted": [
                    {"step": line["step"], "length": line["accepted_length"].get("pooled")}
                    for line in run.lines.get("accepted", ())
                ]
            },
        )
        for run in runs
    ]
    return _curves(flat, "accepted length", (("accepted", "length", "measured"),))


def _memory(runs: Sequence[Series]) -> bytes | None:
    kinds = (("rate", "peak_rss_bytes", "host"), ("rate", "peak_gpu_bytes", "GPU"))
    return _curves(runs, "peak memory, GiB", kinds, zero=True, scale=2**-30)
