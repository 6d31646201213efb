"""What hardware reaches: rates that were measured here, or a GPU of a table that need not be here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What the hardware reaches.  Measured by rates.py, or a card of the table.  FLOP/s, bytes/s, seconds."""

    target_flops: float
    drafter_flops: float
    head_flops: float
    optimizer: float
    """Parameters a second: clipping and AdamW."""
    copy: float
    """Bytes read and written a second."""
    link: float
    """Bytes a second from one process to another."""
    reduce: float
    """Bytes a second of an all-reduce between two processes."""
    target_fixed: float = 0.0
    """Seconds a row beside the layers."""
    drafter_fixed: float = 0.0
    step_fixed: float = 0.0
    muon_flops: float = 0.0
    """Of Muon's products; 0: `optimizer` was measured with them."""
    target_host: float = 0.0
    """Seconds that the host takes to ask for the kernels of a layer: no row is faster.  0: measured with the layers."""
    drafter_host: float = 0.0
    """Likewise, forward and backward, the loss's share included."""


@dataclass(frozen=True)
class Card:
    """A GPU that need not be here."""

    memory_gib: float
    bf16: float
    """FLOP/s that large matrix products reach."""
    copy: float
    measured: bool


_REACHED, _COPIED = 768 / 989, 4.26 / 4.8
"""Share of the data sheet that an H200 reached (products of 8192 cubed to 8192 x 4096 x 12288; copy)."""


def _sheet(memory_gib: float, tflops: float, terabytes: float) -> Card:
    return Card(memory_gib, tflops * 1e12 * _REACHED, terabytes * 1e12 * _COPIED, measured=False)


CARDS = {
    "h200": Card(139.0, 768e12, 4.26e12, measured=True),
    "h100": _sheet(79.0, 989, 3.35),
    "b200": _sheet(178.0, 2250, 8.0),
    "a100": _sheet(79.0, 312, 2.04),
    "l40s": _sheet(44.4, 362, 0.864),
}
"""Memory as the driver shows it free.  All but the H200 from data sheets (dense bf16), times what the H200 reached."""


def card_rates(
    card: Card, *, target: float = 0.765, drafter: float = 0.79, link: float = 323e9, reduce: float = 341e9
) -> Rates:
    """Rates of a card.  target, drafter: share of `bf16` that the whole forward, the whole step reach.

    The defaults give what one H200 took for Qwen3-8B widths, T = 3072, A = 512, B = 16, five layers: 73 ms a row in
    the target's 34 layers, 125 ms a drafter step; and between two H200 126 MB in 0.39 ms, an all-reduce of 4.2 GB in
    12.3 ms.  AdamW moves 28 bytes a parameter.  The host of an H200 took 18 to 30 ms for 28 layers of SmolLM2-135M's
    widths, and 22 to 35 ms for five of its drafter's (`as_first_written` in benchmarks/results/graphs_h200.json).
    """
    flops = card.bf16 * drafter
    return Rates(
        card.bf16 * target, flops, flops, card.copy / 28, card.copy, link, reduce, muon_flops=flops,
        target_host=0.8e-3, drafter_host=6e-3,
    )  # fmt: skip
