"""Two drafters over gloo against one process: unequal rows, a rank whose rows are empty, both empty."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

CASES: dict[str, tuple[list, list]] = {
    "unequal": ([0, 1], [2]),
    "one rank empty": ([0, 1, 2], ["empty"]),
    "both empty": (["empty"], ["empty"]),
}
KINDS = ("decay", "dpace")
ODD_SIZES = [(3,), (16,), (5, 7), (4, 8), (1,)]


def rank_main(rank: int, port: int, out: str) -> None:
    """Every case in one pair of processes: starting them is what takes long."""
    sys.path.insert(0, str(Path(__file__).parent))
    import os

    from test_step import gradients, make_step

    from draftsmith.config import PlacementConfig
    from draftsmith.train.dist import world

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = {}
    with world(PlacementConfig(drafters=2, timeout_seconds=60), "cpu") as both:
        for case, rows in CASES.items():
            for kind in KINDS:
                step = make_step(kind, torch.float64)
                step.world = both
                seen, sums = gradients(step, chosen(rows[rank]))
                loss = both.sum_device(sums.weighted.clone()) / max(sums.denominator, 1e-12)
                found[f"{case} {kind}"] = {"gradients": seen, "loss": loss}
        odd = [torch.nn.Parameter(torch.empty(size)) for size in ODD_SIZES]
        for number, p in enumerate(odd):
            p.grad = torch.full_like(p, float(number + rank)) if number != rank else None
        both.sum_gradients(odd)
        found["odd"] = {"sums": [p.grad.clone() for p in odd], "at": [p.grad.storage_offset() for p in odd]}
    torch.save(found, f"{out}.{rank}")


def chosen(rows: list) -> list:
    from test_step import EMPTY, ROWS

    return [EMPTY if r == "empty" else ROWS[r] for r in rows]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks") / "out"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port, str(out)), nprocs=2)
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(case, kind, ranks):
    sys.path.insert(0, str(Path(__file__).parent))
    from test_step import gradients, make_step

    alone, sums = gradients(make_step(kind, torch.float64), chosen([*CASES[case][0], *CASES[case][1]]))
    for one in (found[f"{case} {kind}"] for found in ranks):
        assert one["gradients"].keys() == alone.keys()
        if case == "both empty":
            assert alone == {}
            continue
        torch.testing.assert_close(one["loss"], sums.weighted / sums.denominator, rtol=1e-12, atol=0)
        for name, value in alone.items():
            torch.testing.assert_close(one["gradients"][name], value, rtol=1e-9, atol=1e-12)


def test_summed_gradients_begin_where_16_numbers_can_be_read_at_once(ranks):
    """Whether they can is what kernels are compiled for in the warm-up."""
    want = [1.0, 1.0, 5.0, 7.0, 9.0]  # rank 0 has no first gradient, rank 1 no second
    for one in (found["odd"] for found in ranks):
        assert [tuple(s.shape) for s in one["sums"]] == ODD_SIZES
        assert all((s == value).all() for s, value in zip(one["sums"], want, strict=True))
        assert one["at"] == [0, 16, 32, 80, 112]
