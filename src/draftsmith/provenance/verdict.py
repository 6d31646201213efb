"""The result of comparing two runs, and how it is told to people."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.provenance.rules import LOSS, NEITHER, SPEED


@dataclass(frozen=True)
class Change:
    """One field that differs."""

    field: str
    effect: str
    """loss (numbers, and with them perhaps speed), speed, or neither."""
    was: str
    is_: str
    why: str
    """Why it can matter."""
    back: str
    """How to put it back."""
    follows: str | None = None
    """The change above that explains this one."""
    ranks: tuple[int, ...] = ()
    """The processes it was seen in; empty: all."""
    order: int = 0

    def lines(self, number: int) -> Iterator[str]:
        where = f" ({_ranks(self.ranks)} only)" if self.ranks else ""
        yield f"{number:3}. {self.field}{where}" + (f", follows from {self.follows}" if self.follows else "")
        for word, value in (("was", self.was), ("is", self.is_), ("why", self.why), ("back", self.back)):
            if word in ("was", "is") or not self.follows:
                yield textwrap.indent(textwrap.fill(f"{word:5}{value}", 112, subsequent_indent="     ",
                                                    break_on_hyphens=False), "     ")  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["is"] = values.pop("is_")
        del values["order"]
        return values


@dataclass(frozen=True)
class Unknown:
    """A field that cannot be compared."""

    field: str
    side: str
    """was, is, or both: where it is not known."""
    why: str


@dataclass(frozen=True)
class Verdict:
    """The comparison of two runs.  `code` is the command's exit code: 0 same, 1 differs, 2 cannot tell."""

    before: str
    after: str
    changes: tuple[Change, ...]
    """Most likely causes first: those that can affect loss, then speed, then neither."""
    unknown: tuple[Unknown, ...]
    same: tuple[str, ...]
    """What did not change, in sentences."""
    results: tuple[tuple[str, str, str], ...]
    """(figure, was, is): what came out; results, not causes."""
    folded: int
    """Differences of time, process numbers and temporary places."""
    ranks: tuple[Change, ...] = ()
    """How the processes of the later run differ among themselves."""
    preliminary: str = ""
    """Why this is not the last word: a run is still going on."""

    @property
    def code(self) -> int:
        if self.preliminary:
            return 2
        return 1 if self.changes else 2 if self.unknown else 0

    def causes(self, effect: str) -> list[Change]:
        return [c for c in self.changes if c.effect == effect and c.follows is None]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if not self.changes:
            return f"no change found, {len(self.unknown)} unknown: cannot tell" if self.unknown else "nothing changed"
        loss, speed, neither = (len(self.causes(e)) for e in (LOSS, SPEED, NEITHER))
        follow = sum(c.follows is not None for c in self.changes)
        parts = [f"{loss} change{'' if loss == 1 else 's'} can affect loss", f"{speed} can affect speed"]
        parts += [f"{neither} neither"] if neither else []
        parts += [f"{follow} follow{'s' if follow == 1 else ''} from these"] if follow else []
        parts += [f"{len(self.unknown)} unknown"] if self.unknown else []
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.line,
            "code": self.code,
            "before": self.before,
            "after": self.after,
            "changes": [c.as_dict() for c in self.changes],
            "unknown": [dataclasses.asdict(u) for u in self.unknown],
            "not_changed": list(self.same),
            "results": [{"figure": f, "was": w, "is": i} for f, w, i in self.results],
            "ranks": [c.as_dict() for c in self.ranks],
            "folded": self.folded,
            "preliminary": self.preliminary,
        }

    def text(self) -> str:
        """For people: the verdict, the changes, the unknown, what did not change."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.line
        yield f"was: {self.before}   is: {self.after}"
        if self.preliminary:
            yield f"{self.preliminary}: this is not the last word"
        number = 0
        titles = {LOSS: "can affect loss", SPEED: "can affect speed", NEITHER: "can affect neither, as far as is known"}
        for effect, title in titles.items():
            chosen = [c for c in self.changes if c.effect == effect]
            if chosen:
                yield f"\n{title}"
            for change in chosen:
                number += 1
                yield from change.lines(number)
        if self.ranks:
            yield f"\nprocesses of {self.after} differ among themselves"
            for change in self.ranks:
                yield f"  {change.field}: {change.was} in the first, {change.is_} in {_ranks(change.ranks)}"
        if self.results:
            yield "\nresults (what came of it, not causes)"
            yield from (f"  {figure}: was {was}, is {now}" for figure, was, now in self.results)
        if self.unknown:
            yield "\nunknown (not the same as unchanged)"
            yield from (f"  {u.field}, {_side(u.side)}: {u.why}" for u in self.unknown)
        if self.same:
            yield "\nnot changed"
            yield from (f"  {sentence}" for sentence in self.same)
        if self.folded:
            yield f"\n{self.folded} differences of time, process numbers and temporary or chosen names are left out"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _side(side: str) -> str:
    return {"was": "in the earlier run", "is": "in the later run", "both": "in both"}[side]
