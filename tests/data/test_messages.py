"""Files and shapes: what can be read is read the same from all of them, what cannot is named."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.data.messages import (
    BadLine,
    Chunk,
    Leniency,
    conversation_key,
    normalise,
    parse_conversation,
    parse_lines,
    parse_prompt,
    read_chunks,
    read_prompts,
)
from draftsmith.errors import InputError

OPENAI = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def entries(path, size=64, start=0):
    return [v for chunk in read_chunks(path, "x", start, size) for _, v in parse_lines(chunk)]


def test_every_shape_is_the_same_conversation():
    shapes = [
        {"messages": OPENAI},
        {"conversations": SHAREGPT},
        {"conversations": SHAREGPT[1:], "system": "s"},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in OPENAI]},
        {"messages": [{**m, "tool_calls": None, "weight": None} for m in OPENAI], "tools": None},
    ]
    assert all(normalise(shape) == (OPENAI, []) for shape in shapes)
    assert normalise({"prompt": "q"}) == ([OPENAI[1]], [])
    assert normalise({"messages": OPENAI, "tools": '[{"type": "function"}]'})[1] == [{"type": "function"}]


@pytest.mark.parametrize(
    "value",
    [
        {"conversations": []},
        {"conversations": [{"from": "robot", "value": "x"}]},
        {"conversations": [{"from": "human"}]},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user"}]},
        {"messages": OPENAI, "tools": "{"},
        {"messages": OPENAI, "tools": [1]},
        {"messages": OPENAI, "generated": [1]},
        {"messages": OPENAI, "generated": [9]},
        {"prompt": None},
        {"messages": ["a"], "system": "s"},
        {"messages": OPENAI, "completion_tokens": float("inf")},
        {"messages": OPENAI, "tools": "[" * 200_000},
    ],
    ids=lambda value: str(value)[:99],
)
def test_what_is_no_conversation(value):
    with pytest.raises(BadLine, match="not a conversation"):
        parse_conversation(value, 1)


HALF = "x\ud800"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": HALF}}


@pytest.mark.parametrize(
    "more",
    [
        {"id": HALF},
        {"category": HALF},
        {"tools": [{"type": "function", "function": {"name": HALF}}]},
        {"tools": "[" * 200_000},
        {"tools": '[{"a":' + "[" * 100 + "]" * 100 + "}]"},
        {"system": "s", "messages": ["a"]},
        {"messages": [*OPENAI[:2], {**OPENAI[2], "reasoning_content": HALF}, OPENAI[1]]},
        {"messages": [*OPENAI[:2], {**OPENAI[2], "tool_calls": [CALL]}, OPENAI[1]]},
        {"messages": [{**OPENAI[1], "name": HALF}]},
        '{"prompt": "b", "n": ' + "1" * 5000 + "}",
    ],
    ids=lambda more: str(more)[:99],
)
def test_a_prompt_that_cannot_be_used_is_a_bad_line(tmp_path, more):
    path = tmp_path / "p.jsonl"
    bad = more if isinstance(more, str) else json.dumps({"messages": OPENAI[:2], **more})
    path.write_text('{"prompt": "a"}\n' + bad + '\n{"prompt": "c"}\n')
    assert [p.id for p in read_prompts(path, max_bad_lines=1)] == ["1", "3"]
    with pytest.raises(InputError, match=r"p\.jsonl:2: not "):
        read_prompts(path)


def test_how_deep_a_prompt_may_be_does_not_depend_on_the_process(tmp_path):
    path = tmp_path / "p.jsonl"
    for levels in (99, 100, 101, 600):
        tools = [{"a": json.loads("[" * (levels - 1) + "]" * (levels - 1))}]
        path.write_text(json.dumps({"messages": OPENAI[:2], "tools": tools}) + "\n")
        for limit in (1000, 5000):
            before = sys.getrecursionlimit()
            sys.setrecursionlimit(limit)
            try:
                if levels <= 100:
                    assert len(read_prompts(path)) == 1
                else:
                    with pytest.raises(InputError, match="nested more than 100 levels deep"):
                        read_prompts(path)
            finally:
                sys.setrecursionlimit(before)


def test_files_of_every_kind_hold_the_same(tmp_path):
    rows = [{"id": f"r{i}", "prompt": "é" * i + '"]},[{'} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "a.json").write_text("\n " + json.dumps(rows, ensure_ascii=False, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=70)
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert entries(tmp_path / name) == rows
        assert [p.id for p in read_prompts(tmp_path / name)] == [r["id"] for r in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_reading_goes_on_where_it_was_left(tmp_path, name):
    rows = [{"id": f"r{i}", "prompt": "x" * (i % 37)} for i in range(200)]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if name.endswith("json") else "\n".join(json.dumps(r) for r in rows) + "\n")
    chunks = list(read_chunks(path, "x", 0, 500))
    assert len(chunks) > 5
    numbered = [n for c in chunks for n, _ in parse_lines(c)]
    assert numbered == list(range(1, 201))
    for i, chunk in enumerate(chunks[:-1]):
        assert list(read_chunks(path, "x", chunk.position, 500)) == chunks[i + 1 :]


def test_a_json_list_is_read_a_piece_at_a_time(tmp_path):
    path = tmp_path / "big.json"
    big = [{"prompt": "x" * 3_000_000}, {"prompt": "[" * 1000}, {"prompt": "end"}]
    path.write_text(json.dumps(big))
    assert entries(path) == big
    path.write_text(json.dumps(big)[:-20])
    with pytest.raises(InputError, match=r"big\.json: entry 3: not JSON"):
        entries(path)
    for odd in ("1" * 5000, "[" * 200_000):
        path.write_text('[{"a": 1}, ' + odd + "]")
        with pytest.raises(InputError, match=r"big\.json: entry 2: not JSON"):
            entries(path)
    path.write_text('{"a": 1}')
    with pytest.raises(InputError, match="must hold a JSON list"):
        entries(path)
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(InputError, match="is not a Parquet file"):
        entries(tmp_path / "no.parquet")


def test_bad_lines_are_counted_and_stop_past_the_limit(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{broken\n{"prompt": "\xff"}\n[]\n{"prompt": "b"}\n{"prompt": "  "}\n')
    assert [p.id for p in read_prompts(path, max_bad_lines=4)] == ["1", "5"]
    said = capsys.readouterr().err.splitlines()
    assert [x.split(": ")[1] for x in said] == [f"{path}:{n}" for n in (2, 3, 4, 6)]
    with pytest.raises(InputError, match=r"p\.jsonl:6: .*empty \(4 bad lines, generate\.max_bad_lines is 3\)"):
        read_prompts(path, max_bad_lines=3)
    with pytest.raises(InputError, match=r"p\.jsonl:2: not JSON.*generate\.max_bad_lines lets"):
        read_prompts(path)
    with pytest.raises(InputError, match="x; tokenize.max_bad_lines"):
        Leniency(0, "tokenize.max_bad_lines").bad("x")


def test_deep_nesting_and_lone_surrogates_are_bad_lines(tmp_path):
    deep = Chunk("f", 1, b'{"a":' * 200_000, 0)
    ((_, value),) = parse_lines(deep)
    assert isinstance(value, BadLine) and "f:1: not JSON" in str(value)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "\\ud800 alone"}\n')
    with pytest.raises(InputError, match=r"p\.jsonl:1: .*lone surrogate"):
        read_prompts(path)


def test_a_key_names_what_is_said():
    key = conversation_key(OPENAI)
    assert key == conversation_key([dict(reversed(m.items())) for m in OPENAI]) and len(key) == 16
    assert key != conversation_key(OPENAI[1:]) != conversation_key(OPENAI, [{"type": "function"}])
    assert conversation_key([{"role": "user", "content": "\ud800"}])


def test_which_turns_are_the_targets_to_write():
    tool = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{}]},
        {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    assert parse_prompt({"messages": tool}, 1, "regenerate").regenerate == (3, 5)
    assert parse_prompt({"messages": tool[:5]}, 1, "last").regenerate == (5,)
    begun = parse_prompt({"messages": [tool[3], *tool]}, 1, "regenerate")
    assert begun.messages[0]["role"] == "user", "an answer to nothing is no context"
    assert parse_prompt({"prompt": "x", "id": 0}, 5, "last").id == "0"
    assert parse_prompt({"prompt": "x"}, 5, "last").id == "5"
