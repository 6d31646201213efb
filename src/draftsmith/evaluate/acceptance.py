"""Accepted length and speed-up of a drafter on held-out prompts, against plain decoding by the same target.

Three averages are in use; all three are given by name, since they differ on the same rounds:
    mean_of_answers   mean over answers of the answer's mean tokens a round        (the DFlash paper's package)
    per_request       mean over answers of completion tokens / verifications       (SGLang; counts the prefill token)
    pooled            1 + accepted drafts / rounds, over all rounds of all answers (vLLM's counters)
and `full_rounds`, the mean over rounds that neither a stop token nor the length limit cut short: gates use that one.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.config import Config, EvaluateConfig
from draftsmith.data.answers import Talk
from draftsmith.data.engine import prompt_ids
from draftsmith.data.messages import iter_prompts
from draftsmith.data.store import Document, Store
from draftsmith.drafter.attention import any_shape
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.evaluate.graphed import GraphedLoop, unsupported
from draftsmith.evaluate.replay import greedy_answers, replay
from draftsmith.evaluate.speculate import Sampler, decode_plain, decode_speculative
from draftsmith.export import load_drafter
from draftsmith.files import make_folder, write_text
from draftsmith.progress import Progress
from draftsmith.records import Answer, GreedyAnswer
from draftsmith.rundir import RunDir
from draftsmith.target.model import Target, drafter_spec, load_target
from draftsmith.train.checkpoint import default_checkpoint, newest_checkpoint, newest_or


@dataclass(frozen=True)
class Measured:
    """One drafter on one set of prompts.  Written by `measure`; read by reports and the demo."""

    label: str
    result: dict[str, Any]


def average_lengths(answers: Sequence[Answer]) -> dict[str, float | None]:
    """The four averages of the module's docstring; None where no answer had a (full) round."""
    drafted = [a for a in answers if a.rounds]
    full = [r for a in drafted for r in a.full_rounds()]
    if not drafted:
        return dict.fromkeys(("mean_of_answers", "per_request", "pooled", "full_rounds"))
    rounds = sum(len(a.rounds) for a in drafted)
    return {
        "mean_of_answers": _mean([sum(a.rounds) / len(a.rounds) for a in drafted]),
        "per_request": _mean([len(a.tokens) / len(a.rounds) for a in drafted]),
        "pooled": 1 + sum(sum(a.accepted) for a in drafted) / rounds,
        "full_rounds": _mean(full) if full else None,
    }


def acceptance_by_slot(answers: Sequence[Answer]) -> list[float | None]:
    """For slots 1..B-1: share of the rounds that drafted the slot in which it was accepted."""
    offered = [sum(x) for x in zip(*(a.slot_offered for a in answers), strict=True)]
    agreed = [sum(x) for x in zip(*(a.slot_accepted for a in answers), strict=True)]
    return [a / o if o else None for a, o in zip(agreed, offered, strict=True)]


def spread(answers: Sequence[Answer], draws: int = 1000) -> float | None:
    """Standard deviation of `pooled` when as many answers are drawn anew, with replacement; None without a round."""
    drafted = [a for a in answers if a.rounds]
    if not drafted:
        return None
    accepted, rounds = np.array([sum(a.accepted) for a in drafted]), np.array([len(a.rounds) for a in drafted])
    chosen = np.random.default_rng(0).integers(0, len(drafted), (draws, len(drafted)))
    return float((accepted[chosen].sum(1) / rounds[chosen].sum(1)).std())


def evaluation_prompts(config: Config, store: Store, tokenizer: Any, count: int) -> list[Document]:
    """`count` prompts of `evaluate.heldout`, or of the store's held-out documents, in turn from each category.  Raises
    InputError if the store trains on one of them."""
    if config.evaluate.heldout is None:
        return heldout_prompts(store, count)
    documents, settings = [], config.generate
    for prompt in iter_prompts(
        config.evaluate.heldout, multi_turn=settings.multi_turn, max_bad_lines=settings.max_bad_lines,
        key="evaluate.heldout",
    ):  # fmt: skip
        # of several turns the first, as of the store's documents: what stands for later answers is not the target's
        ids = np.array(prompt_ids(tokenizer, prompt, Talk(prompt, "keep").messages, config), dtype=np.int32)
        documents.append(Document(ids, ((len(ids), len(ids)),), prompt.id, prompt.category, heldout=True))
    chosen = in_turn(documents, count)
    asked = {d.prompt().tobytes(): d.id for d in chosen}
    for number in np.flatnonzero(~store.heldout):
        if (known := asked.get(store.document(int(number)).prompt().tobytes())) is not None:
            raise InputError(
                f"evaluate.heldout: {store.path} trains on {known} of {config.evaluate.heldout}: leave it out of one"
            )
    return chosen


def heldout_prompts(store: Store, count: int) -> list[Document]:
    """The first `count` held-out documents, taken in turn from each category.  Raises InputError if there are none."""
    documents = [store.document(int(n)) for n in np.flatnonzero(store.heldout)]
    if not documents:
        raise InputError(f"{store.path} has no held-out documents to evaluate on: raise tokenize.heldout_fraction")
    return in_turn(documents, count)


def in_turn(documents: Sequence[Document], count: int) -> list[Document]:
    """The first of each category, then the second of each, and so on, `count` in all."""
    by_category: dict[str, list[Document]] = {}
    for document in documents:
        by_category.setdefault(document.category, []).append(document)
    chosen: list[Document] = []
    depth = 0
    while len(chosen) < count and any(len(d) > depth for d in by_category.values()):
        chosen += [d[depth] for d in by_category.values() if len(d) > depth][: count - len(chosen)]
        depth += 1
    return chosen


def plain_answers(
    target: Target,
    prompts: Sequence[Document],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    loop: GraphedLoop | None = None,
) -> list[Answer]:
    """The target alone, one token a pass: the reference for both the tokens and the time."""
    answers = []
    with any_shape(target.device), Progress("plain decoding", len(prompts), "prompts") as progress:
        for i, document in enumerate(prompts):
            ids = _ids(document, target)
            sampler = Sampler(temperature, generator=_generator(target, seed + i))
            answers.append(
                loop.decode_plain(ids, seed + i) if loop else decode_plain(target, ids, max_new_tokens, sampler)
            )
            progress.advance()
    return answers


def measure(
    label: str,
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Document],
    plain: Sequence[Answer] | None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    rule: str = "match",
    seed: int = 0,
    loop: GraphedLoop | None = None,
) -> Measured:
    """Run the serving loop on every prompt.  With `plain`, also compare tokens (temperature 0) and time.

    loop: made for the same drafter and settings; it then decodes.
    """
    answers = []
    with any_shape(target.device), Progress(f"speculative decoding ({label})", len(prompts), "prompts") as progress:
        for i, document in enumerate(prompts):
            ids = _ids(document, target)
            sampler = Sampler(temperature, rule, _generator(target, seed + i))
            answers.append(
                loop.decode_speculative(ids, seed + i)
                if loop
                else decode_speculative(target, drafter, ids, max_new_tokens, sampler)
            )
            progress.advance(note=f"accepted length {average_lengths(answers)['pooled'] or 0:.2f}")
    result: dict[str, Any] = {
        "drafter": label,
        "method": "serving loop" + (", fixed shapes" if loop else ""),
        "temperature": temperature,
        "rule": "greedy" if temperature == 0 else rule,
        "dtype": str(target.dtype).removeprefix("torch."),
        **summary(answers, [d.category for d in prompts], drafter.spec.block_size),
    }
    if plain is not None:
        tokens, seconds = sum(len(p.tokens) for p in plain), sum(p.seconds for p in plain)
        taken = sum(a.seconds for a in answers)
        # rates: with random numbers, and where two best tokens tie, the two texts are of different lengths
        result["passes_speedup"] = result["tokens"] / sum(1 + len(a.rounds) for a in answers)
        result["wall_speedup"] = result["tokens"] / taken / (tokens / seconds)
        result["plain_tokens"], result["seconds"] = tokens, {"plain": seconds, "speculative": taken}
        if temperature > 0:  # other random numbers, other tokens
            result["lossless"] = None
        else:
            result["differing"] = [
                d.id for a, p, d in zip(answers, plain, prompts, strict=True) if a.tokens != p.tokens
            ]
            result["lossless"] = not result["differing"]
            result["parted"] = [
                {"id": d.id, **parting(target, _ids(d, target), p.tokens, a.tokens)}
                for a, p, d in zip(answers, plain, prompts, strict=True)
                if a.tokens != p.tokens
            ]
    return Measured(label, result)


@torch.inference_mode()
def parting(target: Target, prompt: Tensor, one: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
    """Where two greedy answers part.  gap: between the logits of the two tokens there, computed once more in the
    target's dtype; step: between neighbouring numbers of that dtype at that size.  A near tie is a gap of few steps."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if at >= min(len(one), len(other)):
        return {"at": at, "gap": None, "step": None}
    line = torch.cat([prompt, torch.tensor(one[:at], dtype=prompt.dtype, device=prompt.device)])
    logits = target.model(input_ids=line[None], use_cache=False, logits_to_keep=1).logits[0, -1]
    a, b = float(logits[one[at]]), float(logits[other[at]])
    step = torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(a), abs(b), 1e-30)))
    return {"at": at, "gap": abs(a - b), "step": step}


def make_loop(
    settings: EvaluateConfig, target: Target, drafter: DFlashDrafter | None, prompts: Sequence[Document]
) -> GraphedLoop | None:
    """The loop of fixed shapes where it is wanted and can be.  Raises InputError where it is asked for and cannot."""
    why = unsupported(target)
    if settings.graphs and why:
        raise InputError(f"evaluate.graphs: the loop of fixed shapes cannot do this, {why}")
    if why or not (target.device.type == "cuda" if settings.graphs is None else settings.graphs):
        return None
    longest = max(len(d.prompt()) for d in prompts)
    with any_shape(target.device):
        return GraphedLoop(target, drafter, longest, settings.max_new_tokens, settings.temperature, settings.rule)


def measure_replayed(
    label: str, target: Target, drafter: DFlashDrafter, answers: Sequence[GreedyAnswer], max_new_tokens: int
) -> Measured:
    """As `measure` at temperature 0, on answers given (evaluate/replay.py)."""
    replayed = replay(target, drafter, answers, max_new_tokens)
    found = summary(replayed, [a.category for a in answers], drafter.spec.block_size)
    dtype = str(target.dtype).removeprefix("torch.")
    result = {"drafter": label, "method": "replay", "temperature": 0.0, "rule": "greedy", "dtype": dtype, **found}
    result["passes_speedup"] = found["tokens"] / (found["prompts"] + found["verifications"])
    return Measured(label, result)


def summary(answers: Sequence[Answer], categories: Sequence[str], block_size: int) -> dict[str, Any]:
    """What answers of prompts of these categories come to.  `spread` is of `pooled`, by category and of all."""
    by_category = {
        c: [a for a, other in zip(answers, categories, strict=True) if other == c] for c in sorted(set(categories))
    }
    return {
        "prompts": len(answers),
        "tokens": sum(len(a.tokens) for a in answers),
        "verifications": sum(len(a.rounds) for a in answers),
        "block_size": block_size,
        "accepted_length": average_lengths(answers),
        "acceptance_by_slot": acceptance_by_slot(answers),
        "by_category": {c: average_lengths(of) for c, of in by_category.items()},
        "spread": {"all": spread(answers), **{c: spread(of) for c, of in by_category.items()}},
        "rounds": [list(a.rounds) for a in answers],
    }


def evaluate(config: Config, target: Target | None = None, run: RunDir | None = None) -> dict[str, Any]:
    """The evaluate stage: trained drafter, optionally an untrained one, on held-out prompts; JSON and text files.

    A run is needed only if `evaluate.drafter` or `evaluate.output` is not set.
    Raises RuntimeError if greedy answers differ from plain decoding in float32: then the loop is wrong.
    """
    settings = config.evaluate
    path, folder = drafter_and_folder(config, run)
    assert path is not None
    store = Store(config.store)
    target = target or load_target(config.target, config.device)
    prompts = evaluation_prompts(config, store, target.tokenizer, settings.prompts)
    drafter = load_drafter(path, target)
    make_folder(folder)  # before the work, not after it
    drafters = [("trained", drafter)]
    if settings.untrained:
        fresh = DFlashDrafter(drafter_spec(config.drafter, target)).initialize(config.train.seed)
        drafters.append(("untrained", fresh.to(target.device, target.dtype).eval()))
    if settings.replay:
        texts = greedy_answers(config, target, prompts)
        measured = [measure_replayed(label, target, d, texts, settings.max_new_tokens) for label, d in drafters]
    else:
        plain = plain_answers(
            target, prompts, settings.max_new_tokens, settings.temperature, settings.seed,
            make_loop(settings, target, None, prompts),
        )  # fmt: skip
        measured = [
            measure(
                label, target, d, prompts, plain, max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature, rule=settings.rule, seed=settings.seed,
                loop=make_loop(settings, target, d, prompts),
            )
            for label, d in drafters
        ]  # fmt: skip
    out = {"evaluated": str(path), "target": config.target.model, "results": [m.result for m in measured]}
    how = f"-{settings.rule}" if settings.temperature else "-replay" if settings.replay else ""
    stem = f"{path.name}-t{settings.temperature:g}{how}"
    name = unused(folder, stem)
    write_text(folder / f"{name}.json", json.dumps(out, indent=2))
    text = render(measured)
    write_text(folder / f"{name}.txt", text)
    print(text)
    print(f"written: {folder / name}.json and .txt")
    if target.dtype == torch.float32 and any(m.result.get("lossless") is False for m in measured):
        differing = sorted({i for m in measured for i in m.result["differing"]})
        raise RuntimeError(f"greedy speculative decoding differs from plain decoding in float32 on {differing}")
    return out


def drafter_and_folder(config: Config, run: RunDir | None = None, *, drafter: bool = True) -> tuple[Path | None, Path]:
    """The drafter to measure (None if none is wanted) and the folder for results; looks for a run only if it must."""
    path, folder, place = config.evaluate.drafter, config.evaluate.output, (config.runs_dir, config.name)
    if drafter and path is None:
        run, path = (run, newest_checkpoint(run)) if run else default_checkpoint(*place, "evaluate.drafter")
    if folder is None:
        folder = (run or newest_or(*place, "evaluate.output")).evaluation
    return path if drafter else None, folder


def render(measured: Sequence[Measured]) -> str:
    """The table, as text."""
    table = Table(title=f"accepted length, {measured[0].result['rule']}, {measured[0].result['prompts']} prompts")
    table.add_column("")
    for m in measured:
        table.add_column(m.label, justify="right")

    def row(name: str, values: Sequence[Any], form: str = ".3f") -> None:
        table.add_row(name, *("-" if v is None else v if isinstance(v, str) else format(v, form) for v in values))

    results = [m.result for m in measured]
    for key in results[0]["accepted_length"]:
        row(key, [r["accepted_length"][key] for r in results])
    for category in results[0]["by_category"]:
        row(f"  {category} (pooled)", [r["by_category"][category]["pooled"] for r in results])
    row("pooled, +- (prompts drawn anew)", [r["spread"]["all"] for r in results])
    for slot in range(len(results[0]["acceptance_by_slot"])):
        row(f"  slot {slot + 1} accepted", [r["acceptance_by_slot"][slot] for r in results])
    if "passes_speedup" in results[0]:
        row("speed-up, target passes", [r["passes_speedup"] for r in results], ".2f")
    if "wall_speedup" in results[0]:
        row("speed-up, wall time", [r["wall_speedup"] for r in results], ".2f")
        row("lossless", [{True: "yes", False: "NO", None: "by rule"}[r["lossless"]] for r in results])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def _ids(document: Document, target: Target) -> torch.Tensor:
    return torch.from_numpy(document.prompt().astype("int64")).to(target.device)


def _generator(target: Target, seed: int) -> torch.Generator:
    return torch.Generator(device=target.device).manual_seed(seed)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def unused(folder: Path, stem: str) -> str:
    """`stem`, or stem-2, -3 ...: a result is never written over."""
    number = 1
    while (folder / f"{stem}{'' if number == 1 else f'-{number}'}.json").exists():
        number += 1
    return stem if number == 1 else f"{stem}-{number}"
