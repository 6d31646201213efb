"""The command line: `draftsmith STAGE CONFIG.yaml [a.b=c ...]`.

Exit codes: 0 done, 1 a fault of ours or of the run, 2 bad input (one line says what and how to mend it), 130 and 143
after SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith import __version__, env
from draftsmith.config import Config, load_config
from draftsmith.errors import InputError, Interrupted

STAGES = {
    "generate": "prompts -> conversations answered by the target itself",
    "tokenize": "conversations -> store of token ids and supervised spans",
    "train": "store -> drafter checkpoints",
    "evaluate": "drafter -> accepted length and speed-up on held-out prompts",
    "export": "drafter -> one folder that servers load",
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
    demo = commands.add_parser("demo", help="the whole flow on a small real model, with a table at the end")
    demo.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace a value of the demo's config")
    demo.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    env.prepare()
    try:
        return _run(args)
    except InputError as error:
        print(f"draftsmith {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"draftsmith {args.command}: interrupted", file=sys.stderr)
        return 130
    except Interrupted as stop:
        print(f"draftsmith {args.command}: {stop}", file=sys.stderr)
        return stop.code


def _run(args: argparse.Namespace) -> int:
    if args.command == "demo":
        from draftsmith import demo

        config = demo.demo_config(env.demo_size(), args.overrides)
    else:
        config = load_config(args.config, args.overrides)
    if args.dry_run:
        print(config.dump())
        return 0
    _stage(args, config)
    return 0


def _stage(args: argparse.Namespace, config: Config) -> None:
    """One stage; each starts from the files of the one before.  torch is imported here, not earlier."""
    if args.command == "generate":
        from draftsmith.data.generate import generate

        print(f"{config.conversations}: {json.dumps(generate(config))}")
    elif args.command == "tokenize":
        from draftsmith.data.store import describe
        from draftsmith.data.tokenize import tokenize

        print(f"{config.store}: {describe(tokenize(config))}")
    elif args.command == "train":
        from draftsmith.train.loop import train

        print(train(config, resume=args.resume, new_attempt=args.new_attempt).path)
    elif args.command == "evaluate":
        from draftsmith.evaluate.acceptance import evaluate

        evaluate(config)
    elif args.command == "export":
        from draftsmith.export import export

        print(export(config))
    elif args.command == "demo":
        from draftsmith.demo import demo

        demo(config)


if __name__ == "__main__":
    sys.exit(main())
