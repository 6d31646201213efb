"""What quality_gpu.py makes of its arms: curves from metrics, the best of each side, the time to the peer's value."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import quality_gpu as quality

from draftsmith.config import load_config


def point(step: int, seconds: float, pooled: float) -> dict:
    lengths = {"mean_of_answers": pooled, "per_request": pooled, "pooled": pooled, "full_rounds": pooled}
    return {
        "step": step, "tokens": 100 * step, "seconds": seconds, "loss": 1.0, "accepted_length": lengths,
        "by_slot": [0.5] * 7, "by_category": {"math": lengths}, "spread": {"all": 0.1, "math": 0.2},
    }  # fmt: skip


def arm(*points: tuple[int, float, float], overrides: tuple[str, ...] = ()) -> dict:
    return {"overrides": list(overrides), "whole_s": 9.0, "beside": 4, "curve": [point(*p) for p in points]}


def test_seconds_to_a_value_lie_between_measurements_in_proportion():
    curve = arm((1, 10.0, 2.0), (2, 20.0, 1.9), (3, 30.0, 3.0))["curve"]
    assert [quality.seconds_to(curve, v) for v in (1.0, 1.5, 2.0)] == [0.0, 5.0, 10.0]
    assert quality.seconds_to(curve, 2.45) == pytest.approx(25.0) and quality.seconds_to(curve, 3.01) is None


def test_the_best_of_ours_stands_against_the_best_recipe_of_the_peer_at_equal_tokens():
    found = {
        "base": arm((1, 40.0, 2.0)),
        "Muon": arm((1, 20.0, 1.5), (2, 40.0, 2.5)),
        "Muon, alone": arm((1, 5.0, 1.5), (2, 10.0, 2.5)),
        "more": arm((4, 80.0, 4.0), overrides=("train.steps=9",)),
        "peer, its own recipe": arm((1, 90.0, 1.8), overrides=("peer", "own")),
        "peer, our recipe": arm((2, 99.0, 2.0), overrides=("peer", "ours")),
        "FP8": {"overrides": [], "failed": "exit code 2", "said": "no GPU"},
    }
    top = quality.summary(found)
    assert top["best"] == {"ours": "Muon", "speculators": "peer, our recipe"}
    assert top["accepted_length"] == {"ours": 2.5, "speculators": 2.0} and top["tokens"] == 200
    assert top["seconds"] == {"ours": 10.0, "speculators": 99.0} and top["seconds_to_peer_final"] == 7.5
    assert top["arms_at_once"] == 4 and top["timed"] == {"ours": "Muon, alone", "speculators": "peer, our recipe"}
    found["Muon, alone"]["beside"] = 1
    assert quality.summary(found)["seconds_to_peer_final"] is None  # the peer was not
    found["peer, our recipe, alone"] = {**found["peer, our recipe"], "beside": 1}
    assert quality.summary(found)["seconds_to_peer_final"] == 7.5
    found["peer, better"] = arm(
        (2, 150.0, 2.25), overrides=("peer", "own")
    )  # not timed: what ours has to reach all the same
    assert quality.summary(found)["seconds_to_peer_final"] == 8.75
    assert quality.summary(found)["timed"]["speculators"] == "peer, our recipe, alone"
    del found["peer, better"]
    found["Muon, alone"]["gpus"] = 2
    assert quality.summary(found)["seconds_to_peer_final"] is None  # the host was shared by two
    found["base, alone"] = {**arm((1, 30.0, 2.25)), "beside": 1}  # worse, but a run of the peer's can stand beside it
    assert quality.summary(found)["timed"] == {"ours": "base, alone", "speculators": "peer, our recipe, alone"}
    assert quality.summary(found)["best"]["ours"] == "Muon"
    del found["base, alone"]
    found["base, seed 1"] = arm((1, 40.0, 3.2))  # one lucky seed of an arm whose mean is 2.6
    found["Muon, seed 1"] = arm((2, 40.0, 2.9))
    top = quality.summary(found)
    assert top["best"]["ours"] == "Muon" and top["accepted_length"]["ours"] == pytest.approx(2.7)
    assert top["accepted_length_of_seeds"] == {"ours": [2.5, 2.9], "speculators": [2.0]}
    found["base, seed 2"] = arm((1, 40.0, 1.8))
    found["lucky"] = arm((1, 40.0, 2.9))  # one seed, ahead of every mean
    found["other data"] = arm((1, 40.0, 9.0), overrides=("data_dir=elsewhere",))
    assert quality.summary(found)["best"]["ours"] == "base"  # the only one of three seeds
    assert quality.summary(found)["timed"]["ours"] == "Muon, alone"  # base was never alone
    assert quality.summary({})["seconds_to_peer_final"] is None
    assert "2.500 +- 0.100" in quality.line("Muon", found["Muon"]) and "no GPU" in quality.line("FP8", found["FP8"])


def test_a_curve_is_read_from_the_metrics_of_a_run(tmp_path):
    def rate(step: int, seconds: float) -> dict:
        return {"step": step, "kind": "rate", "tokens_per_s": 50.0, "seconds": seconds, "peak_gpu_bytes": 2**30}

    accepted = {k: v for k, v in point(0, 0, 2.0).items() if k not in ("step", "tokens", "seconds", "loss")}
    lines = [
        *({"step": s, "kind": "train", "loss": float(s)} for s in (1, 2)), rate(2, 4.0),
        {"step": 2, "kind": "accepted", **accepted}, *({"step": s, "kind": "train", "loss": float(s)} for s in (3, 4)),
        rate(4, 2.0), {"step": 4, "kind": "heldout", "loss": 7.0}, {"step": 4, "kind": "accepted", **accepted},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = quality.read_run(tmp_path)
    assert [(p["step"], p["tokens"], p["seconds"], p["loss"]) for p in found["curve"]] == [
        (2, 200, 4, 1.5),
        (4, 300, 6, 3.5),
    ]
    assert found["curve"][0]["by_slot"] == [0.5] * 7 and found["heldout_loss"] == 7.0 and found["peak_gib"] == 1.0


def test_every_arm_trains_with_its_overrides_the_peers_too(tmp_path, monkeypatch):
    commands, cards = [], []
    monkeypatch.setattr(
        quality.subprocess,
        "Popen",
        lambda command, **more: commands.append(command) or cards.append(more["env"]["CUDA_VISIBLE_DEVICES"]),
    )
    (tmp_path / "arms").mkdir()
    args = argparse.Namespace(
        config="c.yaml", fields=["train.seed=0"], tiny=False, cache=None, gpus=["0", "1"], others=1
    )
    for fields in (["train.seed=1"], ["peer", "ours", "train.seed=1"], ["peer", "own", "train.seed=1", "sdpa"]):
        assert quality.Arm("name", fields, args, tmp_path / "arms", 4, "1").gpus == 3
    assert cards == ["1"] * 3
    for command in commands:
        seeds = [a for a in command if a.startswith("train.seed")]
        assert seeds == ["train.seed=0", "train.seed=1"] and "peer" not in command
    args.tiny = True
    quality.Arm("name", [quality.FEW, quality.GRAPHS, "train.seed=1"], args, tmp_path / "arms", 4, "1")
    assert "train.seed=1" in commands[-1] and not {quality.FEW, quality.GRAPHS} & set(commands.pop())
    assert [c[c.index("--attention") + 1] for c in commands[1:]] == ["flex", "sdpa"]
    served = quality.Arm("name", ["peer", "own"], args, tmp_path / "arms", 1, "1", export=True)
    assert commands[-1][-2:] == ["--export", str(served.exported)] and "--export" not in commands[-2]


def test_settings_of_an_arm_take_the_place_of_those_of_the_base_and_the_chosen_arm_is_the_example():
    assert quality.from_base([]) == list(quality.BASE)
    assert quality.from_base(["peer", "own", quality.FEW]) == [
        "peer",
        "own",
        "drafter.num_features=5",
        "train.anchors=512",
        "train.schedule=cosine",
        "compile.graphs=false",
    ]
    root = Path(quality.__file__).parents[1]
    example = root / "examples/smollm2-135m-gpu.yaml"
    chosen = load_config(example, quality.from_base([*quality.ARMS[quality.CHOSEN], quality.GRAPHS]))
    assert chosen == load_config(example) and load_config(example, quality.from_base([])) != chosen


def test_a_peer_that_failed_to_compile_is_taken_again_without():
    failed = {"overrides": ["peer", "own"], "failed": "longer than 150 s", "said": ""}
    assert quality.uncompiled("p", {"p": failed}) == {"p, SDPA": ["peer", "own", "sdpa"]}
    assert quality.uncompiled("p", {"p": arm((1, 1.0, 2.0), overrides=("peer", "own"))}) is None
    assert quality.uncompiled("x", {"x": {**failed, "overrides": []}}) is None
    assert quality.uncompiled("p", {"p": {**failed, "overrides": ["peer", "own", "sdpa"]}}) is None


def test_a_name_whose_first_try_failed_can_be_run_alone(tmp_path, monkeypatch, capsys):
    failed = {"overrides": ["peer", "own"], "failed": "exit code -6", "said": ""}
    (tmp_path / "quality_smollm2.json").write_text(json.dumps({"arms": {quality.PEER: failed}}))
    wanted, names = {}, []
    monkeypatch.setattr(quality, "STORED", tmp_path / "nowhere")
    monkeypatch.setattr(quality, "RESULTS", tmp_path)
    monkeypatch.setattr("_common.RESULTS", tmp_path)
    monkeypatch.setattr(quality, "gpus", lambda: ["0"])
    monkeypatch.setattr(quality, "prepare", lambda args: None)
    monkeypatch.setattr(quality, "run_arms", lambda arms, *rest: wanted.update(arms))
    monkeypatch.setattr(quality, "serve", lambda name, fields, *rest: names.append((name, fields)) or {})
    monkeypatch.setattr("sys.argv", ["quality_gpu.py", "c.yaml", "--alone", quality.PEER])
    quality.main()
    assert wanted == {f"{quality.PEER}, alone": ["peer", "own"]}
    monkeypatch.setattr("sys.argv", ["quality_gpu.py", "serve", quality.CHOSEN, "c.yaml"])
    quality.main()
    assert names == [(quality.CHOSEN, quality.from_base(quality.ARMS[quality.CHOSEN]))]
    monkeypatch.setattr(
        "sys.argv",
        ["quality_gpu.py", "c.yaml", "--only", "1024 anchors", "--add", "mine: train.seed=3", "--only", "mine"],
    )
    wanted.clear()
    quality.main()
    assert wanted["mine"] == [*quality.BASE, "train.seed=3"]
    for asked in (["serve", "nothing", "c.yaml"], ["c.yaml", "--alone", "nothing"], ["c.yaml", "--seeds", "nothing"]):
        monkeypatch.setattr("sys.argv", ["quality_gpu.py", *asked])
        with pytest.raises(SystemExit):
            quality.main()
        assert "no such arm: nothing: there are " in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["quality_gpu.py", "c.yaml", "--add", "base: train.seed=3"])
    with pytest.raises(SystemExit):
        quality.main()
    assert "there is such an arm, with drafter.num_features=5 train.anchors=1024" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["quality_gpu.py", "c.yaml", "--only", "base", "--add", "base: train.anchors=1024"])
    quality.main()
    assert quality.PEER not in wanted and f"{quality.PEER}, SDPA" in wanted


def test_of_a_log_the_error_is_kept_and_not_a_hundred_lines_that_follow_from_it():
    warnings = "".join(f"[W1130 05:18:43.{i}] Warning: CUDA warning: unspecified launch failure\n" for i in range(500))
    frames = "".join(
        f'  File "/a/very/long/path/of/a/package/runtime/module.py", line {i}, in f\n    g()\n' for i in range(3)
    )
    dump = "".join(
        f"[08:31:{i:02}.70] coredump: SM {i}/132 has finished\n[08:32] coredump: {i}%...\n" for i in range(99)
    )
    said = quality.told(f"step 1\nTraceback\n{frames}RuntimeError: the cause\n" + warnings + dump)
    assert said.count("CUDA warning") == 1 and said.count("File") == 3 and said.count("g()") == 3
    assert '"module.py"' in said and "very" not in said
    assert quality.told("/root/x.py https://a.org/b/c.html a/b/c") == "x.py https://a.org/b/c.html a/b/c"
    assert said.index("step 1") < said.index("Traceback") < said.index("the cause") < said.index("CUDA warning")


class Known(quality.Arm):
    """Ends when it has been asked `rounds` times."""

    rounds, begun = 1, list["Known"]()

    def __init__(self, name, fields, args, work, share, gpu):
        self.name, self.fields, self.gpu, self.gpus, self.beside, self.asked = name, fields, gpu, len(args.gpus), 1, 0
        self.peer = fields[:1] == ["peer"]
        self.begun.append(self)

    def found(self):
        self.asked += 1
        if self.asked <= self.rounds:
            return None
        return {**arm((1, 1.0, 2.0)), "whole_s": self.whole, "beside": self.beside}

    whole = 9.0
    compiled = lambda self: True


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(quality, "Arm", Known)
    monkeypatch.setattr(Known, "begun", [])
    monkeypatch.setattr(quality, "save", lambda *a, **k: None)
    monkeypatch.setattr(
        quality, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda s: None)
    )  # a clock that stands
    monkeypatch.setattr(quality, "commit", lambda: "c")
    return Known


def batch(**settings) -> argparse.Namespace:
    return argparse.Namespace(**{"seconds": 100.0, "beside": 4, "tiny": False, "gpus": ["0"], **settings})


def test_arms_are_spread_over_the_gpus_and_no_gpu_has_more_than_asked(tmp_path, known):
    arms, found = {f"{n} layers": [f"drafter.num_layers={n}"] for n in range(5)}, {}
    quality.run_arms(arms, batch(beside=2, gpus=["0", "3"]), tmp_path, found, {})
    assert [a.gpu for a in known.begun] == ["0", "3", "0", "3", "0"]
    assert [found[n]["beside"] for n in arms] == [2, 2, 2, 2, 1]  # the fifth began when the first four had ended


def test_an_arm_is_begun_only_while_there_is_time_for_its_shape_and_steps(tmp_path, known, monkeypatch):
    monkeypatch.setattr(known, "whole", 150.0)  # it says so; the clock stands
    quality.run_arms({"long": ["train.steps=4880"], "base": []}, batch(), tmp_path, {}, {})
    assert [a.name for a in known.begun] == ["base"]
    known.begun.clear()
    arms = {"base": [], "seed 1": ["train.seed=1"], "wide": ["drafter.num_features=8"], "peer": ["peer", "own"]}
    quality.run_arms(arms, batch(beside=1, seconds=120.0), tmp_path, {}, {})
    assert [a.name for a in known.begun] == ["base"]
    known.begun.clear()
    quality.run_arms(arms, batch(beside=1, seconds=200.0), tmp_path, {}, {})
    assert [a.name for a in known.begun] == ["base", "seed 1", "wide"]  # a peer is first reckoned with 250 s


def test_a_peer_that_failed_uncompiled_is_not_tried_again_and_peers_do_not_wait_for_one_another(
    tmp_path, known, monkeypatch
):
    monkeypatch.setattr(known, "compiled", lambda self: False)
    failed = {"overrides": ["peer", "own", "sdpa"], "failed": "exit code -6", "said": ""}
    arms = {"peer a": ["peer", "own"], "peer b": ["peer", "ours"], "p, SDPA": failed["overrides"]}
    found = {"p, SDPA": failed}
    quality.run_arms(arms, batch(seconds=300.0), tmp_path, found, {})
    assert [a.name for a in known.begun] == ["peer a", "peer b"] and found["peer a"]["beside"] == 2
    known.begun.clear()
    arms = {**{f"peer {i}": ["peer", "own"] for i in range(3)}, "base": []}
    quality.run_arms(arms, batch(seconds=300.0), tmp_path, {}, {})
    assert [a.name for a in known.begun] == ["peer 0", "peer 1", "base", "peer 2"]  # two of the peer's at once on a GPU


def test_of_ours_one_of_a_shape_compiles_first(tmp_path, known, monkeypatch):
    order = []
    monkeypatch.setattr(known, "compiled", lambda self: order.append(len(self.begun)) or len(order) > 2)
    quality.run_arms(
        {"base": [], "seed 1": ["train.seed=1"], "wide": ["drafter.num_layers=8"]}, batch(), tmp_path, {}, {}
    )
    assert [a.name for a in known.begun][:2] == ["base", "wide"]


def test_the_document_has_the_tables_of_the_results():
    found = json.loads((quality.STORED / f"{quality.NAME}.json").read_text())["arms"]
    document = (quality.STORED.parents[1] / "docs" / "quality.md").read_text()
    assert "\n".join(quality.tables(found)) in document


def test_tables_are_of_arms_that_ended_the_best_first():
    rows = quality.tables({"a": arm((1, 9.0, 2.0)), "b": arm((1, 8.0, 2.5)), "c": {"failed": "1", "said": ""}})
    assert [r.split(" | ")[0] for r in rows if r.startswith(("| a", "| b", "| c"))] == [
        "| arm", "| arm", "| b", "| a", "| arm", "| arm", "| b", "| a",
    ]  # fmt: skip
    rows = quality.tables(
        {"a": arm((1, 9.0, 2.0)), "a, seed 1": arm((1, 9.0, 2.2)), "a, seed 1, alone": arm((1, 9.0, 9.0))}
    )
    assert "| a | 2.100 | 0.141 | 2.000, 2.200 |" in rows
    curve = [(i, 1.0 * i, 2.0 + i) for i in range(4)]
    rows = quality.tables({"a, alone": arm(*curve), "b": arm(*curve)})
    assert "| a, alone | 0.0: 2.00, 0.0: 3.00, 0.0: 4.00, 0.0: 5.00 |" in rows
    assert not any(r.startswith("| b | 0.0") for r in rows)


def test_the_result_is_summed_up_as_its_script_does_and_has_no_paths_of_a_machine():
    text = (quality.STORED / f"{quality.NAME}.json").read_text()
    stored = json.loads(text)
    top = {**quality.summary(stored["arms"]), **quality.served(stored["serve"])}
    assert {k: stored[k] for k in top} == top
    assert all(a["overrides"] == quality.from_base(a["overrides"]) for a in stored["arms"].values())
    assert stored["best"]["ours"] == quality.CHOSEN and stored["serve"]["drafter"] == quality.SERVED
    lengths = {n: a["curve"][-1]["accepted_length"]["pooled"] for n, a in stored["arms"].items() if "curve" in a}
    graphed = f"{quality.CHOSEN}, graphs"
    assert sorted(lengths, key=lambda n: -lengths[n])[:2] == [
        f"{graphed}, three times the tokens{quality.ALONE}", f"{quality.SERVED}{quality.ALONE}",
    ]  # fmt: skip
    runs = [
        stored["arms"][n] for n in (quality.CHOSEN, f"{quality.CHOSEN}{quality.ALONE}", f"{graphed}{quality.ALONE}")
    ]
    for told in ("accepted_length", "by_slot", "by_category", "tokens"):  # neighbours and graphs change nothing of it
        assert runs[0]["curve"][-1][told] == runs[1]["curve"][-1][told] == runs[2]["curve"][-1][told]
    assert len({run["heldout_loss"] for run in runs}) == 1
    assert {n: set(s) >= set(quality.served({})) for n, s in stored["serve_others"].items()} == {
        quality.BOTH: True,
        graphed: True,
        "peer, its own recipe, 2048 anchors": True,
    }
    assert not re.search(r"/(root|opt|usr|home|tmp|work)/", text)
    readme = (quality.STORED.parents[1] / "README.md").read_text()
    length, seconds = top["accepted_length"], top["seconds"]
    assert f"| {length['ours']:.2f} (" in readme and f"| {length['speculators']:.2f} (" in readme
    assert (
        f"{seconds['ours']:.0f} s; at {length['speculators']:.2f} after {top['seconds_to_peer_final']:.0f} s" in readme
    )
    plain, quick = (run["curve"] for run in runs[1:])
    reached = quality.seconds_to(quick, length["speculators"])
    assert (
        f"{quick[-1]['seconds']:.0f} s, at {length['speculators']:.2f} after {reached:.0f} s; without its CUDA graphs "
        f"{plain[-1]['seconds']:.0f} s"
    ) in readme
    assert f"with 2,048, the second: {seconds['speculators']:.0f} s" in readme
    assert (
        f"{top['wall_speedup']:.2f} times as fast as plain decoding at T = 0 and, at T = 1, "
        f"{top['wall_speedup_at_1']:.2f} times by the rule `match` and {top['wall_speedup_at_1_by_rejection']:.2f} times"
    ) in readme
    document = (quality.STORED.parents[1] / "docs" / "quality.md").read_text()
    for values in map(quality.served, stored["serve_others"].values()):
        speedups = rf"{values['wall_speedup']:.2f}[^|(]{{0,45}}\({values['passes_speedup']:.2f} in passes"
        assert re.search(speedups, document), speedups
    assert f"| {top['passes_speedup']:.2f}x | {top['wall_speedup']:.2f}x (" in document


def test_serving_takes_the_exported_folder_of_ours_and_of_a_peer(tmp_path, monkeypatch):
    commands = []

    class Evaluation:
        returncode = 0

        def __init__(self, command, **more):
            commands.append(command)
            out = Path(next(c for c in command if c.startswith("evaluate.output=")).partition("=")[2])
            out.mkdir()
            lossless = None if "evaluate.temperature=1" in command else True
            result = {"rounds": [], "wall_speedup": 1.5, "seconds": {}, "passes_speedup": 2.0, "lossless": lossless}
            (out / "x.json").write_text(json.dumps({"results": [result]}))

        wait = lambda self: 0

    class Trained(Known):
        rounds = 0

        def __init__(self, *given, export=False):
            super().__init__(*given)
            assert export
            self.folder = tmp_path / self.name
            (self.folder / "arm" / "attempt_1" / "checkpoints" / "step_9").mkdir(parents=True)

    exported, saved = [], []
    monkeypatch.setattr(quality, "Arm", Trained)
    monkeypatch.setattr(quality.subprocess, "Popen", Evaluation)
    monkeypatch.setattr(quality, "export_folder", lambda source, folder, name: exported.append((source.name, folder)))
    monkeypatch.setattr(quality, "save", lambda found, **more: saved.append(more))
    monkeypatch.setattr(quality, "commit", lambda: "c")
    args = batch(config="c.yaml", fields=[], prompts=3, keep=False)
    for name, fields in ((quality.SERVED, ["train.seed=1"]), ("peer x", ["peer", "own", "train.seed=1"])):
        out = quality.serve(name, fields, args, tmp_path, {}, {"note": "n"})
        assert out["bfloat16, T=0"]["wall_speedup"] == 1.5 and "wall_speedup" not in out["float32, T=0"]
        drafter = tmp_path / name / "exported"
        assert all(f"evaluate.drafter={drafter}" in c and "peer" not in c for c in commands) and len(commands) == 5
        commands.clear()
    assert exported == [("step_9", tmp_path / quality.SERVED / "exported")]
    assert (
        saved[4]["serve"]["drafter"] == quality.SERVED and saved[4]["wall_speedup"] == 1.5 and saved[4]["note"] == "n"
    )
    assert "serve" not in saved[-1] and saved[-1]["serve_others"]["peer x"]["wall_speedup"] == 1.5
    one = quality.served_by({"drafter": "a, three times"}, {"serve_others": {"b": {}}})
    assert set(one["serve_others"]) == {"b", "a, three times"} and set(one) <= set(quality.KEPT)


def test_arms_measure_where_they_also_write_their_rates():
    """A curve's tokens and seconds are those of the rates written until then."""
    root = Path(quality.__file__).parents[1]
    for name, fields in quality.ARMS.items():
        settings = [f for f in quality.from_base(fields) if "=" in f and not f.startswith("data_dir")]
        train = load_config(root / "examples/smollm2-135m-gpu.yaml", settings).train
        assert train.accept_every % train.log_every == 0 and train.steps % train.accept_every == 0, name
        assert train.steps // 10 % train.log_every == 0, f"{name}, served"
