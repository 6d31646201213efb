"""A real vLLM (CPU build) serves a trained drafter: same answers as without it, same accepted length as our own loop.

    python benchmarks/served_vllm.py --run runs/smollm2-135m-cpu/attempt_1 [--vllm .peers/vllm/bin/python]

The run is one of `make demo`.  Starts the server twice, with the drafter and without, one after the other, asks both
the held-out prompts at temperature 0 in float32, and writes results/served_vllm.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from _common import write_result

from draftsmith.config import Config
from draftsmith.env import prepare

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def server(python: Path, model: str, drafter: Path | None, block_size: int, log: Path) -> Iterator[str]:
    """A vLLM server on a free port; its URL.  Stopped, with its children, at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        "--model", model, "--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4",
        "--max-num-batched-tokens", "1024",
    ]  # fmt: skip
    if drafter is not None:
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": block_size - 1}
        flags += ["--speculative-config", json.dumps(speculative)]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 300
            while True:
                if process.poll() is not None:
                    raise RuntimeError(f"vLLM ended with {process.returncode}, see {log}")
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM did not come up in 300 s, see {log}")
                time.sleep(1)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="an attempt's folder with data/ and export/")
    parser.add_argument("--vllm", type=Path, default=Path(".peers/vllm/bin/python"))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    prepare()
    from draftsmith.data.store import Store
    from draftsmith.evaluate.acceptance import heldout_prompts
    from draftsmith.evaluate.server import ask_vllm, evaluate_server, server_facts

    drafter = (args.run / "export").resolve()
    values = json.loads((args.run / "config.json").read_text())
    values["data_dir"] = str(args.run / "data")
    values["runs_dir"] = str(args.run.parent.parent)
    values["evaluate"] |= {"drafter": str(drafter), "max_new_tokens": args.max_new_tokens, "temperature": 0.0}
    config = Config.model_validate(values)
    model = str(Path(config.target.model).resolve())
    block = config.drafter.block_size
    prompts = heldout_prompts(Store(config.store), config.evaluate.prompts)
    with (
        server(args.vllm, model, None, block, args.run / "vllm-plain.log") as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        plain = ask_vllm(client, server_facts(client), prompts, args.max_new_tokens, 0.0)
    with server(args.vllm, model, drafter, block, args.run / "vllm-dflash.log") as url:
        result = evaluate_server(config, url)
    text_equal = result["answers"] == plain.tokens
    write_result(
        "served_vllm",
        {
            "accepted_length_vllm": result["accepted_length_server"],
            "accepted_length_ours": result["accepted_length_ours"],
            "text_equal": text_equal,
            "text_equal_ours": result["text_equal"],
            "prompts": result["prompts"],
            "tokens": result["tokens"],
            "rounds": result["rounds"],
            "vllm": result["server"]["version"],
        },
    )
    print(
        json.dumps(
            {k: result[k] for k in ("accepted_length_server", "accepted_length_ours")} | {"text_equal": text_equal}
        )
    )


if __name__ == "__main__":
    main()
