"""Fixed shapes decode what the loop without them decodes, round by round; what they cannot do is said."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import make_config

from draftsmith.config import EvaluateConfig
from draftsmith.data.store import Document
from draftsmith.errors import InputError
from draftsmith.evaluate.acceptance import evaluate, make_loop, parting
from draftsmith.evaluate.graphed import GraphedLoop
from draftsmith.evaluate.replay import replay
from draftsmith.evaluate.speculate import decode_plain, decode_speculative
from draftsmith.records import GreedyAnswer
from draftsmith.train.loop import train
from evaluate.conftest import GREEDY, KINDS, without_stop

LIMIT = 30


def timeless(answer):
    return dataclasses.replace(answer, seconds=0.0, prefill_seconds=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_shapes_decode_the_same_round_by_round(target, half_trained, prompts, kind):
    """One loop for all prompts, the longest first: what another prompt left in the buffers must not be seen."""
    who, drafter = without_stop(target), half_trained[kind]
    plain = [decode_plain(who, p, LIMIT, GREEDY).tokens for p in prompts]
    stopping = dataclasses.replace(target, eos_token_ids=tuple(p[9 + 2 * i] for i, p in enumerate(plain)))
    for one in (who, stopping):
        loop = GraphedLoop(one, drafter, max(map(len, prompts)), LIMIT)
        for prompt in reversed(prompts):
            served = decode_speculative(one, drafter, prompt, LIMIT, GREEDY)
            assert timeless(loop.decode_speculative(prompt)) == timeless(served)
            assert timeless(loop.decode_plain(prompt)) == timeless(decode_plain(one, prompt, LIMIT, GREEDY))


def test_at_a_temperature_the_first_two_tokens_have_the_targets_distribution(target, half_trained, prompts):
    who, count = without_stop(target), 500
    loop = GraphedLoop(who, half_trained["full"], len(prompts[0]), 2, temperature=0.25)
    drawn = [loop.decode_speculative(prompts[0], seed).tokens for seed in range(count)]
    with torch.no_grad():
        logits = target.model(input_ids=prompts[0][None]).logits[0, -1]
        first = torch.softmax(logits / 0.25, -1)
        most = int(first.argmax())
        line = torch.cat([prompts[0], torch.tensor([most])])
        second = torch.softmax(target.model(input_ids=line[None]).logits[0, -1] / 0.25, -1)
    for chances, seen in (
        (first, [d[0] for d in drawn]), (second, [d[1] for d in drawn if d[0] == most]),
    ):  # fmt: skip
        top = int(chances.argmax())
        share, chance = seen.count(top) / len(seen), float(chances[top])
        assert 0.02 < chance < 0.98 and len(seen) > 100
        assert abs(share - chance) < 4 * (chance * (1 - chance) / len(seen)) ** 0.5


def test_evaluate_takes_it_where_asked_and_refuses_what_it_cannot(stored, target_folder, tmp_path):
    train(stored)
    plain = evaluate(stored)["results"][0]
    fixed = evaluate(make_config(target_folder, tmp_path, "evaluate.graphs=true"))["results"][0]
    assert fixed["method"] == "serving loop, fixed shapes" and fixed["lossless"] is True
    assert {k for k in plain if plain[k] != fixed[k]} == {"method", "wall_speedup", "seconds"}
    sampled = ("evaluate.graphs=true", "evaluate.temperature=1")
    assert evaluate(make_config(target_folder, tmp_path, *sampled))["results"][0]["rule"] == "match"
    with pytest.raises(InputError, match=r"evaluate\.graphs: .* the rule is reject"):
        evaluate(make_config(target_folder, tmp_path, *sampled, "evaluate.rule=reject"))


def test_a_target_whose_attention_would_misread_the_mask_is_left_to_the_plain_loop(target, prompts):
    settings, documents = EvaluateConfig(graphs=True), [Document(prompts[0].numpy(), ((8, 8),), "0", "all", True)]
    before = target.model.config._attn_implementation
    assert make_loop(settings, target, None, documents) is not None
    target.model.set_attn_implementation("eager")
    try:
        with pytest.raises(InputError, match=r"evaluate\.graphs: .* its attention is eager"):
            make_loop(settings, target, None, documents)
    finally:
        target.model.set_attn_implementation(before)


def test_a_target_whose_features_are_not_finite_is_an_error_whoever_decodes(target, half_trained, prompts):
    drafter, answer = half_trained["full"], GreedyAnswer("0", "all", tuple(prompts[0].tolist()), (5,) * 40, 9)
    loop = GraphedLoop(target, drafter, 20, LIMIT)
    layer = target.layers[drafter.spec.feature_layers[-1]]
    broken = layer.register_forward_hook(lambda module, args, out: out * float("inf"))
    try:
        for decode in (
            lambda: loop.decode_speculative(prompts[0]),
            lambda: decode_speculative(target, drafter, prompts[0], LIMIT, GREEDY),
            lambda: replay(target, drafter, [answer], LIMIT),
        ):
            with pytest.raises(FloatingPointError, match="features of .* hold NaN or Inf"):
                decode()
    finally:
        broken.remove()


def test_where_answers_part_the_gap_is_that_of_their_two_tokens(target, prompts):
    answer = decode_plain(without_stop(target), prompts[0], 6, GREEDY).tokens
    other = (*answer[:3], (answer[3] + 1) % 200, 7)
    found = parting(target, prompts[0], answer, other)
    with torch.no_grad():
        line = torch.cat([prompts[0], torch.tensor(answer[:3])])
        logits = target.model(input_ids=line[None]).logits[0, -1]
    gap = float(logits[answer[3]] - logits[other[3]])
    assert found["at"] == 3 and found["gap"] == pytest.approx(gap, abs=1e-5) and found["gap"] > 100 * found["step"] > 0
