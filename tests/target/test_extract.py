"""The compiled target is held against single documents layer by layer: how deep it is does not count, a leak does.

Layers are not compiled here: what is compared, packed by flex_attention and single by SDPA, rounds differently anyhow.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import write_target
from helpers_train import make_row
from torch import nn

from draftsmith.config import TargetConfig
from draftsmith.target import extract as extracting
from draftsmith.target.extract import FeatureExtractor
from draftsmith.target.model import load_target

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
ROW = make_row([40, 60, 50], [(3, 14), (47, 60)], 160, [5], 1)  # three documents and padding
DEEP = 48


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """packed(layers, dtype): of one random target of 48 layers; what runs packed rows is not compiled."""
    folder = write_target(tmp_path_factory.mktemp("deep"), num_hidden_layers=DEEP, initializer_range=0.3)
    targets = {
        dtype: load_target(TargetConfig(model=str(folder), dtype=dtype, forward="packed"), "cpu")
        for dtype in ("float32", "bfloat16")
    }

    def make(layers: int, dtype: str) -> FeatureExtractor:
        extract = FeatureExtractor(targets[dtype], [layers - 1], torch.float32)
        extract.compiled = extract._cut(nn.ModuleList(extract.trunk.layers))
        return extract

    return make


def end_to_end(extract: FeatureExtractor) -> float:
    """The same measure, of features and not of each layer by itself."""
    found = extract.row(ROW)
    apart = []
    for start, end in zip(ROW.starts, ROW.starts[1:], strict=False):
        alone = extract.document(torch.from_numpy(ROW.tokens[start:end]))
        apart.append(float(((found[start:end] - alone).norm(dim=-1) / alone.norm(dim=-1)).mean()))
    return max(apart)


def test_depth_does_not_count(packed):
    shallow, deep = packed(2, "bfloat16"), packed(DEEP, "bfloat16")
    assert end_to_end(deep) > 0.05 > 3 * end_to_end(shallow), "there is nothing here that grows with depth"
    assert 1e-3 < shallow.deviation(ROW) <= deep.deviation(ROW) < min(0.01, 1.5 * shallow.deviation(ROW))
    assert packed(DEEP, "float32").deviation(ROW) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checked", [1024, 20])
def test_documents_that_see_each_other_are_far_apart(packed, monkeypatch, dtype, checked):
    """Also where only the first tokens of a document are looked at."""
    right = extracting.packed_masks
    as_one = dataclasses.replace(ROW, starts=(0, ROW.starts[-1]), document=np.minimum(ROW.document, 0))
    extract = packed(2, dtype)
    monkeypatch.setattr(extracting, "CHECKED", checked)
    assert extract.deviation(ROW) < {"float32": 1e-6, "bfloat16": 0.01}[dtype]
    monkeypatch.setattr(extracting, "packed_masks", lambda row, *args: right(as_one, *args))
    assert extract.deviation(ROW) > 0.5


class Scaled(nn.Module):
    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, *args, **settings):
        return self.layer(*args, **settings) * self.factor


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_one_wrong_layer_is_seen_wherever_it_is_and_by_as_much_as_it_is_wrong(packed, wrong):
    extract = packed(4, "float32")
    layers = extract.compiled.layers
    layers[wrong] = Scaled(layers[wrong], 1.03)
    assert extract.deviation(ROW) == pytest.approx(0.03, rel=1e-3)
    layers[wrong].factor = float("nan")
    assert np.isnan(extract.deviation(ROW))


class Layer(nn.Module):
    def forward(self, hidden_states, scale, mask=None):
        return hidden_states * scale, mask


def test_a_layer_is_given_its_input_and_compared_however_it_is_called():
    layer, zeros, ones, apart = Layer(), torch.zeros(1, 3, 4), torch.ones(3, 4), []
    with (
        layer.register_forward_pre_hook(extracting._given(ones), with_kwargs=True),
        layer.register_forward_hook(extracting._compared(ones * 1.5, apart)),
    ):
        for states, mask in (layer(zeros, 2.0, mask=5), layer(scale=2.0, mask=5, hidden_states=zeros)):
            assert torch.equal(states, 2 * ones[None]) and mask == 5
    assert [float(a) for a in apart] == [0.25, 0.25]
