"""Fixed shapes decode what the loop without them decodes, round by round; what they cannot do is said."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import make_config

from draftsmith.config import EvaluateConfig
from draftsmith.data.store import Document
from draftsmith.errors import InputError
from draftsmith.evaluate import graphed
from draftsmith.evaluate.acceptance import evaluate, make_loop, parting
from draftsmith.evaluate.graphed import GraphedLoop
from draftsmith.evaluate.replay import replay
from draftsmith.evaluate.speculate import decode_plain, decode_speculative, rejection
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


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_at_a_temperature_tokens_have_the_targets_distribution(target, half_trained, prompts, rule):
    for temperature in (0.6, 0.3):
        check_distribution(without_stop(target), half_trained["full"], prompts[0], rule, temperature)


def check_distribution(target, drafter, prompt, rule, temperature, trials=1000):
    """The tokens of a round behind a given one, from the same state over and over; the second behind the likeliest first,
    which at low temperatures most have."""
    loop = GraphedLoop(target, drafter, len(prompt), LIMIT, temperature, rule)
    torch.manual_seed(3)
    with torch.inference_mode():
        loop._start(prompt)
        first, drawn = target.model(input_ids=prompt[None]).logits[0, -1].argmax(), []
        for _ in range(trials):
            loop.length.fill_(len(prompt))
            loop.token.copy_(first)
            loop.round()
            *tokens, agreed = loop.said.tolist()
            drawn.append((*tokens[: agreed + 1], None))
    line = torch.cat([prompt, first[None]])
    for i in range(2):
        with torch.no_grad():
            chances = torch.softmax(target.model(input_ids=line[None]).logits[0, -1] / temperature, -1)
        assert len(drawn) > 40
        for token in chances.topk(5).indices.tolist():
            share, chance = sum(d[i] == token for d in drawn) / len(drawn), float(chances[token])
            assert abs(share - chance) < 4.5 * (chance * (1 - chance) / len(drawn)) ** 0.5, (i, token, share)
        most = int(chances.argmax())
        # those that went on: a match is only of the drafted token, whatever comes behind it
        drawn, line = (
            [d for d in drawn if d[i] == most and d[i + 1] is not None],
            torch.cat([line, line.new_tensor([most])]),
        )


def test_by_rejection_a_drafter_that_is_the_target_is_always_right(target, half_trained, prompts, monkeypatch):
    loop = GraphedLoop(without_stop(target), half_trained["full"], len(prompts[0]), 20, 0.25, "reject")
    monkeypatch.setattr(graphed, "rejection", lambda drafts, q, p, chance: rejection(drafts, p[:-1], p, chance))
    answer = loop.decode_speculative(prompts[0])
    assert answer.accepted == answer.drafted and len(answer.tokens) == 20


def test_evaluate_takes_it_where_asked_and_refuses_what_it_cannot(stored, target_folder, tmp_path):
    train(stored)
    plain = evaluate(stored)["results"][0]
    fixed = evaluate(make_config(target_folder, tmp_path, "evaluate.graphs=true"))["results"][0]
    assert fixed["method"] == "serving loop, fixed shapes" and fixed["lossless"] is True
    assert {k for k in plain if plain[k] != fixed[k]} == {"method", "wall_speedup", "seconds"}
    sampled = ("evaluate.graphs=true", "evaluate.temperature=1")
    for rule in ("match", "reject"):
        found = evaluate(make_config(target_folder, tmp_path, *sampled, f"evaluate.rule={rule}"))["results"][0]
        assert found["rule"] == rule and found["method"] == "serving loop, fixed shapes"


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
