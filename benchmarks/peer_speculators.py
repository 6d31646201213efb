"""DFlash by PyPI speculators 0.9.0 on our packed rows, measured by our replay: the peer of quality_gpu.py.

    PYTHONPATH=.peers/speculators python benchmarks/peer_speculators.py CONFIG [a.b=c ...] --recipe own|ours --out FILE

Its model, initialisation, loss, optimizers, schedule and clipping are its own, called as its trainer calls them; the rows
(their tokens and order), the features and the number of steps are ours.  Recipes:

own    the defaults of its command line for DFlash, read from its own TrainConfig: Muon 1e-3 for matrices (momentum 0.95,
       decay 0.1, matched to AdamW) and AdamW 1e-3 (decay 0.01) for the rest, linear to zero after 1% warm-up, D-PACE
       (alpha 0.5) on cross entropy against the target's argmax, five layers that slide over 2048 tokens (longer than any
       document here, so causal inside the block is all that differs from full), B = 16, 512 anchors, bf16 over fp32
ours   the same model, full attention, with this config's optimizer (its AdamW has torch's betas), rate, schedule
       (where that is not cosine, its linear one) and loss weights

What it must not decide is set: target layers, anchors a row, block size and layers are the config's.  Its fused loss
fails on torch 2.11, so the loss is its eager one.  Its mask is built uncompiled (torch 2.11 compiles it for minutes): the
same mask.  `--attention sdpa` runs it without any compilation, by its own setting for machines without flex_attention.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith import env
from draftsmith.config import Config, load_config
from draftsmith.data.store import Store
from draftsmith.drafter.attention import put_all
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.export import write_folder
from draftsmith.records import DrafterSpec, PackedRow

WINDOW = 2048


def recipe(name: str, config: Config) -> tuple[SimpleNamespace, dict[str, Any], str]:
    """(optimizer and scheduler settings, those of the loss, type of its layers)."""
    from speculators.train.config.schema import TrainConfig

    theirs = TrainConfig(speculator_type="dflash")
    settings = SimpleNamespace(
        **theirs.optimizer.model_dump(), scheduler=theirs.scheduler.scheduler_type, warmup=0.01, num_cycles=0.5
    )
    loss = {
        "per_position_loss_weight": theirs.dflash.per_position_loss_weight,
        "dflash_decay_gamma": theirs.dflash.dflash_decay_gamma,
        "dpace_alpha": theirs.dflash.dpace_alpha,
        "loss_fn": theirs.loss.loss_fn,
    }
    if name == "own":
        return settings, loss, "sliding"
    from draftsmith.drafter.blocks import default_gamma

    train = config.train
    settings.optimizer, settings.lr, settings.muon_lr = train.optimizer, train.learning_rate, train.learning_rate
    settings.weight_decay = settings.muon_weight_decay = train.weight_decay
    settings.scheduler, settings.warmup = ("cosine" if train.schedule == "cosine" else "linear"), train.warmup_fraction
    loss["per_position_loss_weight"] = "dpace" if config.loss.kind == "dpace" else "fixed-exp-decay"
    loss["dflash_decay_gamma"] = config.loss.gamma or default_gamma(config.drafter.block_size)
    return settings, loss, "full"


def build(spec: DrafterSpec, attention: str) -> Any:
    """Its model of our geometry, on the CPU, with its own initial weights; the target's are still missing."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, rms_norm_eps=spec.rms_norm_eps, max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta}, tie_word_embeddings=False,
        use_sliding_window=spec.sliding_window is not None, sliding_window=spec.sliding_window,
        layer_types=[f"{t}_attention" for t in spec.layer_types],
    )  # fmt: skip
    layers._attn_implementation = {"flex": "simple_flex_attention"}.get(attention, attention)
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=spec.vocab_size,
            block_size=spec.block_size,
            # it counts the embedding as layer 0
            aux_hidden_state_layer_ids=[i + 1 for i in spec.feature_layers],
            mask_token_id=spec.mask_token_id,
        )
    )
    if attention == "flex":
        model._create_mask_fn = create_block_mask
    return model


@torch.no_grad()
def give_target(model: Any, embedding: torch.Tensor, head: torch.Tensor, norm: torch.Tensor) -> None:
    """The frozen matrices [V, H] and the final norm's weights [H]."""
    for name, value in (
        ("embed_tokens", embedding), ("lm_head", head), ("verifier_lm_head", head), ("verifier_norm", norm),
    ):  # fmt: skip
        getattr(model, name).weight.copy_(value)
        getattr(model, name).requires_grad_(False)


def convert(model: Any, spec: DrafterSpec) -> DFlashDrafter:
    """Its weights as our drafter, float32 on the CPU.  Its layers have our names."""
    drafter = DFlashDrafter(spec).requires_grad_(False)
    theirs = model.state_dict()
    drafter.load_state_dict({k: theirs[k].float().cpu() for k in drafter.state_dict()})
    frozen = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert theirs.keys() == drafter.state_dict().keys() | frozen, theirs.keys() ^ drafter.state_dict().keys()
    return drafter


def batch(row: PackedRow, features: torch.Tensor, last: torch.Tensor) -> dict[str, torch.Tensor]:
    """What its model is called with.  features [T, K*H]; last [T, H], the target's last layer before the final norm."""
    device = features.device
    arrays = {
        "input_ids": row.tokens, "loss_mask": row.supervised, "document_ids": row.document.astype("int64"),
        "position_ids": row.positions,
    }  # fmt: skip
    tensors = dict(zip(arrays, (t[None] for t in put_all(list(arrays.values()), device)), strict=True))
    return {**tensors, "hidden_states": features[None], "verifier_last_hidden_states": last[None]}


def schedule(optimizer: torch.optim.Optimizer, settings: SimpleNamespace, steps: int) -> Any:
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    warmup = int(steps * settings.warmup)
    if settings.scheduler == "linear":
        return get_linear_schedule_with_warmup(optimizer, warmup, steps)
    return get_cosine_schedule_with_warmup(optimizer, warmup, steps, settings.num_cycles)


def run(config: Config, name: str, attention: str, limit_s: float, folder: Path | None = None) -> dict[str, Any]:
    """Train and measure at every `train.accept_every` steps.  Seconds are of training alone, without the first step,
    in which it compiles.  folder: where its weights go at the end, as `draftsmith export` would write ours.
    Raises TimeoutError if the steps would not end within `limit_s`."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.train.optimizers import build_optimizers

    from draftsmith.evaluate.acceptance import evaluation_prompts, measure_replayed
    from draftsmith.evaluate.replay import greedy_answers
    from draftsmith.target.extract import FeatureExtractor
    from draftsmith.target.model import drafter_spec, load_target
    from draftsmith.train.loop import make_loader

    begin, train = time.monotonic(), config.train
    settings, loss, kind = recipe(name, config)
    target = load_target(config.target, config.device)
    device, gpu = target.device, target.device.type == "cuda"
    layer_types = {"layer_types": kind, "sliding_window": WINDOW if kind == "sliding" else None}
    spec = drafter_spec(config.drafter.model_copy(update=layer_types), target)
    store = Store(config.store)
    assert int(store.lengths.max()) + spec.block_size <= WINDOW, "its window would be counted otherwise than ours"
    loader = make_loader(config, store, heldout=False)
    answers = greedy_answers(
        config, target, evaluation_prompts(config, store, target.tokenizer, config.evaluate.prompts)
    )
    layers = (*spec.feature_layers, target.text_config.num_hidden_layers - 1)
    extract = FeatureExtractor(target, layers, torch.bfloat16 if gpu else torch.float32)
    if gpu and attention == "flex":
        extract.compile()
    torch.manual_seed(train.seed)
    model = build(spec, attention)
    give_target(model, target.embedding, target.head, target.trunk.norm.weight)
    model.to(device).train()
    call, _ = DFlashDraftModel.get_trainer_kwargs(loss_implementation="eager", max_anchors=train.anchors, **loss)
    optimizers = build_optimizers(model, settings)
    assert train.steps is not None and train.rows_per_step == 1
    schedulers = [schedule(o, settings, train.steps) for o in optimizers]
    curve, seconds, tokens, first_step, sums = [], 0.0, 0, 0.0, []
    for step in range(train.steps):
        mark = time.monotonic()
        row = loader.row(step)
        found = extract.row(row)
        width = len(spec.feature_layers) * spec.hidden_size
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            total = model(**batch(row, found[:, :width], found[:, width:]), **call)[1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedulers):
            each.step()
        sums.append(total.detach())
        tokens += row.starts[-1]
        done = step + 1
        if step == 0 or done % 50 == 0 or done == train.steps or done % train.accept_every == 0:
            if gpu:
                torch.cuda.synchronize()
            if done % 50 == 0 and time.monotonic() - begin > limit_s:
                raise TimeoutError(f"step {done} of {train.steps} after {limit_s:.0f} s")
        if step == 0:
            first_step = time.monotonic() - mark
            print(f"compiled in {first_step:.1f} s", flush=True)
        else:
            seconds += time.monotonic() - mark
        if done % train.accept_every == 0 or done == train.steps:
            drafter = convert(model, spec).to(device, target.dtype).eval()
            result = measure_replayed(f"step {done}", target, drafter, answers, config.evaluate.max_new_tokens).result
            mean = float(torch.stack(sums).mean())
            sums = []
            curve.append({"step": done, "tokens": tokens, "seconds": seconds, "loss": mean, **kept(result)})
            print(f"step {done}: accepted length {result['accepted_length']['pooled']:.3f} (pooled)", flush=True)
    found = {
        "recipe": {**vars(settings), **loss, "layer_types": kind, "attention": attention, "anchors": train.anchors},
        "first_step_s": first_step, "whole_s": time.monotonic() - begin, "curve": curve,
    }  # fmt: skip
    if folder is not None:
        write_folder(convert(model, spec), folder, config.target.model)
    return found


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """Of a result, what a curve has at each point: the same of a peer as of ours."""
    return {
        "accepted_length": result["accepted_length"], "by_slot": result["acceptance_by_slot"],
        "by_category": result["by_category"], "spread": result["spread"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--recipe", choices=("own", "ours"), required=True)
    parser.add_argument("--attention", choices=("flex", "sdpa"), default="flex")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    parser.add_argument("--export", type=Path, help="folder for its drafter, which must not exist")
    parser.add_argument("--out", type=Path, required=True)
    args, rest = parser.parse_known_args()
    if args.export is not None and args.export.exists():
        parser.error(f"--export {args.export}: it exists")
    env.prepare()
    if args.attention == "sdpa":
        torch.compiler.set_stance("force_eager")
    config = load_config(args.config, [*args.overrides, *rest])
    if config.compile.cache_dir is not None:
        env.compile_cache(config.compile.cache_dir / "peer")
    args.out.write_text(json.dumps(run(config, args.recipe, args.attention, args.limit, args.export)))


if __name__ == "__main__":
    main()
