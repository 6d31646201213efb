"""Growing a store from 902,000 to 1,100,000 conversations: what it costs, and that nothing old changes.

    python benchmarks/store_growth.py --model MODEL [--lengths STORE ...] [--before N --after N]

Synthetic conversations (two turns of frequent words, 200 tokens and more on average) go through the command line:
`draftsmith tokenize` of the first 902,000, `draftsmith data append` of the grown file, a full build of the grown file
to compare with, and an append of a file of old conversations in another order, all of them duplicates.  Peak memory is
that of the process and its workers together.
--lengths: stores of real conversations, whose lengths say how full rows of real documents are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _common import write_result

from draftsmith.data.loader import plan_epoch
from draftsmith.data.store import Store, read_manifest
from draftsmith.files import sha256

WORDS = """\
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea kid body information back parent
face others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education the of and a to in is you that it he was for on are as with his they at be this have from or
one had by but not what all were we when your can said there use an each which she do how their if will up other about
out many then them these so some her would make like him into has look two more write go see no could my than first been
call who its now find long down did get come made may
"""


def conversations(count: int, seed: int):
    """Lines of conversations, each its own."""
    rng, words = random.Random(seed), WORDS.split()
    for number in range(count):
        turns = []
        for role, least, most in (("user", 12, 60), ("assistant", 60, 240)):
            turns.append({"role": role, "content": " ".join(rng.choices(words, k=rng.randint(least, most))) + "."})
        turns[0]["content"] += f" ({number})"
        yield json.dumps({"id": str(number), "messages": turns, "finish_reason": "stop"}) + "\n"


def measured(*command: str) -> tuple[float, float, str, float]:
    """(seconds, peak GiB of the process and its children together, last line, CPU seconds) of `draftsmith ...`."""
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak = [0.0]

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], memory(process.pid))
            time.sleep(0.25)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = process.communicate()[0]
    watcher.join()
    if process.returncode:
        raise SystemExit(output)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return time.perf_counter() - begin, peak[0], output.splitlines()[-1], cpu


def memory(pid: int) -> float:
    """Resident GiB of a process and all below it."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += int(memory(int(child)) * 2**30)
    except OSError:
        pass
    return total / 2**30


OPEN = """
import json, resource, sys, time, tracemalloc
from pathlib import Path
import numpy, pyarrow.ipc
from draftsmith.data.store import Store
from draftsmith.data.loader import Loader
rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
begin, before = time.perf_counter(), rss()
store = Store(Path(sys.argv[1]))
opened = time.perf_counter() - begin
loader = Loader(store, row_tokens=3072, anchors=512, block_size=16, seed=0)
begin, at = time.perf_counter(), rss()
plan = loader.plan(0)
planned = time.perf_counter() - begin
tracemalloc.start()
loader.plan(1)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
print(json.dumps({
    "documents": len(store), "mean_tokens": float(store.lengths.mean()), "open_seconds": opened,
    "open_rss_gib": at, "plan_seconds": planned, "plan_mib": peak / 2**20, "rss_gib": rss(),
    "rows": len(plan), "filled": float(loader.lengths.sum() / (len(plan) * 3072)),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--before", type=int, default=902_000)
    parser.add_argument("--after", type=int, default=1_100_000)
    parser.add_argument("--lengths", type=Path, nargs="*", default=[], help="stores of real conversations")
    parser.add_argument("--row-tokens", type=int, default=4096, help="of the rows that real documents are packed into")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="store-growth-"))
    source, grown, mixed = work / "conversations.jsonl", work / "grown.jsonl", work / "mixed.jsonl"
    some = []
    with open(source, "w") as small, open(grown, "w") as large:
        for number, line in enumerate(conversations(args.after, 0)):
            large.write(line)
            if number < args.before:
                small.write(line)
            if number % 10 == 3:
                some.append(line)
    random.Random(1).shuffle(some)
    mixed.write_text("".join(some))
    config = work / "config.yaml"
    config.write_text(f"{{name: growth, target: {{model: {args.model}}}, train: {{row_tokens: 3072, steps: 1}}}}")

    def paths(name: str) -> list[str]:
        return [f"data_dir={work}/{name}", f"tokenize.conversations={source}"]

    build = measured("tokenize", str(config), *paths("store"))
    print("build", build, flush=True)
    store = work / "store" / "store"
    old = {s.file: s.sha256 for s in read_manifest(store).shards}
    shutil.copyfile(grown, source)  # the file has grown
    append = measured("data", "append", str(config), *paths("store"))
    print("append", append, flush=True)
    identical = all(sha256(store / file) == digest for file, digest in old.items())
    first = read_manifest(store, 1).fingerprint
    full = measured("tokenize", str(config), *paths("full"))
    print("full", full, flush=True)
    again = measured("data", "append", str(config), *paths("store"), "--from", str(mixed))
    print("again", again, flush=True)
    opened = json.loads(
        subprocess.run([sys.executable, "-c", OPEN, str(store)], capture_output=True, text=True, check=True).stdout
    )
    real = [Store(path).lengths for path in args.lengths]
    packed = packing(np.concatenate(real), args.row_tokens) if real else {}
    values = {
        "samples_before": args.before,
        "samples_after": opened["documents"],
        # on a busy machine the two need not have had the same share of it: the less flattering of three ratios counts
        "append_share_of_full": round(
            max(append[0] / full[0], append[0] / (build[0] * args.after / args.before), append[3] / full[3]), 3
        ),
        "old_shards_identical": identical and Store(store, fingerprint=first).manifest.generation == 1,
        "peak_rss_gib": round(max(build[1], append[1], full[1], again[1], opened["rss_gib"]), 2),
        "open_seconds": round(opened["open_seconds"], 3),
        "plan_seconds": round(opened["plan_seconds"], 2),
        "packing_efficiency": packed.get("filled", round(opened["filled"], 4)),
        "packing": packed or None,
        "packing_efficiency_synthetic": round(opened["filled"], 4),
        "plan_mib": round(opened["plan_mib"]),
        "mean_tokens": round(opened["mean_tokens"], 1),
        "seconds": {
            "build": round(build[0], 1),
            "append": round(append[0], 1),
            "full": round(full[0], 1),
            "append_of_duplicates": round(again[0], 1),
        },
        "append_share_of_full_cpu": round(append[3] / full[3], 3),
        "cpu_seconds": {
            "build": round(build[3], 1),
            "append": round(append[3], 1),
            "full": round(full[3], 1),
            "append_of_duplicates": round(again[3], 1),
        },
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "duplicates": {"offered": len(some), "said": again[2]},
        "peak_gib": {
            "build": round(build[1], 2),
            "append": round(append[1], 2),
            "full": round(full[1], 2),
            "append_of_duplicates": round(again[1], 2),
        },
    }
    print(write_result("store_growth", values))
    shutil.rmtree(work)


def packing(lengths: np.ndarray, row_tokens: int) -> dict[str, float]:
    """Real lengths drawn again and again until there are 1.1M."""
    drawn = np.random.default_rng(0).choice(lengths, 1_100_000)
    begin = time.perf_counter()
    rows = len(plan_epoch(np.arange(len(drawn)), drawn, row_tokens, 0, 0))
    seconds = time.perf_counter() - begin
    least = max(-(-int(drawn.sum()) // row_tokens), int((drawn > row_tokens // 2).sum()))
    return {
        "row_tokens": row_tokens,
        "filled": round(float(drawn.sum() / (rows * row_tokens)), 4),
        "at_best": round(float(drawn.sum() / (least * row_tokens)), 4),
        "mean_tokens": round(float(lengths.mean()), 1),
        "plan_seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    main()
