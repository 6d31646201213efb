"""Both gates on the demo's real target: results/gate_overfit.json and results/gate_parity.json.

    python benchmarks/gates.py [--run runs/demo/attempt_1] [--official-python .peers/official/bin/python]

parity takes the run's newest checkpoint: a drafter that accepts some drafts and rejects others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from _common import write_result

from draftsmith import gate
from draftsmith.config import Config
from draftsmith.env import prepare
from draftsmith.rundir import RunDir
from draftsmith.target.model import load_target
from draftsmith.train.checkpoint import newest_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo/attempt_1"))
    parser.add_argument("--official-python", type=Path, default=Path(".peers/official/bin/python"))
    args = parser.parse_args()
    prepare()
    values = json.loads((args.run / "config.json").read_text())
    values["evaluate"]["drafter"] = str(newest_checkpoint(RunDir(args.run)))
    config = Config.model_validate(values)
    target = load_target(config.target, config.device)
    print(json.dumps(parity := gate.parity(config, args.official_python, target=target)), flush=True)
    print(json.dumps(overfit := gate.overfit(config, target=target)), flush=True)
    write_result("gate_parity", parity)
    write_result("gate_overfit", overfit)


if __name__ == "__main__":
    main()
