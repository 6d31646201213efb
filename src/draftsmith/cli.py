"""The command line: `draftsmith STAGE CONFIG.yaml [a.b=c ...]`.

Exit codes: 0 done, 1 a fault of ours or of the run, 2 bad input (one line says what and how to mend it), 3 stopped by
the throughput floor, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from draftsmith import __version__, env
from draftsmith.errors import NOT_FINITE, FallbackError, InputError, Interrupted, PeerError, RunError, SaidElsewhere

if TYPE_CHECKING:  # `runs` works where pydantic does not
    from draftsmith.config import Config

STAGES = {
    "generate": "prompts -> conversations answered by the target itself",
    "tokenize": "conversations -> store of token ids and supervised spans",
    "train": "store -> drafter checkpoints",
    "evaluate": "drafter -> accepted length and speed-up on held-out prompts",
    "export": "drafter -> one folder that servers load",
}


DATA = {
    "show": "one sample, its supervised tokens marked",
    "stats": "counts, lengths, supervised share, what was left out and why",
    "verify": "whether every byte is as it was written",
    "append": "add what is new, as the next generation; the shards there are stay as they are",
}


GATES = {
    "overfit": "one conversation by heart: full rounds of the serving loop must then accept whole blocks",
    "parity": "the exported drafter in the official package: same hidden states, logits, answers, accepted lengths",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="draftsmith", description="Trains DFlash drafters.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in STAGES.items():
        stage = commands.add_parser(name, help=what, description=what)
        stage.add_argument("config", type=Path, help="a YAML file, see examples/")
        stage.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the config")
        stage.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
        if name == "train":
            stage.add_argument("--resume", metavar="auto|FOLDER", help="go on from a checkpoint, in a new attempt")
            stage.add_argument("--new-attempt", action="store_true", help="start again beside the attempts there are")
        if name == "evaluate":
            stage.add_argument("--server", metavar="URL", help="measure a running vLLM or SGLang beside our own loop")
            stage.add_argument("--no-reference", action="store_true", help="with --server: do not run our own loop")
    data = commands.add_parser("data", help="look at a store, check it, add to it: " + " | ".join(DATA))
    kinds = data.add_subparsers(dest="data", required=True, metavar="WHAT")
    for name, what in DATA.items():
        kind = kinds.add_parser(name, help=what, description=what)
        kind.add_argument("config", type=Path, help="a YAML file, see examples/")
        kind.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the config")
        kind.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
        if name == "show":
            kind.add_argument("--sample", type=int, metavar="N", help="number of the document (default 0)")
            kind.add_argument("--id", help="or its id")
            kind.add_argument("--tokens", action="store_true", help="one token a line")
        elif name == "stats":
            kind.add_argument("--plot", type=Path, metavar="PNG", help="default: lengths.png beside the store")
        elif name == "append":
            kind.add_argument("--from", type=Path, action="append", dest="sources", metavar="FILE",
                              help="conversations to add, more than once if wanted; default: the config's")  # fmt: skip
    gate = commands.add_parser("gate", help="checks that catch what a loss curve hides")
    gates = gate.add_subparsers(dest="gate", required=True, metavar="GATE")
    for name, what in GATES.items():
        one = gates.add_parser(name, help=what, description=what)
        one.add_argument("config", type=Path, help="a YAML file, see examples/")
        one.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the config")
        one.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
        if name == "overfit":
            one.add_argument("--steps", type=int, default=400, help="at most so many steps (default 400)")
            one.add_argument("--answer-tokens", type=int, default=64, help="length of the answer (default 64)")
        else:
            one.add_argument("--max-new-tokens", type=int, default=48, help="length of the answers (default 48)")
            one.add_argument("--official-python", type=Path, default=Path(".peers/official/bin/python"),
                             help="python of an environment with dflash==0.1.0 (make peers)")  # fmt: skip
    plan = commands.add_parser("plan", help="memory and rows/s of every placement, before it is allocated")
    plan.add_argument("config", type=Path, help="a YAML file, see examples/")
    plan.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the config")
    plan.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--gpus", type=int, metavar="N", help="plan for N processes, a GPU each, whatever the config has")
    plan.add_argument("--gpu", metavar="CARD", help="for GPUs that need not be here, such as h200")
    demo = commands.add_parser("demo", help="the whole flow on a small real model, with a table at the end")
    demo.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the demo's config")
    demo.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    bench = commands.add_parser("bench", help="how fast this machine trains, part by part, against its own ceilings")
    bench.add_argument("overrides", nargs="*", metavar="a.b=c", help="a value of the config, such as loss.chunk_rows")
    bench.add_argument("--geometry", default="qwen3-8b", help="qwen3-4b, qwen3-8b (default), dense-27b or tiny")
    bench.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    for name, value in (("row-tokens", 3072), ("anchors", 512), ("block-size", 16), ("layers", 5), ("documents", 1),
                        ("rows-per-step", 1)):  # fmt: skip
        bench.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default {value}")
    bench.add_argument(
        "--steps", type=int, metavar="N", help="training steps as in a run, of any placement (default 10)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="the figures with their environment")
    commands.add_parser("report", help="one HTML file about a run, or two side by side", add_help=False)
    commands.add_parser("runs", help="what changed? list | show | diff | check | good | restore", add_help=False)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["runs"]:
        from draftsmith.provenance import runs

        return runs.main(given[1:])
    if given[:1] == ["report"]:
        from draftsmith import report

        return report.main(given[1:])
    top = parser()
    args, rest = top.parse_known_args(given)
    for override in rest:  # before Python 3.13 argparse does not take them behind an option
        if override.startswith("-") or "=" not in override:
            top.error(f"unrecognized arguments: {override}")
        args.overrides.append(override)
    try:
        env.prepare()
        return _run(args)
    except SaidElsewhere:
        return 2
    except InputError as error:
        print(f"draftsmith {args.command}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except PeerError:
        return 1
    except (RunError, FallbackError) as error:
        print(f"draftsmith {args.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"draftsmith {args.command}: {error.strerror}{where}: free space, then go on", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        if env.local_rank()[0] == 0:  # raised alike on all drafters
            print(f"draftsmith {args.command}: {error}", file=sys.stderr)
        return NOT_FINITE
    except KeyboardInterrupt:
        print(f"draftsmith {args.command}: interrupted", file=sys.stderr)
        return 130
    except Interrupted as stop:
        print(f"draftsmith {args.command}: {stop}", file=sys.stderr)
        return stop.code


def _run(args: argparse.Namespace) -> int:
    if args.command == "bench":
        return _bench(args)
    if args.command == "demo":
        from draftsmith import demo

        config = demo.demo_config(env.demo_size(), args.overrides)
    else:
        from draftsmith.config import load_config

        config = load_config(args.config, args.overrides)
    if args.dry_run:
        print(config.dump())
        return 0
    if args.command == "gate":
        return _gate(args, config)
    if args.command == "data":
        from draftsmith.data.show import data

        data(config, args.data, vars(args))
        return 0
    if args.command == "train":
        return _train(args, config)
    _stage(args, config)
    return 0


def _train(args: argparse.Namespace, config: Config) -> int:
    """Train in this process, or start the processes that the placement asks for (unless torchrun has)."""
    if config.placement.processes > 1 and not env.launched():
        from draftsmith.launch import launch

        arguments = [str(args.config), *args.overrides]
        arguments += ["--resume", args.resume] if args.resume else []
        arguments += ["--new-attempt"] if args.new_attempt else []
        return launch(arguments, config.placement, _gpus(config), run=(config.runs_dir, config.name))
    from draftsmith.train.loop import train

    run = train(config, resume=args.resume, new_attempt=args.new_attempt)
    if env.world()[0] == 0:
        print(run.path)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from draftsmith.bench import Bench, render
    from draftsmith.geometry import Shape

    if args.steps is not None and args.steps < 1:
        raise InputError(f"--steps {args.steps}: at least one step is timed")
    shape = Shape(args.row_tokens, args.anchors, args.block_size, args.layers, documents=args.documents)
    bench = Bench(args.geometry, shape, args.device, rows_per_step=args.rows_per_step, fields=args.overrides)
    placement = bench.config.placement
    if placement.processes == 1:
        found = bench.run() if args.steps is None else bench.run_together(args.steps)
    elif not env.launched():
        from draftsmith.launch import launch

        return launch(sys.argv[2:], placement, _gpus(bench.config), command="bench")
    else:
        from draftsmith.train.dist import world as join

        with join(placement, bench.device.type) as world:
            bench.world = world
            found = bench.run_together(args.steps or 10)
    if not found:
        return 0
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(render(found) if "share_of_floor" in found else json.dumps(found))
    return 0


def _gpus(config: Config) -> int:
    """GPUs that the processes of this machine share out among them."""
    if config.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _gate(args: argparse.Namespace, config: Config) -> int:
    """Run a gate; its last line is one JSON object; exit 1 if it did not pass."""
    from draftsmith import gate

    if args.gate == "overfit":
        result = gate.overfit(config, answer_tokens=args.answer_tokens, steps=args.steps)
    else:
        result = gate.parity(config, args.official_python, max_new_tokens=args.max_new_tokens)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


def _stage(args: argparse.Namespace, config: Config) -> None:
    """One stage; each starts from the files of the one before.  torch is imported here, not earlier."""
    if args.command == "generate":
        from draftsmith.data.generate import generate

        print(f"{config.conversations}: {json.dumps(generate(config))}")
    elif args.command == "tokenize":
        from draftsmith.data.store import describe
        from draftsmith.data.tokenize import tokenize

        print(f"{config.store}: {describe(tokenize(config))}")
    elif args.command == "evaluate":
        if args.server:
            from draftsmith.evaluate.server import evaluate_server

            evaluate_server(config, args.server, reference=not args.no_reference)
        else:
            from draftsmith.evaluate.acceptance import evaluate

            evaluate(config)
    elif args.command == "export":
        from draftsmith.export import export

        print(export(config))
    elif args.command == "plan":
        from draftsmith.plan import as_json, does_not_fit, plan, render

        planned = plan(config, args.gpus, args.gpu)
        print(json.dumps(as_json(planned, config), indent=2) if args.json else render(planned, config))
        if line := does_not_fit(planned, config):
            raise InputError(line)
    elif args.command == "demo":
        from draftsmith.demo import demo

        demo(config)


def end(code: int) -> NoReturn:
    """End this process.  One of several that failed ends at once: threads that wait for a peer that is gone cannot be
    ended otherwise."""
    if code and env.launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    end(main())
