"""A fact is a JSON value; what could not be read is `{"unknown": reason}`, never left out and never guessed.

Everything in this package is standard library only and runs on Python 3.10 or newer, because the same files are put
into the stand-alone capture that runs inside serving environments (standalone.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def unknown(reason: str) -> dict[str, str]:
    return {"unknown": " ".join(reason.split()) or "no reason given"}


def why_unknown(value: Any) -> str | None:
    """The reason if the value is an unknown, else None."""
    if isinstance(value, dict) and set(value) == {"unknown"}:
        return str(value["unknown"])
    return None


def attempt(read: Callable[..., Any], *args: Any) -> Any:
    """What `read` returns, or an unknown.

    The one place where any exception is caught: recording must never fail the run that it records.
    """
    try:
        return read(*args)
    except Exception as error:
        return unknown(f"{type(error).__name__}: {error}")
