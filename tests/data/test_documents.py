"""What becomes of conversations that are long, odd, partly the target's own, or shown otherwise later."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from conftest import TEMPLATE, make_config
from test_render import QWEN3
from test_tokenize import CHAT, RETOKENIZED, line, model_folder, run, say, slow, supervised_text, write_lines
from tokenizers import Tokenizer

from draftsmith.config import TargetConfig
from draftsmith.data import messages
from draftsmith.data.documents import agrees, cut_windows, most_characters
from draftsmith.data.spans import SpanEncoder, spans_to_tokens, token_bytes, token_spans
from draftsmith.data.store import Document, Store, describe
from draftsmith.data.tokenize import tokenize
from draftsmith.errors import InputError
from draftsmith.records import Conversation
from draftsmith.target.model import load_tokenizer

DROP = ("tokenize.length_cut=drop", "tokenize.heldout_fraction=0")


def left_out(store: Store) -> dict[str, int]:
    return {k: v for k, v in store.manifest.counts.items() if v and k not in ("read", "kept", "heldout")}


# ---- spans


@pytest.mark.parametrize("merges", [False, True])
def test_asking_for_a_boundary_equals_the_table_of_offsets(tmp_path, merges):
    """Random text of characters of one to four bytes, with special tokens; every pair of boundaries."""
    model_folder(tmp_path, merges=merges)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(0)
    pieces = ["four", "é", "—", "😀", "日本", "\n\n", "  ", "<|im_end|>", "<|im_start|>assistant\n", "a", "the answer"]
    kinds = set()
    for _ in range(200):
        text = "".join(rng.choice(pieces, size=int(rng.integers(1, 12))))
        encoding = tokenizer.encode(text, add_special_tokens=False)
        for _ in range(20):
            s, e = sorted(rng.integers(0, len(text) + 1, size=2).tolist())
            found = token_spans(encoding, [(s, e)])
            assert found == spans_to_tokens(encoding.offsets, [(s, e)]), (text, s, e)
            kinds.add(found is None)
        ends = [(i, i + 1) for i in range(len(text))]
        assert token_spans(encoding, ends) == spans_to_tokens(encoding.offsets, ends)
    assert kinds == {True, False}
    assert token_spans(tokenizer.encode(""), [(0, 0)]) == [(0, 0)]


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "NFKC"}])
@pytest.mark.parametrize("merges", [False, True])
def test_counting_bytes_equals_the_table_of_offsets(tmp_path, merges, normalizer):
    """Ids and spans, of random texts with characters that a normalizer changes."""
    model_folder(tmp_path, merges=merges)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_str(json.dumps({**content, "normalizer": normalizer}))
    assert (token_bytes(tokenizer) is None) == (normalizer == {"type": "NFKC"})
    encoder, rng = SpanEncoder(tokenizer), np.random.default_rng(0)
    pieces = [
        "four",
        "é",
        "e\u0301",
        "\ufb01",
        "😀",
        "日本",
        "\n\n",
        "  ",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "a",
    ]
    texts = ["", *("".join(rng.choice(pieces, size=int(rng.integers(1, 12)))) for _ in range(600))]
    spans = [[tuple(c) for c in np.sort(rng.integers(0, len(x) + 1, size=4)).reshape(2, 2).tolist()] for x in texts]
    kinds = set()
    for text, wanted, found in zip(texts, spans, encoder.encode(texts, spans), strict=True):
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert found.ids.tolist() == plain.ids and found.ids.dtype == np.int32
        assert found.spans == spans_to_tokens(plain.offsets, wanted), (text, wanted)
        kinds.add(found.spans is None)
    assert kinds == {True, False}


# ---- whose answers


def test_only_what_the_target_wrote_is_supervised(tmp_path):
    config, store = run(tmp_path, [line(0, CHAT, generated=[3])])
    assert supervised_text(store, config) == ["Yes — 4.<|im_end|>"]
    config, store = run(tmp_path / "none", [line(0, CHAT, generated=[]), line(1, CHAT[:2])], *DROP)
    assert left_out(store)["no_supervised_tokens"] == 1 and len(store) == 1


def test_an_answer_to_nothing_is_dropped_and_counted(tmp_path):
    begun = [say("system", "s"), say("assistant", "hello"), *CHAT]
    config, store = run(tmp_path, [line(0, begun), line(1, [say("assistant", "a")])], *DROP)
    assert store.document(0).tokens.tolist() == slow(load_tokenizer(config.target), [begun[0], *CHAT])[0]
    assert store.manifest.counts["leading_answers_dropped"] == 1 and store.manifest.counts["no_prompt"] == 1
    _, store = run(tmp_path / "own", [line(0, begun, generated=[5]), line(1, CHAT)], *DROP)
    assert store.manifest.counts["no_prompt"] == 1, "indices of generated turns are not shifted"


@pytest.mark.parametrize(
    ("finish", "said", "length", "right"),
    [
        ("stop", 10, 10, True), ("stop", 9, 10, True), ("stop", 8, 10, False), ("stop", 11, 10, False),
        ("length", 10, 10, True), ("length", 9, 10, False),
    ],
)  # fmt: skip
def test_the_stop_token_may_be_counted_or_not(finish, said, length, right):
    conversation = Conversation("x", tuple(CHAT[:2]), finish, said)
    assert agrees(length, conversation, 1) == right


def test_answers_with_another_number_of_tokens_are_counted(tmp_path):
    answer = len("Four.") + 1
    lines = [
        line(0, CHAT[:2], completion_tokens=answer), line(1, [say("user", "q"), CHAT[1]], completion_tokens=answer - 1),
        line(2, [say("user", "r"), CHAT[1]], completion_tokens=3), line(3, [say("user", "s"), CHAT[1]], completion_tokens=0),
    ]  # fmt: skip
    _, store = run(tmp_path, [{**x, "completion_tokens": x["completion_tokens"]} for x in lines])
    counts = store.manifest.counts
    assert (counts["token_count_known"], counts["retokenized_differently"]) == (3, 1)
    assert describe(store.manifest).endswith("1 of 3 answers have another number of tokens than generated")


# ---- history shown otherwise


PER_TURN = "tokenize.rewritten_history=per_turn"
THOUGHT = [
    say("user", "q"), {**say("assistant", "a"), "reasoning_content": "why"},
    say("user", "r"), {**say("assistant", "b"), "reasoning_content": "so"},
]  # fmt: skip


def test_one_document_an_answer_where_history_is_rewritten(tmp_path):
    messages = THOUGHT
    with pytest.raises(InputError, match="tokenize.rewritten_history=per_turn"):
        run(tmp_path, [line(0, messages)], template=QWEN3)
    config, store = run(tmp_path, [line(0, messages)], "tokenize.rewritten_history=per_turn", template=QWEN3)
    assert len(store) == 2 and store.manifest.counts["kept"] == 1
    assert supervised_text(store, config, 0) == ["<think>\nwhy\n</think>\n\na<|im_end|>"]
    assert supervised_text(store, config, 1) == ["<think>\nso\n</think>\n\nb<|im_end|>"]
    whole = load_tokenizer(config.target).decode(store.document(1).tokens.tolist())
    assert "why" not in whole and "\na<|im_end|>" in whole, "the history as the target saw it"
    config, store = run(tmp_path / "own", [line(0, messages, generated=[3])], "tokenize.rewritten_history=per_turn",
                        template=QWEN3)  # fmt: skip
    assert len(store) == 1 and "so" in supervised_text(store, config)[0]


def test_an_answer_by_itself_that_was_cut_teaches_no_stop(tmp_path):
    config, store = run(tmp_path, [line(0, THOUGHT, "length")], PER_TURN, template=QWEN3)
    found = [supervised_text(store, config, i)[0] for i in range(2)]
    assert [x.endswith("<|im_end|>") for x in found] == [True, False] and found[1].endswith("b")


def test_no_answer_of_the_targets_ends_no_file(tmp_path, monkeypatch):
    """In the middle of the file, in a chunk of its own."""
    monkeypatch.setattr(messages.read_chunks, "__defaults__", (0, 700))
    lines = [line(i, [say("user", f"q{i}"), say("assistant", "a")]) for i in range(20)]
    lines[10] = line(10, THOUGHT, generated=[])
    _, store = run(tmp_path, lines, PER_TURN, "tokenize.workers=0", "tokenize.heldout_fraction=0", template=QWEN3)
    counts = {k: v for k, v in store.manifest.counts.items() if v and k not in RETOKENIZED}
    assert counts == {"read": 20, "kept": 19, "no_supervised_tokens": 1} and len(store) == 19


def test_template_variables_reach_the_template(tmp_path):
    template = "{{ mood }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    config, store = run(tmp_path, [line(0, CHAT[:2])], "generate.chat_template_kwargs={mood: good}", template=template)
    assert load_tokenizer(config.target).decode(store.document(0).tokens.tolist()).startswith("good[user]")


# ---- long


def test_windows_hold_every_supervised_token_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, size = int(rng.integers(1, 400)), int(rng.integers(8, 64))
        cuts = np.sort(rng.choice(n + 1, size=min(n, 2 * int(rng.integers(1, 4))) // 2 * 2, replace=False))
        spans = tuple((int(s), int(e)) for s, e in cuts.reshape(-1, 2))
        document = Document(np.arange(n, dtype=np.int32), spans, "d", "c", True)
        seen: list[int] = []
        for window in cut_windows(document, size):
            assert len(window.tokens) <= size and window.spans and window.heldout and window.category == "c"
            assert np.array_equal(np.diff(window.tokens), np.ones(len(window.tokens) - 1))
            assert int(window.tokens[0]) % (size - size // 8) == 0
            seen += window.tokens[window.supervised()].tolist()
        assert seen == np.flatnonzero(document.supervised()).tolist()


def test_long_conversations_as_configured(tmp_path):
    long = [say("user", "q"), say("assistant", "y" * 300), say("user", "r"), say("assistant", "z")]
    config, store = run(tmp_path, [line(0, long)], "tokenize.max_tokens=100", "tokenize.long_documents=windows")
    assert store.manifest.counts["cut_into_windows"] == 1 and len(store) == 4
    assert [store.identity(i) for i in range(4)] == [f"c0#{i}" for i in range(4)]
    text = "".join(t for i in range(4) for t in supervised_text(store, config, i))
    assert text == "y" * 300 + "<|im_end|>z<|im_end|>"
    with pytest.raises(InputError, match=r"'c0' has 3\d\d tokens, a document holds 100 .*long_documents is refuse"):
        run(tmp_path / "no", [line(0, long)], "tokenize.max_tokens=100", "tokenize.long_documents=refuse")


def test_turns_out_of_reach_are_counted_and_make_no_others_answer_the_targets(tmp_path):
    far = [say("user", "q"), say("assistant", "GIVEN"), say("user", "r"), say("assistant", "word " * 100_000)]
    config, store = run(tmp_path, [line(0, far, generated=[3]), line(1, far, generated=[1, 3]), line(2, CHAT)], *DROP,
                        "train.row_tokens=256", merges=True)  # fmt: skip
    assert [store.identity(i) for i in range(len(store))] == ["c1", "c2"]
    assert supervised_text(store, config) == ["GIVEN<|im_end|>"]
    counts = left_out(store)
    assert (counts["no_supervised_tokens"], counts["shortened"], counts["token_count_known"]) == (1, 1, 1)


def test_a_message_of_ten_megabytes_is_left_out_before_it_is_tokenized(tmp_path):
    big = "word " * 2_000_000
    lines = [
        line(0, [say("user", "q"), say("assistant", big)]), line(1, [say("user", big), say("assistant", "a")]),
        line(2, [*CHAT, say("user", "more"), say("assistant", big)]), line(3, [say("user", "x"), say("assistant", "a")]),
    ]  # fmt: skip
    config = make_config(model_folder(tmp_path / "m", merges=True), tmp_path, *DROP, "tokenize.long_prompt=drop")
    write_lines(config, lines)
    begin = time.process_time()
    store = Store(tokenize(config) and config.store)
    assert time.process_time() - begin < 5, "tokenizing 30 MB takes longer"
    assert [store.identity(i) for i in range(len(store))] == ["c2", "c3"]
    assert {k: left_out(store)[k] for k in ("too_long", "prompt_too_long", "shortened")} == {
        "too_long": 1, "prompt_too_long": 1, "shortened": 1,
    }  # fmt: skip
    strict = make_config(tmp_path / "m", tmp_path, *DROP, f"data_dir={tmp_path}/other",
                         f"tokenize.conversations={config.conversations}")  # fmt: skip
    with pytest.raises(InputError, match=r"jsonl:2: the prompt has 10000000 characters.*tokenize\.long_prompt=drop"):
        tokenize(strict)


def test_characters_bound_tokens_only_where_that_is_certain(tmp_path):
    model_folder(tmp_path, merges=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    longest = max(map(len, content["model"]["vocab"]))
    assert most_characters(Tokenizer.from_str(json.dumps(content)), 10) == 40 * longest
    content["model"]["unk_token"] = "<mask>"
    assert most_characters(Tokenizer.from_str(json.dumps(content)), 10) is None


# ---- odd


def test_odd_turns_are_left_out_by_their_reasons(tmp_path):
    lines = [
        line(0, [say("user", "  "), say("assistant", "a")]),
        line(1, [say("user", "q\ud800"), say("assistant", "a")]),
        line(2, [*CHAT[:3], say("assistant", "\n")]),
        line(3, [say("user", "q"), say("assistant", "a"), say("user", "r"), say("assistant", ""), *CHAT]),
        line(4, CHAT),
        *(line(5, [*CHAT[:3], {**CHAT[3], k: "x\ud800"}]) for k in ("reasoning_content", "name")),
        *({**line(6, CHAT[:2]), k: "x\ud800"} for k in ("id", "category")),
        line(7, CHAT[:2], tools=[{"type": "function", "function": {"name": "x\ud800"}}]),
    ]
    _, store = run(tmp_path, lines, *DROP)
    found = {k: v for k, v in left_out(store).items() if "token" not in k}
    assert found == {"empty_turn": 2, "lone_surrogate": 6, "no_answer": 1} and len(store) == 1


def test_bad_lines_are_skipped_counted_and_stop_past_the_limit(tmp_path, capsys):
    config = make_config(model_folder(tmp_path / "m"), tmp_path, "tokenize.max_bad_lines=4")
    good = [json.dumps(line(i, [say("user", f"q{i}"), say("assistant", "a")])) for i in range(4)]
    bad = ["{", json.dumps({"id": "x"}), json.dumps(line(9, [say("robot", "x")])), '{"id": ' + "1" * 5000 + "}"]
    config.conversations.parent.mkdir(parents=True)
    config.conversations.write_text("\n".join([good[0], bad[0], good[1], bad[1], bad[2], bad[3], good[2]]))
    assert tokenize(config).counts["bad_lines"] == 4
    said = capsys.readouterr().err.splitlines()
    assert [x.split(":")[2] for x in said] == ["2", "4", "5", "6"] and all("conversations.jsonl" in x for x in said)
    other = make_config(tmp_path / "m", tmp_path, "tokenize.max_bad_lines=2", f"data_dir={tmp_path}/o",
                        f"tokenize.conversations={config.conversations}")  # fmt: skip
    with pytest.raises(InputError, match=r"jsonl:5: .*\(3 bad lines, tokenize\.max_bad_lines is 2\)"):
        tokenize(other)
    assert not (tmp_path / "o" / "store").exists()


def test_a_tool_call_that_the_template_cannot_show_is_a_bad_line(tmp_path):
    template = TEMPLATE.replace("m['content'] +", "m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | items | list }}{% endfor %}{{", 1)  # fmt: skip
    called = [
        say("user", "q"), {**say("assistant", ""), "tool_calls": [{"function": {"arguments": "none"}}]},
        say("tool", "4"), say("assistant", "a"),
    ]  # fmt: skip
    config = make_config(model_folder(tmp_path / "m", template), tmp_path, "tokenize.max_bad_lines=1")
    write_lines(config, [line(0, CHAT), line(1, called)])
    counts = tokenize(config).counts
    assert (counts["bad_lines"], counts["kept"]) == (1, 1)


def test_a_date_in_the_template_does_not_change_its_name(tmp_path, monkeypatch):
    from draftsmith.data import render
    from draftsmith.data.tokenize import fingerprint

    dated = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(TargetConfig(model=str(model_folder(tmp_path, template=dated))))
    today = fingerprint(tokenizer)

    class Later(render.datetime):
        @classmethod
        def now(cls):
            return cls(2042, 1, 1)

    monkeypatch.setattr(render, "datetime", Later)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    assert fingerprint(tokenizer) == today
