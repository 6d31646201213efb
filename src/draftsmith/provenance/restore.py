"""What a run had, made again in a new folder; nothing that exists is touched.

source/<project>/   each project at the run's commit, with its uncommitted edits and untracked files
constraints.txt     every package at its version
patched/            files of packages that were not as installed, with the text they had
config.json         the resolved config
compile_cache/      the compiled kernels, if the run bundled them
environment.sh      the variables that can matter
rebuild.sh          the commands that make an environment of it; they are printed, not run
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole
from draftsmith.provenance.facts import why_unknown
from draftsmith.provenance.manifest import RunRecord
from draftsmith.provenance.rules import FOLDED, NEITHER, rule_for
from draftsmith.provenance.source import git
from draftsmith.provenance.view import short
from draftsmith.rundir import RunDir

OWN = ("HOME", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "PYTHONPATH")
"""Variables that belong to the person and the machine and are not set again."""


@dataclass(frozen=True)
class Restored:
    """What restore made: what there is, what is missing from it, and the commands that rebuild the environment."""

    folder: Path
    made: tuple[str, ...]
    missing: tuple[str, ...]
    commands: tuple[str, ...]


def restore(record: RunRecord, folder: Path) -> Restored:
    """Raises InputError if the folder exists, or the source cannot be had any more."""
    if folder.exists():
        raise InputError(f"{folder} exists: restore only writes into a new folder")
    facts = record.facts
    for section in ("code", "packages", "config"):
        reason = why_unknown(facts[section])
        if reason:
            raise InputError(f"{record.label} cannot be restored: its {section} is unknown ({reason})")
    made: list[str] = []
    missing: list[str] = []
    try:
        with folder_written_whole(folder) as new:
            for name, project in facts["code"].items():
                _source(name, project, new, made, missing)
            _packages(facts["packages"]["installed"], new, made, missing)
            (new / "config.json").write_text(json.dumps(facts["config"], indent=2) + "\n", encoding="utf-8")
            made.append("config.json: the resolved config")
            bundle = RunDir(record.path).compile_cache
            if bundle.is_dir():
                shutil.copytree(bundle, new / "compile_cache")
                made.append("compile_cache/: the compiled kernels")
            else:
                missing.append("the run bundled no compile cache: the first start compiles")
            (new / "environment.sh").write_text(_environment(facts["environment"]), encoding="utf-8")
            made.append("environment.sh: the variables that can matter")
            commands = _commands(facts, folder, new)
            script = "\n".join(["#!/bin/sh", "set -eu", *commands, ""])
            (new / "rebuild.sh").write_text(script, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error}") from error
    return Restored(folder, tuple(made), tuple(missing), tuple(commands))


def _source(name: str, project: dict[str, Any], new: Path, made: list[str], missing: list[str]) -> None:
    if why_unknown(project) or not project["git"]:
        missing.append(f"source of {name}: {why_unknown(project) or project['why']}")
        return
    target, commit = new / "source" / name, project["commit"]
    if commit is None:
        missing.append(f"source of {name}: it had no commit yet")
        return
    if not Path(project["root"]).is_dir():
        raise InputError(f"the source of {name} is not at {project['root']} any more: bring its repository back there")
    try:
        git(new, "clone", "-q", "--no-hardlinks", "--no-checkout", project["root"], str(target))
        try:
            git(target, "checkout", "-q", "--detach", commit)
        except RuntimeError:  # a commit that no branch holds any more is not cloned
            git(target, "-c", "uploadpack.allowAnySHA1InWant=true", "fetch", "-q", project["root"], commit)
            git(target, "checkout", "-q", "--detach", commit)
    except RuntimeError as error:
        raise InputError(f"commit {commit} of {name} cannot be had from {project['root']}: {error}") from error
    said = f"source/{name}/ at commit {short(commit)}"
    if project["diff"]:
        patch = new / f"{name}.patch"
        patch.write_bytes(project["diff"].encode("utf-8", "surrogateescape"))
        try:
            git(target, "apply", "--whitespace=nowarn", "--binary", str(patch))
            said += f", with its uncommitted edits ({patch.name})"
        except RuntimeError as error:
            missing.append(f"the edits of {name} do not apply ({error}): see {patch.name}")
        if hashlib.sha256(patch.read_bytes()).hexdigest() != project["diff_sha256"]:
            missing.append(f"{patch.name} is not exact: secrets in it were masked when it was recorded")
    elif project["diff_sha256"]:
        missing.append(f"the edits of {name}: {project['diff_chars']} characters were too many to keep")
    for path, file in project["untracked"].items():
        if file["text"] is None:
            missing.append(f"{name}: {path} was too large to keep")
            continue
        if not _write_inside(target, path, file["text"]):
            missing.append(f"{name}: {path} lies outside of the source's folder")
    made.append(said + (f", {len(project['untracked'])} untracked files" if project["untracked"] else ""))


def _write_inside(folder: Path, path: str, text: str) -> bool:
    """Write `path` below `folder`; False, and nothing written, if it would lie elsewhere."""
    target = (folder / path).resolve()
    if not target.is_relative_to(folder.resolve()):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode("utf-8", "surrogateescape"))
    return True


def _packages(installed: dict[str, Any], new: Path, made: list[str], missing: list[str]) -> None:
    lines = []
    for name, package in sorted(installed.items()):
        origin = package["origin"] or {}
        if origin.get("dir_info", {}).get("editable"):
            continue
        commit = origin.get("vcs_info", {}).get("commit_id")
        if commit:
            lines.append(f"{name} @ {origin['vcs_info'].get('vcs', 'git')}+{origin['url']}@{commit}")
        elif origin.get("url"):
            lines.append(f"{name} @ {origin['url']}")
        else:
            lines.append(f"{name}=={package['version']}")
        for path, file in package["files"].get("changed", {}).items():
            if file["text"] is None:
                missing.append(f"{name}: the text of {path}, which was edited in place, was too large to keep")
                continue
            if _write_inside(new / "patched", path, file["text"]):
                made.append(f"patched/{path}: it was not as {name} installs it")
            else:  # a script of the environment, which RECORD names by a path that climbs out of site-packages
                missing.append(f"{name}: {path} was edited in place, outside of site-packages")
    (new / "constraints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    made.append(f"constraints.txt: {len(lines)} packages")


def _environment(environment: Any) -> str:
    if why_unknown(environment) or why_unknown(environment["at_exec"]):
        return "# the environment was not recorded\n"
    lines = []
    for name, value in sorted(environment["at_exec"].items()):
        if rule_for(f"environment.{name}")[1].effect in (FOLDED, NEITHER) or name in OWN:
            continue
        line = f"export {name}={shlex.quote(value)}"
        lines.append(f"# masked, set it by hand: {name}" if "<masked " in value else line)
    return "\n".join(lines) + "\n"


def _commands(facts: dict[str, Any], folder: Path, new: Path) -> list[str]:
    version = facts["python"]["version"].rpartition(".")[0] if "version" in facts["python"] else "3"
    torch = facts["packages"]["installed"].get("torch", {}).get("version", "")
    build = torch.partition("+")[2]
    note = f"  # torch is the {build} build: pip must be pointed at where that lies" if build else ""
    commands = [
        f"cd {shlex.quote(str(folder.absolute()))}",
        f"python{version} -m venv venv",
        f"venv/bin/python -m pip install --no-deps -r constraints.txt{note}",
    ]
    if (new / "source").is_dir():
        commands += [
            f"venv/bin/python -m pip install --no-deps -e source/{p.name}"
            for p in sorted((new / "source").iterdir())
            if (p / "pyproject.toml").is_file() or (p / "setup.py").is_file()
        ]
    if (new / "patched").is_dir():
        commands.append(f"cp -r patched/. venv/lib/python{version}/site-packages/")
    commands.append(". ./environment.sh")
    if (new / "compile_cache").is_dir():
        commands.append('export TORCHINDUCTOR_CACHE_DIR="$PWD/compile_cache"')
    return [*commands, "venv/bin/draftsmith train config.json --new-attempt"]
