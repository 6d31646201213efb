"""The compile cache of a run: a folder of its own per fingerprint, and a bundle of it beside the run.

<root>/<fingerprint>/       what torch and Triton compiled; marker.json says for what
<run>/compile_cache/        bundle.tar and manifest.json, written whole or not at all

Two runs share a folder only if everything agrees that compiled code depends on, so neither another torch nor another
GPU can ever meet the wrong files.  A bundle is used only if its fingerprint and its content are right.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, sha256, write_text
from draftsmith.rundir import RunDir, attempts

MARKER = "marker.json"


def fingerprint(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def folder_for(root: Path, parts: Mapping[str, str]) -> Path:
    """The cache folder, made and tried.  Raises InputError if it cannot be written, or is another fingerprint's."""
    folder = root / fingerprint(parts)
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(4096))  # of a full disk the empty file can still be made
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"compile.cache_dir: {folder} cannot be written ({error.strerror}): set it to a folder that can, or "
            f"compile.enabled=false"
        ) from error
    found = read_marker(folder)
    if found is not None and (differing := differences(found, parts)):
        raise InputError(
            f"compile.cache_dir: {folder} holds what was compiled for something else ({'; '.join(differing)}): remove "
            f"it, or set another folder"
        )
    return folder


def read_marker(folder: Path) -> dict[str, str] | None:
    """What a warm-up that came to its end left; None: there was none."""
    try:
        return dict(json.loads((folder / MARKER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    keys = sorted(before.keys() | now.keys())
    return [f"{k} was {before.get(k)}, is {now.get(k)}" for k in keys if before.get(k) != now.get(k)]


def restore(folder: Path, parts: Mapping[str, str], runs_dir: Path, name: str, say: Callable[[str], None]) -> str:
    """Fill an empty cache folder from the newest bundle that fits.  Returns what the cache is: warm, restored, cold."""
    if read_marker(folder) is not None:
        return "warm"
    told = False
    for run in _candidates(runs_dir, name):
        manifest = _manifest(run.compile_cache)
        if manifest is None:
            if run.compile_cache.exists():
                say(f"compile-cache bundle {run.compile_cache} is partial: not used")
            continue
        if manifest["fingerprint"] != fingerprint(parts):
            if not told and run.path.parent.name == name:
                changed = "; ".join(differences(manifest["parts"], parts))
                say(f"compile-cache bundle of {run.path.name} not used: {changed}")
                told = True
            continue
        bundle = run.compile_cache / "bundle.tar"
        if not bundle.is_file() or sha256(bundle) != manifest["sha256"]:
            say(f"compile-cache bundle {bundle} is damaged (its content is not what was written): not used")
            continue
        # file by file, each renamed into place: another run may read from the same folder
        with tempfile.TemporaryDirectory(prefix=".restoring.", dir=folder) as temporary:
            with tarfile.open(bundle) as tar:
                tar.extractall(temporary, filter="data")
            for file in sorted(Path(temporary).rglob("*")):
                place = folder / file.relative_to(temporary)
                if file.is_file():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, place)
        mark(folder, parts)
        say(f"compile cache restored from {run.compile_cache}")
        return "restored"
    return "cold"


def mark(folder: Path, parts: Mapping[str, str]) -> None:
    """Everything is in the folder."""
    write_text(folder / MARKER, json.dumps(dict(parts), indent=1))


def save(folder: Path, parts: Mapping[str, str], run: RunDir) -> None:
    """Mark the folder as complete and bundle it with the run."""
    mark(folder, parts)
    if run.compile_cache.exists():
        return
    with folder_written_whole(run.compile_cache) as temporary:
        bundle = temporary / "bundle.tar"
        with tarfile.open(bundle, "w") as tar:
            for file in sorted(folder.rglob("*")):
                # locks and temporary files belong to processes that are at work
                if file.is_file() and file.name != MARKER and file.suffix not in (".lock", ".tmp"):
                    tar.add(file, file.relative_to(folder), recursive=False)
        manifest = {
            "fingerprint": fingerprint(parts),
            "parts": dict(parts),
            "sha256": sha256(bundle),
            "bytes": bundle.stat().st_size,
        }
        write_text(temporary / "manifest.json", json.dumps(manifest, indent=1))


def _candidates(runs_dir: Path, name: str) -> Iterator[RunDir]:
    """Attempts of this run, newest first; then those of the other runs."""
    names = [name, *sorted(p.name for p in runs_dir.glob("*") if p.is_dir() and p.name != name)]
    for one in names:
        yield from reversed(attempts(runs_dir, one))


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return found if {"fingerprint", "parts", "sha256"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None
