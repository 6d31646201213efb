"""A recorded process as a flat table, field -> short text, so that comparing two runs is comparing two tables.

Only what can tell two runs apart is in it: texts of files, and figures that differ from second to second, are not.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from draftsmith.provenance.facts import attempt, why_unknown
from draftsmith.provenance.gpu import SERIOUS

ABSENT = "(not there)"
TENANT_BYTES = 1 << 30
"""Memory of other processes on a GPU below this is drivers and display."""


@dataclass(frozen=True)
class Fact:
    """value is compared; note is only shown; unknown says why there is no value; parts: name -> digest, where the value
    stands for many files and those that differ are to be named."""

    value: str = ""
    note: str = ""
    unknown: str | None = None
    parts: tuple[tuple[str, str], ...] = ()


Table = dict[str, Fact]


def table(facts: dict[str, Any]) -> Table:
    """Every field of a process.  A section that is unknown gives one field with its name."""
    out: Table = {}
    makers = {
        "target": _target, "data": _data, "config": _config, "patches": _patches, "packages": _packages, "code": _code,
        "python": _python, "torch": _torch, "libraries": _libraries, "switches": _switches,
        "environment": _environment, "built": _built, "gpu": _gpu, "host": _host, "process": _process,
        "outcome": _outcome,
    }  # fmt: skip
    for section, make in makers.items():
        if section not in facts:
            continue
        reason = why_unknown(facts[section])
        if reason is not None:
            out[section] = Fact(unknown=reason)
            continue
        prefix = facts["python"].get("prefix", "") if isinstance(facts.get("python"), dict) else ""
        made = attempt(make, facts[section], facts)  # a record that was damaged later is unknown too
        if why_unknown(made):
            out[section] = Fact(unknown=f"its record is damaged ({made['unknown']})")
            continue
        for name, fact in made.items():
            value, note = (text.replace(prefix, "{env}") if prefix else text for text in (fact.value, fact.note))
            out[f"{section}.{name}"] = Fact(value, note, fact.unknown, fact.parts)
    return out


def short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def fact(value: Any, note: str = "") -> Fact:
    """A JSON value as a field."""
    reason = why_unknown(value)
    if reason is not None:
        return Fact(unknown=reason)
    return Fact(value if isinstance(value, str) else json.dumps(value, sort_keys=True), note)


def leaves(value: Any, prefix: str = "") -> Table:
    """A tree of JSON as dotted fields; lists are one field."""
    if isinstance(value, dict) and why_unknown(value) is None:
        out: Table = {}
        for key, inner in value.items():
            out.update(leaves(inner, f"{prefix}.{key}" if prefix else str(key)))
        return out
    return {prefix: fact(value)}


def digest_of(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _target(target: Any, facts: Any) -> Table:
    weights = target["weights"]
    names = ", ".join(target["tokenizer"])
    return {
        "weights": Fact(f"{short(weights['sha256'])}", f"{len(weights['files'])} files, {weights['bytes']:,} bytes"),
        "config": Fact(short(target["config"])),
        "generation_config": Fact(short(target["generation_config"])),
        "chat_template": Fact(short(target["chat_template"])),
        "tokenizer": Fact(digest_of(target["tokenizer"]), names),
        "tokenizer_config": Fact(short(target["tokenizer_config"])),
        "folder": Fact(target["folder"]),
    }


def _data(data: Any, facts: Any) -> Table:
    size = f"{data['documents']:,} documents, {data['tokens']:,} tokens ({data['supervised']:,} supervised)"
    return {
        "store": Fact(f"{size}, content {short(data['sha256'])}", f"generation {data['generation']}"),
        "tokenizer": Fact(short(data["tokenizer"])),
        "folder": Fact(data["folder"]),
    }


def _config(config: Any, facts: Any) -> Table:
    return leaves(config)


def _patches(patches: Any, facts: Any) -> Table:
    out = {name: Fact(short(p.get("code") or digest_of(p)), p["by"]) for name, p in patches["replaced"].items()}
    return out | {f"{name} (not audited)": Fact(unknown=why) for name, why in patches["not_audited"].items()}


def _packages(packages: Any, facts: Any) -> Table:
    out: Table = {}
    for name, package in packages["installed"].items():
        origin = package["origin"] or {}
        editable = origin.get("dir_info", {}).get("editable")
        commit = origin.get("vcs_info", {}).get("commit_id", "")
        source = f" from {origin['url']}{'@' + commit if commit else ''}" if origin.get("url") and not editable else ""
        out[name] = Fact(package["version"] + source + (" (editable)" if editable else ""))
        files = package["files"]
        if not files["recorded"]:
            out[f"files.{name}"] = Fact("not listed by its installer")
        elif files["changed"] or files["missing"]:
            parts = [f"{f} ({short(c['sha256'])})" for f, c in sorted(files["changed"].items())]
            parts += [f"{f} (missing)" for f in sorted(files["missing"])]
            more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
            text = f"{len(parts)} not as installed: {', '.join(parts[:3])}{more}"
            out[f"files.{name}"] = Fact(f"{text} [{digest_of([files['changed'], files['missing']])}]")
        else:
            out[f"files.{name}"] = Fact("as installed")
    for name, digest in packages["startup"].items():
        out[f"startup.{name}"] = Fact(short(digest))
    out["shadowed"] = Fact(", ".join(packages["shadowed"]) or "none")
    return out


def _code(code: Any, facts: Any) -> Table:
    out: Table = {}
    for name, project in code.items():
        reason = why_unknown(project)
        if reason is not None:
            out[name] = Fact(unknown=reason)
        elif not project["git"]:
            out[f"{name}.tree"] = Fact(short(project.get("tree")), project["why"])
        else:
            edited = project["edited"]
            untracked = {path: file["sha256"] for path, file in project["untracked"].items()}
            out[f"{name}.commit"] = Fact(short(project["commit"]), f"branch {project['branch']}")
            out[f"{name}.edits"] = _files("uncommitted edits in", edited)
            out[f"{name}.untracked"] = _files("untracked:", untracked)
    return out


def _files(what: str, digests: dict[str, str]) -> Fact:
    if not digests:
        return Fact("none")
    value = f"{what} {len(digests)} file{'' if len(digests) == 1 else 's'} [{digest_of(digests)}]"
    return Fact(value, parts=tuple(digests.items()))


def _python(python: Any, facts: Any) -> Table:
    return {
        "version": Fact(python["version"], python["build"]),
        "optimize": fact(python["optimize"]),
        "path": Fact(" ".join(python["path"][1:]), f"after {python['path'][0]!r}, which depends on the command"),
        "executable": Fact(python["executable"]),
    }


def _torch(torch: Any, facts: Any) -> Table:
    names = ("version", "cuda", "git")
    build = ", ".join(f"{name} {torch[name]}" for name in names if torch[name])
    return {"build": Fact(build), "file": Fact(torch["file"])}


def _libraries(libraries: Any, facts: Any) -> Table:
    return {
        name: fact(lib) if why_unknown(lib) else Fact(short(lib["sha256"]), lib["path"])
        for name, lib in libraries.items()
    }


def _switches(switches: Any, facts: Any) -> Table:
    out: Table = {}
    for name, values in switches.items():
        out.update({name: Fact("not loaded")} if values is None else leaves(values, name))
    return out


def _environment(environment: Any, facts: Any) -> Table:
    if why_unknown(environment["at_exec"]):
        return {name: Fact(value) for name, value in environment["now"].items()}
    now = {**environment["at_exec"], **environment["now"]}
    changed = {name: " (set while importing)" for name in environment["now"]}
    return {name: Fact(value, changed.get(name, "")) for name, value in now.items() if value is not None}


def _built(built: Any, facts: Any) -> Table:
    return {name: fact(value) for name, value in built.items() if name != "pins"}


def _host(host: Any, facts: Any) -> Table:
    gib = round(host["memory_bytes"] / 2**30)
    limit = host["cgroup"]["memory_bytes"]
    return {
        "name": Fact(host["name"]),
        "cpu": Fact(f"{host['cpu']} ({host['machine']})"),
        "cpus": Fact(f"{host['cpus_usable']} usable of {host['cpus']}"),
        "cpu_limit": fact(host["cgroup"]["cpus"]),
        "memory": Fact(f"{gib} GiB"),
        "memory_limit": Fact(f"{limit / 2**30:.1f} GiB" if limit else "none"),
        "kernel": Fact(host["kernel"]),
        "glibc": Fact(host["glibc"]),
    }


def _gpu(gpu: Any, facts: Any) -> Table:
    devices = gpu["devices"]
    if not devices:
        return {"name": Fact("none", gpu.get("why", "")), "driver": fact(gpu["driver"] or "none")}
    samples = facts.get("gpu_samples")
    samples = samples if isinstance(samples, list) and len(samples) == len(devices) else [{}] * len(devices)
    own = "the same on every card"
    rows = {
        "name": [d["name"] for d in devices],
        "mig": [d["mig"] for d in devices],
        "ecc": [d["ecc"] for d in devices],
        "power_limit": [_watts(d["power_limit_mw"]) for d in devices],
        "clock_max": [d["clock_max_mhz"] for d in devices],
        "clock_application": [d["clock_application_mhz"] for d in devices],
        "pcie": [f"x{d['pcie_width']} of generation {d['pcie_generation_max']}" for d in devices],
        "nvlinks": [d["nvlinks_active"] for d in devices],
        "compute_mode": [d["compute_mode"] for d in devices],
        "persistence": [d["persistence"] for d in devices],
        "throttled": [_throttled(d, s) for d, s in zip(devices, samples, strict=True)],
        "others": [_tenants(d) for d in devices],
        "uuid": [d["uuid"] for d in devices],
    }
    out = {name: _over_cards(values, own) for name, values in rows.items()}
    out["driver"] = fact(gpu["driver"] if why_unknown(gpu["driver"]) else f"{gpu['driver']} (CUDA {gpu['cuda']})")
    return out


def _over_cards(values: list[Any], own: str) -> Fact:
    """One field for all cards: one value and how many cards, or each card's."""
    for value in values:
        for inner in value if isinstance(value, list) else [value]:
            if why_unknown(inner):
                return Fact(unknown=why_unknown(inner))
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if len(set(texts)) == 1:
        return Fact(texts[0] if len(texts) == 1 else f"{len(texts)} x {texts[0]}", own if len(texts) > 1 else "")
    return Fact(", ".join(f"{i}: {text}" for i, text in enumerate(texts)))


def _watts(milliwatts: Any) -> Any:
    return f"{milliwatts / 1000:.0f} W" if isinstance(milliwatts, int) else milliwatts


def _throttled(device: Any, sample: Any) -> Any:
    """Serious reasons seen at the start or by the heartbeat."""
    if why_unknown(device["throttle"]) or isinstance(device["throttle"], str):
        return device["throttle"]
    during = sample.get("throttle", [])
    return ", ".join(sorted(SERIOUS.intersection([*device["throttle"], *during]))) or "no"


def _tenants(device: Any) -> Any:
    """Memory that others hold."""
    used = device["others_bytes"]
    if not isinstance(used, int):
        return used
    return "none" if used < TENANT_BYTES else f"{used / 2**30:.0f} GiB of its memory"


def _process(process: Any, facts: Any) -> Table:
    return {name: fact(process.get(name)) for name in ("pid", "boot_id", "command", "folder")}


def _outcome(outcome: Any, facts: Any) -> Table:
    """What went wrong on the way; losses and rates are results, which the verdict lists apart."""
    counters = facts.get("counters")
    known = counters if isinstance(counters, dict) and why_unknown(counters) is None else {}
    return {
        "fallbacks": Fact("; ".join(outcome.get("fallbacks") or []) or "none"),
        "graphs": fact(known.get("graphs", 0)),
        "graph_breaks": fact(known.get("graph_breaks", 0)),
    }
