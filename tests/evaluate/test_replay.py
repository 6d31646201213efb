"""The replay gives the serving loop's rounds, one by one, and the stage and the training loop use it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conftest import make_config

from draftsmith.data.store import Store
from draftsmith.errors import InputError
from draftsmith.evaluate import replay as module
from draftsmith.evaluate.acceptance import evaluate, heldout_prompts, spread
from draftsmith.evaluate.replay import BEYOND, generate_greedily, greedy_answers, replay
from draftsmith.evaluate.speculate import decode_plain, decode_speculative
from draftsmith.records import Answer, GreedyAnswer
from draftsmith.tracking import read_metrics
from draftsmith.train.loop import train
from evaluate.conftest import GREEDY, KINDS, without_stop

LIMIT = 30


def answers_to(target, prompts, limit=LIMIT) -> list[GreedyAnswer]:
    tokens = generate_greedily(target, [p.tolist() for p in prompts], limit + BEYOND, 3)
    return [
        GreedyAnswer(str(i), "all", tuple(p.tolist()), tuple(t), module._length(t, target, limit))
        for i, (p, t) in enumerate(zip(prompts, tokens, strict=True))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", ["length", "stop"])
def test_the_replay_is_the_serving_loop_round_by_round(target, half_trained, prompts, kind, stops, monkeypatch):
    """Answers that end by the limit, whose last blocks are shorter, and by a stop token, with drafts beyond it."""
    who = without_stop(target)
    if stops == "stop":  # a token that stands well inside the answers
        plain = [decode_plain(who, p, LIMIT, GREEDY).tokens for p in prompts]
        who = dataclasses.replace(target, eos_token_ids=tuple(p[9 + 2 * i] for i, p in enumerate(plain)))
    monkeypatch.setitem(module.ROW_QUERIES, "cpu", 240)  # several passes, several answers in some of them
    drafter = half_trained[kind]
    answers = answers_to(who, prompts)
    replayed = replay(who, drafter, answers, LIMIT)
    served = [decode_speculative(who, drafter, p, LIMIT, GREEDY) for p in prompts]
    for one, other in zip(replayed, served, strict=True):
        assert one == dataclasses.replace(other, seconds=0.0, prefill_seconds=0.0)
    accepted = {n for a in replayed for n in a.accepted}
    assert {0, 3} <= accepted and ({1, 2} & accepted or stops == "stop")
    assert any(len(a.tokens) < LIMIT for a in replayed) == (stops == "stop")
    beyond = [sum(a.rounds) < sum(n + 1 for n in a.accepted) for a in replayed]
    assert any(beyond)  # the limit or the stop token did cut rounds


def test_a_first_token_that_ends_the_answer_leaves_no_round(target, half_trained, prompts):
    first = decode_plain(target, prompts[0], 1, GREEDY).tokens[0]
    who = dataclasses.replace(target, eos_token_ids=(first,))
    (answer,) = replay(who, half_trained["full"], answers_to(who, prompts[:1]), LIMIT)
    assert answer.tokens == (first,) and answer.rounds == ()


def test_a_block_must_not_reach_beyond_what_was_kept(target, half_trained):
    drafter = half_trained["full"]
    wide = type(drafter)(dataclasses.replace(drafter.spec, block_size=BEYOND + 3))
    with pytest.raises(InputError, match="up to 33 slots, the drafter has 34"):
        replay(target, wide, [], LIMIT)


def test_the_answers_are_plain_decodings_and_are_kept(stored, target, monkeypatch):
    prompts = heldout_prompts(Store(stored.store), 3)
    first = greedy_answers(stored, target, prompts)
    for answer, document in zip(first, prompts, strict=True):
        assert answer.prompt == tuple(document.prompt()) and answer.category == document.category
        plain = decode_plain(target, module.put(document.prompt().astype("int64"), target.device), 12, GREEDY)
        assert answer.tokens[: answer.length] == plain.tokens and len(answer.tokens) == 12 + BEYOND
    monkeypatch.setattr(module, "generate_greedily", lambda *args: pytest.fail("generated again"))
    assert greedy_answers(stored, target, prompts) == first
    with pytest.raises(pytest.fail.Exception):
        greedy_answers(stored, target, prompts[:1])


def test_evaluate_and_training_replay_on_prompts_of_their_own(stored, target_folder, tmp_path):
    prompts = tmp_path / "heldout.jsonl"
    lines = [{"id": f"h{i}", "category": "xy"[i % 2], "prompt": f"What of {'z' * i}?"} for i in range(5)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = (f"evaluate.heldout={prompts}", "evaluate.prompts=4")
    config = make_config(target_folder, tmp_path, *settings, "evaluate.replay=true", "train.accept_every=3")
    run = train(config)
    accepted = [line for line in read_metrics(run.metrics) if line["kind"] == "accepted"]
    assert [line["step"] for line in accepted] == [3, 6] and set(accepted[0]["by_category"]) == {"x", "y"}
    replayed = evaluate(config)["results"][0]
    served = evaluate(make_config(target_folder, tmp_path, *settings))["results"][0]
    assert accepted[-1]["accepted_length"] == replayed["accepted_length"]
    assert (replayed["method"], served["method"]) == ("replay", "serving loop") and replayed["prompts"] == 4
    differing = {k for k in replayed.keys() & served.keys() if replayed[k] != served[k]}
    assert differing == {"method"}
    assert {p.name for p in run.evaluation.glob("*.json")} == {"step_00000006-t0-replay.json", "step_00000006-t0.json"}
    with pytest.raises(InputError, match=r"evaluate\.replay is for evaluate\.temperature=0"):
        make_config(target_folder, tmp_path, "evaluate.replay=true", "evaluate.temperature=1")


def test_the_spread_is_that_of_prompts_drawn_anew():
    def answer(accepted: int) -> Answer:
        return Answer((0,), (1,) * 4, (3,) * 4, (accepted,) * 4, (True,) * 4, 4, 0.0, 0.0)

    assert spread([answer(2)] * 5) == 0 and spread([]) is None
    both = spread([answer(0), answer(2)] * 50)  # a mean of 100 draws from 0 and 2, whose deviation is 1
    assert 0.09 < both < 0.11
