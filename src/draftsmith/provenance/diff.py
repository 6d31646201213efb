"""What changed between two runs, what that can affect, how to put it back, and what did not change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from draftsmith.errors import InputError
from draftsmith.provenance import caches
from draftsmith.provenance.facts import why_unknown
from draftsmith.provenance.manifest import ProcessRecord, RunRecord
from draftsmith.provenance.rules import FOLDED, LOSS, NEITHER, SPEED, Rule, rule_for
from draftsmith.provenance.source import not_run
from draftsmith.provenance.unchanged import Compared, not_changed, results
from draftsmith.provenance.verdict import Change, Unknown, Verdict
from draftsmith.provenance.view import ABSENT, Fact, Table, table

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
        tuple(not_changed(found[common[0]], before.facts)),
        tuple(results(before.facts, after.facts)),
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
    if field.startswith("code.") and _no_source_differs(field.split(".")[1], old, new, facts):
        effect, why = NEITHER, "the files that a run could import are the same"
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


def _no_source_differs(project: str, old: Fact, new: Fact, facts: dict[str, Any]) -> bool:
    """Do only tests, documents and the like differ, or only what has been committed of the same files?"""
    sources = [facts[side]["code"].get(project, {}).get("source") for side in ("before", "after")]
    if sources[0] is not None and sources[0] == sources[1]:
        return True
    differing = set(old.parts) ^ set(new.parts)
    return bool(differing) and all(not_run(name) for name, _ in differing)


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
    lists = [f["imported"] for f in facts.values() if "imported" in f]
    return not lists or any(not isinstance(x, list) or package in x for x in lists)


def _unknowns(was: Table, now: Table) -> list[Unknown]:
    out = []
    for field in sorted(was.keys() | now.keys()):
        reasons = [t[field].unknown if field in t else None for t in (was, now)]
        if field in was and field in now:
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
        namesake = [c for c in causes if c.rpartition(".")[2] == change.field.rpartition(".")[2]]
        out.append(dataclasses.replace(change, follows=next(iter([*namesake, *causes]), None)))
    return sorted(out, key=lambda c: (effects.index(c.effect), c.follows is not None, c.order, c.field))
