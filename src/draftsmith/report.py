"""`draftsmith report RUN [RUN_B]`: a run, or two side by side, as one HTML file that needs nothing else.

Reads only the run folder, also while it is being written, and where torch cannot be imported.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.files import write_text
from draftsmith.provenance.diff import diff
from draftsmith.provenance.heartbeat import State, run_state
from draftsmith.provenance.history import last_good
from draftsmith.provenance.manifest import RunRecord, find_run
from draftsmith.provenance.outcome import percentiles
from draftsmith.provenance.verdict import Verdict
from draftsmith.provenance.view import table
from draftsmith.report_plots import Series, draw, last_slots
from draftsmith.rundir import RunDir, attempts
from draftsmith.tracking import read_metrics
from draftsmith.train.floor import LABELS, from_line, together

ENVIRONMENT = {
    "code": "code", "python": "Python", "packages": "packages", "torch": "torch", "libraries": "native libraries",
    "patches": "functions replaced at run time", "gpu": "GPU", "host": "host", "environment": "environment variables",
    "switches": "effective switches", "compile_cache": "compile caches", "built": "built model", "config": "config",
}  # fmt: skip
TITLES = {
    "loss": "Loss", "accuracy": "Accuracy", "accuracy_by_slot": "Accuracy by slot", "throughput": "Throughput",
    "time_shares": "Time shares", "accepted_length": "Accepted length over training", "memory": "Memory",
}  # fmt: skip
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;border-bottom:1px solid #ddd;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}
td.n{font-variant-numeric:tabular-nums}tr.differs td{background:#fff3e0}.verdict{font-weight:600}
pre{background:#f6f6f6;padding:.8rem;overflow:auto;font-size:13px}img{max-width:100%}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1rem}figure{margin:0}
td.v{word-break:break-all;font-size:13px}
"""


@dataclass(frozen=True)
class Shown:
    """One run as the report shows it."""

    run: RunDir
    series: Series
    state: State
    record: RunRecord | None
    problem: str
    """Why there is no record."""


def read(runs_dir: Path, name: str) -> Shown:
    """NAME, NAME/attempt_N or a run folder.  Raises InputError if there is no such run; one without a usable manifest
    is shown without what that would tell."""
    record, problem = None, ""
    try:
        record = find_run(runs_dir, name)
    except InputError as error:
        problem = str(error)
    folder = record.path if record else _folder(runs_dir, name)
    if folder is None:
        raise InputError(problem)
    if folder.is_file():
        raise InputError(f"{folder} is a single manifest: a report needs a run folder")
    run = RunDir(folder)
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in read_metrics(run.metrics) if run.metrics.is_file() else []:
        lines.setdefault(str(line.get("kind")), []).append(line)
    label = f"{folder.absolute().parent.name}/{folder.name}"
    return Shown(run, Series(label, lines), run_state(run), record, problem)


def _folder(runs_dir: Path, name: str) -> Path | None:
    for folder in (Path(name), runs_dir / name):
        if folder.is_dir() and (folder.name.startswith("attempt_") or (folder / "metrics.jsonl").is_file()):
            return folder.absolute()
        if folder.name and (found := attempts(folder.parent, folder.name)):
            return found[-1].path.absolute()
    return None


def against(shown: Shown, other: Shown | None) -> Verdict | str:
    """What changed from `other`, else from the last good run; a sentence where that cannot be told."""
    try:
        if shown.record is None:
            return f"cannot tell what changed: {shown.problem}"
        if other is not None:
            return (
                f"cannot tell what changed: {other.problem}"
                if other.record is None
                else diff(other.record, shown.record)
            )
        good = last_good(shown.run.path.absolute().parents[1], shown.record)
        if good is None:
            return "cannot tell what changed: there is no last good run of the same target, geometry and hardware"
        return diff(good, shown.record)
    except InputError as error:
        return f"cannot tell what changed: {error}"


def numbers(shown: Shown) -> dict[str, str]:
    """The figures of a run, ready to read."""
    train, rates, held, accepted = (shown.series.lines.get(k, []) for k in ("train", "rate", "heldout", "accepted"))
    steady = rates[1:] or rates
    out = {"state": f"{shown.state.how}{', ' + shown.state.detail if shown.state.detail else ''}"}
    if shown.record is not None:
        out["begun"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown.record.begun))
    out["steps"] = str(train[-1]["step"]) if train else "none yet"
    if train:
        out["loss"], out["accuracy"] = _number(train[-1]["loss"]), _number(train[-1]["accuracy"])
    if held:
        out["held-out loss"], out["held-out accuracy"] = _number(held[-1]["loss"]), _number(held[-1]["accuracy"])
    if accepted:
        out["accepted length"] = _number(accepted[-1]["accepted_length"].get("pooled"))
    for key, name in (("rows_per_s", "rows/s"), ("tokens_per_s", "tokens/s")):
        if found := percentiles([float(line[key]) for line in steady if key in line]):
            out[f"{name}, median (10th to 90th)"] = f"{found['p50']:.4g} ({found['p10']:.4g} to {found['p90']:.4g})"
    if rates:
        whole = together(map(from_line, rates))
        for part, label in LABELS.items():
            if whole.parts[part]:
                out[f"time: {label}"] = f"{whole.parts[part] / whole.wall:.1%}"
        for key, name in (("peak_rss_bytes", "peak memory, host"), ("peak_gpu_bytes", "peak memory, GPU")):
            if key in rates[-1]:
                out[name] = f"{rates[-1][key] / 2**30:.2f} GiB"
    for path in sorted(shown.run.evaluation.glob("*.json")):
        for result in _results(path):
            length = result.get("accepted_length", {}).get("pooled")
            out[f"evaluation {path.stem}, {result.get('drafter')}"] = f"accepted length {_number(length)}"
    return out


def _results(path: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8")).get("results", []))
    except (OSError, ValueError, AttributeError):
        return []  # being written, or of another kind


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-" if value is None else str(value)


def page(runs: Sequence[Shown], plots: dict[str, bytes]) -> str:
    """The HTML.  Its policy forbids the browser to load anything from elsewhere."""
    title = escape(" and ".join(r.series.label for r in runs))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head><body>',
            f"<h1>{title}</h1>",
            *_verdicts(runs),
            "<h2>Figures</h2>",
            *_columns([numbers(r) for r in runs], runs, "n"),
            *_plots(plots),
            "<h2>Accuracy by slot</h2>",
            *_columns([_slots(r) for r in runs], runs, "n"),
            "<h2>Data</h2>",
            *_columns([_fields(r, ("data",)) for r in runs], runs, "v"),
            "<h2>Environment</h2>",
            *_environment(runs),
            "</body></html>",
        ]
    )


def _verdicts(runs: Sequence[Shown]) -> Iterator[str]:
    asked: list[tuple[str, Shown, Shown | None]] = [("the last good run", run, None) for run in runs]
    if len(runs) == 2:
        asked.insert(0, (runs[0].series.label, runs[1], runs[0]))
    for number, (reference, run, other) in enumerate(asked):
        found = against(run, other)
        line = found if isinstance(found, str) else found.line
        yield f"<h2>{escape(run.series.label)} against {escape(reference)}</h2>"
        yield f'<p class="verdict">{escape(line)}</p>'
        if isinstance(found, Verdict):
            is_open = "" if number else " open"
            yield f"<details{is_open}><summary>in full</summary><pre>{escape(found.text())}</pre></details>"
    for run in runs:
        if run.state.traceback:
            yield f"<h2>{escape(run.series.label)} crashed</h2><pre>{escape(run.state.traceback)}</pre>"


def _columns(values: Sequence[dict[str, str]], runs: Sequence[Shown], kind: str) -> Iterator[str]:
    """A row for each name, a column for each run; rows that differ are marked."""
    names = dict.fromkeys(name for one in values for name in one)
    if not names:
        yield "<p>nothing recorded</p>"
        return
    yield "<table>"
    if len(runs) > 1:
        yield "<tr><th></th>" + "".join(f"<th>{escape(r.series.label)}</th>" for r in runs) + "</tr>"
    for name in names:
        cells = [one.get(name, "") for one in values]
        differs = ' class="differs"' if len(set(cells)) > 1 else ""
        shown = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell in cells)
        yield f"<tr{differs}><td>{escape(name)}</td>{shown}</tr>"
    yield "</table>"


def _plots(plots: dict[str, bytes]) -> Iterator[str]:
    yield '<h2>Plots</h2><div class="plots">'
    for name, png in plots.items():
        data = base64.b64encode(png).decode()
        image = f'<img alt="{TITLES[name]}" src="data:image/png;base64,{data}">'
        yield f"<figure><figcaption>{TITLES[name]}</figcaption>{image}</figure>"
    yield "</div>" if plots else "<p>nothing measured yet</p></div>"


def _slots(shown: Shown) -> dict[str, str]:
    return {f"slot {k}": _number(value) for k, value in enumerate(last_slots(shown.series), 1)}


def _fields(shown: Shown, sections: Sequence[str]) -> dict[str, str]:
    if shown.record is None:
        return {}
    found = {}
    for field, fact in table(shown.record.facts).items():
        if field.partition(".")[0] in sections and fact.value != "as installed":
            value = f"unknown: {fact.unknown}" if fact.unknown else fact.value
            found[field] = f"{value} ({fact.note})" if fact.note else value
    return found


def _environment(runs: Sequence[Shown]) -> Iterator[str]:
    for section, title in ENVIRONMENT.items():
        values = [_fields(r, (section,)) for r in runs]
        if any(values):
            yield f"<details><summary>{escape(title)} ({max(map(len, values))} fields)</summary>"
            yield from _columns(values, runs, "v")
            yield "</details>"


def report(runs: Sequence[Shown], output: Path) -> None:
    """Write the page, and its plots as PNG into the (later) run's plots/.  Raises InputError if that cannot be."""
    plots = draw([r.series for r in runs])
    beside = f"_against_{runs[0].series.label.replace('/', '_')}" if len(runs) > 1 else ""
    try:
        runs[-1].run.plots.mkdir(exist_ok=True)
        for name, png in plots.items():
            (runs[-1].run.plots / f"{name}{beside}.png").write_bytes(png)
        write_text(output, page(runs, plots))
    except OSError as error:
        raise InputError(f"cannot write the report: {error}: choose another place with --output") from error


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="draftsmith report", description="One HTML file about a run, or two side by side."
    )
    top.add_argument("run", metavar="RUN", help="NAME, NAME/attempt_N or a run folder")
    top.add_argument("other", metavar="RUN_B", nargs="?", help="a second, later run to show beside it")
    top.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the (later) run's folder")
    top.add_argument("--runs-dir", type=Path, default=Path("runs"), help="the folder of the runs (default: runs)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        runs = [read(args.runs_dir, name) for name in (args.run, args.other) if name is not None]
        output = args.output or runs[-1].run.report
        report(runs, output)
    except InputError as error:
        print(f"draftsmith report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OSError) as error:
        print(f"draftsmith report: a record is damaged ({type(error).__name__}: {error})", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
