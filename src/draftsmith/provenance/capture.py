"""What a run was made of, as facts of this machine.  Standard library only; torch is asked only if it is loaded."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def capture(facts: dict[str, Any]) -> dict[str, Any]:
    """Versions, code, host and the given facts about the run, as a JSON-ready dictionary."""
    torch = sys.modules.get("torch")
    return {
        "schema": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "host": {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "packages": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()},
        "torch": None
        if torch is None
        else {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "git": torch.version.git_version,
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "code": _code(),
        **facts,
    }


def _code() -> dict[str, Any]:
    """Commit and uncommitted changes of this package's source; unknown is said, not guessed."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        out = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10, check=True)
        return out.stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "changed": git("status", "--porcelain", ".").splitlines()}
    except (OSError, subprocess.SubprocessError) as error:
        return {"commit": "unknown", "why": str(error)}
