"""Supervised spans, exact to the token, against a version that joins the pieces of a conversation one by one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import SPECIAL, TEMPLATE, make_config, write_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from draftsmith.config import Config, TargetConfig
from draftsmith.data.documents import end_at_stop, is_heldout
from draftsmith.data.messages import read_conversations, read_jsonl
from draftsmith.data.spans import spans_to_tokens
from draftsmith.data.store import Store
from draftsmith.data.tokenize import fingerprint, tokenize
from draftsmith.errors import InputError
from draftsmith.files import sha256
from draftsmith.records import Conversation
from draftsmith.target.model import load_tokenizer

EOS = 2
RETOKENIZED = ("token_count_known", "retokenized_differently")
WORDS = [
    "four",
    "Four",
    "é",
    "—",
    "😀",
    "日本",
    "12",
    "x+y",
    ",",
    ".",
    "\n",
    "\n\n",
    "  ",
    "the",
    "answer",
    "is",
    "<b>",
]
LAST_ANSWER_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:2] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Rewrites earlier answers, as templates do that take the thinking out of them."""
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def model_folder(folder: Path, template: str = TEMPLATE, merges: bool = False) -> Path:
    """Config and tokenizer, no weights.  merges: a byte-pair vocabulary instead of one token a byte."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": EOS}))
    write_tokenizer(folder, template)
    if merges:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["".join(WORDS), "assistant\n", "user\n", "four the answer", "\n\n"] * 9, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def line(i, messages, finish="stop", **more) -> dict:
    return {"id": f"c{i}", "messages": messages, "finish_reason": finish, "completion_tokens": 9, **more}


def write_lines(config: Config, lines) -> Path:
    config.conversations.parent.mkdir(parents=True, exist_ok=True)
    config.conversations.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return config.conversations


def run(tmp_path, lines, *overrides, **folder) -> tuple[Config, Store]:
    model = model_folder(tmp_path / "model", **folder)
    config = make_config(model, tmp_path, "train.row_tokens=4096", *overrides)
    write_lines(config, lines)
    tokenize(config)
    return config, Store(config.store)


def slow(tokenizer, messages, *, cut=False) -> tuple[list[int], list[bool]]:
    """Ids and supervision by joining pieces: an answer's own text and the stop token behind it, nothing else."""
    ids: list[int] = []
    mask: list[bool] = []

    def add(text: str, supervised: bool) -> None:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        mask.extend([supervised] * len(piece))

    for i, message in enumerate(messages):
        answer = message["role"] == "assistant"
        add(f"<|im_start|>{message['role']}\n", False)
        add(message["content"], answer)
        add("<|im_end|>", answer and not (cut and i == len(messages) - 1))
        add("\n", False)
    return ids, mask


def random_conversation(rng) -> list[dict[str, str]]:
    def text() -> str:
        return "w" + " ".join(rng.choice(WORDS, size=int(rng.integers(1, 12))))

    out = [say("system", text())] if rng.random() < 0.3 else []
    for _ in range(int(rng.integers(1, 4))):
        out.append(say("user", text()))
        if rng.random() < 0.2:
            out += [say("assistant", text()), say("tool", text())]
        out.append(say("assistant", text()))
    return out


@pytest.mark.parametrize("merges", [False, True])
def test_spans_exact_to_the_token(tmp_path, merges):
    rng = np.random.default_rng(0)
    lines = [line(i, random_conversation(rng), ("stop", "length")[i % 4 == 3]) for i in range(60)]
    config, store = run(tmp_path, lines, "tokenize.length_cut=keep", merges=merges)
    tokenizer = load_tokenizer(config.target)
    assert len(store) == 60
    answers = set()
    for number, wanted in enumerate(lines):
        document = store.document(number)
        ids, mask = slow(tokenizer, wanted["messages"], cut=wanted["finish_reason"] == "length")
        assert document.tokens.tolist() == ids
        assert document.supervised().tolist() == mask
        assert document.id == wanted["id"]
        answers.add(len(document.spans))
    assert answers >= {1, 2, 3}
    if merges:  # or the test would say no more than the one with a token a byte
        assert sum(store.lengths) < sum(len(json.dumps(x["messages"], ensure_ascii=False)) for x in lines) * 0.8


def supervised_text(store: Store, config: Config, number: int = 0) -> list[str]:
    tokenizer, document = load_tokenizer(config.target), store.document(number)
    return [tokenizer.decode(document.tokens[s:e].tolist()) for s, e in document.spans]


CHAT = [say("user", "2 + 2?"), say("assistant", "Four."), say("user", "Sure?"), say("assistant", "Yes — 4.")]


def test_the_stop_token_is_supervised_and_what_follows_is_not(tmp_path):
    config, store = run(tmp_path, [line(0, CHAT)])
    assert supervised_text(store, config) == ["Four.<|im_end|>", "Yes — 4.<|im_end|>"]
    text = load_tokenizer(config.target).decode(store.document(0).tokens.tolist())
    assert text.endswith("<|im_end|>\n"), "the template does put something behind the stop token"


def test_an_answer_cut_by_its_length_teaches_no_stop(tmp_path):
    config, store = run(tmp_path, [line(0, CHAT, "length")], "tokenize.length_cut=keep")
    assert supervised_text(store, config) == ["Four.<|im_end|>", "Yes — 4."]


def test_an_answer_cut_by_its_length_is_dropped_and_counted(tmp_path):
    _, store = run(tmp_path, [line(0, CHAT, "length"), line(1, CHAT[:2])], "tokenize.length_cut=drop")
    assert [store.document(i).id for i in range(len(store))] == ["c1"]
    assert store.manifest.counts["finish_reason_length"] == 1


def test_every_stop_token_of_the_target_ends_an_answer(tmp_path):
    model = model_folder(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, EOS]}))
    config = make_config(model, tmp_path)
    write_lines(config, [line(0, [say("user", "q"), say("assistant", "one<|endoftext|>two")])])
    manifest = tokenize(config)
    assert manifest.eos_token_ids == (0, EOS)
    assert supervised_text(Store(config.store), config) == ["one<|endoftext|>"]


@pytest.mark.parametrize(("room", "turns"), [(0, 2), (-1, 1)])
def test_what_is_too_long_loses_whole_turns(tmp_path, room, turns):
    tokenizer = load_tokenizer(TargetConfig(model=str(model_folder(tmp_path / "model"))))
    whole = len(slow(tokenizer, CHAT)[0])
    _, store = run(
        tmp_path, [line(0, CHAT, "length")], "tokenize.length_cut=keep", f"tokenize.max_tokens={whole + room}"
    )
    ids, mask = slow(tokenizer, CHAT[: 2 * turns], cut=turns == 2)
    assert store.document(0).tokens.tolist() == ids
    assert store.document(0).supervised().tolist() == mask, "an earlier answer was not the one that was cut"
    assert store.manifest.counts.get("shortened", 0) == (turns == 1)


@pytest.mark.parametrize("system", [[], [say("system", "be brief")]])
def test_what_is_too_long_with_one_turn_is_left_out_by_its_reason(tmp_path, system):
    long = [*system, say("user", "q"), say("assistant", "x" * 200)]
    fit = ("tokenize.max_tokens=150", "tokenize.heldout_fraction=0")
    _, store = run(tmp_path, [line(0, long), line(1, CHAT)], *fit)
    counts = {k: v for k, v in store.manifest.counts.items() if v and k not in RETOKENIZED}
    assert counts == {"read": 2, "kept": 1, "too_long": 1}


def test_a_prompt_that_leaves_no_room_is_an_error_or_dropped(tmp_path):
    lines = [line(0, CHAT), line(1, [say("user", "x" * 300), say("assistant", "y")])]
    with pytest.raises(
        InputError, match=r"conversations\.jsonl: the prompt of 'c1' has 3\d\d tokens.*holds 200 .*drop"
    ):
        run(tmp_path, lines, "tokenize.max_tokens=200")
    assert not (tmp_path / "data" / "store").exists()
    _, store = run(tmp_path, lines, "tokenize.max_tokens=200", "tokenize.long_prompt=drop")
    assert len(store) == 1 and store.manifest.counts["prompt_too_long"] == 1


def test_a_template_that_rewrites_history_is_refused_where_it_matters(tmp_path):
    with pytest.raises(InputError, match=r"conversations\.jsonl:2: 'c1': the chat template rewrites earlier turns"):
        run(tmp_path, [line(0, CHAT[:2]), line(1, CHAT)], template=LAST_ANSWER_ONLY)
    assert not (tmp_path / "data" / "store").exists()
    config, store = run(tmp_path, [line(0, CHAT[:2])], template=LAST_ANSWER_ONLY)
    assert supervised_text(store, config) == ["Four.<|im_end|>"]


def test_a_template_that_refuses_a_role_is_an_input_error(tmp_path):
    lines = [line(0, [say("system", "s"), *CHAT])]
    with pytest.raises(InputError, match=r"conversations\.jsonl:1: the chat template refuses 'c0': no system role"):
        run(tmp_path, lines, template=NO_SYSTEM)


def test_an_answer_that_begins_inside_a_token_is_left_out(tmp_path):
    lines = [line(0, CHAT), line(1, [say("user", "q"), say("assistant", "\n\nfour")])]
    _, store = run(tmp_path, lines, merges=True)
    assert len(store) == 1 and store.manifest.counts["answer_boundary_inside_a_token"] == 1
    _, store = run(tmp_path / "bytes", lines)
    assert len(store) == 2


def test_counts_add_up_and_name_the_source(tmp_path):
    lines = [
        line(0, CHAT),
        line(1, CHAT[:3]),
        line(2, CHAT, "length"),
        line(3, [say("user", "q"), say("assistant", "  ")]),
        line(4, [say("user", "q"), say("assistant", "x" * 300)]),
        line(5, [say("user", "x" * 300), say("assistant", "y")]),
        line(6, CHAT, "content_filter"),
        *(line(i, [say("user", f"q{i}"), say("assistant", "fine")]) for i in range(7, 40)),
    ]
    config, store = run(tmp_path, lines, "tokenize.length_cut=drop", "tokenize.long_prompt=drop",
                        "tokenize.max_tokens=250", "tokenize.heldout_fraction=0.3")  # fmt: skip
    counts = {k: v for k, v in store.manifest.counts.items() if v and k not in RETOKENIZED}
    assert counts["read"] == len(lines)
    assert counts["heldout"] == int(store.heldout.sum()) > 0
    assert counts.pop("read") == sum(v for k, v in counts.items() if k != "heldout")
    del counts["heldout"]
    assert counts == {"kept": 34, "no_answer": 2, "finish_reason_length": 1, "too_long": 1, "prompt_too_long": 1,
                      "finish_reason_content_filter": 1}  # fmt: skip
    assert len(store) == 34
    assert store.manifest.sources == {"conversations.jsonl": sha256(config.conversations)}


def test_nothing_supervised_is_an_empty_data_set(tmp_path):
    with pytest.raises(InputError, match=r"the data set is empty \(read 2, no_answer 2\)"):
        run(tmp_path, [line(0, CHAT[:1]), line(1, [say("user", "q"), say("assistant", "")])])
    only_stop = [line(0, [say("user", "q"), say("assistant", "<|im_end|>")], "length")]
    with pytest.raises(InputError, match=r"\(read 1, no_supervised_tokens 1\)"):
        run(tmp_path, only_stop, "tokenize.length_cut=keep")


# ---- held out


def conversation(prompt: str, answer: str = "a", category: str = "all") -> Conversation:
    return Conversation("i", (say("system", "s"), say("user", prompt), say("assistant", answer)), "stop", 1, category)


def test_held_out_is_a_pure_function_of_the_first_question():
    for i in range(200):
        share = int.from_bytes(hashlib.sha256(f"Question {i}?".encode()).digest()[:4], "big") / 2**32
        for fraction in (0.0, 0.05, 0.3, 0.9):
            expected = share < fraction
            assert is_heldout(conversation(f"Question {i}?"), fraction) == expected
            assert is_heldout(conversation(f"Question {i}?", "another answer", "b"), fraction) == expected


def test_held_out_share_is_the_fraction():
    """Binomial(4000, f): within 4.5 standard deviations."""
    for fraction in (0.05, 0.5):
        count = sum(is_heldout(conversation(f"p{i}"), fraction) for i in range(4000))
        assert abs(count - 4000 * fraction) < 4.5 * (4000 * fraction * (1 - fraction)) ** 0.5


def test_held_out_is_the_same_in_every_build(tmp_path):
    lines = [line(i, [say("user", f"q{i}"), say("assistant", f"answer {i}")]) for i in range(60)]
    _, one = run(tmp_path / "1", lines, "tokenize.heldout_fraction=0.3")
    changed = [{**x, "messages": [x["messages"][0], say("assistant", "other")]} for x in lines[:5:-1]]
    _, two = run(tmp_path / "2", changed, "tokenize.heldout_fraction=0.3")

    def held(store: Store) -> set[str]:
        return {store.document(i).id for i in range(len(store)) if store.heldout[i]}

    kept = {x["id"] for x in changed}
    assert held(one) & kept == held(two) and len(held(two)) > 3
    _, more = run(tmp_path / "3", lines, "tokenize.heldout_fraction=0.5")
    assert held(one) < held(more)


# ---- the pure functions


def test_spans_to_tokens_against_a_slow_version():
    """Random tokenizations of random text; characters of several bytes are several tokens with one offset."""
    rng = np.random.default_rng(0)
    inside = exact = 0
    for _ in range(500):
        offsets, at = [], 0
        for _ in range(int(rng.integers(2, 15))):
            width = int(rng.integers(1, 4))
            offsets += [(at, at + width)] * int(rng.choice([1, 1, 1, 3]))
            at += width
        s, e = sorted(rng.integers(0, at + 1, size=2).tolist())
        if s == e:
            continue
        cut = any(a < s < b or a < e < b for a, b in offsets)
        found = spans_to_tokens(offsets, [(s, e)])
        if cut:
            inside += 1
            assert found is None
        else:
            exact += 1
            ((first, last),) = found
            assert list(range(first, last)) == [i for i, (a, b) in enumerate(offsets) if s <= a and b <= e]
    assert inside > 50 and exact > 50


def test_end_at_stop_against_a_slow_version():
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(0, 8, size=20)
        start, end = sorted(rng.integers(0, 21, size=2).tolist())
        for keep in (True, False):
            expected = end
            for i in range(start, end):
                if tokens[i] in (2, 5):
                    expected = i + 1 if keep else i
                    break
            assert end_at_stop(tokens, start, end, (2, 5), keep_stop=keep) == (start, expected)


def test_fingerprint_changes_with_template_and_vocabulary(tmp_path):
    def of(name: str, **folder) -> str:
        return fingerprint(load_tokenizer(TargetConfig(model=str(model_folder(tmp_path / name, **folder)))))

    plain = of("a")
    assert of("b") == plain
    assert of("c", template=TEMPLATE.replace("'\n'", "'\n\n'")) != plain
    assert of("d", merges=True) != plain
    asked = TEMPLATE.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif")
    assert asked != TEMPLATE and of("f", template=asked) != plain, "only the generation prompt differs"
    swapped = model_folder(tmp_path / "e")
    content = json.loads((swapped / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["F"], ids["r"] = ids["r"], ids["F"]
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    assert fingerprint(load_tokenizer(TargetConfig(model=str(swapped)))) != plain, "the same size, other ids"


# ---- reading


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b'{"id": "x"', r":3: not JSON"),
        (b'{"id": "\xff"}', r":3: not UTF-8"),
        (b'["id"]', r":3: not a JSON object"),
        (b'{"id": "x"}', r":3: not a conversation: messages is missing"),
        (b'{"messages": []}', r":3: not a conversation: .*non-empty"),
        (b'{"id": "x", "messages": []}', r":3: .*non-empty"),
        (b'{"id": "x", "messages": [{"role": "bot", "content": "c"}]}', r":3: .*unknown role 'bot'"),
        (b'{"id": "x", "messages": [{"role": "user", "content": null}]}', r":3: .*text content"),
        (b'{"id": "x", "messages": {"role": "user"}}', r":3: .*list"),
        (b'{"id": "x", "messages": [{"role": "user", "content": "c"}], "completion_tokens": "many"}', r":3: "),
    ],
)
def test_a_bad_line_is_named(tmp_path, damage, said):
    good = json.dumps(line(0, CHAT)).encode()
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join([good, b"", damage, good]) + b"\n")
    with pytest.raises(InputError, match=str(path) + said) as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value)


def test_a_bad_line_far_down_is_named_by_its_own_number(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"".join(b'{"a": "%d"}\n' % i for i in range(5000)) + b'{"a": "\xe9"}\n')
    with pytest.raises(InputError, match=r"c\.jsonl:5001: not UTF-8"):
        list(read_jsonl(path, "things"))


def test_no_file_and_an_empty_file_are_named(tmp_path):
    with pytest.raises(InputError, match=r"conversations \(run `draftsmith generate` first\) cannot be read: .*none"):
        read_conversations(tmp_path / "none")
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(InputError, match="empty is empty"):
        read_conversations(tmp_path / "empty")
