"""Answers are the target's own, one by one, and an interrupted run loses and repeats nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import TEMPLATE, make_config, write_prompts, write_target, write_tokenizer

from draftsmith.config import Config
from draftsmith.data import answers
from draftsmith.data import engine as engine_module
from draftsmith.data.engine import answer_batch
from draftsmith.data.generate import generate
from draftsmith.data.messages import read_prompts
from draftsmith.errors import InputError
from draftsmith.target.model import Target, load_target, load_tokenizer


def prompt_ids(target: Target, content: str) -> list[int]:
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def slow_greedy(target: Target, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
    """Plain decoding without batch, padding or cache; and the smallest lead of a chosen token over the next best."""
    out, lead = list(ids), float("inf")
    while len(out) - len(ids) < max_new_tokens:
        best = target.model(input_ids=torch.tensor([out])).logits[0, -1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        out.append(int(best.indices[0]))
        if out[-1] in target.eos_token_ids:
            break
    return out[len(ids) :], lead


def expected(target: Target, content: str, max_new_tokens: int) -> tuple[str, str, int]:
    tokens, lead = slow_greedy(target, prompt_ids(target, content), max_new_tokens)
    assert lead > 1e-4, "a near tie: the order of sums could decide it, so this prompt proves nothing"
    stopped = tokens[-1] in target.eos_token_ids
    text = target.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)
    return text, "stop" if stopped else "length", len(tokens)


PROMPTS = ["a?", "Question 3: xxx?", "what is the longest of these prompts, so that the others are padded?"]


def test_answers_equal_plain_decoding_one_by_one(target, config):
    """In one batch, left-padded to the longest; with a stop token that some answers reach and some do not."""
    plain = [slow_greedy(target, prompt_ids(target, p), 24)[0] for p in PROMPTS]
    stop = next(t for t in plain[0][3:] if t not in plain[0][:3] and t not in plain[1] and t > 3)
    target = dataclasses.replace(target, eos_token_ids=(2, stop))
    wanted = [expected(target, p, 24) for p in PROMPTS]
    assert {reason for _, reason, _ in wanted} == {"stop", "length"}
    assert len({text for text, _, _ in wanted}) == len(PROMPTS)
    assert answer_batch(target, [prompt_ids(target, p) for p in PROMPTS], config) == wanted


def test_the_models_own_generation_config_does_not_bend_the_answers(tmp_path):
    """repetition_penalty and the like, shipped by many models: the serving loop knows nothing of them."""
    folder = write_target(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "repetition_penalty": 5.0, "no_repeat_ngram_size": 2, "max_new_tokens": 3})
    )
    config = make_config(folder, tmp_path)
    target = load_target(config.target, "cpu")
    assert answer_batch(target, [prompt_ids(target, PROMPTS[0])], config) == [expected(target, PROMPTS[0], 24)]


def test_sampling_follows_seed_and_temperature(target, tmp_path, target_folder):
    prompts = [prompt_ids(target, p) for p in PROMPTS]

    def answers(*overrides: str, stream: int = 0):
        return answer_batch(target, prompts, make_config(target_folder, tmp_path, *overrides), stream)

    hot = answers("generate.temperature=1.5")
    assert hot == answers("generate.temperature=1.5")
    assert hot != answers("generate.temperature=1.5", "generate.seed=1")
    assert hot != answers("generate.temperature=1.5", stream=8)
    greedy = answers()
    assert hot != greedy
    assert greedy == answers("generate.temperature=1.5", "generate.top_p=1e-6"), "only the best token is left"


def lines(config: Config) -> list[dict]:
    return [json.loads(x) for x in config.conversations.read_text().splitlines()]


def test_every_prompt_is_answered_once_by_the_target(config, target):
    counts = generate(config, target)
    prompts = {p.id: p for p in read_prompts(config.generate.prompts)}
    found = lines(config)
    assert sorted(x["id"] for x in found) == sorted(prompts)
    for x in found:
        assert x["messages"][:-1] == list(prompts[x["id"]].messages)
        assert x["category"] == prompts[x["id"]].category
        assert x["messages"][-1]["role"] == "assistant"
    assert counts["prompts"] == 12 == sum(v for k, v in counts.items() if k.startswith("finish_"))
    assert counts["completion_tokens"] == sum(x["completion_tokens"] for x in found)
    for x in found[:2]:
        wanted = expected(target, x["messages"][0]["content"], config.generate.max_new_tokens)
        assert (x["messages"][-1]["content"], x["finish_reason"], x["completion_tokens"]) == wanted


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_resume_after_a_half_written_line_loses_and_repeats_nothing(config, target, cut):
    generate(config, target)
    whole = config.conversations.read_bytes()
    by_id = {x["id"]: x for x in lines(config)}
    keep = whole.splitlines(keepends=True)[:5]
    last = whole.splitlines(keepends=True)[5]
    config.conversations.write_bytes(b"".join(keep) + last[:cut])
    counts = generate(config, target)
    assert counts["answered_before"] == 5 and counts["prompts"] == 12
    assert config.conversations.read_bytes().startswith(b"".join(keep))
    assert len(lines(config)) == 12 and {x["id"]: x for x in lines(config)} == by_id
    after = config.conversations.read_bytes()
    assert generate(config, target)["answered_before"] == 12
    assert config.conversations.read_bytes() == after


def test_interrupted_between_batches_it_goes_on_where_it_was(config, target, monkeypatch):
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(kwargs["stream"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer_batch(*args, **kwargs)

    monkeypatch.setattr(engine_module, "answer_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(config, target)
    first = config.conversations.read_bytes()
    assert first.count(b"\n") == config.generate.batch_size == 8
    assert generate(config, target)["answered_before"] == 8
    assert config.conversations.read_bytes().startswith(first)
    assert len({x["id"] for x in lines(config)}) == 12 == len(lines(config))
    assert len(calls) == 3 and calls[2] == 8, "what comes after must not draw the random numbers of what came before"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("generate.temperature=0.7", "temperature was 0.0, is 0.7"),
        ("generate.max_new_tokens=25", "max_new_tokens was 24, is 25"),
        ("generate.seed=5", "seed was 0, is 5"),
        ("target.model=other", "model was '.*', is 'other'"),
    ],
)
def test_changed_settings_are_refused_with_the_difference(config, target, tmp_path, target_folder, override, said):
    generate(config, target)
    before = {p.name: p.read_bytes() for p in config.data.iterdir()}
    with pytest.raises(InputError, match=rf"begun with other settings \({said}\).*data_dir"):
        generate(make_config(target_folder, tmp_path, override), target)
    assert {p.name: p.read_bytes() for p in config.data.iterdir()} == before


def test_settings_that_change_no_answer_may_change(config, target, tmp_path, target_folder):
    generate(config, target)
    again = make_config(target_folder, tmp_path, "generate.batch_size=3", "generate.limit=4")
    assert generate(again, target) == {"prompts": 4, "answered_before": 4}


def test_another_prompt_under_an_answered_id_is_refused(config, target, tmp_path):
    generate(config, target)
    path = write_prompts(tmp_path)
    path.write_text(path.read_text().replace("Question 3:", "Another question:"))
    with pytest.raises(InputError, match=r"prompts\.jsonl: the prompt 'p3' is not the one answered in .*data_dir"):
        generate(config, target)


def test_answers_without_their_settings_are_not_gone_on_with(config, target):
    generate(config, target)
    config.conversations.with_suffix(".settings.json").unlink()
    with pytest.raises(InputError, match=r"settings .*conversations\.settings\.json"):
        generate(config, target)


def test_more_prompts_are_added_to_the_answers_there_are(config, target, tmp_path):
    generate(config, target)
    before = config.conversations.read_bytes()
    write_prompts(tmp_path, count=15)
    assert generate(config, target)["answered_before"] == 12
    assert config.conversations.read_bytes().startswith(before) and len(lines(config)) == 15


def test_a_prompt_longer_than_the_row_is_an_error_or_dropped(target, tmp_path, target_folder):
    path = write_prompts(tmp_path)
    with open(path, "a") as out:
        out.write(json.dumps({"id": "long", "prompt": "x" * 200}) + "\n")
    config = make_config(target_folder, tmp_path)
    with pytest.raises(InputError, match=r"prompts\.jsonl: the prompt 'long' has 2\d\d tokens, a row holds 128.*drop"):
        generate(config, target)
    assert not config.data.exists()
    config = make_config(target_folder, tmp_path, "tokenize.long_prompt=drop")
    counts = generate(config, target)
    assert counts["prompt_too_long"] == 1 and len(lines(config)) == 12


def test_a_template_that_refuses_a_role_is_an_input_error(tmp_path):
    folder = write_target(tmp_path / "m")
    write_tokenizer(
        folder, "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "s1", "messages": messages}) + "\n")
    config = make_config(folder, tmp_path)
    with pytest.raises(InputError, match=r"prompts\.jsonl: the chat template refuses 's1': no system"):
        generate(config)
    assert not config.data.exists()


def test_a_template_that_stumbles_is_an_input_error(tmp_path):
    """Given a tool call whose arguments are no JSON; with those that are, it is shown the object."""
    shown = "m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | items | list }}{% endfor %}{{"
    folder = write_target(tmp_path / "m")
    write_tokenizer(folder, TEMPLATE.replace("m['content'] +", shown, 1))
    config = make_config(folder, tmp_path)
    for arguments, said in (("none", r"prompts\.jsonl: the chat template refuses 'c': TypeError"), ('{"x": 1}', None)):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}
        messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "4"}]
        config.generate.prompts.write_text(json.dumps({"id": "c", "messages": messages}) + "\n")
        if said is None:
            tokenizer, prompt = load_tokenizer(config.target), read_prompts(config.generate.prompts)[0]
            text = engine_module.prompt_text(tokenizer, prompt, prompt.messages, config)
            assert "assistant\n[('x', 1)]<|im_end|>" in text
        else:
            with pytest.raises(InputError, match=said):
                generate(config)


def test_prompts_are_read_as_written(tmp_path):
    path = tmp_path / "p.jsonl"
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    path.write_text('{"prompt": "one"}\n\n' + json.dumps({"messages": system, "id": 7, "category": "c"}) + "\n")
    one, two = read_prompts(path)
    assert (one.id, one.messages, one.category) == ("1", ({"role": "user", "content": "one"},), "all")
    assert (two.id, two.messages, two.category) == ("7", tuple(system), "c")
    assert read_prompts(path, limit=1) == [one]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (b'{"prompt": "x"', r":2: not JSON"),
        (b'{"prompt": "\xff"}', r":2: not UTF-8"),
        (b'"prompt"', r":2: not a JSON object"),
        (b'{"text": "x"}', r":2: not a prompt: prompt is missing"),
        (b'{"prompt": 5}', r":2: not a prompt: .*text content"),
        (b'{"messages": []}', r":2: not a prompt: .*non-empty"),
        (b'{"messages": [{"role": "human", "content": "x"}]}', r":2: not a prompt: unknown role 'human'"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', r":2: .*last message must be the user's"),
        (b'{"id": "1", "prompt": "x"}', r":2: the id '1' appears twice"),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_line(tmp_path, second, said):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"id": 1, "prompt": "fine"}\n' + second + b"\n")
    with pytest.raises(InputError, match=str(path) + said):
        read_prompts(path)


def test_no_prompts_are_an_input_error(tmp_path, target_folder):
    config = make_config(target_folder, tmp_path)
    with pytest.raises(InputError, match=r"generate\.prompts.*cannot be read.*prompts\.jsonl"):
        generate(config)
    (tmp_path / "prompts.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"prompts\.jsonl holds no prompts"):
        generate(config)
    with pytest.raises(InputError, match=r"generate\.prompts is not set"):
        generate(make_config(target_folder, tmp_path, "generate.prompts=null"))
    assert not config.data.exists()


def test_multi_turn_each_answer_in_its_turn(target, tmp_path, target_folder):
    """By the embedded engine: the second answer follows the target's own first one, not the one that was given."""
    messages = [{"role": r, "content": c} for r, c in (("user", "a?"), ("assistant", "given"), ("user", "b?"))]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "m", "messages": messages}) + '\n{"prompt": "a?"}\n')
    config = make_config(target_folder, tmp_path, "generate.max_new_tokens=8")
    stops = [2, *range(4, 120)]  # a random target must end its first answer by itself
    talkative = dataclasses.replace(target, eos_token_ids=tuple(stops))
    generate(config, talkative)
    found = {x["id"]: x for x in lines(config)}
    first = found["2"]["messages"][1]["content"]
    assert found["2"]["finish_reason"] == "stop", "or the second turn was never reached"
    assert [m["content"] for m in found["m"]["messages"][:3]] == ["a?", first, "b?"]
    assert len(found["m"]["messages"]) == 4 and found["m"]["generated"] == [1, 3]
    text = target.tokenizer.apply_chat_template(
        found["m"]["messages"][:3], tokenize=False, add_generation_prompt=True
    )  # fmt: skip
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = slow_greedy(talkative, ids, 8)[0]
    kept = [t for t in tokens if t not in stops]
    assert found["m"]["messages"][3]["content"] == target.tokenizer.decode(kept, skip_special_tokens=True)


def test_a_bad_line_is_said_once(config, target, capsys):
    with open(config.generate.prompts, "a") as out:
        out.write("{\n")
    more = config.model_copy(update={"generate": config.generate.model_copy(update={"max_bad_lines": 1})})
    assert generate(more, target)["prompts"] == 12
    assert capsys.readouterr().err.count("prompts.jsonl:13: not JSON") == 1


def test_answers_that_cannot_be_synced_are_an_error(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device.*make room"), answers.AnswerFile(tmp_path / "a"):
        pass


def test_static_batches_where_there_is_no_gpu_are_said_and_recorded(config, target, capsys):
    generate(config, target)
    assert "static batches: continuous batching pays on a GPU, the device is cpu" in capsys.readouterr().out
    assert json.loads((config.data / "conversations.settings.json").read_text())["engine"] == "static"
