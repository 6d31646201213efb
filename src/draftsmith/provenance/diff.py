"""What changed between two runs, what that can affect, how to put it back, and what did not change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from draftsmith.errors import InputError
from draftsmith.provenance import caches
from draftsmith.provenance.facts import why_unknown
from draftsmith.provenance.manifest import ProcessRecord, RunRecord
from draftsmith.provenance.rules import FOLDED, LOSS, NEITHER, SPEED, Rule, rule_for
from draftsmith.provenance.verdict import Change, Unknown, Verdict
from draftsmith.provenance.view import ABSENT, Fact, Table, short, table

TEMPORARY = re.compile(r"(/var/tmp|/tmp|/dev/shm)/[^\s\"',:\]]*")
PLACES_MATTER = ("environment.", "compile_cache.")
"""Fields in which a temporary path is the thing itself and not noise."""


def diff(before: RunRecord, after: RunRecord) -> Verdict:
    """Compare two runs of one kind, process by process.  Only sections that both recorded are compared.

    Raises InputError for runs of different kinds.
    """
    if before.kind != after.kind:
        raise InputError(
            f"{before.label} is a {before.kind} run and {after.label} a {after.kind} run: only runs of one kind can be "
            f"compared"
        )
    common = sorted(before.ranks.keys() & after.ranks.keys())
    if not common:
        raise InputError(f"{before.label} and {after.label} have no process of the same rank in common")
    found = {rank: compare(before.ranks[rank], after.ranks[rank], before.label) for rank in common}
    changes = _over_ranks({rank: part.changes for rank, part in found.items()}, lambda c: (c.field, c.was, c.is_))
    worlds = (before.ranks[common[0]].world, after.ranks[common[0]].world)
    if worlds[0] != worlds[1]:
        changes.append(_change("processes", Fact(str(worlds[0])), Fact(str(worlds[1])), before.label, {}))
    unknowns: dict[tuple[str, str], Unknown] = {}
    for part in found.values():
        for unknown in part.unknown:
            unknowns.setdefault((unknown.field, unknown.side), unknown)
    running = [r.label for r in (before, after) if r.state.how == "running"]
    return Verdict(
        before.label,
        after.label,
        tuple(_ordered(changes)),
        tuple(unknowns.values()),
        tuple(_not_changed(found[common[0]], before.facts)),
        tuple(_results(before.facts, after.facts)),
        found[common[0]].folded,
        tuple(among_ranks(after)),
        f"{' and '.join(running)} is still being written" if running else "",
    )


def among_ranks(run: RunRecord) -> list[Change]:
    """How the other processes of a run differ from its first: what should be the same everywhere and is not."""
    first, *others = sorted(run.ranks)
    found = {rank: compare(run.ranks[first], run.ranks[rank], run.label).changes for rank in others}
    own = ("host.", "gpu.uuid", "config.", "outcome.", "environment.CUDA_VISIBLE_DEVICES", "built.device")
    kept = {rank: [c for c in changes if not c.field.startswith(own)] for rank, changes in found.items()}
    merged = _over_ranks(kept, lambda c: (c.field, c.was, c.is_))
    return _ordered(dataclasses.replace(c, ranks=c.ranks or tuple(others)) for c in merged)


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


def compare(before: ProcessRecord, after: ProcessRecord, label: str) -> Compared:
    was, now = table(before.facts), table(after.facts)
    unknown = _unknowns(was, now)
    hidden = {u.field for u in unknown}
    below = tuple(f"{u.field}." for u in unknown)
    sections = frozenset(before.facts.keys() & after.facts.keys())
    changes: list[Change] = []
    same: list[str] = []
    folded = 0
    for field in sorted(was.keys() | now.keys()):
        if field.partition(".")[0] not in sections or field in hidden or field.startswith(below):
            continue
        if field.startswith(("patches.", "libraries.")) and not _looked_at(field, before.facts, after.facts):
            continue
        old, new = was.get(field, Fact(ABSENT)), now.get(field, Fact(ABSENT))
        if field.startswith("packages.files.") and ABSENT in (old.value, new.value):
            continue  # the package itself came or went, which is a change of its own
        if old.value == new.value:
            same.append(field)
        elif rule_for(field)[1].effect == FOLDED or _settled(field, old.value) == _settled(field, new.value):
            folded += 1
        else:
            changes.append(_change(field, old, new, label, {"before": before.facts, "after": after.facts}))
    for name, (was_cache, is_cache) in _caches(before.facts, after.facts).items():
        result = caches.lost(was_cache, is_cache)
        if result is None:
            same.append(f"compile_cache.{name}")
        elif isinstance(result, str):
            unknown.append(Unknown(f"compile_cache.{name}", "is", result))
        else:
            changes.append(_change(f"compile_cache.{name}", Fact(result[0]), Fact(result[1]), label, {}))
    return Compared(changes, unknown, same, sections, folded)


def _change(field: str, old: Fact, new: Fact, label: str, facts: dict[str, Any]) -> Change:
    order, rule = rule_for(field)
    effect, why = rule.effect, rule.why
    name = (
        field.split(".", 2)[2]
        if field.startswith(("packages.files.", "packages.startup."))
        else field.rpartition(".")[2]
    )
    of_package = field.startswith("packages.") and not field.startswith(("packages.startup.", "packages.shadowed"))
    if of_package and facts and not _imported(name, facts):
        effect, why = NEITHER, "neither run imported it"
    back = rule.back_absent if old.value == ABSENT and rule.back_absent else rule.back
    words = {
        "name": name,
        "key": field.partition(".")[2],
        "was": old.value.removesuffix(" (editable)"),
        "is": new.value,
        "run": label,
        "version": _version(name, facts),
    }
    was, now = (_shown(mine, other) for mine, other in ((old, new), (new, old)))
    return Change(field, effect, was, now, _fill(why, words), _fill(back, words), order=order)


def _fill(template: str, words: dict[str, str]) -> str:
    """str.format would stumble over braces in the values."""
    return re.sub(r"\{(\w+)\}", lambda m: words.get(m[1], m[0]), template)


def _shown(fact: Fact, other: Fact) -> str:
    """A value for people; of many files, those that are not the same on the other side."""
    if fact.parts:
        names = [name for name, digest in fact.parts if dict(other.parts).get(name) != digest]
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            return f"{fact.value}; different: {', '.join(names[:8])}{more}"
    return f"{fact.value} ({fact.note})" if fact.note else fact.value


def _version(name: str, facts: dict[str, Any]) -> str:
    packages = facts.get("before", {}).get("packages", {})
    return str(packages.get("installed", {}).get(name, {}).get("version", ""))


def _imported(package: str, facts: dict[str, Any]) -> bool:
    """Did either run import the package?  Where that is not known, it may have."""
    lists = [f.get("imported") for f in facts.values()]
    known = [x for x in lists if isinstance(x, list)]
    return not known or any(package in x for x in known)


def _unknowns(was: Table, now: Table) -> list[Unknown]:
    out = []
    for field in sorted(was.keys() | now.keys()):
        reasons = [t[field].unknown if field in t else None for t in (was, now)]
        if field.startswith("environment.") and field in was and field in now:
            salts = [re.findall(r"<masked (\w+):", t[field].value) for t in (was, now)]
            if all(salts) and salts[0] != salts[1]:
                reasons = ["masked under another salt", "masked under another salt"]
        if any(reasons):
            side = "both" if all(reasons) else "was" if reasons[0] else "is"
            out.append(Unknown(field, side, "; ".join(dict.fromkeys(r for r in reasons if r))))
    return out


def _looked_at(field: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Was it looked at in both?  A module audited, or a library mapped, in only one run tells nothing."""
    section, _, name = field.partition(".")
    if section == "libraries":
        return all(name in facts["libraries"] for facts in (before, after))
    audited = [set(facts["patches"]["audited"]) for facts in (before, after)]
    return any(name.startswith(f"{module}.") for module in audited[0] & audited[1])


def _settled(field: str, value: str) -> str:
    return value if field.startswith(PLACES_MATTER) else TEMPORARY.sub("TEMPORARY", value)


def _caches(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The states of each cache to compare.

    A run is measured by what it found at its start; what has not run yet (`runs check`) by what the earlier run left.
    """
    ahead = "built" not in after and "compile_cache_end" in before
    old, new = before.get("compile_cache_end" if ahead else "compile_cache"), after.get("compile_cache")
    if old is None or new is None:
        return {}
    if why_unknown(old) or why_unknown(new):
        return {"all": (old, new)}
    return {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys())}


def _over_ranks(by_rank: dict[int, list[Change]], key: Any) -> list[Change]:
    """The same change in several processes is one change."""
    merged: dict[Any, tuple[Change, list[int]]] = {}
    for rank, changes in by_rank.items():
        for change in changes:
            merged.setdefault(key(change), (change, []))[1].append(rank)
    return [
        dataclasses.replace(change, ranks=() if len(ranks) == len(by_rank) else tuple(ranks))
        for change, ranks in merged.values()
    ]


def _ordered(changes: Iterable[Change]) -> list[Change]:
    """Loss, speed, neither; causes before what follows from them; then by rule."""
    effects = (LOSS, SPEED, NEITHER)
    by_rule = sorted(changes, key=lambda c: (effects.index(c.effect), c.order, c.field))
    out: list[Change] = []
    for change in by_rule:
        rule: Rule = rule_for(change.field)[1]
        causes = [
            c.field
            for c in by_rule
            if rule_for(c.field)[1] is not rule
            and (c.effect == LOSS or c.effect == change.effect == SPEED or change.effect == NEITHER)
            and c.effect != NEITHER
            and any(fnmatchcase(c.field, pattern) for pattern in rule.follows)
        ]
        out.append(dataclasses.replace(change, follows=causes[0] if causes else None))
    return sorted(out, key=lambda c: (effects.index(c.effect), c.follows is not None, c.order, c.field))


SUBJECTS = {
    "code": "code", "packages": "packages", "torch": "torch build", "libraries": "native libraries",
    "patches": "functions replaced at run time", "target": "target", "data": "data", "config": "config",
    "switches": "effective switches", "environment": "environment variables", "python": "Python", "host": "host",
    "gpu": "GPU and driver", "compile_cache": "compile caches", "built": "built model",
}  # fmt: skip


def _not_changed(found: Compared, facts: dict[str, Any]) -> Iterable[str]:
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


def _results(before: dict[str, Any], after: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Losses and rates where both runs have them."""
    old, new = before.get("outcome", {}), after.get("outcome", {})
    for figure in ("steps", "loss", "heldout_loss", "accepted_length"):
        if old.get(figure) is not None and new.get(figure) is not None and old[figure] != new[figure]:
            yield figure, f"{old[figure]}", f"{new[figure]}"
    if old.get("tokens_per_s") and new.get("tokens_per_s"):
        yield "tokens/s (median)", f"{old['tokens_per_s']['p50']:.0f}", f"{new['tokens_per_s']['p50']:.0f}"
