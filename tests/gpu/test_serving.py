"""On a GPU, float32: a round as a CUDA graph and the replay give the rounds of the plain serving loop; sampling runs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from evaluate.conftest import GREEDY, KINDS, half_trained, prompts  # noqa: F401 (fixtures)
from evaluate.test_graphed import check_distribution
from evaluate.test_replay import answers_to

from draftsmith.config import TargetConfig
from draftsmith.evaluate.graphed import GraphedLoop
from draftsmith.evaluate.replay import replay
from draftsmith.evaluate.speculate import decode_plain, decode_speculative
from draftsmith.target.model import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LIMIT = 30


def timeless(answer):
    return dataclasses.replace(answer, seconds=0.0, prefill_seconds=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_replay_make_the_rounds_of_the_loop(target, half_trained, prompts, kind):  # noqa: F811
    target = load_target(TargetConfig(model=target.name, dtype="float32"), "cuda")
    target = dataclasses.replace(target, eos_token_ids=(-1,))
    drafter, prompts = copy.deepcopy(half_trained[kind]).to("cuda"), [p.to("cuda") for p in prompts]
    loop = GraphedLoop(target, drafter, max(map(len, prompts)), LIMIT)
    served = [decode_speculative(target, drafter, p, LIMIT, GREEDY) for p in prompts]
    assert sum(n for s in served for n in s.accepted) > 20
    assert [timeless(loop.decode_speculative(p)) for p in prompts] == [timeless(s) for s in served]
    plain = [decode_plain(target, p, LIMIT, GREEDY).tokens for p in prompts]
    assert [loop.decode_plain(p).tokens for p in prompts] == plain == [s.tokens for s in served]
    assert replay(target, drafter, answers_to(target, prompts, LIMIT), LIMIT) == [timeless(s) for s in served]
    for rule in ("match", "reject"):
        sampling = GraphedLoop(target, drafter, max(map(len, prompts)), LIMIT, 1.0, rule)
        drawn = [sampling.decode_speculative(prompts[0], seed).tokens for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2] and len(drawn[2]) == LIMIT
        for temperature in (0.6, 0.3):
            check_distribution(target, drafter, prompts[0], rule, temperature)
