"""Every installed package: version, installer, origin, and whether its files are still those that were installed.

A package patched in place leaves `pip freeze` and `pip check` as they were; hashing its .py files against RECORD finds
it.  A package's result is kept in the user's cache and used again while the size and modification time of all its
files agree, so that a host hashes a package once.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from draftsmith import env
from draftsmith.provenance.digests import read_memory, write_memory

MOST_TEXT = 200_000
"""Characters of a changed file that are kept."""


def read_packages(every_file: bool = False) -> dict[str, Any]:
    """{"installed": {name: facts}, "shadowed": [...], "startup": {file: sha256}}.

    every_file: also data and native files, not only .py (seconds more for a torch environment).
    startup: .pth files, sitecustomize and usercustomize, which run before anything else and can change all else.
    """
    prefix = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    memory = env.cache_dir() / "packages" / f"{prefix}{'-all' if every_file else ''}.json"
    known = read_memory(memory)
    installed: dict[str, Any] = {}
    shadowed: list[str] = []
    startup: dict[str, str] = {}
    fresh: dict[str, Any] = {}
    for folder in site_folders():
        for info in sorted([*folder.glob("*.dist-info"), *folder.glob("*.egg-info")]):
            entry = _read_one(info, known, every_file)
            if entry is None:
                continue
            fresh[str(info)] = entry
            facts = entry["facts"]
            if facts["name"] in installed:
                shadowed.append(f"{facts['name']} {facts['version']} in {folder}")
            else:
                installed[facts["name"]] = facts
        for file in sorted([*folder.glob("*.pth"), *folder.glob("*customize.py")]):
            startup.setdefault(file.name, hashlib.sha256(file.read_bytes()).hexdigest())
    if fresh != {k: v for k, v in known.items() if k in fresh}:
        write_memory(memory, {**known, **fresh})
    return {"installed": installed, "shadowed": shadowed, "startup": startup}


def site_folders() -> list[Path]:
    """Folders on sys.path, in its order, each once."""
    return list(dict.fromkeys(p for p in map(Path, sys.path) if p.is_dir()))


def editables(packages: dict[str, Any]) -> dict[str, Path]:
    """Name and folder of every editable install."""
    out = {}
    for name, facts in packages["installed"].items():
        url = facts["origin"] or {}
        if url.get("dir_info", {}).get("editable"):
            out[name] = Path(unquote(urlparse(url["url"]).path))
    return out


def imported(packages: dict[str, Any]) -> list[str]:
    """Packages of which this process has imported something so far."""
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    return sorted(name for name, facts in packages["installed"].items() if loaded.intersection(facts["modules"]))


def _read_one(info: Path, known: dict[str, Any], every_file: bool) -> dict[str, Any] | None:
    """{"signature", "facts"}; None for a folder without a name (left over by a broken uninstall)."""
    head = _head(info)
    if head is None:
        return None
    rows = _rows(info)
    chosen = [(name, digest) for name, digest, _ in rows if digest and (every_file or name.endswith(".py"))]
    signature = hashlib.sha256(json.dumps([head, _text(info / "direct_url.json"), chosen]).encode())
    for name, _ in chosen:
        try:
            stat = (info.parent / name).stat()
            signature.update(f"{stat.st_size},{stat.st_mtime_ns};".encode())
        except OSError:
            signature.update(b"missing;")
    kept = known.get(str(info))
    if isinstance(kept, dict) and kept.get("signature") == signature.hexdigest():
        return kept
    origin = _text(info / "direct_url.json")
    facts = {
        "name": re.sub(r"[-_.]+", "-", head[0]).lower(),
        "version": head[1],
        "installer": (_text(info / "INSTALLER") or "").strip() or None,
        "origin": json.loads(origin) if origin else None,
        "modules": sorted({_module(name) for name, _, _ in rows} - {""}),
        "files": _compare(info.parent, chosen) if rows else {"recorded": False},
    }
    return {"signature": signature.hexdigest(), "facts": facts}


def _head(info: Path) -> tuple[str, str] | None:
    text = _text(info / "METADATA") or _text(info / "PKG-INFO") or ""
    found = {k: v.strip() for k, v in re.findall(r"^(Name|Version):(.*)$", text.partition("\n\n")[0], re.MULTILINE)}
    return (found["Name"], found["Version"]) if {"Name", "Version"} <= set(found) else None


def _rows(info: Path) -> list[tuple[str, str, str]]:
    """(path, digest, size) lines of RECORD; none where there is no RECORD."""
    text = _text(info / "RECORD")
    return [(r[0], r[1], r[2]) for r in csv.reader((text or "").splitlines()) if len(r) == 3]


def _module(name: str) -> str:
    """The top-level module that a file of RECORD belongs to, or nothing."""
    first, _, rest = name.partition("/")
    if rest:
        return "" if first.endswith((".dist-info", ".data")) or first in ("..", "__pycache__") else first
    return first.partition(".")[0] if first.endswith((".py", ".so")) else ""


def _compare(folder: Path, chosen: list[tuple[str, str]]) -> dict[str, Any]:
    """What is on disk against RECORD: how many files agree, which differ (with their text), which are missing."""
    changed: dict[str, Any] = {}
    missing: list[str] = []
    for name, recorded in chosen:
        algorithm, _, digest = recorded.partition("=")
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            missing.append(name)
            continue
        there = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()
        if there != digest:
            text = content.decode("utf-8", "surrogateescape") if len(content) <= MOST_TEXT else None
            changed[name] = {"sha256": hashlib.sha256(content).hexdigest(), "text": text}
    return {"recorded": True, "same": len(chosen) - len(changed) - len(missing), "changed": changed, "missing": missing}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
