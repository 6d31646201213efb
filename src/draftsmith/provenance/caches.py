"""Compile caches: where they are and why there, and what is in them.  Names and sizes are read, not contents."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.provenance.facts import why_unknown

MOST_FILES = 20_000
"""Files looked at; a cache with more is described as far as that and marked so."""
MOST_KEYS = 5_000


def read_caches(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """{"inductor", "triton"}: path, why, entries (files), bytes, oldest, newest, digest, keys."""
    environ = os.environ if environ is None else environ
    return {
        name: {"path": str(path), "why": why, **inventory(path)}
        for name, (path, why) in {"inductor": _inductor(environ), "triton": _triton(environ)}.items()
    }


def _inductor(environ: Mapping[str, str]) -> tuple[Path, str]:
    if environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(environ["TORCHINDUCTOR_CACHE_DIR"]), "TORCHINDUCTOR_CACHE_DIR"
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    why = next((n for n in ("TMPDIR", "TEMP", "TMP") if environ.get(n)), "torch's default")
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}", why


def _triton(environ: Mapping[str, str]) -> tuple[Path, str]:
    if environ.get("TRITON_CACHE_DIR"):
        return Path(environ["TRITON_CACHE_DIR"]), "TRITON_CACHE_DIR"
    if environ.get("TRITON_HOME"):
        return Path(environ["TRITON_HOME"]) / ".triton" / "cache", "TRITON_HOME"
    return Path("~").expanduser() / ".triton" / "cache", "HOME"


def inventory(folder: Path) -> dict[str, Any]:
    """What a cache folder holds.  `keys` are short hashes of name and size, so that two states can be compared."""
    files: list[tuple[str, int, float]] = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".lock", ".tmp")) or len(files) >= MOST_FILES:
                continue
            path = os.path.join(parent, name)
            try:
                stat = os.stat(path)
            except OSError:  # another process is cleaning up
                continue
            files.append((os.path.relpath(path, folder), stat.st_size, stat.st_mtime))
    keys = sorted(hashlib.sha256(f"{name}:{size}".encode()).hexdigest()[:8] for name, size, _ in files)
    return {
        "entries": len(files),
        "bytes": sum(size for _, size, _ in files),
        "oldest": min((t for _, _, t in files), default=None),
        "newest": max((t for _, _, t in files), default=None),
        "digest": hashlib.sha256(" ".join(keys).encode()).hexdigest() if keys else None,
        "keys": keys[:MOST_KEYS],
        "complete": len(files) < MOST_FILES,
    }


def lost(before: Any, after: Any) -> tuple[str, str] | str | None:
    """What the earlier state of a cache held and the later one lacks: None if nothing, (was, is) in words, or the
    reason why it cannot be told."""
    reason = why_unknown(before) or why_unknown(after)
    if reason:
        return reason
    if before["digest"] == after["digest"]:
        return None
    old, new = set(before["keys"]), set(after["keys"])
    if any(not c["complete"] or len(c["keys"]) < c["entries"] for c in (before, after)):
        return f"it holds more than {MOST_KEYS} files"
    if old <= new:
        return None
    what = "deleted" if not new else "partial" if old & new else "of another run"
    moved = "" if before["path"] == after["path"] else f"; it is now looked for in {after['path']} ({after['why']})"
    return (
        f"{_size(before)} in {before['path']} ({before['why']})",
        f"{_size(after)}: {what}, {len(old & new)} of the {len(old)} files are there{moved}",
    )


def _size(cache: dict[str, Any]) -> str:
    return f"{cache['entries']} files, {cache['bytes'] / 1e6:.1f} MB"
