"""The optimizer's kernels, all tensors of a kind in one launch, against the same formulas tensor by tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.train import optim

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SHAPES = [(300, 64), (3,), (7,), (4096,), (33, 5), (1000, 1031), (129,), (64, 64), (5000, 2048)]
"""Some that can be read 16 bytes at a time, some that cannot; several chunks, one, less than a tile."""


def drawn(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in SHAPES]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_adamw_of_all_tensors_at_once(dtype):
    generator, kind = torch.Generator("cuda").manual_seed(0), getattr(torch, dtype)
    parameters, means, squares = (drawn(generator) for _ in range(3))
    squares = [s.abs() for s in squares]
    gradients = [g.to(kind) if g.dim() == 2 else g for g in drawn(generator)]
    copies = [torch.empty_like(p, dtype=kind) if p.dim() == 2 else None for p in parameters]
    # a copy that begins in the middle of another tensor, as the parts of a joined one do, and at an odd place
    joined = torch.full((400 * 64,), 9.0, device="cuda", dtype=kind)
    copies[0] = joined[64 : 64 + 300 * 64].view(300, 64)
    gradients[7] = torch.randn(64 * 64 + 1, device="cuda", generator=generator).to(kind)[1:].view(64, 64)
    plain = [[t.clone() for t in tensors] for tensors in (parameters, means, squares)]
    numbers, factor = np.array([1e-2, 0.1, 0.9, 0.95, 1e-8, 0.3, 0.5], dtype=np.float32), torch.tensor(0.7).cuda()
    optim.update(parameters, means, squares, gradients, copies, numbers, factor)
    for i in range(len(SHAPES)):
        line = (tensors[i].view(-1) for tensors in plain)
        optim.adamw(*line, gradients[i].reshape(-1), None, factor, torch.from_numpy(numbers).cuda())
        for tensors, own in zip(plain, (parameters, means, squares), strict=True):
            torch.testing.assert_close(own[i], tensors[i], rtol=1e-5, atol=1e-6)
        if copies[i] is not None:
            assert torch.equal(copies[i], parameters[i].to(kind))
    assert (joined[:64] == 9).all() and (joined[64 + 300 * 64 :] == 9).all()


def test_the_norm_of_gradients():
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = [*drawn(generator), *drawn(generator, torch.bfloat16)]
    tensors = [t / t.norm() * (1 + i / 10) for i, t in enumerate(tensors)]  # each counts, the small ones too
    norm, factor = optim.clip_factor(tensors, 2.0, torch.device("cuda"))
    torch.testing.assert_close(norm, torch.cat([t.float().flatten() for t in tensors]).norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(factor * norm, torch.tensor(2.0).cuda(), rtol=1e-5, atol=0)
