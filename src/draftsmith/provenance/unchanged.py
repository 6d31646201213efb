"""What two runs have alike, in sentences, and what came out of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from draftsmith.provenance.verdict import Change, Unknown
from draftsmith.provenance.view import short


@dataclass(frozen=True)
class Compared:
    """Two processes side by side."""

    changes: list[Change]
    unknown: list[Unknown]
    same: list[str]
    """Fields that are equal."""
    sections: frozenset[str]
    """What both recorded."""
    folded: int


SUBJECTS = {
    "code": "code", "packages": "packages", "torch": "torch build", "libraries": "native libraries",
    "patches": "functions replaced at run time", "target": "target", "data": "data", "config": "config",
    "switches": "effective switches", "environment": "environment variables", "python": "Python", "host": "host",
    "gpu": "GPU and driver", "compile_cache": "compile caches", "built": "built model",
}  # fmt: skip


def not_changed(found: Compared, facts: dict[str, Any]) -> Iterable[str]:
    """What did not change, plainly: that is what ends a hunt."""
    for section, subject in SUBJECTS.items():
        same = [f for f in found.same if f.partition(".")[0] == section]
        touched = [c for c in found.changes if c.field.partition(".")[0] == section]
        unknown = [u for u in found.unknown if u.field.partition(".")[0] == section]
        if section not in found.sections or unknown or (touched and not same):
            continue
        if touched:
            yield f"{subject}: {len(same)} identical, {len(touched)} changed"
        else:
            yield f"{subject}: identical{_detail(section, facts, len(same))}"


def _detail(section: str, facts: dict[str, Any], count: int) -> str:
    if section == "code":
        parts = []
        for name, project in facts["code"].items():
            if project.get("git"):
                state = "the same uncommitted edits" if project["diff_sha256"] or project["untracked"] else "clean tree"
                parts.append(f"{name} at commit {short(project['commit'])}, {state}")
        return f", {'; '.join(parts)}" if parts else ""
    if section == "packages":
        installed = facts["packages"]["installed"]
        files = sum(p["files"].get("same", 0) for p in installed.values())
        return f", {len(installed)} of them, {files:,} files checked against what was installed"
    if section == "patches":
        return ", none" if not facts["patches"]["replaced"] else f", {len(facts['patches']['replaced'])}"
    if section == "compile_cache":
        return ", nothing is missing"
    if section == "gpu" and not facts["gpu"]["devices"]:
        return ", no NVIDIA GPU"
    return f", {count} fields" if count > 1 else ""


def results(before: dict[str, Any], after: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Losses and rates where both runs have them."""
    old, new = before.get("outcome", {}), after.get("outcome", {})
    for figure in ("steps", "loss", "heldout_loss", "accepted_length"):
        if old.get(figure) is not None and new.get(figure) is not None and old[figure] != new[figure]:
            yield figure, f"{old[figure]}", f"{new[figure]}"
    if old.get("tokens_per_s") and new.get("tokens_per_s") and old["tokens_per_s"] != new["tokens_per_s"]:
        yield "tokens/s (median)", f"{old['tokens_per_s']['p50']:.0f}", f"{new['tokens_per_s']['p50']:.0f}"
