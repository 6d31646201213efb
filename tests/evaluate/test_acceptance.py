"""The averages on rounds written by hand, prompts chosen by category, and what the evaluate stage writes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from conftest import make_config, write_conversations

from draftsmith.data.store import Document, Store
from draftsmith.data.tokenize import tokenize
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.evaluate import acceptance
from draftsmith.evaluate.acceptance import (
    acceptance_by_slot,
    average_lengths,
    evaluate,
    evaluation_prompts,
    heldout_prompts,
    measure,
    plain_answers,
    render,
)
from draftsmith.records import Answer
from draftsmith.rundir import create
from draftsmith.target.model import drafter_spec
from draftsmith.train.loop import train

# B = 4.  One answer of 1 + 4 + 2 + 3 tokens whose last round was cut from 4 to 3, one of 1 + 1 + 1, one without a round.
FIRST = Answer(
    tokens=tuple(range(10)), rounds=(4, 2, 3), drafted=(3, 3, 3), accepted=(3, 1, 3), full=(True, True, False),
    block_size=4, seconds=2.0, prefill_seconds=0.5, slot_offered=(3, 3, 3), slot_accepted=(3, 2, 2),
)  # fmt: skip
SECOND = Answer(
    tokens=(1, 2, 3), rounds=(1, 1), drafted=(3, 1), accepted=(0, 0), full=(True, False),
    block_size=4, seconds=1.0, prefill_seconds=0.5, slot_offered=(2, 1, 1), slot_accepted=(0, 0, 0),
)  # fmt: skip
NONE = Answer(
    tokens=(2,), rounds=(), drafted=(), accepted=(), full=(), block_size=4, seconds=0.1, prefill_seconds=0.1,
    slot_offered=(0, 0, 0), slot_accepted=(0, 0, 0),
)  # fmt: skip


def test_the_four_averages_of_rounds_made_by_hand():
    assert average_lengths([FIRST]) == pytest.approx(
        {"mean_of_answers": 3.0, "per_request": 10 / 3, "pooled": 1 + 7 / 3, "full_rounds": 3.0}
    )
    assert average_lengths([FIRST, SECOND]) == pytest.approx(
        {
            "mean_of_answers": (9 / 3 + 2 / 2) / 2,
            "per_request": (10 / 3 + 3 / 2) / 2,
            "pooled": 1 + 7 / 5,
            "full_rounds": (4 + 2 + 1) / 3,
        }
    )


def test_answers_without_a_round_say_nothing():
    assert average_lengths([FIRST, SECOND, NONE]) == average_lengths([FIRST, SECOND])
    assert set(average_lengths([NONE]).values()) == {None} and set(average_lengths([]).values()) == {None}
    cut = dataclasses.replace(SECOND, full=(False, False))
    assert average_lengths([cut])["full_rounds"] is None and average_lengths([cut])["pooled"] == 1


def test_acceptance_by_slot_is_over_the_rounds_that_drafted_the_slot():
    assert acceptance_by_slot([FIRST, SECOND, NONE]) == [3 / 5, 2 / 4, 2 / 4]
    assert acceptance_by_slot([NONE]) == [None, None, None]


def document(number: int, category: str, heldout: bool = True) -> Document:
    return Document(np.arange(8, dtype=np.int32), ((3, 8),), f"d{number}", category, heldout)


class FakeStore:
    path = "store"

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.heldout = np.array([d.heldout for d in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, number: int) -> Document:
        return self.documents[number]


def test_prompts_are_held_out_and_taken_in_turn_from_each_category():
    store = FakeStore([document(i, c, i != 1) for i, c in enumerate("aaaabbc")])
    assert [d.id for d in heldout_prompts(store, 5)] == ["d0", "d4", "d6", "d2", "d5"]
    assert [d.id for d in heldout_prompts(store, 2)] == ["d0", "d4"]
    assert len(heldout_prompts(store, 99)) == 6
    with pytest.raises(InputError, match=r"no held-out documents .*tokenize\.heldout_fraction"):
        heldout_prompts(FakeStore([document(0, "a", heldout=False)]), 3)


def test_of_prompts_of_their_own_the_first_turn_is_asked_and_what_is_wrong_names_the_key(
    stored, target, target_folder, tmp_path
):
    path = tmp_path / "heldout.jsonl"
    turns = [{"role": r, "content": c} for r, c in (("user", "A?"), ("assistant", "..."), ("user", "B?"))]
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "A?"}) + "\n")
    config = make_config(target_folder, tmp_path, f"evaluate.heldout={path}")
    two, one = evaluation_prompts(config, Store(stored.store), target.tokenizer, 9)
    assert two.prompt().tolist() == one.prompt().tolist(), "answers that stand for the target's own are not shown to it"
    known = [json.loads(line) for line in stored.conversations.read_text().splitlines()]
    store = Store(stored.store)
    trained = {store.identity(int(n)) for n in np.flatnonzero(~store.heldout)}
    for held in (True, False):
        one = next(c for c in known if (c["id"] in trained) != held)
        path.write_text(
            json.dumps({"prompt": "A?"}) + "\n" + json.dumps({"id": "x", "messages": one["messages"][:1]}) + "\n"
        )
        if held:
            assert len(evaluation_prompts(config, store, target.tokenizer, 9)) == 2
        else:
            with pytest.raises(InputError, match=r"evaluate\.heldout: .*store trains on x of"):
                evaluation_prompts(config, store, target.tokenizer, 9)
    path.write_text("")
    with pytest.raises(InputError, match=r"heldout\.jsonl holds no prompts"):
        evaluation_prompts(config, Store(stored.store), target.tokenizer, 9)
    path.unlink()
    with pytest.raises(InputError, match=r"prompts \(evaluate\.heldout\) cannot be read"):
        evaluation_prompts(config, Store(stored.store), target.tokenizer, 9)


@pytest.fixture
def trained(stored):
    return stored, train(stored)


def test_measure_reports_by_category_and_against_plain_decoding(stored, target, monkeypatch):
    drafter = DFlashDrafter(drafter_spec(stored.drafter, target))
    prompts = [document(0, "a"), document(1, "b"), document(2, "a")]
    answers = iter([FIRST, SECOND, dataclasses.replace(NONE, tokens=(9,))])
    monkeypatch.setattr(acceptance, "decode_speculative", lambda *args: next(answers))
    plain = [dataclasses.replace(a, seconds=4.0) for a in (FIRST, SECOND, dataclasses.replace(NONE, tokens=(8, 7, 6)))]
    result = measure("x", target, drafter, prompts, plain, max_new_tokens=10).result
    assert result["by_category"] == {"a": average_lengths([FIRST, NONE]), "b": average_lengths([SECOND])}
    assert result["accepted_length"] == average_lengths([FIRST, SECOND])
    assert result["rule"] == "greedy" and result["rounds"] == [[4, 2, 3], [1, 1], []]
    assert result["tokens"] == 14 and result["verifications"] == 5
    assert result["plain_tokens"] == 16 and result["passes_speedup"] == 14 / (4 + 3 + 1)
    assert result["wall_speedup"] == pytest.approx(14 / 3.1 / (16 / 12))  # rates, as the third answer is shorter
    assert result["lossless"] is False and result["differing"] == ["d2"]


def test_sampling_claims_nothing_about_the_tokens_and_compares_rates(stored, target, monkeypatch):
    drafter = DFlashDrafter(drafter_spec(stored.drafter, target))
    monkeypatch.setattr(acceptance, "decode_speculative", lambda *args: FIRST)
    plain = [dataclasses.replace(FIRST, tokens=tuple(range(5)), seconds=3.0)]
    result = measure(
        "x", target, drafter, [document(0, "a")], plain, max_new_tokens=9, temperature=0.7, rule="reject"
    ).result
    assert result["lossless"] is None and "differing" not in result and result["rule"] == "reject"
    assert result["passes_speedup"] == pytest.approx(10 / 4)  # tokens a pass, against one token a pass
    assert result["wall_speedup"] == pytest.approx((10 / 2.0) / (5 / 3.0))


def test_evaluate_writes_json_and_text_and_names_the_averages(trained, target_folder, tmp_path):
    config, run = trained
    config = make_config(target_folder, tmp_path, "evaluate.untrained=true")
    out = evaluate(config)
    (path,) = run.evaluation.glob("*.json")
    assert path.name == "step_00000006-t0.json" and json.loads(path.read_text()) == json.loads(json.dumps(out))
    text = path.with_suffix(".txt").read_text()
    for word in (
        "mean_of_answers",
        "per_request",
        "pooled",
        "full_rounds",
        "slot 3 accepted",
        "a (pooled)",
        "untrained",
        "greedy",
        "yes",
    ):
        assert word in text, word
    first, second = out["results"]
    assert [r["drafter"] for r in out["results"]] == ["trained", "untrained"]
    assert first["lossless"] is second["lossless"] is True and first["differing"] == []
    assert first["prompts"] == 2 and first["block_size"] == 4 and len(first["acceptance_by_slot"]) == 3


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_evaluate_names_the_rule_beside_numbers_at_a_temperature(trained, target_folder, tmp_path, rule):
    _, run = trained
    out = evaluate(make_config(target_folder, tmp_path, "evaluate.temperature=0.8", f"evaluate.rule={rule}"))
    assert out["results"][0]["rule"] == rule and out["results"][0]["temperature"] == 0.8
    text = (run.evaluation / f"step_00000006-t0.8-{rule}.txt").read_text()
    assert rule in text and "by rule" in text


def test_a_loop_that_is_not_lossless_is_an_error(trained, target_folder, tmp_path, monkeypatch):
    config, run = trained
    real = acceptance.decode_speculative

    def wrong(*args):
        answer = real(*args)
        return dataclasses.replace(answer, tokens=(*answer.tokens[:-1], 7))

    monkeypatch.setattr(acceptance, "decode_speculative", wrong)
    with pytest.raises(RuntimeError, match="differs from plain decoding in float32 on"):
        evaluate(config)
    assert list(run.evaluation.glob("*.json"))  # the numbers are there to be looked at


def test_evaluate_refuses_what_it_cannot_measure(trained, target_folder, tmp_path):
    def refused(match: str, *overrides: str) -> None:
        with pytest.raises(InputError, match=match):
            evaluate(make_config(target_folder, tmp_path, *overrides))

    refused("neither a checkpoint", f"evaluate.drafter={tmp_path}")
    refused("no run in", "name=other")
    other = make_config(target_folder, tmp_path / "o", "tokenize.heldout_fraction=0")
    write_conversations(other.conversations)
    tokenize(other)
    refused("no held-out documents", f"data_dir={other.data}")
    assert len(Store(other.store)) == 12


def test_with_drafter_and_output_named_no_run_is_needed(trained, target_folder, tmp_path):
    _, run = trained
    path, out = run.checkpoint(6), tmp_path / "results" / "here"
    settings = (f"evaluate.drafter={path}", f"runs_dir={tmp_path / 'none'}")
    config = make_config(target_folder, tmp_path, *settings, f"evaluate.output={out}")
    first = evaluate(config)
    assert first["evaluated"] == str(path) and not (tmp_path / "none").exists()
    evaluate(config)
    names = ["step_00000006-t0-2.json", "step_00000006-t0-2.txt", "step_00000006-t0.json", "step_00000006-t0.txt"]
    assert sorted(p.name for p in out.iterdir()) == names and not run.evaluation.exists()
    with pytest.raises(InputError, match=r"no run in .*or set evaluate\.output$"):
        evaluate(make_config(target_folder, tmp_path, *settings))
    with pytest.raises(InputError, match=r"no run in .*or set evaluate\.drafter$"):
        evaluate(make_config(target_folder, tmp_path, settings[1], f"evaluate.output={out}"))


def test_a_folder_for_results_that_cannot_be_made_is_refused_before_the_work(trained, target_folder, tmp_path, monkeypatch):  # fmt: skip
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(acceptance, "plain_answers", lambda *args: pytest.fail("the work began"))
    with pytest.raises(InputError, match="cannot make the folder"):
        evaluate(make_config(target_folder, tmp_path, f"evaluate.output={tmp_path / 'file' / 'results'}"))


def test_an_attempt_without_a_checkpoint_is_passed_over_aloud(trained, target_folder, tmp_path, capsys):
    config, run = trained
    create(config.runs_dir, config.name, new_attempt=True)
    capsys.readouterr()
    assert evaluate(config)["evaluated"] == str(run.checkpoint(6))
    assert f"attempt_2 has no checkpoint: taking {run.checkpoint(6)}\n" in capsys.readouterr().out
    assert (run.evaluation / "step_00000006-t0.json").is_file()  # beside the checkpoint that was measured


def test_render_has_a_column_for_each_drafter(stored, target):
    drafter = DFlashDrafter(drafter_spec(stored.drafter, target)).initialize(0)
    prompts = heldout_prompts(Store(stored.store), 1)
    plain = plain_answers(target, prompts, 6, 0.0, 0)
    one = measure("one", target, drafter, prompts, plain, max_new_tokens=6)
    two = measure("two", target, drafter, prompts, None, max_new_tokens=6)
    assert "speed-up" in render([one]) and "speed-up" not in render([two])
    head = render([one, dataclasses.replace(one, label="other")]).splitlines()[2]
    assert "one" in head and "other" in head
