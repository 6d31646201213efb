"""sha256 of large files, read once: a digest is kept and used again while size and modification time agree.

Digests of model and store shards are kept beside them (`.draftsmith-digests.json`), so that the other hosts of a
shared disk need not read them either; where that folder is read-only, and for native libraries, in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith import env
from draftsmith.errors import InputError
from draftsmith.files import sha256, write_text

BESIDE = ".draftsmith-digests.json"
SETTLED_SECONDS = 2.0
"""A file changed more recently than this could change again within one tick of its clock: its digest is not kept."""


def sha256_cached(paths: Iterable[Path], *, beside: bool) -> dict[Path, str]:
    """Digest of every path.  beside: keep the digests beside the files if that folder can be written.

    Raises OSError for a file that cannot be read.
    """
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        by_folder.setdefault(path.absolute().parent, []).append(path)
    out: dict[Path, str] = {}
    for folder, files in by_folder.items():
        out.update(_folder_digests(folder, files, beside))
    return out


def _folder_digests(folder: Path, files: list[Path], beside: bool) -> dict[Path, str]:
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    in_cache = env.cache_dir() / "digests" / f"{name}.json"
    memories = [folder / BESIDE, in_cache] if beside else [in_cache]
    known: dict[str, Any] = {}
    for memory in reversed(memories):
        known.update(read_memory(memory))
    out, fresh = {}, False
    for path in files:
        stat = path.stat()
        kept = known.get(path.name)
        if isinstance(kept, list) and kept[:2] == [stat.st_size, stat.st_mtime_ns]:
            out[path] = str(kept[2])
            continue
        out[path] = sha256(path)
        if abs(time.time() - stat.st_mtime) > SETTLED_SECONDS:
            known[path.name] = [stat.st_size, stat.st_mtime_ns, out[path]]
            fresh = True
    if fresh:
        any(write_memory(memory, known) for memory in memories)  # the first that can be written
    return out


def read_memory(path: Path) -> dict[str, Any]:
    """A kept JSON object, or nothing: a memory that is missing or damaged only costs time."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_memory(path: Path, values: dict[str, Any]) -> bool:
    """Whether it could be kept."""
    try:
        write_text(path, json.dumps(values))
    except (OSError, InputError):
        return False
    return True
