"""The drafter: its tensors, its formula written out, its cache, and what a block must not see.

The leak tests run the training step's own forward pass (RowStep.run) and look at the hidden states it makes.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers_train import make_row, make_spec, random_row, sees_block, sees_context, slow_mask
from torch import Tensor

from draftsmith.config import LossConfig, TrainConfig
from draftsmith.drafter import model
from draftsmith.drafter.model import DFlashDrafter, embed, rotary_tables, to_logits
from draftsmith.records import DrafterSpec, PackedRow
from draftsmith.train.step import Frozen, RowStep

KINDS = {
    "full": {"layer_types": "full"},
    "sliding 6": {"layer_types": "sliding", "sliding_window": 6},
    "sliding 2": {"layer_types": "sliding", "sliding_window": 2},
    "mixed": {"layer_types": ("full", "sliding"), "sliding_window": 6},
}
PACKED = make_row([14, 20, 12], [(3, 14), (17, 34), (36, 46)], 50, [5, 6, 9, 12, 19, 20, 21, 28, 32, 38, 44], 13)
SINGLE = make_row([40], [(2, 40)], 40, [2, 3, 4, 5, 12, 20, 37, 38], 8)
ROWS = {"packed": PACKED, "single": SINGLE}


def layer_keys(i: int) -> set[str]:
    projections = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    norms = {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"}
    return {f"layers.{i}.{n}.weight" for n in projections | norms}


def test_state_dict_keys_are_those_of_the_format():
    state = DFlashDrafter(make_spec(num_layers=5)).state_dict()
    expected = {"norm.weight", "fc.weight", "hidden_norm.weight"}.union(*(layer_keys(i) for i in range(5)))
    assert set(state) == expected and len(state) == 58
    assert list(state["fc.weight"].shape) == [32, 2 * 32]
    biased = set(DFlashDrafter(make_spec(attention_bias=True)).state_dict())
    plain = set(DFlashDrafter(make_spec()).state_dict())
    assert biased - plain == {f"layers.{i}.self_attn.{n}_proj.bias" for i in (0, 1) for n in "qkvo"}


@pytest.mark.parametrize(
    ("name", "hidden", "mlp", "vocab", "layers", "count"),
    [
        ("Qwen3-4B", 2560, 9728, 151936, 36, 537_427_200),
        ("Qwen3-8B", 4096, 12288, 151936, 36, 1_048_626_432),
        ("Qwen3.6-27B", 5120, 17408, 248320, 64, 1_730_213_120),
    ],
)
def test_parameter_counts_of_the_published_drafters(name, hidden, mlp, vocab, layers, count):
    spec = make_spec(
        hidden_size=hidden, vocab_size=vocab, num_layers=5, intermediate_size=mlp, num_heads=32, num_kv_heads=8,
        head_dim=128, block_size=16, feature_layers=(1, 9, 17, 25, 33), num_target_layers=layers,
    )  # fmt: skip
    with torch.device("meta"):
        drafter = DFlashDrafter(spec)
    assert sum(p.numel() for p in drafter.parameters()) == count


def test_initial_weights_are_normal_with_the_range_asked_for_and_the_same_for_a_seed():
    spec = make_spec(hidden_size=256, head_dim=64, initializer_range=0.02, attention_bias=True)
    drafter = DFlashDrafter(spec).initialize(3)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            assert (
                float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05)
                and abs(float(parameter.detach().mean())) < 1e-3
            )
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
    again, other = DFlashDrafter(spec).initialize(3), DFlashDrafter(spec).initialize(4)
    assert torch.equal(again.fc.weight, drafter.fc.weight) and not torch.equal(other.fc.weight, drafter.fc.weight)


# the formula, one block at a time, in float64, from the state dict alone


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """x: [n, D].  Pairs (i, i + D/2) turn by position * theta^(-2i/D)."""
    out, half = x.clone(), x.shape[1] // 2
    for n, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(position * theta ** (-2 * i / x.shape[1]), dtype=torch.float64)
            a, b = x[n, i], x[n, i + half]
            out[n, i], out[n, i + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def one_block(drafter: DFlashDrafter, row: PackedRow, block: int, features: Tensor, x: Tensor) -> Tensor:
    """Hidden states [B, H] of one block: features [T, K*H], x [B, H], all of float64."""
    spec, w = drafter.spec, {k: v.double() for k, v in drafter.state_dict().items()}
    size, eps = spec.block_size, spec.rms_norm_eps
    a = int(row.anchors[block])
    slots = [int(row.positions[a]) + k for k in range(size)]
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    for i in range(spec.num_layers):

        def project(of: Tensor, name: str, i: int = i) -> Tensor:
            bias = w.get(f"layers.{i}.self_attn.{name}_proj.bias", 0.0)
            return of @ w[f"layers.{i}.self_attn.{name}_proj.weight"].T + bias

        window = spec.sliding_window if spec.layer_types[i] == "sliding" else None
        normed = rms(x, w[f"layers.{i}.input_layernorm.weight"], eps)
        heads = []
        for n in range(spec.num_heads):
            m = n * spec.num_kv_heads // spec.num_heads
            q_piece, kv_piece = (slice(h * spec.head_dim, (h + 1) * spec.head_dim) for h in (n, m))
            q = rms(project(normed, "q")[:, q_piece], w[f"layers.{i}.self_attn.q_norm.weight"], eps)
            both = torch.cat([context, normed])
            k = rms(project(both, "k")[:, kv_piece], w[f"layers.{i}.self_attn.k_norm.weight"], eps)
            v = project(both, "v")[:, kv_piece]
            q = rope(q, slots, spec.rope_theta)
            k = rope(k, [*row.positions.tolist(), *slots], spec.rope_theta)
            outs = []
            for slot in range(size):
                seen = [j for j in range(len(row.tokens)) if sees_context(row, block, slot, j, window)]
                seen += [len(row.tokens) + s for s in range(size) if sees_block(0, slot, 0, s, window)]
                scores = (k[seen] @ q[slot] / spec.head_dim**0.5).softmax(0)
                outs.append(scores @ v[seen])
            heads.append(torch.stack(outs))
        x = x + project(torch.cat(heads, dim=1), "o")
        normed = rms(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps)
        mlp = {n: w[f"layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
        gate = normed @ mlp["gate"].T
        x = x + (gate * torch.sigmoid(gate) * (normed @ mlp["up"].T)) @ mlp["down"].T
    return rms(x, w["norm.weight"], eps)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_is_the_formula(kind, bias):
    spec = make_spec(**KINDS[kind], attention_bias=bias)
    drafter = DFlashDrafter(spec).initialize(0)
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            if parameter.dim() == 1:  # norms of one and biases of zero would hide a norm or a bias left out
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    row = make_row([14, 12], [(3, 14), (17, 26)], 28, [5, 8, 12, 19], 4)
    step, features, embedding = make_step(drafter)
    hidden = hidden_states(step, row, features[:28])
    for block in range(4):
        tokens = torch.tensor([row.tokens[row.anchors[block]]] + [spec.mask_token_id] * 3)
        expected = one_block(drafter, row, block, features[:28].double(), embedding[tokens].double())
        torch.testing.assert_close(hidden[block].double(), expected[1:], rtol=1e-4, atol=1e-4)


def make_step(drafter: DFlashDrafter) -> tuple[RowStep, Tensor, Tensor]:
    """A training step with random frozen matrices, and features [64, K*H]."""
    spec = drafter.spec
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    head = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    features = torch.randn(64, len(spec.feature_layers) * spec.hidden_size, generator=generator)
    step = RowStep(
        drafter, Frozen(embedding, head), source=None, train=TrainConfig(steps=1), loss=LossConfig(),
        attention="sdpa", compute_dtype=torch.float32,
    )  # fmt: skip
    step.trim = False
    return step, features, embedding


def hidden_states(step: RowStep, row: PackedRow, features: Tensor, x: Tensor | None = None) -> Tensor:
    """[A, B - 1, H], slots 1 to B - 1, as the step's forward pass makes them; x [A * B, H]: block inputs in place of the
    embedded ones."""
    found: list[Tensor] = []

    def replace(module, args):
        return args if x is None else (x, *args[1:4], None, args[5])  # every block token by itself

    hooks = [
        step.drafter.layers[0].register_forward_pre_hook(replace),
        step.drafter.register_forward_hook(lambda module, args, out: found.append(out)),
    ]
    try:
        step.run(row, step.blocks(row), features)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0].view(len(row.anchors), step.drafter.spec.block_size - 1, step.drafter.spec.hidden_size)


def block_inputs(step: RowStep, row: PackedRow, embedding: Tensor) -> Tensor:
    """[A * B, H]"""
    return embed(torch.from_numpy(step.blocks(row).inputs.reshape(-1)), embedding, step.drafter.spec)


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_features_a_block_must_not_see_change_no_bit_of_it(kind, where):
    """The anchor's own feature and later ones, other documents, padding, and what a sliding window has left behind."""
    spec, row = make_spec(**KINDS[kind]), ROWS[where]
    step, features, _ = make_step(DFlashDrafter(spec).initialize(0))
    features = features[: len(row.tokens)]
    widest = None if None in spec.windows() else spec.sliding_window
    noise = 10 * torch.randn(features.shape, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        before = hidden_states(step, row, features)
        for block in range(row.anchor_count):
            # slot 0 reaches furthest to the left, and later slots read what slot 0 has read
            seen = [sees_context(row, block, 0, j, widest) for j in range(len(row.tokens))]
            after = hidden_states(step, row, features + noise * ~torch.tensor(seen)[:, None])
            assert torch.equal(after[block], before[block]), block
            if block < row.anchor_count - 1:  # the noise is not lost on the others
                assert not torch.equal(after, before)


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_features_a_block_must_see_change_it(kind, where):
    spec, row = make_spec(**KINDS[kind]), ROWS[where]
    step, features, _ = make_step(DFlashDrafter(spec).initialize(0))
    features = features[: len(row.tokens)]
    widest = None if None in spec.windows() else spec.sliding_window
    with torch.no_grad():
        before = hidden_states(step, row, features)
        for key in range(len(row.tokens)):
            changed = features.clone()
            changed[key] += 1
            after = hidden_states(step, row, changed)
            for block in range(row.anchor_count):
                for slot in range(1, spec.block_size):
                    sees = any(sees_context(row, block, s, key, widest) for s in reaching(spec, slot))
                    assert torch.equal(after[block, slot - 1], before[block, slot - 1]) != sees, (key, block, slot)


def reaching(spec: DrafterSpec, slot: int) -> list[int]:
    """Slots whose view of the context ends up in `slot`: its own, and from the second layer on those of slots it sees."""
    size = spec.block_size
    views = [{s} for s in range(size)]
    for window in spec.windows()[1:]:
        views = [set().union(*(views[s] for s in range(size) if sees_block(0, t, 0, s, window))) for t in range(size)]
    return sorted(views[slot])


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_other_blocks_change_no_bit_of_a_block(kind, where):
    spec, row = make_spec(**KINDS[kind]), ROWS[where]
    step, features, embedding = make_step(DFlashDrafter(spec).initialize(0))
    features, x = features[: len(row.tokens)], block_inputs(step, row, embedding)
    noise = 10 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    owner = torch.arange(len(x)) // spec.block_size
    with torch.no_grad():
        before = hidden_states(step, row, features)
        assert torch.equal(hidden_states(step, row, features, x), before)
        for block in range(len(row.anchors)):
            after = hidden_states(step, row, features, x + noise * (owner != block)[:, None])
            assert torch.equal(after[block], before[block])
            if block < row.anchor_count - 1:
                assert not torch.equal(after[block + 1], before[block + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_see_their_block_both_ways_on_full_layers_and_backwards_on_sliding_ones(kind):
    spec, row = make_spec(**KINDS[kind]), PACKED
    step, features, embedding = make_step(DFlashDrafter(spec).initialize(0))
    features, x = features[: len(row.tokens)], block_inputs(step, row, embedding)
    with torch.no_grad():
        before = hidden_states(step, row, features)
        for slot in range(spec.block_size):
            changed = x.view(len(row.anchors), spec.block_size, -1).clone()
            changed[:, slot] += 1
            after = hidden_states(step, row, features, changed.flatten(0, 1))
            for other in range(1, spec.block_size):
                behind, steps = other - slot, spec.num_layers * ((spec.sliding_window or 0) - 1)
                sees = "full" in spec.layer_types or 0 <= behind <= steps
                for block in range(row.anchor_count):
                    same = torch.equal(after[block, other - 1], before[block, other - 1])
                    assert same != sees, (slot, other, block)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 20])
@pytest.mark.parametrize("where", ["packed", "single", "random"])
def test_one_layer_passes_gradient_exactly_where_the_rule_looks(where, window):
    """For every query: the features and inputs with a gradient are those the rule shows, no more and no fewer."""
    row = random_row(4, row_tokens=60, slots=8, most_anchors=6) if where == "random" else ROWS[where]
    spec = make_spec(num_layers=1, layer_types="sliding" if window else "full", sliding_window=window)
    step, features, embedding = make_step(DFlashDrafter(spec).initialize(0))
    features = features[: len(row.tokens)].clone().requires_grad_()
    x = block_inputs(step, row, embedding).requires_grad_()
    hidden = hidden_states(step, row, features, x).flatten(0, 1)
    rule = torch.from_numpy(slow_mask(row, len(row.anchors), spec.block_size, window))
    rule = rule.unflatten(0, (-1, spec.block_size))[:, 1:].flatten(0, 1)
    direction = torch.randn(spec.hidden_size, generator=torch.Generator().manual_seed(2))
    for query in range(len(hidden)):
        grads = torch.autograd.grad((hidden[query] * direction).sum(), (features, x), retain_graph=True)
        reached = torch.cat([(g != 0).any(1) for g in grads])
        assert torch.equal(reached, rule[query]), query


def test_unused_slots_change_nothing():
    spec = make_spec()
    step, features, _ = make_step(DFlashDrafter(spec).initialize(0))
    features = features[: len(PACKED.tokens)]
    with torch.no_grad():
        all_slots = hidden_states(step, PACKED, features)
        fewer = dataclasses.replace(PACKED, anchors=PACKED.anchors[: PACKED.anchor_count])
        torch.testing.assert_close(hidden_states(step, fewer, features), all_slots[:11], rtol=1e-5, atol=1e-6)


def test_rotary_tables_stay_float32_in_a_bfloat16_drafter(monkeypatch):
    """A public bug: .to(bfloat16) casts inv_freq, and far positions lose their place."""
    spec = make_spec(num_layers=1, initializer_range=0.6)
    drafter = DFlashDrafter(spec).initialize(0).to(torch.bfloat16)
    assert list(drafter.buffers()) == []
    positions = torch.cat([torch.arange(20) * 150, torch.arange(3000, 3004)])
    cos, sin = rotary_tables(positions, 8, 1e4)
    exact = positions.double()[:, None] * 1e4 ** (-torch.arange(0, 8, 2).double() / 8)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[:, :4].double(), exact.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[:, 4:].double(), exact.sin(), rtol=0, atol=1e-3)

    generator = torch.Generator().manual_seed(0)
    features, x = torch.randn(20, 64, generator=generator), torch.randn(4, 32, generator=generator)

    def run(of: DFlashDrafter) -> Tensor:
        dtype = of.fc.weight.dtype
        with torch.no_grad():
            return of(features.to(dtype), positions[:20], x.to(dtype), positions[20:], [None]).float()

    wide = DFlashDrafter(spec)
    wide.load_state_dict(drafter.state_dict())

    def error() -> float:
        return float((run(drafter) - run(wide)).norm() / run(wide).norm())

    good = error()
    reference = run(wide)

    def cast(positions_n: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
        inverse = (1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)).bfloat16().float()
        angles = (positions_n.float()[:, None] * inverse).repeat(1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(model, "rotary_tables", cast)
    bad = float((run(drafter) - reference).norm() / reference.norm())
    assert good < 0.02 and bad > 4 * good, (good, bad)


def test_norms_are_computed_in_float32():
    norm = model.RMSNorm(64, 1e-6).to(torch.bfloat16)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = rms(x.double(), torch.ones(64).double(), 1e-6)
    assert torch.equal(norm(x), expected.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_context_in_pieces_is_the_context_at_once(kind):
    spec = make_spec(**KINDS[kind])
    drafter = DFlashDrafter(spec).initialize(0).double()
    features = torch.randn(23, 64, generator=torch.Generator().manual_seed(0)).double()
    positions = torch.arange(23)
    whole = drafter.context(features, positions)
    pieces = [drafter.context(features[a:b], positions[a:b]) for a, b in ((0, 9), (9, 10), (10, 10), (10, 23))]
    joined = [tuple(torch.cat([p[i][n] for p in pieces], dim=1) for n in (0, 1)) for i in range(spec.num_layers)]
    for a, b in zip(whole, joined, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a[0].shape == (spec.num_kv_heads, 23, spec.head_dim)


def test_embedding_scale_multiplier_and_softcap_are_applied_in_serving_order():
    embedding = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 3, 6])
    assert torch.equal(embed(ids, embedding, make_spec()), embedding[ids])
    assert torch.equal(embed(ids, embedding, make_spec(input_embedding_scale=3.0)), embedding[ids] * 3)
    raw = torch.tensor([-20.0, 0.5, 40.0])
    both = make_spec(output_multiplier=0.25, final_logit_softcapping=6.0)
    assert torch.equal(to_logits(raw, make_spec()), raw)
    torch.testing.assert_close(to_logits(raw, both), 6 * torch.tanh(raw * 0.25 / 6))


def test_swiglu_and_only_layers_fc_and_norms_train():
    mlp = DFlashDrafter(make_spec()).initialize(0).layers[0].mlp
    x = torch.randn(3, 32)
    gate = F.linear(x, mlp.gate_proj.weight)
    expected = F.linear(gate * gate.sigmoid() * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)
    torch.testing.assert_close(mlp(x), expected)
    drafter = DFlashDrafter(make_spec()).initialize(0)
    step, features, embedding = make_step(drafter)
    step.run(PACKED, step.blocks(PACKED), features[:50]).weighted.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())
    assert step.frozen.embedding.grad is None and step.frozen.head.grad is None and embedding.grad is None
