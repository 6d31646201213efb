"""`draftsmith plan`: sizes against models that are built, placements that exist, what does not fit, bad input."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import make_config
from helpers_train import SPEC
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.cards import CARDS, Rates, card_rates
from draftsmith.cli import main
from draftsmith.config import TrainConfig
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.geometry import GEOMETRIES, Shape, drafter_spec
from draftsmith.plan import available_memory, graphs_advice, prepare, row_settings
from draftsmith.predict import (
    GIB,
    Settings,
    choices,
    dense_geometry,
    drafter_parameters,
    memory,
    muon_flops,
    predict,
    too_little,
)
from draftsmith.rates import measure, measure_together
from draftsmith.train.optim import make_optimizer

QWEN3_8B = dense_geometry(
    layers=36, needed=34, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, tied=False
)
DRAFTER = dataclasses.replace(
    SPEC, hidden_size=4096, vocab_size=151936, num_layers=5, intermediate_size=12288, num_heads=32, num_kv_heads=8,
    head_dim=128, block_size=16, feature_layers=(1, 9, 17, 25, 33), num_target_layers=36, layer_types=("full",) * 5,
)  # fmt: skip
ROW = Settings(
    row_tokens=3072, anchors=512, rows_per_step=24, chunk_rows=512, run_ahead=4, tokens=3072, used=512, trained=7680,
    squares=3072**2, target_bytes=2, compute_bytes=2, feature_bytes=2, gpu=True, packed=True,
)  # fmt: skip
SMOLLM2 = GEOMETRIES["smollm2-135m"]
SMALL = dense_geometry(
    layers=30, needed=28, hidden=SMOLLM2.hidden, intermediate=SMOLLM2.intermediate, heads=SMOLLM2.heads,
    kv_heads=SMOLLM2.kv_heads, head_dim=SMOLLM2.head_dim, vocab=SMOLLM2.vocab, tied=True,
)  # fmt: skip
H200 = card_rates(CARDS["h200"])
FLAT = Rates(1e12, 1e12, 1e12, 1e9, 1e10, 1e10, 1e10)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "num_heads": 2}, {"num_layers": 1, "head_dim": 16}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_drafter_parameters_are_those_of_a_built_drafter(changes, dtype, kind):
    layers = changes.get("num_layers", SPEC.num_layers)
    spec = dataclasses.replace(SPEC, **changes, layer_types=("full",) * layers)
    drafter = DFlashDrafter(spec).to(dtype)
    assert drafter_parameters(spec) == sum(p.numel() for p in drafter.parameters())
    optimizer = make_optimizer(drafter, TrainConfig(optimizer=kind, steps=1))
    for p in drafter.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    settings = dataclasses.replace(ROW, gpu=False, compute_bytes=dtype.itemsize, muon=kind == "muon")
    parts = memory(QWEN3_8B, spec, settings, 1)["drafter"]
    held = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
    assert parts["masters"] == held(drafter.parameters())
    assert parts["gradients"] == held(p.grad for p in drafter.parameters())
    moments = held(s for state in optimizer.state.values() for s in state.values() if s.dim())
    assert parts["moments"] == (moments if kind == "adamw" else pytest.approx(moments, rel=3e-2))


@pytest.mark.parametrize(
    ("fields", "rows", "of_a_weight"),
    [((), 1, 2), (("train.optimizer=muon",), 1, 4), (("compile.enabled=false",), 1, 4), ((), 2, 6)],
)
def test_gradients_of_bfloat16_weights_are_counted_as_the_step_keeps_them(
    stored, target_folder, tmp_path, fields, rows, of_a_weight
):
    config = make_config(
        target_folder, tmp_path, "train.compute_dtype=bfloat16", f"train.rows_per_step={rows}", *fields
    )
    settings = row_settings(config, DRAFTER, prepare(stored).rows, gpu=True)
    eager = "compile.enabled=false" in fields
    assert settings.muon == ("train.optimizer=muon" in fields) and settings.in_place == (not eager)
    parts = memory(QWEN3_8B, DRAFTER, settings, 1)["drafter"]
    logits = settings.chunk_rows * DRAFTER.vocab_size * 2 * (2 if eager else 1)
    assert parts["loss chunk"] == logits + 2 * settings.trained * DRAFTER.hidden_size * 2
    assert parts["gradients"] == of_a_weight * drafter_parameters(DRAFTER)
    capped = dataclasses.replace(DRAFTER, final_logit_softcapping=30.0)
    assert not row_settings(config, capped, prepare(stored).rows, gpu=True).in_place


def test_target_counts_are_those_of_the_loaded_target(target, stored):
    work = prepare(stored)
    assert work.target.model.device.type == "meta"
    assert work.geometry.parameters == sum(p.numel() for p in target.model.parameters())
    needed = target.layers[: work.spec.feature_layers[-1] + 1]
    assert work.geometry.needed_parameters == sum(p.numel() for p in needed.parameters())
    weights = memory(work.geometry, work.spec, work.settings, 1)["target"]["weights"]
    assert weights == sum(p.numel() * p.element_size() for p in target.model.parameters())


def test_a_geometry_by_hand_is_that_of_the_config(stored):
    work = prepare(stored)
    needed = work.spec.feature_layers[-1] + 1
    assert work.geometry == dense_geometry(
        layers=8, needed=needed, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=272, tied=False
    )


def test_a_row_counts_what_the_loader_and_the_blocks_give(stored):
    from draftsmith.drafter.blocks import build_blocks

    work = prepare(stored)
    blocks = [build_blocks(r, work.spec.block_size, work.spec.mask_token_id, 4.0, trim=True) for r in work.rows]
    assert work.settings.trained == pytest.approx(sum(b.counts.sum() for b in blocks) / len(blocks))
    assert 0 < work.settings.tokens <= stored.train.row_tokens
    graphed = stored.model_copy(update={"compile": stored.compile.model_copy(update={"graphs": True})})
    on_cpu, on_gpu = (row_settings(graphed, work.spec, work.rows, gpu) for gpu in (False, True))
    assert not on_cpu.graphs and on_cpu.trained == work.settings.trained
    assert on_gpu.graphs and on_gpu.trained == stored.train.anchors * (work.spec.block_size - 1)  # all go through


def test_qwen3_8b_on_an_h200_is_what_was_measured_there():
    row = dataclasses.replace(ROW, rows_per_step=1, chunk_rows=2560, in_place=True)
    found = predict(QWEN3_8B, DRAFTER, row, H200, 1, [139 * GIB])
    assert found.target_seconds == pytest.approx(0.0723, rel=0.02)
    assert found.drafter_seconds == pytest.approx(0.1232, rel=0.02)
    assert found.memory["drafter"]["peak"] / GIB == pytest.approx(22.9, rel=0.08)


def test_the_host_bounds_a_small_model_on_a_gpu_unless_its_rows_are_graphs():
    """Widths of SmolLM2-135M: 61 ms a step were measured (61 to 74 on a host of two cards), 25 with graphs; kernels 23."""
    shape = Shape(4096, 2048, 16, 5, 8, documents=12)
    spec = drafter_spec(SMOLLM2, shape)
    row = dataclasses.replace(
        ROW, row_tokens=4096, anchors=2048, rows_per_step=1, tokens=4096, used=2048, trained=30000,
        squares=12 * (4096 / 12) ** 2, muon=True, one_pass=False,
    )  # fmt: skip

    def milliseconds(settings: Settings) -> float:
        return 1e3 / predict(SMALL, spec, settings, H200, 1, (139 * GIB,)).placements[0].rows_per_s

    assert 50 < milliseconds(row) < 74
    assert 10 < milliseconds(dataclasses.replace(row, graphs=True)) < 23  # the kernels of small layers reach less
    split = [
        predict(SMALL, spec, r, H200, 2, (139 * GIB,) * 2).placements[-1]
        for r in (row, dataclasses.replace(row, graphs=True))
    ]
    assert [p.name for p in split] == ["split 1 + 1"] * 2
    assert 1e3 / split[1].rows_per_s == pytest.approx(28 * 0.8)  # a target of a split has no graph
    assert split[0].rows_per_s < split[1].rows_per_s and sum(split[0].need) < sum(split[1].need)
    tight = (max(split[1].need),) * 2  # only the split fits
    planned = predict(SMALL, spec, dataclasses.replace(row, graphs=True), H200, 2, tight)
    assert planned.recommended == "split 1 + 1" and planned.target_seconds == pytest.approx(28 * 0.8e-3)
    graphed = dataclasses.replace(ROW, graphs=True)
    online, files = (memory(SMALL, spec, dataclasses.replace(row, graphs=True, files=f), 1) for f in (False, True))
    assert online["colocated"]["graphs"] > files["colocated"]["graphs"] > 0 and "graphs" not in online["target"]
    assert online["drafter"]["gradients"] == 6 * drafter_parameters(spec)  # a graph's stay while Muon's sums are made
    large = [predict(QWEN3_8B, DRAFTER, r, H200, 1, (139 * GIB,)).placements[0] for r in (ROW, graphed)]
    assert large[0].rows_per_s == large[1].rows_per_s  # there the kernels are the step
    assert large[0].need < large[1].need


def test_muons_products_are_those_of_its_step():
    drafter = DFlashDrafter(SPEC).bfloat16()
    optimizer = make_optimizer(drafter, TrainConfig(optimizer="muon", steps=1))
    for p in drafter.parameters():
        p.grad = torch.ones_like(p)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == muon_flops(SPEC)
    adamw, muon = (
        predict(QWEN3_8B, DRAFTER, dataclasses.replace(ROW, muon=m), H200, 1, [139 * GIB]).placements[0].rows_per_s
        for m in (False, True)
    )
    assert 24 / muon - 24 / adamw == pytest.approx(muon_flops(DRAFTER) / H200.drafter_flops, rel=1e-6)


def test_every_split_whose_drafters_divide_the_step_is_listed():
    assert choices(8, 24) == [
        ("colocated", 0, 8), ("split", 7, 1), ("split", 6, 2), ("split", 5, 3), ("split", 4, 4), ("split", 2, 6),
    ]  # fmt: skip
    assert choices(8, 1) == [("split", 7, 1)]
    assert choices(1, 1) == [("colocated", 0, 1)]
    with pytest.raises(InputError, match="at least one"):
        choices(0, 1)
    assert choices(2, 4, files=True) == [("colocated", 0, 2)]
    with pytest.raises(InputError, match="a multiple of 8"):
        choices(8, 1, files=True)


def test_the_slower_role_bounds_a_split_and_cores_are_shared():
    row = dataclasses.replace(ROW, gpu=False)
    alone = predict(QWEN3_8B, DRAFTER, row, FLAT, 2, [1e15])
    rates = {p.name: p.rows_per_s for p in alone.placements}
    t, d = alone.target_seconds, alone.drafter_seconds
    assert rates["split 1 + 1"] == pytest.approx(1 / max(t, d), rel=0.01)
    assert rates["colocated x2"] == pytest.approx(2 / (t + d), rel=0.01)
    half = dataclasses.replace(FLAT, target_flops=5e11, drafter_flops=5e11, head_flops=5e11)
    shared = {
        p.name: p.rows_per_s for p in predict(QWEN3_8B, DRAFTER, row, FLAT, 2, [1e15], crowd=(2, half)).placements
    }
    assert shared["colocated x2"] == pytest.approx(1 / (t + d), rel=0.02)
    assert shared["split 1 + 1"] == pytest.approx(1 / (t + d), rel=0.02)  # one core's worth, whoever has it
    four = {p.name: p.rows_per_s for p in predict(QWEN3_8B, DRAFTER, row, FLAT, 4, [1e15], crowd=(2, FLAT)).placements}
    assert four["colocated x4"] == pytest.approx(rates["colocated x2"], rel=0.02)  # two cores, however many share them


def test_what_does_not_fit_is_named_with_what_would():
    devices = [42 * GIB] * 8
    found = predict(QWEN3_8B, DRAFTER, ROW, H200, 8, devices)
    colocated = found.placements[0]
    assert not colocated.fits and found.recommended == "split 4 + 4"
    line = too_little(QWEN3_8B, DRAFTER, ROW, colocated, devices, found.placements)
    need = max(colocated.need) / GIB
    assert f"GPU 0 (and 7 more) needs {need:.1f} GiB for its colocated process and has 42.0 GiB" in line
    assert f"{need - 42:.1f} GiB too little" in line and "split 4 + 4" in line
    shorter = int(line.split("train.row_tokens=")[1].split()[0])
    for tokens, fits in ((shorter, True), (shorter + 64, False)):
        peak = memory(QWEN3_8B, DRAFTER, dataclasses.replace(ROW, row_tokens=tokens), 8)["colocated"]["peak"]
        assert (peak <= 42 * GIB) == fits
    ahead = dataclasses.replace(ROW, run_ahead=2000)
    split = predict(QWEN3_8B, DRAFTER, ahead, H200, 8, devices).placements[3]
    assert "placement.run_ahead=" in too_little(QWEN3_8B, DRAFTER, ahead, split, devices, [split])
    nothing = predict(QWEN3_8B, DRAFTER, ROW, H200, 8, [10 * GIB] * 8)
    assert nothing.recommended is None
    line = too_little(QWEN3_8B, DRAFTER, ROW, nothing.placements[1], [10 * GIB] * 8, nothing.placements)
    assert "GPU 0" in line and "neither" in line


def test_one_memory_holds_all_processes_and_a_gpu_those_that_share_it():
    one = predict(QWEN3_8B, DRAFTER, ROW, H200, 4, [1e15]).placements[0]
    two = predict(QWEN3_8B, DRAFTER, ROW, H200, 4, [1e15] * 2).placements[0]
    four = predict(QWEN3_8B, DRAFTER, ROW, H200, 4, [1e15] * 4).placements[0]
    assert one.need[0] == pytest.approx(2 * two.need[0]) == pytest.approx(4 * four.need[0])


def test_processes_that_share_a_gpu_take_turns():
    def rates(processes: int, gpus: int) -> dict[str, float]:
        found = predict(QWEN3_8B, DRAFTER, ROW, H200, processes, [1e15] * gpus).placements
        return {p.name: p.rows_per_s for p in found}

    one, spread, shared = rates(1, 1), rates(8, 8), rates(8, 1)
    assert shared["colocated x8"] == pytest.approx(one["colocated x1"], rel=0.05)
    assert spread["colocated x8"] == pytest.approx(8 * one["colocated x1"], rel=0.1)
    assert shared["split 4 + 4"] == pytest.approx(one["colocated x1"], rel=0.05)  # as much work, whoever does it
    three = rates(3, 2)  # the second drafter has a GPU to itself, the first shares its own with the target
    row = predict(QWEN3_8B, DRAFTER, ROW, H200, 3, [1e15] * 2)
    assert three["split 1 + 2"] == pytest.approx(1 / (row.target_seconds + row.drafter_seconds / 2), rel=0.05)


def test_available_memory_is_part_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() < total


OFF = (
    "compile.graphs=true",
    "compile.enabled=false",
    "train.attention=flex",
    "train.compute_dtype=float32",
    "target.forward=per_document",
    "target.dtype=float32",
)


@pytest.mark.parametrize("fields", ["", *OFF])
def test_plan_tells_of_graphs_where_they_can_be(target_folder, tmp_path, capsys, fields):
    path = tmp_path / "tiny.yaml"
    path.write_text(make_config(target_folder, tmp_path, *fields.split()).dump())
    assert main(["plan", str(path), "--gpus", "1", "--gpu", "h200"]) == 0
    assert ("compile.graphs=true may be faster" in capsys.readouterr().out) is (not fields)


def test_the_advice_is_for_the_card_that_is_asked_for(target_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("draftsmith.plan.graphs_advice", lambda config, work, rates, said: asked.append(rates))
    path = tmp_path / "tiny.yaml"
    path.write_text(make_config(target_folder, tmp_path).dump())
    assert main(["plan", str(path), "--gpus", "1", "--gpu", "l40s"]) == main(["plan", str(path)]) == 0
    assert asked == [card_rates(CARDS["l40s"])]  # here, nothing says what graphs would do


def test_graphs_are_advised_by_the_rates_of_the_card_and_for_the_placement(target_folder, tmp_path):
    def advice(geometry, spec, settings, card="h200", *placement):
        config, rates = (
            make_config(target_folder, tmp_path, "train.rows_per_step=6", *placement),
            card_rates(CARDS[card]),
        )
        work, count = SimpleNamespace(geometry=geometry, spec=spec, settings=settings), config.placement.processes
        return graphs_advice(config, work, rates, predict(geometry, spec, settings, rates, count, (139 * GIB,) * count))

    row = dataclasses.replace(ROW, rows_per_step=6)
    spec = drafter_spec(SMOLLM2, Shape(3072, 512, 16, 5, 5))
    assert "may be faster: 19.1 rows/s is as fast as the host asks" in str(advice(SMALL, spec, row))
    assert advice(QWEN3_8B, DRAFTER, row) is None  # the kernels are the step
    split = "placement.mode=split", "placement.targets=1", "placement.drafters=2"
    assert advice(SMALL, spec, row, "h200", *split) is None  # its one target, which has no graph, is what it waits for
    assert "a drafter" in str(advice(SMALL, spec, row, "h200", split[0], "placement.targets=2", "placement.drafters=1"))
    short = dataclasses.replace(row, row_tokens=2048, tokens=2048, anchors=256, used=256, trained=3840, squares=2048**2)
    wide = dense_geometry(
        layers=28,
        needed=26,
        hidden=2048,
        intermediate=6144,
        heads=16,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        tied=True,
    )
    drafter = dataclasses.replace(DRAFTER, hidden_size=2048, intermediate_size=6144, num_heads=16)
    assert advice(wide, drafter, short, "l40s") is None  # a slower card has less to wait for
    assert advice(wide, drafter, short, "b200") is not None


def test_plan_for_gpus_that_are_not_here(target_folder, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(make_config(target_folder, tmp_path, "train.rows_per_step=6").dump())
    assert main(["plan", str(path), "--gpus", "8", "--gpu", "h200", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in said["placements"]] == ["split 7 + 1", "split 6 + 2", "split 5 + 3", "split 2 + 6"]
    assert said["recommended"] in {p["name"] for p in said["placements"]} and said["does_not_fit"] is None
    assert main(["plan", str(path), "--gpus", "8", "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    assert "split 5 + 3" in text and "recommended" in text and "no store yet" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0", "--gpu", "h200"], "--gpus 0"),
        (["--gpu", "h2000"], "knows h200"),
        (["--gpus", "2"], "no GPU is here"),
    ],
)
def test_bad_input_is_one_line(target_folder, tmp_path, capsys, options, message):
    path = tmp_path / "config.json"
    path.write_text(make_config(target_folder, tmp_path).dump())
    assert main(["plan", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_that_does_not_fit_exits_2(target_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CARDS, "h200", dataclasses.replace(CARDS["h200"], memory_gib=0.5))
    path = tmp_path / "config.json"
    path.write_text(make_config(target_folder, tmp_path).dump())
    assert main(["plan", str(path), "--gpu", "h200"]) == 2
    said = capsys.readouterr()
    assert "does not fit: GPU 0 needs" in said.err and "GiB too little" in said.err
    assert "none fits" in said.out


def test_what_fits_is_said_also_where_measuring_takes_too_much(target_folder, tmp_path, capsys, monkeypatch):
    def measure(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("draftsmith.plan.measure", measure)
    monkeypatch.setattr("draftsmith.plan.available_memory", lambda: GIB)
    path = tmp_path / "config.json"
    path.write_text(make_config(target_folder, tmp_path, "train.row_tokens=1048576").dump())
    assert main(["plan", str(path)]) == 2
    said = capsys.readouterr()
    assert "GiB too little; what fits: train.row_tokens=" in said.err and said.err.count("\n") == 1
    assert "measuring ran out of memory: rows/s and tokens/s are an H200's" in said.out


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_measured_rates_give_back_the_measured_seconds(stored, dtype):
    train = stored.train.model_copy(update={"compute_dtype": dtype})
    work = prepare(stored.model_copy(update={"train": train}))
    rates = measure(work, torch.device("cpu"))
    assert all(v > 0 for k, v in dataclasses.asdict(rates).items() if not k.endswith(("fixed", "host", "muon_flops")))
    found = predict(work.geometry, work.spec, work.settings, rates, 1, [1e12])
    assert 1e-4 < found.target_seconds < 5 and 1e-4 < found.drafter_seconds < 5


def test_a_process_beside_others_measures_when_told(stored):
    rates = measure_together(stored, 1)
    assert rates.drafter_flops > 0 and rates.target_flops > 0
