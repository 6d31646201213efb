"""Growing, pinning, checking and locking a store; and what a kill, a full disk or a second writer leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import make_config, write_target
from test_tokenize import line, model_folder, say, write_lines

from draftsmith.cli import main
from draftsmith.data import building, documents, messages
from draftsmith.data import tokenize as tokenizing
from draftsmith.data.building import write_store, writing
from draftsmith.data.store import Store, read_manifest, verify
from draftsmith.data.tokenize import append, tokenize
from draftsmith.errors import InputError


def some(first: int, last: int) -> list[dict]:
    return [line(i, [say("user", f"question {i}"), say("assistant", f"answer {i} " + "x" * (i % 20))]) for i in range(first, last)]  # fmt: skip


def place(tmp_path, lines, *overrides):
    config = make_config(model_folder(tmp_path / "model"), tmp_path, *overrides)
    write_lines(config, lines)
    return config


@pytest.fixture
def many_shards(monkeypatch):
    """A chunk every few lines, a shard every few chunks."""
    monkeypatch.setattr(building, "SHARD_TOKENS", 800)
    monkeypatch.setattr(messages, "CHUNK_BYTES", 700)
    monkeypatch.setattr(messages.read_chunks, "__defaults__", (0, 700))


def shards(config) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(config.store.glob("*.arrow"))}


def ids(store: Store) -> list[str]:
    return [store.identity(i) for i in range(len(store))]


def listing(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_growing_adds_only_what_is_new(tmp_path, many_shards):
    config = place(tmp_path, some(0, 60))
    first = tokenize(config)
    before = shards(config)
    assert len(before) > 3
    write_lines(config, some(0, 90))
    second = append(config)
    after = shards(config)
    assert {k: after[k] for k in before} == before and len(after) > len(before)
    assert (second.generation, second.counts["read"], second.counts["kept"]) == (2, 90, 90), "the first 60 not again"
    assert ids(Store(config.store)) == [f"c{i}" for i in range(90)]
    fresh = place(tmp_path / "fresh", some(0, 90))
    tokenize(fresh)
    for i in range(90):
        assert Store(fresh.store).document(i).tokens.tolist() == Store(config.store).document(i).tokens.tolist()
    # the run that began with the first generation
    for pinned in (Store(config.store, generation=1), Store(config.store, fingerprint=first.fingerprint)):
        assert pinned.manifest == first and ids(pinned) == [f"c{i}" for i in range(60)]
    with pytest.raises(InputError, match="has no generation 3: its newest is 2"):
        Store(config.store, generation=3)
    with pytest.raises(InputError, match="no generation with the content abc"):
        Store(config.store, fingerprint="abc")
    assert verify(config.store) == []


def test_duplicates_are_found_within_and_across_sources(tmp_path, many_shards):
    config = place(tmp_path, some(0, 40) + [{**x, "id": "again"} for x in some(5, 15)])
    assert tokenize(config).counts["duplicate"] == 10
    other = tmp_path / "other.jsonl"
    mixed = some(20, 60)[::-1] + some(50, 55)
    other.write_text("".join(json.dumps(x) + "\n" for x in mixed))
    grown = append(config, [other])
    assert grown.counts["duplicate"] == 10 + 20 + 5 and grown.counts["kept"] == 60 == len(Store(config.store))
    assert set(grown.sources) == {"conversations.jsonl", "other.jsonl"}
    same = append(config, [other])
    assert same.generation == 2 and listing(config.store).count("generations/00003.json") == 0
    write_lines(config, some(55, 70))  # another file under the old name
    third = append(config)
    assert third.generation == 3 and third.counts["kept"] == 70 and len(third.sources) == 3
    assert append(config).counts == third.counts, "known by its hash, whichever of the two files it was"


def test_sources_are_known_by_their_content(tmp_path, capsys):
    config = place(tmp_path, some(0, 10))
    tokenize(config)
    files = [tmp_path / "a" / "part.jsonl", tmp_path / "b" / "part.jsonl", tmp_path / "list.json"]
    for n, file in enumerate(files, 1):
        file.parent.mkdir(exist_ok=True)
        lines = [json.dumps(x) for x in some(10 * n, 10 * n + 10)]
        file.write_text(f"[{','.join(lines)}]" if file.suffix == ".json" else "\n".join(lines) + "\n")
    second = append(config, files)
    assert list(second.sources) == ["conversations.jsonl", "part.jsonl", "part.jsonl (2)", "list.json"]
    capsys.readouterr()
    assert append(config, files[::-1]).counts == second.counts
    out = capsys.readouterr().out
    assert "list.json: unchanged, in the store already" in out and out.count("bytes are in the store already") == 2
    files[2].write_text(json.dumps(some(30, 45)))
    third = append(config, files)
    assert third.counts["read"] - second.counts["read"] == 15 and third.counts["kept"] == 45


def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    lines = [{**x, "id": f"{x['id']}-{k}"} for k, x in enumerate(some(0, 300) + some(100, 200))]
    written = []
    for workers in (0, 1, 2):
        config = place(tmp_path / str(workers), lines, f"tokenize.workers={workers}")
        counts = tokenize(config).counts
        assert counts["kept"] == 300 and counts["duplicate"] == 100
        written.append(list(shards(config).values()))
    assert len(written[0]) == 1 and written[0] == written[1] == written[2]


def test_a_worker_that_stops_early_is_no_end_of_the_file(tmp_path, monkeypatch):
    config = place(tmp_path, some(0, 10), "tokenize.workers=0")
    monkeypatch.setattr(documents.Worker, "chunk", lambda *_: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration"):
        tokenize(config)
    assert not config.store.exists()


def test_workers_import_no_torch():
    code = "import sys, draftsmith.data.workers; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# ---- other tokenizers, other settings


def test_appending_to_a_store_of_another_kind_is_refused(tmp_path):
    config = place(tmp_path, some(0, 10))
    tokenize(config)
    before = listing(tmp_path)
    other = make_config(model_folder(tmp_path / "other", merges=True), tmp_path)
    with pytest.raises(InputError, match="made with another tokenizer or chat template"):
        append(other)
    changed = make_config(tmp_path / "model", tmp_path, "tokenize.heldout_fraction=0.5", "tokenize.length_cut=drop")
    with pytest.raises(InputError, match=r"length_cut was 'keep', is 'drop'; heldout_fraction was 0\.3, is 0\.5"):
        append(changed)
    with pytest.raises(InputError, match=r"run `draftsmith tokenize` first"):
        append(make_config(tmp_path / "model", tmp_path / "nowhere"))
    shutil.rmtree(tmp_path / "other")
    assert listing(tmp_path) == before


# ---- damage


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path, many_shards):
    config = place(tmp_path, some(0, 40))
    tokenize(config)
    rng = np.random.default_rng(0)
    for name, content in shards(config).items():
        at = int(rng.integers(len(content)))
        changed = bytearray(content)
        changed[at] ^= 1 << int(rng.integers(8))
        (config.store / name).write_bytes(changed)
        (wrong,) = verify(config.store)
        assert name in wrong and "not as it was written" in wrong
        (config.store / name).write_bytes(content)
    manifest = config.store / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(
        text.replace('"generation": 1', '"generation": 1, "schema": 1').replace('"kept": 40', '"kept": 41')
    )
    assert any("manifest.json differs" in x for x in verify(config.store))
    manifest.write_text(text)
    (config.store / "shard-00001.arrow").unlink()
    assert "missing" in verify(config.store)[0]


def test_verify_on_the_command_line(tmp_path, capfd):
    config = place(tmp_path, some(0, 10))
    tokenize(config)
    (tmp_path / "c.yaml").write_text(config.dump())
    assert main(["data", "verify", str(tmp_path / "c.yaml")]) == 0
    shard = config.store / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    capfd.readouterr()
    assert main(["data", "verify", str(tmp_path / "c.yaml")]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "shard-00000.arrow is not as it was written" in error


# ---- interrupted


class Stop(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 7, 15])
@pytest.mark.parametrize("base", [False, True])
def test_interrupted_it_goes_on_and_ends_the_same(tmp_path, many_shards, monkeypatch, after, base, capsys):
    def prepared(work):
        config = place(work, some(0, 30) if base else some(0, 90))
        if base:
            tokenize(config)
            write_lines(config, some(0, 120))
        return config, (append if base else tokenize)

    config, run = prepared(tmp_path / "whole")
    run(config)
    broken, run = prepared(tmp_path / "broken")
    taken, add = [], building.Build.add

    def stopping(self, batch):
        taken.append(batch)
        if len(taken) > after:
            raise Stop
        add(self, batch)

    before = listing(broken.data)
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(building.Build, "add", stopping)
        run(broken)
    visible = [x for x in listing(broken.data) if ".building" not in x and ".growing" not in x]
    assert visible == before, "nothing that looks like a store or a part of it"
    if base:
        assert len(Store(broken.store)) == 30
    run(broken)
    assert ("going on behind" in capsys.readouterr().out) == (after > 1)
    assert shards(broken) == shards(config)
    assert read_manifest(broken.store) == read_manifest(config.store)
    assert listing(broken.data) == listing(config.data)


def test_a_list_half_read_is_gone_on_with_unless_it_is_another(tmp_path, many_shards, monkeypatch):
    config = place(tmp_path, some(0, 5))
    tokenize(config)
    file = tmp_path / "list.json"
    file.write_text(json.dumps(some(5, 60)))
    finish = building.Build.finish_shard

    def stopping(self, sources):
        finish(self, sources)
        raise Stop

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(building.Build, "finish_shard", stopping)
        append(config, [file])
    file.write_text(json.dumps(some(5, 61)))
    with pytest.raises(InputError, match=r"list\.json is not the file whose tokenization was begun: remove .*growing"):
        append(config, [file])
    file.write_text(json.dumps(some(5, 60)))
    append(config, [file])
    assert ids(Store(config.store)) == [f"c{i}" for i in range(60)] and verify(config.store) == []


def test_killed_in_earnest_it_goes_on(tmp_path):
    """kill -9 of the command: its workers end by themselves, and the next run goes on."""
    config = place(tmp_path, [line(i, [say("user", f"q {i}"), say("assistant", f"a {i} " * 40)]) for i in range(6000)],
                   "tokenize.workers=1", "train.row_tokens=512")  # fmt: skip
    (tmp_path / "c.yaml").write_text(config.dump())
    code = (
        "import sys; from draftsmith.data import building; building.SHARD_TOKENS = 100_000\n"
        "from draftsmith.cli import main; main(['tokenize', sys.argv[1]])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "c.yaml")], start_new_session=True)
    progress = config.data / ".store.building" / "progress.json"
    while not progress.exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("its workers outlived it")
    assert not config.store.exists() and progress.exists()
    finished = json.loads(progress.read_text())["shards"]
    tokenize(config)
    assert [s.sha256 for s in read_manifest(config.store).shards][: len(finished)] == [s["sha256"] for s in finished]
    assert ids(Store(config.store)) == [f"c{i}" for i in range(6000)] and verify(config.store) == []
    assert not (config.data / ".store.lock").exists()


def test_shards_of_another_build_are_not_gone_on_with(tmp_path, many_shards, monkeypatch):
    config = place(tmp_path, some(0, 90))
    monkeypatch.setattr(building.Build, "commit", lambda *a, **k: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        tokenize(config)
    assert (config.data / ".store.building" / "progress.json").exists()
    monkeypatch.undo()
    other = make_config(tmp_path / "model", tmp_path, "tokenize.max_tokens=120")
    tokenize(other)
    assert read_manifest(other.store).settings["max_tokens"] == 120 and len(Store(other.store)) == 90


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from draftsmith.cli import main
import draftsmith.data.tokenize  # now: torch looks for a place to write in
from transformers import AutoTokenizer
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("command", "size"), [("tokenize", 0), ("tokenize", 20_000), ("data append", 100)])
def test_a_full_disk_is_an_error_and_what_was_there_stays(tmp_path, command, size):
    """A file size limit, which fails as a full disk does: in the middle of a write."""
    config, again = place(tmp_path, some(0, 400)), tokenize
    if command != "tokenize":
        tokenize(config)
        write_lines(config, some(0, 600))
        again = append
    before, held = listing(config.data), shards(config)
    (tmp_path / "c.yaml").write_text(config.dump())
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(size), *command.split(), str(tmp_path / "c.yaml")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "make room, then run the same command again" in done.stderr
    assert listing(config.data) == before and shards(config) == held
    again(config)
    assert len(Store(config.store)) == (400 if command == "tokenize" else 600) and verify(config.store) == []


# ---- two writers


def test_two_writers_at_once_are_refused(tmp_path):
    config = place(tmp_path, some(0, 10))
    me = f"being written by process {os.getpid()} on {socket.gethostname()}"
    with writing(config.store), pytest.raises(InputError, match=me):
        tokenize(config)
    tokenize(config)
    with writing(config.store), pytest.raises(InputError, match="being written by"):
        append(config)


def test_an_append_that_commits_while_another_begins_is_built_on(tmp_path, monkeypatch):
    """The one is loading its tokenizer while the other runs from beginning to end."""
    config = place(tmp_path, some(0, 10))
    tokenize(config)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for n, file in enumerate(files, 1):
        file.write_text("".join(json.dumps(x) + "\n" for x in some(10 * n, 10 * n + 10)))
    load, inner = tokenizing.load_tokenizer, []

    def slowly(target):
        if not inner:
            inner.append(None)
            inner[0] = append(config, files[:1])
        return load(target)

    monkeypatch.setattr(tokenizing, "load_tokenizer", slowly)
    assert append(config, files[1:]).generation == 3
    assert len(Store(config.store)) == 30 and verify(config.store) == []
    assert len(Store(config.store, fingerprint=inner[0].fingerprint)) == 20


def test_a_store_that_changed_under_the_lock_is_not_written(tmp_path):
    config = place(tmp_path, some(0, 10))
    base = tokenize(config)
    write_lines(config, some(0, 20))
    newest = append(config)
    with pytest.raises(InputError, match="has changed meanwhile"):
        write_store(config.store, [Store(config.store).document(0)], tokenizer="t", eos_token_ids=[2], sources={},
                    counts={}, base=base)  # fmt: skip
    assert read_manifest(config.store) == newest and verify(config.store) == []


@pytest.mark.parametrize("whole", [0, 5], ids=["nothing else", "after others"])
def test_a_line_still_being_written_is_left_to_the_next_append(tmp_path, capsys, whole):
    config = place(tmp_path, some(20, 25), "tokenize.max_bad_lines=5")
    tokenize(config)
    file = tmp_path / "live.jsonl"
    lines = "".join(json.dumps(x) + "\n" for x in some(0, whole + 1))
    file.write_text(lines[:-40])
    assert append(config, [file]).counts["read"] == 5 + whole
    assert "live.jsonl: its last line is half written" in capsys.readouterr().err
    file.write_text(lines[:-1])  # without an end, but whole
    grown = append(config, [file])
    assert grown.counts["kept"] == len(Store(config.store)) == 5 + whole + 1 and not grown.counts.get("bad_lines")
    file.write_text(lines + json.dumps(some(30, 31)[0]) + "\n")
    assert append(config, [file]).counts["read"] == 5 + whole + 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, False),
        ({"pid": 2**22 - 3}, False),
        ({"boot": "another boot"}, False),
        ({"started": "1"}, False),
        ({"host": "elsewhere"}, True),
    ],
    ids=["no file", "dead", "rebooted", "number used again", "another host"],
)
def test_a_lock_left_behind(tmp_path, change, refused):
    path, lock = tmp_path / "store", tmp_path / ".store.lock"
    if change:
        me = {"pid": os.getpid(), "host": socket.gethostname(), "boot": building._boot(),
              "started": building._started(os.getpid())}  # fmt: skip
        lock.write_text(json.dumps({**me, **change}))
    if refused:
        said = r"by process \d+ on elsewhere: .*remove .*\.store\.lock"
        with pytest.raises(InputError, match=said), writing(path):
            pass
        return
    with writing(path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert not lock.exists()


def test_a_lock_cut_short_is_nobodys(tmp_path):
    (tmp_path / ".store.lock").write_text('{"pid": 1')
    with writing(tmp_path / "store"):
        pass


# ---- the command line


def test_show_stats_append(tmp_path, capfd):
    config = make_config(write_target(tmp_path / "model"), tmp_path, "tokenize.max_tokens=80")
    write_lines(config, [*some(0, 30), line("long", [say("user", "q"), say("assistant", "y" * 200)])])
    (tmp_path / "c.yaml").write_text(config.dump())

    def run(*command) -> str:
        capfd.readouterr()
        assert main(["data", command[0], str(tmp_path / "c.yaml"), *command[1:]]) == 0
        return capfd.readouterr().out

    tokenize(config)
    assert "assistant\n⟦answer 3 xxx<|im_end|>⟧\n" in run("show", "--id", "c3")
    assert "⟦answer 29 " in run("show", "--sample", "-1")
    tokens = [x.split() for x in run("show", "--sample", "3", "--tokens").splitlines()[3:]]
    marks = [len(x) > 2 and x[2] == "#" for x in tokens if x]
    assert marks == Store(config.store).document(3).supervised().tolist()
    out = run("stats")
    for said in (
        "documents                               30",
        "too long",
        "% of the tokens",
        "held out",
        "####",
        "% full",
    ):
        assert said in out
    assert (config.data / "lengths.png").stat().st_size > 1000
    write_lines(config, some(0, 40))
    assert "generation 2: {" in run("append")
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps(x) + "\n" for x in some(30, 50)))
    assert "generation 3" in run("append", "--from", str(more)) and len(Store(config.store)) == 50
    assert "nothing new: {}" in run("append", "--from", str(more)), "the very same file is not read again"
    more.write_text("".join(json.dumps(x) + "\n" for x in some(10, 30)))
    assert "nothing new: {'read': 20, 'duplicate': 20}" in run("append", "--from", str(more))
    assert "3 generation(s)" in run("verify")
    for command, said in (
        (["show", "--id", "none"], "no document with the id"),
        (["show", "--sample", "99"], "no number"),
    ):
        assert main(["data", command[0], str(tmp_path / "c.yaml"), *command[1:]]) == 2
        assert said in capfd.readouterr().err
