"""`draftsmith runs`: every command, its exit codes, JSON, and bad input in one clear line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from staging import Machine, train_here, workshop, write_run

from draftsmith import cli
from draftsmith.provenance import host, runs
from draftsmith.rundir import RunDir


@pytest.fixture
def folder(tmp_path):
    """Two finished runs: the second with another driver."""
    write_run(tmp_path / "runs", "first", begun=1.0)
    write_run(tmp_path / "runs", "second", (["gpu", "driver"], "570.1"), begun=2.0)
    return tmp_path / "runs"


@pytest.fixture
def call(folder, capsys):
    """Run a command on the folder: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["runs", arguments[0], *map(str, arguments[1:]), "--runs-dir", str(folder)])
        captured = capsys.readouterr()
        assert "Traceback (most recent" not in captured.err
        return code, captured.out, captured.err

    return run


def test_diff_differs_same_and_json(call, folder):
    code, out, _ = call("diff", "first", "second/attempt_1")
    assert code == 1 and out.startswith("0 changes can affect loss, 1 can affect speed\n")
    for piece in ("gpu.driver", "was  580.159.04", "is   570.1", "why ", "back install driver", "not changed"):
        assert piece in out
    assert call("diff", "first", "first")[:1] == (0,)
    code, out, _ = call("diff", "first", "second", "--json")
    assert code == json.loads(out)["code"] == 1 and json.loads(out)["changes"][0]["field"] == "gpu.driver"
    assert call("diff", folder / "first" / "attempt_1", folder / "second")[0] == 1, "paths do too"


def test_diff_with_last_good_on_either_side(call):
    assert "was: first/attempt_1   is: second/attempt_1" in call("diff", "second", "last-good")[1]
    assert "was: first/attempt_1   is: second/attempt_1" in call("diff", "last-good", "second")[1]
    code, _, err = call("diff", "first", "last-good")
    assert code == 2 and "there is no last good run for first/attempt_1" in err and err.count("\n") == 1
    assert call("diff", "last-good", "last-good")[0] == 2


def test_good_marks_and_unmarks(call, folder):
    assert call("good", "first", "--note", "published")[:2] == (0, "first/attempt_1 is marked good\n")
    assert json.loads(RunDir(folder / "first" / "attempt_1").good.read_text())["note"] == "published"
    assert json.loads(call("good", "first", "--not", "--json")[1]) == {"run": "first/attempt_1", "good": False}
    assert call("diff", "second", "last-good")[0] == 2


def test_list_tells_the_states_apart(call, folder):
    write_run(folder, "third", begun=3.0, how="interrupted")
    path = write_run(folder, "fourth", begun=4.0, how="crashed")
    exit_file = RunDir(path).exit()
    exit_file.write_text(json.dumps({"how": "crashed", "detail": "ValueError: no", "traceback": "a\nValueError: no"}))
    write_run(folder, "fifth", begun=5.0, how="running")
    dead = RunDir(write_run(folder, "sixth", begun=6.0, how="running"))
    sign = json.loads(dead.sign_of_life().read_text())
    dead.sign_of_life().write_text(json.dumps({**sign, "started_ticks": 1}))
    call("good", "first")
    code, out, _ = call("list")
    assert code == 0 and "    ValueError: no" in out
    states = {row["run"]: (row["state"], row["mark"]) for row in json.loads(call("list", "--json")[1])}
    expected = ["finished", "finished", "interrupted", "crashed", "running", "dead"]
    assert [s for s, _ in states.values()] == expected and states["first/attempt_1"][1] == "good"


def test_list_says_how_far_a_running_or_dead_run_came(call, folder):
    run = RunDir(write_run(folder, "alive", begun=9.0, how="running", moments=("start", "built")))
    lines = [{"kind": "train", "step": 41, "loss": 2.5}, {"kind": "rate", "step": 41, "tokens_per_s": 20000.0}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    row = json.loads(call("list", "--json")[1])[-1]
    assert (row["state"], row["steps"], row["loss"], row["tokens_per_s"]) == ("running", 41, 2.5, 20000.0)


def test_a_reader_that_has_seen_enough(folder):
    command = f"{sys.executable} -m draftsmith.cli runs show first --runs-dir {folder} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("first/attempt_1: a train run, finished")


def test_show_all_or_one_part(call):
    code, out, _ = call("show", "first")
    assert code == 0 and "a train run, finished" in out and "NVIDIA H200" in out and "2.11.0+cu130" in out
    assert json.loads(call("show", "first", "--json")[1])["ranks"]["0"]["gpu"]["driver"] == "580.159.04"
    assert call("show", "first", "gpu.driver")[1] == "580.159.04\n"
    code, _, err = call("show", "first", "gpu.colour")
    assert code == 2 and "has no gpu.colour: there is driver" in err


def test_restore_and_capture_file(call, tmp_path):
    code, _, err = call("restore", "first", tmp_path / "new")
    assert code == 2 and "is not at /srv/draftsmith any more" in err and not (tmp_path / "new").exists()
    assert call("capture-file", tmp_path / "c.pyz")[0] == 0 and (tmp_path / "c.pyz").stat().st_mode & 0o100
    assert call("capture-file", tmp_path / "no" / "c.pyz")[0] == 2
    machine = Machine(tmp_path)
    machine.capture("run")
    code, out, _ = call("restore", tmp_path / "run.json", tmp_path / "new", "--json")
    assert code == 0 and (tmp_path / "new" / "source" / "pipeline").is_dir()
    assert json.loads(out)["commands"][0] == f"cd {tmp_path / 'new'}"


BAD = {
    "truncated": (lambda p: p.write_text(p.read_text()[:2000]), "is cut short or not JSON"),
    "newer": (lambda p: p.write_text(p.read_text().replace('"schema": 1', '"schema": 9')), "has schema 9, this version reads up to 1"),
    "not one": (lambda p: p.write_text('{"a": 1}'), "is not a manifest: it states no schema"),
    "empty": (lambda p: p.write_text(""), "is cut short or not JSON"),
    "a list": (lambda p: p.write_text("[]"), "is not a manifest"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\0"), "is cut short or not JSON"),
    "damaged": (lambda p: p.write_text(p.read_text().replace('"devices"', '"devises"')), "is damaged: gpu.devices"),
    "no clock": (lambda p: p.write_text(p.read_text().replace('"clock"', '"clok"')), "is damaged: clock"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "command", [("diff", "first", "second"), ("show", "second"), ("good", "second"), ("restore", "second", "x")]
)
def test_bad_manifests_are_one_clear_line(call, folder, bad, command):
    spoil, says = BAD[bad]
    spoil(RunDir(folder / "second" / "attempt_1").manifest("start"))
    code, out, err = call(*command)
    assert (code, out) == (2, "") and says in err and "rank_0.start.json" in err and err.count("\n") == 1


def test_two_runs_of_different_kinds(call, folder):
    write_run(folder, "server", (["kind"], "serving"))
    code, _, err = call("diff", "first", "server")
    assert code == 2 and "only runs of one kind can be compared" in err


def test_a_run_folder_still_being_written(call, folder):
    write_run(folder, "young", moments=(), how="running")
    code, _, err = call("diff", "first", "young")
    assert code == 2 and "is still being written" in err and "its first manifest is not there yet" in err
    write_run(folder, "loading", moments=("start",), how="running")
    code, out, _ = call("diff", "first", "loading")
    assert code == 2 and "loading/attempt_1 is still being written: this is not the last word" in out
    assert "built, in the later run: not recorded: it is still running" in out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("show", "nobody"), "there is no run 'nobody'"), (("diff", "first", "nobody"), "there is no run"),
        (("show", "first/attempt_7"), "there is no run"), (("check", "nobody"), "there is no run"),
        (("check", "first", "a.b=c"), "only works with one"),
    ],
)  # fmt: skip
def test_no_such_run(call, command, says):
    code, _, err = call(*command)
    assert code == 2 and says in err and err.count("\n") == 1


def test_no_runs_at_all(tmp_path, capsys):
    for command in (["list"], ["check"], ["diff", "a", "b"]):
        assert cli.main(["runs", *command, "--runs-dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_a_folder_that_is_no_run(call, folder):
    (folder / "odd" / "attempt_1").mkdir(parents=True)
    code, _, err = call("show", "odd")
    assert code == 2 and "holds no manifest" in err
    assert call("list")[0] == 0


def test_check_same_then_different(tmp_path):
    """A real run, then this machine against it, from one shell; torch is imported in a process of its own.

    On a copy of the package, so that whoever works on the source meanwhile does not change it under the test.
    """
    config, _, _ = workshop()
    values = {**json.loads(config.dump()), "runs_dir": str(tmp_path / "runs")}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    package = Path(runs.__file__).parents[1]
    shutil.copytree(package, tmp_path / "copy" / "draftsmith", ignore=shutil.ignore_patterns("__pycache__"))
    shell = {k: v for k, v in os.environ.items() if k not in host.read_environment()["now"]}
    shell["PYTHONPATH"] = str(tmp_path / "copy")

    def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        full = [sys.executable, "-m", "draftsmith.cli", *arguments]
        return subprocess.run(full, capture_output=True, text=True, env={**shell, **variables}, cwd=tmp_path)

    done = command("train", "config.yaml")
    assert done.returncode == 0, done.stderr
    done = command("runs", "check")
    assert done.returncode == 0 and done.stdout.startswith("nothing changed\n"), done.stdout
    assert "not compared, since only a running process has them" in done.stdout
    template = Path(config.target.model) / "chat_template.jinja"
    template.write_text("{{ messages }}")
    try:
        done = command("runs", "check", "tiny", "--json", NVIDIA_TF32_OVERRIDE="1")
    finally:
        template.unlink()
    found = json.loads(done.stdout)
    assert done.returncode == found["code"] == 1
    assert [c["field"] for c in found["changes"]] == ["target.chat_template", "environment.NVIDIA_TF32_OVERRIDE"]


def test_check_a_config_that_is_about_to_run(tmp_path, capsys):
    train_here(tmp_path)
    config, _, _ = workshop()
    values = {**json.loads(config.dump()), "runs_dir": str(tmp_path / "runs")}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(values))
    command = ["check", str(path), "train.seed=3", "--runs-dir", str(tmp_path / "runs"), "--json"]
    capsys.readouterr()
    assert runs.main(command) == 1
    assert json.loads(capsys.readouterr().out)["changes"][0]["field"] == "config.train.seed"
    assert runs.main([*command[:2], "nonsense", *command[3:]]) == 2


BROKEN = ("torch", "numpy", "pydantic", "pyarrow", "transformers", "yaml", "rich")


def test_everything_works_where_torch_cannot_be_imported(folder, tmp_path):
    """torch, numpy, pydantic and others raise on import; one torch even ends the process."""
    for name in BROKEN:
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text(f"raise ImportError('{name} is broken here')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}

    def command(*arguments: str) -> subprocess.CompletedProcess:
        full = [sys.executable, "-m", "draftsmith.cli", "runs", *arguments, "--runs-dir", str(folder)]
        done = subprocess.run(full, capture_output=True, text=True, env=environ, cwd=tmp_path)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    assert command("list").returncode == 0 and command("show", "first").returncode == 0
    assert command("diff", "first", "second").returncode == 1 and command("good", "first").returncode == 0
    done = command("check", "first", "--against", "first")
    assert done.returncode == 1 and "torch, in the later run: torch cannot be imported: ImportError" in done.stdout
    config = tmp_path / "c.yaml"
    config.write_text("{}")
    assert "name a run instead" in command("check", str(config)).stderr
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    done = command("check", "first", "--against", "first")
    assert f"importing torch ended the process with -{signal.SIGSEGV.value}" in done.stdout, done.stdout
