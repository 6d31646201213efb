"""metrics.jsonl: one JSON object a line, appended, flushed at once; the run's log; and what feeds the sinks."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.rundir import RunDir
from draftsmith.sinks import Sinks


class Tracker:
    """Writes metrics and log lines of one attempt.  Keys of a metrics line: step, time (unix seconds), then values."""

    def __init__(self, run: RunDir, *, quiet: bool = False, sinks: Sinks | None = None) -> None:
        """quiet: one of the other processes of a run: it writes and prints nothing.  sinks: get every record too."""
        self.quiet, self.sinks = quiet, sinks or Sinks({})
        self.metrics = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115 (open for the run's life)
        self.text = open(run.log, "a", encoding="utf-8")  # noqa: SIM115

    def record(self, step: int, **values: Any) -> None:
        if self.quiet:
            return
        now = time.time()
        line = json.dumps({"step": step, "time": round(now, 3), **_finite(values)}, allow_nan=False)
        self.metrics.write(line + "\n")
        self.metrics.flush()
        self.sinks.record(step, now, values)

    def say(self, message: str) -> None:
        if self.quiet:
            return
        print(message, flush=True)
        self.text.write(time.strftime("%Y-%m-%dT%H:%M:%S ") + message + "\n")
        self.text.flush()

    def close(self) -> None:
        for message in self.sinks.close():
            self.say(message)
        self.metrics.close()
        self.text.close()


def _finite(value: Any) -> Any:
    """NaN and infinities are not JSON: they become strings, so that they stay visible."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics.jsonl; a last line cut short by a kill is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    out = []
    for number, line in enumerate(lines, 1):
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}:{number}: not JSON: {error}") from error
    return out
