"""The compiled step on a GPU: same numbers as uncompiled, no synchronisation, fused kernels, 8-bit products.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.bench import Bench
from draftsmith.drafter.fp8 import available
from draftsmith.errors import InputError
from draftsmith.geometry import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TESTS = Path(__file__).parents[1]
SHAPE = Shape(1024, 64, 16, layers=2, documents=3)
OTHER_DRAFTER = {"layer_types": ("full", "sliding"), "sliding_window": 100, "attention_bias": True}
OTHER_FIELDS = ("loss.kind=dpace", "train.optimizer=muon")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.config.error_on_recompile = False


def built(tmp_path, *fields: str, shape: Shape = SHAPE, spec: dict[str, Any] | None = None) -> Bench:
    bench = Bench("small", shape, "cuda", fields=[f"compile.cache_dir={tmp_path}", *fields])
    bench.spec = dataclasses.replace(bench.spec, **(spec or {}))
    bench.build()
    return bench


def train(bench: Bench, steps: int, rows: int = 1) -> list[float]:
    assert bench.step is not None
    losses = []
    for number in range(steps):
        batch = [bench.rows[(number * rows + i) % 4] for i in range(rows)]
        sums = bench.step.step(number, batch, bench.optimizer, 1e-3)
        losses.append(float(sums.weighted) / sums.denominator)
    return losses


def check_nothing_waits(bench: Bench) -> None:
    """Steps of one row and of two, which keep their gradients in different ways, the optimizer's part included."""
    train(bench, 1)
    assert bench.step is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(4):
            bench.step.step(number, bench.rows[: 1 + number % 2], bench.optimizer, 1e-4)
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(bench.step.frozen.head[0, 0])  # the mode does notice
    finally:
        torch.cuda.set_sync_debug_mode("default")


WITHOUT_OUR_KERNELS = ("train.attention=flex", "loss.softmax=torch")
PLAIN = ("compile.enabled=false", *WITHOUT_OUR_KERNELS)


GRAPHS = ("compile.graphs=true",)


@pytest.mark.parametrize(
    ("rows", "fields"),
    [(1, ()), (2, ()), (2, WITHOUT_OUR_KERNELS), (1, GRAPHS), (2, GRAPHS), (2, (*GRAPHS, "loss.softmax=torch"))],
)
def test_compiled_steps_are_the_uncompiled_ones_within_rounding(tmp_path, rows, fields):
    compiled = train(built(tmp_path, *fields), 6, rows)
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = False
    plain = train(built(tmp_path, *PLAIN), 6, rows)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=5e-3, atol=0)
    assert compiled[4] < compiled[0]  # of the same rows


@pytest.mark.parametrize("fields", [(), OTHER_FIELDS, (*OTHER_FIELDS, *GRAPHS)])
def test_so_are_those_of_another_drafter_loss_and_optimizer_which_wait_for_nothing_either(tmp_path, fields):
    """Sliding layers and biases; then dpace and Muon too.  Two rows a step."""
    bench = built(tmp_path, *fields, spec=OTHER_DRAFTER)
    compiled = train(bench, 6, 2)
    check_nothing_waits(bench)
    assert bench.compiler is not None
    bench.compiler.check(6)
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = False
    plain = train(built(tmp_path, *PLAIN, *(f for f in fields if f not in GRAPHS), spec=OTHER_DRAFTER), 6, 2)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=5e-3, atol=0)
    assert compiled[4] < compiled[0]  # of the same rows


@pytest.mark.parametrize("fields", [(), WITHOUT_OUR_KERNELS, GRAPHS])
def test_nothing_waits_for_the_device_between_log_points(tmp_path, fields):
    check_nothing_waits(built(tmp_path, *fields))


@pytest.mark.parametrize("spec", [{}, OTHER_DRAFTER])
def test_no_kernel_is_compiled_after_the_warm_up(tmp_path, spec):
    """Nor any variant of one: Triton compiles another for other alignments, which no guard of torch's notices."""
    from draftsmith.train import optim_kernels

    kernels = (optim_kernels._adamw_kernel, optim_kernels._squares_kernel)

    def variants() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    for kernel in kernels:  # what other tests compiled
        kernel.device_caches.clear()
    bench = built(tmp_path, spec=spec)
    before = variants()
    assert before >= 4  # gradients as they come and as sums, of each the step and the norm
    train(bench, 2)
    train(bench, 2, rows=2)
    assert variants() == before


def test_a_row_that_does_not_fit_ends_in_one_line_and_what_it_names_fits(tmp_path):
    """In a process of its own, which holds nothing that other tests have left."""
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from gpu import test_compiled_step as t; t.check_what_fits({str(tmp_path)!r})"
    code = None
    with open(tmp_path / "said", "w") as said, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.call([sys.executable, "-c", program], stdout=said, stderr=said, timeout=280)
    assert code == 0, (tmp_path / "said").read_text()[-3000:]


def check_what_fits(folder: str) -> None:
    large = Shape(8192, 4096, 16, layers=2, documents=4)  # needs 4 GiB, nearly all of it for the row's activations
    allowed = 1.5 * 2**30
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    with pytest.raises(InputError) as caught:
        built(folder, shape=large)
    line = str(caught.value)
    del caught  # its frames hold the tensors
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    found = re.search(
        r"train\.row_tokens=8192 with train\.anchors=4096 does not fit the GPU \(.*out of memory.*\): about "
        r"\S+ GiB needed .*, \S+ GiB there; what should fit: .*train\.anchors=(\d+) instead of 4096$", line
    )  # fmt: skip
    assert found, line
    anchors = int(found[1]) // 10 * 8  # the sums hold within 20%
    assert 512 < anchors < 2048, line
    train(built(folder, shape=dataclasses.replace(large, anchors=anchors)), 1)


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [((), "_forward_kernel", "_key_gradient_kernel"), (WITHOUT_OUR_KERNELS, "flex_attention", "backward")],
)
def test_the_fused_attention_kernels_ran(tmp_path, fields, forward, backward):
    facts = built(tmp_path, *fields).compiler.facts
    kernels = facts["kernels"]
    assert facts["target_attention"] == ("flex" if fields else "triton") and "our_kernels_refused" not in facts
    assert any(forward in n and backward not in n for n in kernels) and any(backward in n for n in kernels), kernels
    assert not any("softmax" in name and name != "_softmax_rows_kernel" for name in kernels), kernels


@pytest.mark.skipif(not torch.cuda.is_available() or not available(torch.device("cuda")), reason="no 8-bit products")
def test_8_bit_products_train_nearly_the_same(tmp_path):
    wide = train(built(tmp_path), 6)
    torch._dynamo.reset()
    eight = built(tmp_path, "train.fp8=both")
    assert eight.compiler.facts["target"] == "compiled", eight.said
    torch.testing.assert_close(torch.tensor(train(eight, 6)), torch.tensor(wide), rtol=5e-2, atol=0)
