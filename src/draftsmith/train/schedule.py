"""Which row goes where, as pure functions of numbers that every process knows.  Nobody needs to be told anything.

R rows a step, M targets, N drafters.  Row g of the run belongs to step g // R, comes from target g mod M and goes to
drafter g mod N.  N divides R (config.py refuses anything else), so every drafter gets R / N rows
of every step.
"""

from __future__ import annotations

from collections.abc import Iterator


def target_of(g: int, targets: int) -> int:
    return g % targets


def drafter_of(g: int, drafters: int) -> int:
    return g % drafters


def rows_of_drafter(begin: int, rows_per_step: int, drafters: int, index: int) -> list[int]:
    """Rows that drafter `index` trains on in the step that begins with row `begin`, ascending."""
    return [g for g in range(begin, begin + rows_per_step) if drafter_of(g, drafters) == index]


def rows_of_target(first: int, last: int, targets: int, index: int) -> Iterator[int]:
    """Rows first <= g < last that target `index` computes, ascending."""
    return iter(range(first + (index - first) % targets, last, targets))
