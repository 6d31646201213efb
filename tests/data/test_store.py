"""The store: what was written is what is read, and a store that is not whole is no store."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from draftsmith.data import store as store_module
from draftsmith.data.building import write_store
from draftsmith.data.store import Document, Store, describe
from draftsmith.errors import InputError


def random_documents(count: int, seed: int = 0) -> list[Document]:
    """Zero to three spans each, some empty of eligible positions, some documents held out."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(4, 60))
        cuts = np.sort(rng.choice(n + 1, size=2 * int(rng.integers(0, min(4, n // 2))), replace=False))
        out.append(
            Document(
                tokens=rng.integers(0, 2**31 - 1, size=n).astype(np.int32),
                spans=tuple((int(s), int(e)) for s, e in cuts.reshape(-1, 2)),
                id=f"número {i}",
                category=("a", "b")[i % 2],
                heldout=bool(rng.random() < 0.3),
            )
        )
    return out


def write(path, documents, **counts):
    counts = {"read": len(documents), "kept": len(documents), "heldout": sum(d.heldout for d in documents)} | counts
    return write_store(path, documents, tokenizer="t", eos_token_ids=[2, 5], sources={"c.jsonl": "ab"}, counts=counts)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(store_module, "BATCH", 7)


def same(a: Document, b: Document) -> bool:
    return bool(np.array_equal(a.tokens, b.tokens)) and (
        dataclasses.replace(a, tokens=b.tokens) == b and a.tokens.dtype == b.tokens.dtype
    )


@pytest.mark.parametrize("count", [1, 6, 7, 8, 50])
def test_every_document_comes_back_in_any_order(tmp_path, small_batches, count):
    documents = random_documents(count)
    manifest = write(tmp_path / "s", documents)
    store = Store(tmp_path / "s")
    assert len(store.batches) == -(-count // 7)
    assert len(store) == count == manifest.shards[0].documents
    for number in np.random.default_rng(1).permutation(count):
        assert same(store.document(int(number)), documents[number])
    assert store.manifest == manifest


def test_statistics_against_a_slow_count(tmp_path, small_batches):
    documents = random_documents(60, seed=3)
    store, manifest = None, write(tmp_path / "s", documents)
    store = Store(tmp_path / "s")
    for i, document in enumerate(documents):
        mask = document.supervised()
        slow = [any(s <= t < e for s, e in document.spans) for t in range(len(document.tokens))]
        assert mask.tolist() == slow
        eligible = sum(1 for s, e in document.spans for t in range(s, e) if t + 1 < e)
        assert store.eligible[i] == eligible
        assert store.longest_span[i] == max((e - s for s, e in document.spans), default=0)
        assert store.lengths[i] == len(document.tokens)
        assert store.heldout[i] == document.heldout
    assert manifest.shards[0].tokens == sum(len(d.tokens) for d in documents)
    assert manifest.shards[0].supervised == sum(int(d.supervised().sum()) for d in documents)


def test_prompt_is_what_precedes_the_first_answer(tmp_path):
    document = Document(np.arange(10, dtype=np.int32), ((4, 6), (8, 10)), "x", "a", True)
    write(tmp_path / "s", [document])
    assert Store(tmp_path / "s").document(0).prompt().tolist() == [0, 1, 2, 3]


def test_a_store_is_never_written_over(tmp_path):
    write(tmp_path / "s", random_documents(3))
    before = (tmp_path / "s" / "manifest.json").read_bytes()
    with pytest.raises(InputError, match=r"store .*/s exists: remove it, or set data_dir"):
        write(tmp_path / "s", random_documents(4))
    assert (tmp_path / "s" / "manifest.json").read_bytes() == before


def test_a_fault_while_writing_leaves_nothing(tmp_path, small_batches):
    def failing():
        yield from random_documents(20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "s", failing(), tokenizer="t", eos_token_ids=[2], sources={}, counts={})
    assert list(tmp_path.iterdir()) == []


def test_an_empty_data_set_says_why_and_leaves_nothing(tmp_path):
    counts = {"read": 5, "no_answer": 3, "too_long": 2, "prompt_too_long": 0}
    with pytest.raises(InputError, match=r"the data set is empty \(read 5, no_answer 3, too_long 2\)"):
        write_store(tmp_path / "s", [], tokenizer="t", eos_token_ids=[2], sources={}, counts=counts)
    assert list(tmp_path.iterdir()) == []


def test_counts_may_grow_while_documents_come(tmp_path):
    counts = {"read": 0}

    def counted():
        for document in random_documents(5):
            counts["read"] += 1
            yield document

    manifest = write_store(tmp_path / "s", counted(), tokenizer="t", eos_token_ids=[2], sources={}, counts=counts)
    assert manifest.counts == Store(tmp_path / "s").manifest.counts == {"read": 5}


def test_fingerprint_names_the_content(tmp_path):
    one = write(tmp_path / "1", random_documents(9)).fingerprint
    assert write(tmp_path / "2", random_documents(9)).fingerprint == one
    changed = random_documents(9)
    changed[4].tokens[0] += 1
    assert write(tmp_path / "3", changed).fingerprint != one


def test_no_store_says_what_to_run(tmp_path):
    with pytest.raises(InputError, match=r"run `draftsmith tokenize` first.*s/manifest.json"):
        Store(tmp_path / "s")


@pytest.mark.parametrize("keep", [0, 1, 7, 0.3, 0.5, 0.9, -1, -9])
def test_a_shard_cut_short_is_named(tmp_path, keep):
    write(tmp_path / "s", random_documents(40))
    shard = tmp_path / "s" / "shard-00000.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match=r"shard .*shard-00000\.arrow .*cut short.*tokenize") as caught:
        Store(tmp_path / "s")
    assert "\n" not in str(caught.value)


def test_a_shard_of_another_store_is_noticed(tmp_path):
    write(tmp_path / "a", random_documents(10))
    write(tmp_path / "b", random_documents(11))
    shutil.copy(tmp_path / "b" / "shard-00000.arrow", tmp_path / "a")
    with pytest.raises(InputError, match="does not hold the 10 documents its manifest states"):
        Store(tmp_path / "a")
    (tmp_path / "a" / "shard-00000.arrow").unlink()
    with pytest.raises(InputError, match="missing"):
        Store(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: json.dumps(v)[:-20], "manifest .* cannot be read"),
        (lambda v: json.dumps({**v, "schema": 2}), "has schema 2, this version reads 1"),
        (lambda v: json.dumps({k: v[k] for k in v if k != "shards"}), "shards"),
        (lambda v: json.dumps({k: v[k] for k in v if k != "tokenizer"}), "tokenizer"),
        (lambda v: json.dumps([v]), "not a store manifest"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, change, said):
    write(tmp_path / "s", random_documents(3))
    path = tmp_path / "s" / "manifest.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(InputError, match=said) as caught:
        Store(tmp_path / "s")
    assert str(path) in str(caught.value)


def test_description_names_what_was_left_out(tmp_path):
    documents = random_documents(3)
    held = sum(d.heldout for d in documents)
    plain = describe(write(tmp_path / "1", documents))
    assert plain.startswith("3 documents, ") and plain.endswith(f"{held} held out; none left out")
    assert describe(write(tmp_path / "2", documents, too_long=2)).endswith('left out: {"too_long": 2}')
    assert describe(write(tmp_path / "3", documents, shortened=2)).endswith("none left out; 2 shortened by whole turns")
