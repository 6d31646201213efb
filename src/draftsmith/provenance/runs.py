"""`draftsmith runs ...`: what runs there are, what they were made of, what changed, and how to get it back.

Exit codes of diff and check: 0 nothing changed, 1 something did, 2 it cannot be told (also: bad input).  The other
commands: 0 done, 2 bad input.  Works where torch, numpy and pydantic cannot be imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.provenance.diff import among_ranks, diff
from draftsmith.provenance.facts import attempt, why_unknown
from draftsmith.provenance.history import Entry, identity, last_good, list_runs, mark, write_mark
from draftsmith.provenance.machine import NOT_YET, as_started, this_machine
from draftsmith.provenance.manifest import RunRecord, find_run
from draftsmith.provenance.outcome import read_outcome
from draftsmith.provenance.restore import restore
from draftsmith.provenance.standalone import write_standalone
from draftsmith.provenance.view import table
from draftsmith.rundir import RunDir

LAST_GOOD = "last-good"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="draftsmith runs", description="What changed? Runs, and how they differ.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--runs-dir", type=Path, default=Path("runs"), help="the folder of the runs (default: runs)")
    shared.add_argument("--json", action="store_true", help="print JSON")

    def add(name: str, what: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=what, description=what, parents=[shared])

    add("list", "every run: running, finished, interrupted, crashed or silently dead")
    show = add("show", "what a run was made of")
    show.add_argument("run", help="NAME, NAME/attempt_N, a run folder, or a manifest file")
    show.add_argument("field", nargs="?", help="one part in full, e.g. code.draftsmith.diff")
    both = add("diff", "what changed from run A to run B")
    both.add_argument("before", metavar="A", help="the earlier run, or last-good")
    both.add_argument("after", metavar="B", help="the later run, or last-good (then A is compared with it)")
    check = add("check", "this machine now against the last good run, before GPU hours are spent")
    check.add_argument("what", nargs="?", metavar="RUN|CONFIG", help="what is about to run (default: the newest run)")
    check.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the config")
    check.add_argument("--against", default=LAST_GOOD, metavar="RUN", help="another run to compare with")
    check.add_argument("--all-files", action="store_true", help="hash every file of every package, not only .py")
    good = add("good", "say that a run is good, or that it is not")
    good.add_argument("run")
    good.add_argument("--note", default="", help="why")
    good.add_argument("--not", dest="bad", action="store_true", help="never take it as the last good one")
    back = add("restore", "what a run had, in a new folder, and the commands that rebuild its environment")
    back.add_argument("run")
    back.add_argument("folder", type=Path, metavar="NEW_FOLDER")
    alone = add("capture-file", "write the capture as one file that runs in other environments")
    alone.add_argument("output", type=Path, metavar="OUT.pyz")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except InputError as error:
        print(f"draftsmith runs {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OSError) as error:
        print(f"draftsmith runs {args.command}: a record is damaged ({type(error).__name__}: {error})", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.command == "list":
        _list(args)
    elif args.command == "show":
        _show(args)
    elif args.command == "diff":
        verdict = diff(*_pair(args))
        print(json.dumps(verdict.as_dict(), indent=1) if args.json else verdict.text())
        return verdict.code
    elif args.command == "check":
        return _check(args)
    elif args.command == "good":
        run = find_run(args.runs_dir, args.run)
        if run.path.is_file():
            raise InputError(f"{run.path} is a single manifest: only a run can be marked")
        write_mark(RunDir(run.path), not args.bad, args.note)
        said = {"run": run.label, "good": not args.bad}
        print(json.dumps(said) if args.json else f"{run.label} is marked {'not ' if args.bad else ''}good")
    elif args.command == "restore":
        _restore(args)
    elif args.command == "capture-file":
        try:
            write_standalone(args.output)
        except OSError as error:
            raise InputError(f"cannot write {args.output}: {error.strerror}") from error
        said = {"file": str(args.output)}
        print(json.dumps(said) if args.json else f"{args.output}: run it as `PYTHON {args.output} OUT.json`")
    return 0


def _pair(args: argparse.Namespace) -> tuple[RunRecord, RunRecord]:
    if args.before == args.after == LAST_GOOD:
        raise InputError("last-good is measured against a run: name one of the two")
    if args.after == LAST_GOOD:  # "A against last-good": the good one is the earlier side
        after = find_run(args.runs_dir, args.before)
        return _good(args.runs_dir, after), after
    after = find_run(args.runs_dir, args.after)
    return _good(args.runs_dir, after) if args.before == LAST_GOOD else find_run(args.runs_dir, args.before), after


def _good(runs_dir: Path, record: RunRecord) -> RunRecord:
    found = last_good(runs_dir, record)
    if found is None:
        who = identity(record)
        raise InputError(
            f"there is no last good run for {record.label} in {runs_dir}: none of the same target "
            f"({who['target'][0]}), geometry and hardware ({who['hardware'][0]}) finished with a finite loss or was "
            f"marked with `draftsmith runs good RUN`"
        )
    return found


def _check(args: argparse.Namespace) -> int:
    config, label = _about_to_run(args)
    now = this_machine(config, args.all_files)
    if args.against == LAST_GOOD:
        reference = _good(args.runs_dir, dataclasses.replace(now, label=label))
    else:
        reference = find_run(args.runs_dir, args.against)
    rank = min(reference.ranks)
    process = dataclasses.replace(now.ranks[min(now.ranks)], world=reference.ranks[rank].world)
    now = dataclasses.replace(now, kind=reference.kind, ranks={rank: process})
    verdict = diff(as_started(reference), as_started(now))
    later = "not compared, since only a running process has them: effective switches, built model"
    values = {**verdict.as_dict(), "not_compared": [*NOT_YET, "built"]}
    print(json.dumps(values, indent=1) if args.json else f"{verdict.text()}\n\n{later}")
    return verdict.code


def _about_to_run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The resolved config of what is about to run, and what to call it."""
    if args.what and Path(args.what).suffix in (".yaml", ".yml", ".json") and Path(args.what).is_file():
        try:
            from draftsmith.config import load_config
        except ImportError as error:
            raise InputError(f"{args.what} cannot be read in this environment ({error}): name a run instead") from error
        return load_config(Path(args.what), args.overrides).model_dump(mode="json"), args.what
    if args.overrides:
        raise InputError(f"{args.what} is not a config file: a.b=c only works with one")
    if args.what:
        record = find_run(args.runs_dir, args.what)
    else:
        known = [e.record for e in list_runs(args.runs_dir) if e.record is not None]
        if not known:
            raise InputError(f"there is no run in {args.runs_dir} that could be compared with: see --runs-dir")
        record = known[-1]
    if why_unknown(record.facts["config"]):
        raise InputError(f"{record.label} has no config: {record.facts['config']['unknown']}")
    return dict(record.facts["config"]), record.label


def _list(args: argparse.Namespace) -> None:
    if not args.runs_dir.is_dir():
        raise InputError(f"there is no folder {args.runs_dir}: see --runs-dir")
    rows = [_row(entry) for entry in list_runs(args.runs_dir)]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'run':32} {'state':12} {'begun':17} {'steps':>7} {'loss':>8} {'tokens/s':>9}  ")
    for row in rows:
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["begun"])) if row["begun"] else ""
        loss = f"{row['loss']:.4f}" if isinstance(row["loss"], float) else str(row["loss"] or "")
        rate = f"{row['tokens_per_s']:.0f}" if row["tokens_per_s"] else ""
        notes = "; ".join(filter(None, [row["mark"], row["detail"], row["problem"]]))
        print(f"{row['run']:32} {row['state']:12} {begun:17} {row['steps'] or '':>7} {loss:>8} {rate:>9}  {notes}")
        if row["traceback"]:
            print("\n".join(f"    {line}" for line in row["traceback"].strip().splitlines()[-6:]))


def _row(entry: Entry) -> dict[str, Any]:
    facts = entry.record.facts if entry.record else {}
    outcome = facts.get("outcome", {})
    if "steps" not in outcome:  # still running, or it left no last word: its metrics say how far it came
        outcome = attempt(read_outcome, entry.run.metrics, [])
    good = mark(entry.run)
    return {
        "run": f"{entry.run.path.parent.name}/{entry.run.path.name}",
        "state": entry.state.how,
        "detail": entry.state.detail,
        "traceback": entry.state.traceback,
        "begun": facts["clock"]["time"] if facts else None,
        "steps": outcome.get("steps"),
        "loss": outcome.get("loss"),
        "tokens_per_s": (outcome.get("tokens_per_s") or {}).get("p50"),
        "mark": {True: "good", False: "not good", None: ""}[good],
        "problem": entry.problem,
    }


def _show(args: argparse.Namespace) -> None:
    run = find_run(args.runs_dir, args.run)
    if args.field:
        value: Any = run.facts
        for name in args.field.split("."):
            if not isinstance(value, dict) or name not in value:
                known = ", ".join(value) if isinstance(value, dict) else "nothing"
                raise InputError(f"{run.label} has no {args.field}: there is {known}")
            value = value[name]
        print(value if isinstance(value, str) and not args.json else json.dumps(value, indent=1))
        return
    if args.json:
        ranks = {rank: record.facts for rank, record in run.ranks.items()}
        print(json.dumps({"run": run.label, "kind": run.kind, "state": run.state.how, "ranks": ranks}, indent=1))
        return
    print(f"{run.label}: a {run.kind} run, {run.state.how}{', ' + run.state.detail if run.state.detail else ''}")
    outcome = run.facts.get("outcome", {})
    for name in ("steps", "loss", "heldout_loss", "accepted_length", "tokens_per_s", "seconds", "peak_rss_bytes"):
        if outcome.get(name) is not None:
            print(f"  outcome.{name:32} {json.dumps(outcome[name])}")
    for field, fact in table(run.facts).items():
        if fact.unknown:
            print(f"  {field:40} unknown: {fact.unknown}")
        elif not field.startswith(("switches.", "outcome.")) and fact.value not in ("as installed", "null"):
            print(f"  {field:40} {fact.value}{f'  ({fact.note})' if fact.note else ''}")
    for change in among_ranks(run):
        print(f"  rank {', '.join(map(str, change.ranks))} differs: {change.field} {change.was} -> {change.is_}")
    if run.state.traceback:
        print(run.state.traceback)


def _restore(args: argparse.Namespace) -> None:
    done = restore(find_run(args.runs_dir, args.run), args.folder)
    if args.json:
        print(json.dumps({**dataclasses.asdict(done), "folder": str(done.folder)}, indent=1))
        return
    print(f"{done.folder} holds")
    print("\n".join(f"  {line}" for line in done.made))
    if done.missing:
        print("it lacks")
        print("\n".join(f"  {line}" for line in done.missing))
    print("to rebuild the environment (also in rebuild.sh):")
    print("\n".join(f"  {line}" for line in done.commands))


if __name__ == "__main__":
    sys.exit(main())
