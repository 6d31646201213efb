"""What each token of a packed row sees: both kinds of mask against the rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers_train import make_row

from draftsmith.target.packed import packed_intervals, packed_masks

ROW = make_row([14, 20, 12], [(3, 14), (17, 34), (36, 46)], 50, [5], 1)  # three documents and padding
CPU = torch.device("cpu")


@pytest.mark.parametrize("kinds", [("full_attention",), ("full_attention", "sliding_attention"), None])
def test_both_masks_are_causal_within_the_document_and_the_window(kinds):
    text = SimpleNamespace(
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=kinds,
        sliding_window=6 if kinds is None or len(kinds) > 1 else None,
    )
    made = packed_intervals(ROW, text, CPU)
    others = packed_masks(ROW, text, CPU)
    assert set(made) == set(kinds or ["sliding_attention"])
    q, k = torch.meshgrid(torch.arange(50), torch.arange(50), indexing="ij")
    document, zero = torch.from_numpy(ROW.document), torch.zeros_like(q)
    for kind, intervals in made.items():
        rule = (document[q] == document[k]) & (k <= q)
        if kind == "sliding_attention":
            rule &= q - k < 6
        lo, hi, own_lo, own_hi = intervals.sees_4Q
        assert torch.equal((k >= lo[:, None]) & (k < hi[:, None]), rule)
        assert torch.equal(own_lo, own_hi)
        mask = others[kind] if isinstance(others, dict) else others
        assert torch.equal(mask.mask_mod(zero, zero, q, k), rule)
