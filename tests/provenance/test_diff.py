"""The verdict: counts, order, what follows from what, unknown, unchanged, ranks, noise."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from staging import recorded

from draftsmith.errors import InputError
from draftsmith.provenance.diff import among_ranks, diff
from draftsmith.provenance.heartbeat import State
from draftsmith.provenance.rules import FOLDED, RULES, rule_for


def compared(after: list = (), before: list = (), **case: object):
    return diff(*recorded({"after": list(after), "before": list(before), **case})(None))


def test_counts_lead_and_loss_comes_before_speed():
    verdict = compared(
        [
            [["config", "train", "seed"], 1], [["packages", "installed", "numpy", "version"], "2.0"],
            [["target", "chat_template"], "other"], [["gpu", "driver"], "570"],
            [["host"], {"unknown": "no permission"}], [["switches"], {"unknown": "not loaded"}],
        ]
    )  # fmt: skip
    assert verdict.line == "3 changes can affect loss, 1 can affect speed, 2 unknown"
    assert verdict.text().splitlines()[0] == verdict.line
    fields = ["target.chat_template", "config.train.seed", "packages.numpy", "gpu.driver"]
    assert [c.field for c in verdict.changes] == fields and verdict.code == 1


def test_every_change_says_all_it_must():
    change = compared([[["config", "train", "learning_rate"], 0.1]]).changes[0].as_dict()
    assert set(change) == {"field", "effect", "was", "is", "why", "back", "follows", "ranks"}
    assert (change["was"], change["is"], change["back"]) == ("0.0006", "0.1", "train.learning_rate=0.0006")


def test_unknown_is_not_the_same():
    verdict = compared([[["libraries"], {"unknown": "cannot read /proc/self/maps"}]])
    assert (verdict.line, verdict.code) == ("no change found, 1 unknown: cannot tell", 2)
    assert (verdict.unknown[0].field, verdict.unknown[0].side) == ("libraries", "is")
    assert not [s for s in verdict.same if s.startswith("native libraries")]
    both = compared([[["libraries"], {"unknown": "x"}]], [[["libraries"], {"unknown": "x"}]])
    assert both.code == 2 and both.unknown[0].side == "both", "unknown twice is still not the same"


def test_what_did_not_change_is_said_plainly():
    verdict = compared()
    assert verdict.line == "nothing changed" and verdict.code == 0
    assert "code: identical, draftsmith at commit 5f0c5f0c5f0c, clean tree" in verdict.same
    assert len(verdict.same) == 15


def test_time_pids_and_temporary_places_are_only_counted():
    verdict = compared(
        [
            [["process", "pid"], 1], [["process", "boot_id"], "x"], [["process", "folder"], "/elsewhere"],
            [["clock", "time"], 1.0], [["config", "name"], "other"], [["data", "folder"], "/tmp/x/store"],
        ]
    )  # fmt: skip
    assert (verdict.code, verdict.folded, verdict.changes) == (0, 5, ())
    assert "5 differences of time, process numbers" in verdict.text()
    moved = [["built", "scratch"], "/tmp/pytest-1/x"]
    assert compared([moved], [[["built", "scratch"], "/tmp/pytest-2/y"]]).code == 0


def test_a_consequence_is_not_counted_as_a_cause():
    verdict = compared(
        [[["environment", "at_exec", "LD_LIBRARY_PATH"], "/opt"], [["libraries", "libcudnn.so", "sha256"], "x"]]
    )
    assert verdict.line == "1 change can affect loss, 0 can affect speed, 1 follows from these"
    assert [c.follows for c in verdict.changes] == [None, "environment.LD_LIBRARY_PATH"]
    alone = compared([[["libraries", "libcudnn.so", "sha256"], "x"]])
    assert alone.changes[0].follows is None, "without its cause it stands for itself"


def test_a_package_that_nobody_imports_affects_nothing():
    verdict = compared([[["packages", "installed", "networkx", "version"], "9"]])
    assert verdict.line == "0 changes can affect loss, 0 can affect speed, 1 neither" and verdict.code == 1
    assert verdict.changes[0].why == "neither run imported it"
    unsure = compared(
        [[["packages", "installed", "networkx", "version"], "9"], [["imported"], {"unknown": "x"}]],
        [[["imported"], {"unknown": "x"}]],
    )
    assert unsure.changes[0].effect == "loss", "where imports are unknown it may matter"


def test_a_commit_or_an_edit_that_no_run_imports_affects_nothing():
    code = ["code", "draftsmith"]
    verdict = compared([[[*code, "commit"], "e" * 40]])
    assert verdict.line == "0 changes can affect loss, 0 can affect speed, 1 neither"
    assert verdict.changes[0].why == "the files that a run could import are the same"
    assert compared([[[*code, "commit"], "e" * 40], [[*code, "source"], "x"]]).changes[0].effect == "loss"
    for path, effect in (("tests/a.py", "neither"), ("docs/x.md", "neither"), ("src/a.py", "loss")):
        edits = [[[*code, "edited"], {path: "1"}], [[*code, "source"], effect]]
        change = compared(edits).changes[0]
        assert change.effect == effect and path in change.is_


def test_a_change_in_one_process_only_and_processes_that_differ():
    edits = [[["libraries", "libnccl.so", "sha256"], "x"]]
    verdict = compared(edits, rank=3)
    assert verdict.changes[0].ranks == (3,) and "(rank 3 only)" in verdict.text()
    assert [(c.field, c.ranks) for c in verdict.ranks] == [("libraries.libnccl.so", (3,))]
    assert "processes of after differ among themselves" in verdict.text()
    before, after = recorded({"after": edits, "rank": 3})(None)
    assert among_ranks(before) == [] and compared(edits).changes[0].ranks == ()
    again = diff(after, replace(after, label="again"))
    assert again.code == 0 and again.ranks, "unchanged since, but still worth saying"


def test_runs_of_different_kinds():
    before, after = recorded({})(None)
    with pytest.raises(InputError, match="before is a train run and after a serving run"):
        diff(before, replace(after, kind="serving"))


def test_a_run_that_is_still_going_is_not_the_last_word():
    before, after = recorded({"after": [[["gpu", "driver"], "1"]]})(None)
    verdict = diff(before, replace(after, state=State("running")))
    assert verdict.code == 2 and verdict.changes and "after is still being written" in verdict.text()


def test_results_are_told_apart_from_causes():
    verdict = compared([[["outcome", "loss"], 2.5], [["outcome", "tokens_per_s", "p50"], 4300.0]])
    assert verdict.code == 0 and verdict.results == (("loss", "2.31", "2.5"), ("tokens/s (median)", "21500", "4300"))


def test_json_holds_everything():
    verdict = compared([[["gpu", "driver"], "1"], [["torch"], {"unknown": "x"}]])
    values = json.loads(json.dumps(verdict.as_dict()))
    assert values["verdict"] == verdict.line and values["code"] == 1
    assert {"changes", "unknown", "not_changed", "results", "folded", "ranks", "preliminary"} <= set(values)


def test_a_damaged_section_is_unknown():
    verdict = compared([[["target"], {"weights": 3}]])
    assert verdict.code == 2 and "its record is damaged" in verdict.unknown[0].why


def test_cache_that_grew_or_moved_whole_is_no_loss():
    cache = json.loads(json.dumps(recorded({})(None)[0].facts["compile_cache"]["inductor"]))
    grown = {**cache, "keys": [*cache["keys"], "zzzzzzzz"], "entries": 286, "digest": "x"}
    assert compared([[["compile_cache", "inductor"], grown]]).code == 0
    assert compared([[["compile_cache", "inductor"], {**cache, "path": "/copied/elsewhere"}]]).code == 0
    huge = {**grown, "complete": False}
    assert compared([[["compile_cache", "inductor"], huge]]).code == 2, "too large to be compared: unknown"


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.pattern)
def test_every_rule_can_speak(rule):
    """No rule is hidden by one before it, and each says why and how back."""
    sample = rule.pattern.replace("*", "xyz")
    first = rule_for(sample)[1]
    assert first is rule or fnmatchcase(first.pattern.replace("*", "xyz"), rule.pattern)
    assert rule.effect == FOLDED or (rule.why and rule.back)


def test_every_field_of_a_run_has_a_rule_of_its_own():
    from draftsmith.provenance.view import table

    catch_all = RULES[-1]
    strangers = [f for f in table(recorded({})(None)[0].facts) if rule_for(f)[1] is catch_all]
    assert not strangers
