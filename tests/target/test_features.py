"""Features from files are the features online, bit for bit; files of something else, or damaged, are refused."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_config

from draftsmith.data.loader import Loader
from draftsmith.data.store import Store
from draftsmith.errors import InputError
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.features import FileFeatures, features_folder, write_features

PINS = {"target_weights": "w", "store": "s", "feature_layers": "[1, 3, 5]", "dtype": "torch.float32"}
CPU = torch.device("cpu")


@pytest.fixture
def store(stored):
    return Store(stored.store)


def rows_of(store: Store, row_tokens: int = 160):
    loader = Loader(store, row_tokens=row_tokens, anchors=8, block_size=4, seed=0)
    return [loader.row(g) for g in range(2 * len(loader.plan(0)))]


def write(store, target, dtype=torch.float32, layers=(1, 3, 5), pins=PINS):
    folder = features_folder(store, pins)
    extract = FeatureExtractor(target, layers, dtype)
    write_features(folder, store, extract, pins)
    return folder, extract


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_from_files_are_the_features_online_bit_for_bit(store, target, dtype):
    folder, extract = write(store, target, dtype)
    read = FileFeatures(folder, store, PINS, CPU)
    rows = rows_of(store)
    assert any(len(row.samples) > 1 for row in rows) and len({row.samples for row in rows}) > 1
    for row in rows:
        a, b = read.row(row), extract.row(row)
        assert a.dtype == b.dtype == dtype and a.shape == b.shape == (160, 192)
        assert torch.equal(a, b)
    read.row(rows[0]).add_(1)  # rows are copies: the file stays as it is
    assert torch.equal(read.row(rows[0]), extract.row(rows[0]))


def test_the_folder_is_named_after_what_it_holds(store):
    here = features_folder(store, PINS)
    assert here.parent == store.path
    assert len({here, *(features_folder(store, {**PINS, key: "other"}) for key in PINS)}) == 5


@pytest.mark.parametrize("key", PINS)
def test_features_of_something_else_are_refused_by_what_differs(store, target, key):
    folder, _ = write(store, target)
    with pytest.raises(InputError, match=f"features of another {key}: remove"):
        FileFeatures(folder, store, {**PINS, key: "other"}, CPU)


def test_damaged_files_are_refused(store, target):
    folder, _ = write(store, target)
    file, manifest = folder / "features.bin", folder / "manifest.json"
    data, text = file.read_bytes(), manifest.read_text()

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match):
            FileFeatures(folder, store, PINS, CPU)

    for wrong in (data[:-4], data + b"0000", b""):
        file.write_bytes(wrong)
        refused(r"features\.bin is missing or cut short .*remove")
    file.unlink()
    refused(r"features\.bin is missing")
    file.write_bytes(data)
    for wrong in (
        "{}",
        "[]",
        '{"pins": {}}',
        text[: len(text) // 2],
        json.dumps({**json.loads(text), "dtype": "int7"}),
    ):
        manifest.write_text(wrong)
        refused(r"manifest")
    manifest.unlink()
    refused("features manifest not found")


def test_files_of_another_store_are_refused(store, target, target_folder, tmp_path):
    """Same pins by mistake, other documents: the size tells."""
    from conftest import write_conversations

    from draftsmith.data.tokenize import tokenize

    folder, _ = write(store, target)
    config = make_config(target_folder, tmp_path / "other")
    write_conversations(config.conversations, 5)
    tokenize(config)
    with pytest.raises(InputError, match="expected"):
        FileFeatures(folder, Store(config.store), PINS, CPU)


def test_features_are_written_whole_or_not_at_all(store, target, monkeypatch):
    folder = features_folder(store, PINS)
    extract = FeatureExtractor(target, (1, 3, 5), torch.float32)
    real, calls = extract.document, []

    def failing(tokens):
        calls.append(len(tokens))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(tokens)

    monkeypatch.setattr(extract, "document", failing)
    before = sorted(p.name for p in store.path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_features(folder, store, extract, PINS)
    assert sorted(p.name for p in store.path.iterdir()) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused_by_document(store, target, monkeypatch, value):
    extract = FeatureExtractor(target, (1, 3, 5), torch.float32)
    real, third = extract.document, store.document(2)

    def spoilt(tokens):
        features = real(tokens)
        if tokens.tolist() == third.tokens.tolist():
            features[4, 7] = value
        return features

    monkeypatch.setattr(extract, "document", spoilt)
    with pytest.raises(InputError, match=f"document '{third.id}' hold NaN or Inf"):
        write_features(features_folder(store, PINS), store, extract, PINS)
    assert not features_folder(store, PINS).exists()
