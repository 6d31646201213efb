"""Packing and anchors, against slow obvious versions."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from draftsmith.data import loader as loader_module
from draftsmith.data.building import write_store
from draftsmith.data.loader import Loader, draw_anchors, eligible_anchors, pack, plan_epoch
from draftsmith.data.store import Document, Store
from draftsmith.errors import InputError
from draftsmith.records import PackedRow

T, A = 64, 12


def document(rng: np.random.Generator, length: int, spans, heldout: bool, i: int) -> Document:
    return Document(rng.integers(1, 1000, size=length).astype(np.int32), tuple(spans), f"d{i}", "all", heldout)


def make_store(path, documents) -> Store:
    write_store(path, documents, tokenizer="t", eos_token_ids=[2], sources={}, counts={})
    return Store(path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Store:
    """120 documents of 5 to 64 tokens, a fifth held out, some with two answers, some without an eligible position."""
    rng = np.random.default_rng(0)
    documents = []
    for i in range(120):
        n = int(rng.integers(5, T + 1))
        start = int(rng.integers(1, n - 2))
        spans = [(start, n)]
        if i % 3 == 0 and n - start > 6:
            spans = [(start, start + 3), (start + 4, n)]
        if i % 10 == 8:
            spans = [(start, start + 1)]
        documents.append(document(rng, n, spans, i % 5 == 4, i))
    return make_store(tmp_path_factory.mktemp("mixed") / "s", documents)


def make_loader(store: Store, **changes) -> Loader:
    return Loader(store, **{"row_tokens": T, "anchors": A, "block_size": 4, "seed": 3, **changes})


def epoch_rows(loader: Loader, epochs: int) -> list[PackedRow]:
    rows: list[PackedRow] = []
    while not rows or rows[-1].epoch < epochs:
        rows.append(loader.row(len(rows)))
    return rows[:-1]


def same_row(a: PackedRow, b: PackedRow) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(PackedRow))


# ---- packing


def slow_pack(numbers, lengths, row_tokens):
    """Best fit in the order given: put each document where least room is left over; look at every row every time."""
    rows, room = [], []
    for length, number in zip(lengths, numbers, strict=True):
        fitting = [r for r in range(len(rows)) if room[r] >= length]
        if fitting:
            best = min(fitting, key=lambda r: room[r])
        else:
            best = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[best].append(int(number))
        room[best] -= length
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_pack_against_the_slow_version(seed):
    rng = np.random.default_rng(seed)
    count, longest = int(rng.integers(1, 120)), int(rng.choice([3, 20, 100]))
    lengths = rng.integers(1, longest + 1, size=count)
    numbers = rng.permutation(1000)[:count]
    rows = pack(numbers, lengths, 100)
    assert rows == slow_pack(numbers.tolist(), lengths.tolist(), 100)
    by_number = dict(zip(numbers.tolist(), lengths.tolist(), strict=True))
    assert sorted(n for row in rows for n in row) == sorted(by_number)
    assert max(sum(by_number[n] for n in row) for row in rows) <= 100


def test_every_document_once_an_epoch_whole_and_within_the_row(mixed):
    loader = make_loader(mixed)
    wanted = sorted(i for i in range(len(mixed)) if not mixed.heldout[i] and mixed.eligible[i] > 0)
    assert len(wanted) > 70
    for epoch in range(3):
        rows = [r for r in epoch_rows(loader, 3) if r.epoch == epoch]
        assert [r.index for r in rows] == list(range(len(rows)))
        assert sorted(s for r in rows for s in r.samples) == wanted
    for row in epoch_rows(loader, 3):
        assert row.tokens.shape == row.positions.shape == row.document.shape == row.supervised.shape == (T,)
        assert row.anchors.shape == (A,)
        at = 0
        for i, sample in enumerate(row.samples):
            stored = mixed.document(sample)
            assert row.starts[i] == at
            for j in range(len(stored.tokens)):
                assert row.tokens[at] == stored.tokens[j]
                assert row.positions[at] == j
                assert row.document[at] == i
                assert row.supervised[at] == any(s <= j < e for s, e in stored.spans)
                at += 1
        assert row.starts[-1] == at <= T and len(row.starts) == len(row.samples) + 1
        assert (row.document[at:] == -1).all() and not row.supervised[at:].any() and (row.tokens[at:] == 0).all()


def test_groups_are_packed_apart_and_still_lose_nothing(mixed, monkeypatch):
    monkeypatch.setattr(loader_module, "GROUP", 17)
    rows = [r for r in epoch_rows(make_loader(mixed), 1)]
    whole = make_loader(mixed)
    assert sorted(s for r in rows for s in r.samples) == whole.numbers.tolist()


def test_documents_meet_others_in_other_epochs():
    """Sorted exactly by length, a small data set would be packed into the same rows every epoch."""
    lengths = np.random.default_rng(0).permutation(np.arange(100, 300))
    together = [{frozenset(plan.row(r).tolist()) for r in range(len(plan))}
                for plan in (plan_epoch(np.arange(200), lengths, 1024, 0, epoch) for epoch in range(2))]  # fmt: skip
    assert len(together[0] & together[1]) < len(together[0]) / 10


def test_rows_are_filled(tmp_path):
    """Log-normal lengths (median 350 tokens, sigma 0.8) in rows of 3072: at least 98 % of the tokens are documents."""
    rng = np.random.default_rng(0)
    for count in (4096, 20_000):
        lengths = np.clip(np.exp(rng.normal(np.log(350), 0.8, size=count)), 16, 3072).astype(np.int64)
        plan = plan_epoch(np.arange(count), lengths, 3072, seed=0, epoch=0)
        assert np.array_equal(np.sort(plan.flat), np.arange(count))
        assert lengths.sum() / (len(plan) * 3072) >= 0.98


def test_held_out_documents_are_in_no_training_row(mixed):
    training, held = make_loader(mixed), make_loader(mixed, heldout=True)
    seen = {s for r in epoch_rows(training, 4) for s in r.samples}
    assert not any(mixed.heldout[s] for s in seen)
    seen_held = {s for r in epoch_rows(held, 2) for s in r.samples}
    assert seen_held and all(mixed.heldout[s] for s in seen_held)
    assert training.left_out == sum(1 for i in range(len(mixed)) if not mixed.heldout[i] and mixed.eligible[i] == 0) > 0
    assert len(seen) + len(seen_held) + training.left_out + held.left_out == len(mixed)


# ---- the order of rows


def test_any_row_without_the_others(mixed):
    rows = epoch_rows(make_loader(mixed), 4)
    other = make_loader(mixed)
    for g in np.random.default_rng(5).permutation(len(rows)):
        assert same_row(other.row(int(g)), rows[g])
    assert same_row(make_loader(mixed).row(len(rows) - 1), rows[-1])


def test_pure_function_of_seed_and_epoch(mixed):
    first, again, other = (epoch_rows(make_loader(mixed, seed=s), 2) for s in (3, 3, 4))
    assert all(same_row(a, b) for a, b in zip(first, again, strict=True))
    assert [r.samples for r in first] != [r.samples for r in other], "the seed orders the rows, not only the anchors"
    by_epoch = [[r for r in first if r.epoch == e] for e in (0, 1)]
    assert [r.samples for r in by_epoch[0]] != [r.samples for r in by_epoch[1]]


def test_plan_does_not_depend_on_what_was_asked_before(mixed):
    loader = make_loader(mixed)
    late = loader.plan(7)
    for epoch in (0, 3, 1, 9):
        loader.plan(epoch)
    assert np.array_equal(loader.plan(7).flat, late.flat) and np.array_equal(loader.plan(7).first, late.first)


def test_seed_of_the_run_changes_the_anchors_but_not_what_is_eligible(mixed):
    one, two = make_loader(mixed, seed=3), make_loader(mixed, seed=4)
    by_samples = {tuple(sorted(r.samples)): r for r in epoch_rows(one, 1)}
    shared = [(by_samples[k], r) for r in epoch_rows(two, 1) if (k := tuple(sorted(r.samples))) in by_samples]
    full = [(a, b) for a, b in shared if a.samples == b.samples and a.anchor_count == A]
    assert full and any(not np.array_equal(a.anchors, b.anchors) for a, b in full)


# ---- anchors


def slow_eligible(row: PackedRow) -> list[int]:
    out = []
    for a in range(T - 1):
        if row.document[a] < 0 or row.document[a] != row.document[a + 1]:
            continue
        if row.supervised[a] and row.supervised[a + 1]:
            out.append(a)
    return out


def test_anchors_are_eligible_ascending_and_drawn_once(mixed):
    counts = set()
    for row in epoch_rows(make_loader(mixed), 3):
        eligible = slow_eligible(row)
        used = row.anchors[: row.anchor_count].tolist()
        assert row.anchor_count == min(A, len(eligible))
        assert used == sorted(set(used)) and set(used) <= set(eligible)
        assert (row.anchors[row.anchor_count :] == 0).all()
        counts.add(row.anchor_count == A)
    assert counts == {True, False}, "both a full row and one with unused slots must have been seen"


def test_eligible_stops_at_documents_ends_and_padding():
    #                    one document   next      next  padding
    document = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, -1, -1], dtype=np.int32)
    supervised = np.array([0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=bool)
    assert eligible_anchors(supervised, document).tolist() == [1, 5, 6]


def test_draws_differ_by_stream_and_repeat_with_it():
    eligible = np.arange(100, 200)
    one, count = draw_anchors(eligible, 8, [2, 0, 0, 0, 0])
    assert count == 8 and np.array_equal(one, draw_anchors(eligible, 8, [2, 0, 0, 0, 0])[0])
    streams = [[2, 1, 0, 0, 0], [2, 0, 1, 0, 0], [2, 0, 0, 1, 0], [2, 0, 0, 0, 1]]
    drawn = [draw_anchors(eligible, 8, s)[0].tolist() for s in streams]
    assert len({tuple(d) for d in [one.tolist(), *drawn]}) == 5
    none, count = draw_anchors(np.array([], dtype=np.int64), 8, [2, 0, 0, 0, 0])
    assert count == 0 and none.tolist() == [0] * 8


@pytest.mark.parametrize("documents_in_a_row", [4, 2])
def test_every_eligible_position_is_drawn_equally_often(tmp_path, documents_in_a_row):
    """Eight documents of one length, so that every row offers equally many positions and each is drawn with the same
    probability p = A / (positions in a row), independently from epoch to epoch.  The count of a position over N
    epochs is Binomial(N, p).  Bounds: every |z| < 4.5 (all 8 * 15 positions pass with probability > 0.999), and the
    sum of z^2, about chi-squared, within five standard deviations of its mean."""
    rng = np.random.default_rng(1)
    length, epochs = 16, 500
    store = make_store(tmp_path / "s", [document(rng, length, [(0, length)], False, i) for i in range(8)])
    loader = make_loader(store, row_tokens=documents_in_a_row * length, anchors=12)
    drawn = np.zeros((8, length), dtype=np.int64)
    for row in epoch_rows(loader, epochs):
        for a in row.anchors[: row.anchor_count]:
            drawn[row.samples[row.document[a]], row.positions[a]] += 1
    assert (drawn[:, -1] == 0).all()
    positions = documents_in_a_row * (length - 1)
    p = 12 / positions
    z = (drawn[:, :-1] - epochs * p) / np.sqrt(epochs * p * (1 - p))
    assert np.abs(z).max() < 4.5
    free = 8 * (length - 1)
    assert abs((z**2).sum() - free) < 5 * np.sqrt(2 * free)


# ---- what cannot be trained on


def test_no_document_with_an_eligible_position_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    store = make_store(tmp_path / "s", [document(rng, 10, [(4, 5)], False, i) for i in range(3)])
    with pytest.raises(InputError, match=r"no training document has two supervised tokens in a row.*3 left out"):
        make_loader(store)
    with pytest.raises(InputError, match=r"no held-out document.*tokenize\.heldout_fraction"):
        make_loader(store, heldout=True)


def test_document_longer_than_the_row_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    store = make_store(tmp_path / "s", [document(rng, n, [(1, n)], False, n) for n in (10, 33)])
    assert make_loader(store, row_tokens=33).row(0).starts[-1] == 33
    with pytest.raises(InputError, match=r"a document has 33 tokens, a row holds 32: raise train\.row_tokens"):
        make_loader(store, row_tokens=32)


def test_block_larger_than_every_answer_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    documents = [document(rng, 30, [(20, 20 + n)], False, n) for n in (3, 8)]
    documents.append(document(rng, 30, [(20, 22)], True, 9))
    store = make_store(tmp_path / "s", documents)
    make_loader(store, block_size=8)
    with pytest.raises(
        InputError, match=r"drafter\.block_size 9 is larger than any training answer.*longest: 8.*lower it"
    ):
        make_loader(store, block_size=9)
    held = make_loader(store, block_size=8, heldout=True)
    assert held.row(0).anchor_count == 1, "short held-out answers are no reason not to train"


# ---- at full size


def rows_here(path, numbers) -> list[PackedRow]:
    loader = Loader(Store(path), row_tokens=T, anchors=A, block_size=4, seed=3)
    return [loader.row(g) for g in numbers]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_rows_whatever_the_number_of_processes(mixed, workers):
    """Row g goes to process g mod N; each opens the store by itself."""
    wanted = rows_here(mixed.path, range(40))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        shares = [pool.submit(rows_here, mixed.path, range(w, 40, workers)) for w in range(workers)]
        for w, share in enumerate(shares):
            assert all(same_row(a, b) for a, b in zip(share.result(), wanted[w::workers], strict=True))


def test_a_plan_of_many_documents_is_quick_small_and_full():
    """200,000 documents; the full size is in benchmarks/store_growth.py."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(700), 1.0, size=200_000)), 16, 4096).astype(np.int64)
    tracemalloc.start()
    begin = time.process_time()
    plan = plan_epoch(np.arange(len(lengths)) * 3, lengths, 4096, seed=0, epoch=0)
    seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(np.sort(plan.flat), np.arange(len(lengths)) * 3)
    used = np.add.reduceat(lengths[plan.flat // 3], plan.first[:-1])
    assert used.max() <= 4096 and lengths.sum() / (len(plan) * 4096) >= 0.98
    assert seconds < 10 and peak < 90e6
