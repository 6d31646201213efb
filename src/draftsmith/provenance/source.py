"""The source in use: commit, uncommitted changes, untracked files; of this project and of every editable install."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from draftsmith.provenance.facts import attempt

SOURCES = {".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".sh", ".toml", ".yaml", ".yml", ".jinja"}
"""Untracked files with these suffixes are source; others (data, results) are not recorded."""
MOST_DIFF, MOST_FILE, MOST_FILES = 2_000_000, 100_000, 200
"""Characters of a diff, bytes of one untracked file, number of untracked files whose text is kept."""
NOT_RUN = {"tests", "test", "docs", "doc", "benchmarks", "examples", ".github", ".ci"}
OPTIONS = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")


def read_source(editables: dict[str, Path]) -> dict[str, Any]:
    """{project: facts}.  editables: name and folder of every editable install; this package is added."""
    folders = dict(editables)
    own = Path(__file__).parents[1]
    if own.is_dir():  # not inside the stand-alone archive; where this runs from counts, not what is installed
        folders["draftsmith"] = own
    return {name: attempt(read_project, folder) for name, folder in sorted(folders.items())}


def read_project(folder: Path) -> dict[str, Any]:
    """Facts of one project; outside git a digest of its Python files.

    Raises OSError or RuntimeError if git itself is missing or fails.
    """
    if "site-packages" in folder.parts:
        return {"root": str(folder), "git": False, "why": "installed as a package: see packages"}
    try:
        root = Path(git(folder, "rev-parse", "--show-toplevel").strip())
    except RuntimeError as error:
        if "not a git repository" not in str(error):
            raise
        return {"root": str(folder), "git": False, "why": "not a git repository", "tree": tree_digest(folder)}
    diff = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv") if _has_commit(root) else ""
    edited, untracked = _by_file(diff), _untracked(root)
    return {
        "root": str(root),
        "git": True,
        "commit": git(root, "rev-parse", "HEAD").strip() if _has_commit(root) else None,
        "branch": git(root, "rev-parse", "--abbrev-ref", "HEAD").strip() if _has_commit(root) else None,
        "source": _source_digest(root, [*edited, *untracked]) if _has_commit(root) else None,
        "edited": edited,
        "diff_sha256": hashlib.sha256(diff.encode("utf-8", "surrogateescape")).hexdigest() if diff else None,
        "diff": diff if len(diff) <= MOST_DIFF else None,
        "diff_chars": len(diff),
        "untracked": untracked,
    }


def git(folder: Path, *arguments: str) -> str:
    """Output of a git command that only reads.  Raises RuntimeError with what git says."""
    done = subprocess.run(
        ["git", *OPTIONS, "-C", str(folder), *arguments],
        capture_output=True,
        timeout=20,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    )
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout.decode("utf-8", "surrogateescape")


def tree_digest(folder: Path) -> str:
    """sha256 over the names and contents of all Python files under a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def not_run(path: str) -> bool:
    """Is a file of a repository one that no run imports?"""
    return path.partition("/")[0] in NOT_RUN or Path(path).suffix in (".md", ".rst", ".ipynb")


def _source_digest(root: Path, touched: list[str]) -> str:
    """sha256 over the files that a run could import, as they are on disk: the same code gives the same digest whether
    or not it has been committed.  touched: files that are not as the commit has them."""
    blobs = {}
    for line in git(root, "ls-tree", "-r", "--full-tree", "HEAD").splitlines():
        facts, _, path = line.partition("\t")
        blobs[path] = facts.split()[2]
    for path in touched:
        blobs.pop(path, None)
        if (root / path).is_file():
            content = (root / path).read_bytes()
            blobs[path] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    kept = sorted(item for item in blobs.items() if not not_run(item[0]))
    return hashlib.sha256(repr(kept).encode("utf-8", "surrogateescape")).hexdigest()


def _by_file(diff: str) -> dict[str, str]:
    """Path -> sha256 of its part of a diff."""
    parts = re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]
    return {
        part.splitlines()[0].rpartition(" b/")[2]: hashlib.sha256(part.encode("utf-8", "surrogateescape")).hexdigest()
        for part in parts
    }


def _has_commit(root: Path) -> bool:
    try:
        git(root, "rev-parse", "--verify", "-q", "HEAD")
    except RuntimeError:
        return False
    return True


def _untracked(root: Path) -> dict[str, Any]:
    """Path -> sha256 and text, of untracked source files that git does not ignore."""
    names = [n for n in git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0") if n]
    out: dict[str, Any] = {}
    for name in sorted(n for n in names if Path(n).suffix in SOURCES):
        content = (root / name).read_bytes()
        keep = len(content) <= MOST_FILE and len(out) < MOST_FILES
        text = content.decode("utf-8", "surrogateescape") if keep else None
        out[name] = {"sha256": hashlib.sha256(content).hexdigest(), "text": text}
    return out
