"""What every process records, at three moments; nothing in it may fail, slow or give away a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from staging import train_here

from draftsmith.provenance import capture, host, recorder
from draftsmith.provenance.facts import attempt, unknown, why_unknown
from draftsmith.provenance.manifest import AT_BUILD, AT_START
from draftsmith.provenance.standalone import write_standalone
from draftsmith.rundir import RunDir

PROVENANCE = [
    "artifacts", "caches", "capture", "diff", "digests", "facts", "gpu", "heartbeat", "history", "host", "machine", "manifest",
    "masking", "outcome", "packages", "patches", "recorder", "restore", "rules", "runs", "source", "standalone",
    "torchstate", "unchanged", "verdict", "view",
]  # fmt: skip
ONLY_STDLIB = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module("draftsmith.provenance." + name)
foreign = {m.partition(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"draftsmith", "__main__"}
foreign = {m for m in foreign if not m.startswith("__editable__") and "distutils" not in m}
assert not foreign, foreign
"""


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    """{moment: manifest} of a real training run."""
    run = RunDir(train_here(tmp_path_factory.mktemp("run")).path)
    return {moment: json.loads(run.manifest(moment).read_text()) for moment in capture.MOMENTS}


def test_three_moments_with_everything_known(manifests):
    for moment, manifest in manifests.items():
        assert (manifest["schema"], manifest["kind"], manifest["moment"], manifest["rank"]) == (1, "train", moment, 0)
        assert not [k for k, v in manifest.items() if why_unknown(v)]
    assert set(AT_START) <= set(manifests["start"]) and set(AT_BUILD) <= set(manifests["built"])
    assert {"outcome", "compile_cache_end", "counters", "patches", "gpu_samples"} <= set(manifests["end"])


def test_what_it_says_is_true(manifests):
    import torch

    start, built, end = (manifests[m] for m in capture.MOMENTS)
    assert built["torch"]["version"] == torch.__version__ and built["torch"]["git"] == torch.version.git_version
    assert built["switches"]["torch"]["threads"] == torch.get_num_threads()
    assert start["packages"]["installed"]["torch"]["files"]["same"] > 1000
    assert "torch" in built["imported"] and "pytest" in built["imported"]
    assert any(name.startswith("libtorch_cpu") for name in built["libraries"])
    assert built["built"]["dtypes"] == {"torch.float32": built["built"]["parameters"]}
    assert built["built"]["target_attention"] == "sdpa" and not built["patches"]["replaced"]
    assert built["data"]["documents"] == 12 and len(built["target"]["weights"]["files"]) == 1
    assert start["config"]["drafter"]["block_size"] == 4 and start["process"]["pid"] == os.getpid()
    assert end["outcome"]["how"] == "finished" and end["outcome"]["steps"] == 1 and end["outcome"]["loss_finite"]


def test_two_seconds_at_most_once_warm(manifests):
    assert max(m["seconds"]["total"] for m in manifests.values()) <= 2


def test_standard_library_only():
    done = subprocess.run([sys.executable, "-c", ONLY_STDLIB, *PROVENANCE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(PROVENANCE) == {p.stem for p in Path(capture.__file__).parent.glob("*.py")} - {"__init__"}


def test_a_part_that_fails_is_unknown_and_the_run_goes_on(tmp_path, monkeypatch):
    def broken() -> None:
        raise PermissionError("the kernel says no")

    monkeypatch.setattr(host, "read_host", broken)
    record = train_here(tmp_path)
    assert record.facts["host"] == {"unknown": "PermissionError: the kernel says no"}
    assert record.state.how == "finished" and record.facts["outcome"]["steps"] == 1


def test_nothing_can_be_written_and_the_run_goes_on(tmp_path, monkeypatch, capfd):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "write_text", full)
    with pytest.raises(Exception, match="holds no manifest"):
        train_here(tmp_path)  # trains to the end; only reading the record back finds none
    assert "provenance: not recorded: OSError" in capfd.readouterr().err
    assert (tmp_path / "runs" / "tiny" / "attempt_1" / "checkpoints" / "step_00000001").is_dir()


def test_environment_before_and_after_imports():
    code = (
        "import os, json; from draftsmith.provenance.host import read_environment;"
        "os.environ['NCCL_DEBUG'] = 'INFO'; del os.environ['NCCL_ALGO']; print(json.dumps(read_environment()))"
    )
    given = {**os.environ, "NCCL_ALGO": "Ring", "UNRELATED": "x"}
    found = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, env=given).stdout)
    assert found["at_exec"]["NCCL_ALGO"] == "Ring" and "NCCL_DEBUG" not in found["at_exec"]
    assert found["now"] == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": None} and "UNRELATED" not in str(found)


def test_unknown_keeps_its_reason_on_one_line():
    def fail() -> None:
        raise ValueError("a\nb")

    assert attempt(fail) == {"unknown": "ValueError: a b"}
    assert why_unknown(unknown("")) == "no reason given" and why_unknown({"unknown": "x", "more": 1}) is None


def other_pythons() -> list[str]:
    """Pythons of other versions than this one that this machine happens to have."""
    found = {shutil.which(f"python3.{n}") for n in (10, 11, 12, 13) if n != sys.version_info.minor}
    works = [p for p in found if p and not subprocess.run([p, "-c", "import ssl"], capture_output=True).returncode]
    return [sys.executable, *sorted(works)]


@pytest.mark.parametrize("python", other_pythons())
def test_stand_alone_file_writes_the_same_manifest(python, tmp_path):
    """Without this package, in the environment of whoever runs it."""
    write_standalone(tmp_path / "capture.pyz")
    command = [python, "-I", str(tmp_path / "capture.pyz"), str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out.json").read_text())
    assert (manifest["kind"], manifest["moment"], manifest["schema"]) == ("serving", "now", capture.SCHEMA)
    ours = capture.right_now("serving", {})
    assert set(manifest) - {"not_loaded"} == set(ours) and set(manifest["host"]) == set(ours["host"])
    unknown_parts = {k for k, v in manifest.items() if why_unknown(v)}
    assert unknown_parts == {"torch", "switches"}, "torch is not loaded there, and that is said"


def test_stand_alone_file_where_torch_is_broken(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    write_standalone(tmp_path / "capture.pyz")
    command = [sys.executable, str(tmp_path / "capture.pyz"), str(tmp_path / "out.json"), "--load", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out.json").read_text())
    assert "cannot be imported: ImportError: libcudart.so.13" in manifest["torch"]["unknown"]
    assert "torch" in manifest["packages"]["installed"]
