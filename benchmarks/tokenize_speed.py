"""Speed of the tokenize stage beside the bare tokenizer on the same text, and beside a peer's parser.

    make .peers/specforge/installed
    python benchmarks/tokenize_speed.py --model MODEL --conversations FILE.jsonl --peer .peers/specforge

Measured, each `--repeats` times in turn, the same number of processes for all; a measurement during which others used
more than `--others` of the CPUs is made again, as long as `--patience` lasts; medians taken, of the shares too:
  ours     the whole stage: reading, parsing, duplicates, rendering, encoding, spans, writing, hashing, syncing; of
           what the whole file has more than a short piece of it, so that starting processes is left out
  bare     `encode_batch` of the rendered texts and nothing else: in one process with as many threads, and in as many
           single-threaded processes; the faster of the two counts
  peer     SpecForge's GeneralParser (rendering, ids, loss mask) on every n-th of the same conversations, in as many
           processes; it is told to cut at the same length
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import write_result
from tokenizers import Tokenizer

from draftsmith.config import Config, parse_config
from draftsmith.data.documents import Worker
from draftsmith.data.messages import CHUNK_BYTES, read_chunks
from draftsmith.data.tokenize import recipe_of, tokenize
from draftsmith.target.model import load_tokenizer

PEER = "SpecForge 0.2.0 GeneralParser"
PEER_CODE = """
import importlib.util, json, sys, time, types, warnings
warnings.simplefilter("ignore")
root, model, path, longest, part, parts = *sys.argv[1:4], *map(int, sys.argv[4:])
for name in ("specforge", "specforge.data"):  # its package as such wants CUDA engines
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + "/" + name.replace(".", "/")]
from specforge.data.parse import GeneralParser
from specforge.data.template import TEMPLATE_REGISTRY
from transformers import AutoTokenizer
parser = GeneralParser(AutoTokenizer.from_pretrained(model), TEMPLATE_REGISTRY.get("qwen"))
lines = [x for i, x in enumerate(open(path, encoding="utf-8")) if i % parts == part]
begin = time.perf_counter()
tokens = 0
for line in lines:
    ids, mask = parser.parse(json.loads(line)["conversations"], longest)
    tokens += len(ids)
print(json.dumps([tokens, time.perf_counter() - begin]))
"""


def bare_threads(tokenizer: str, texts: list[str], threads: int) -> float:
    """Seconds of encode_batch in one process."""
    code = (
        "import json,sys,time; from tokenizers import Tokenizer; t=Tokenizer.from_file(sys.argv[1]);"
        "x=json.load(open(sys.argv[2])); t.encode_batch(x[:64]); b=time.perf_counter();"
        "[t.encode_batch(x[i:i+512], add_special_tokens=False) for i in range(0,len(x),512)];"
        "print(time.perf_counter()-b)"
    )
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/tokenizer.json", f"{folder}/texts.json"]
        for name, content in zip(names, (tokenizer, json.dumps(texts)), strict=True):
            Path(name).write_text(content, encoding="utf-8")
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}
        done = subprocess.run([sys.executable, "-c", code, *names], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _encode(tokenizer: str, texts: list[str], barrier, out) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Tokenizer.from_str(tokenizer)
    encoder.encode_batch(texts[:64])
    barrier.wait()
    begin = time.perf_counter()
    for i in range(0, len(texts), 512):
        encoder.encode_batch(texts[i : i + 512], add_special_tokens=False)
    out.put((begin, time.perf_counter()))


def bare_processes(tokenizer: str, texts: list[str], processes: int) -> float:
    """Seconds of encode_batch in single-threaded processes, each with its share of the texts."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=_encode, args=(tokenizer, texts[i::processes], barrier, out)) for i in range(processes)
    ]
    for process in started:
        process.start()
    times = [out.get() for _ in started]
    for process in started:
        process.join()
    return max(end for _, end in times) - min(begin for begin, _ in times)


def peer_speed(root: Path, model: str, path: Path, longest: int, processes: int) -> float:
    """Tokens a second, all processes together."""
    command = [sys.executable, "-c", PEER_CODE, str(root), model, str(path), str(longest)]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, str(i), str(processes)], env=env, stdout=subprocess.PIPE, text=True)
        for i in range(processes)
    ]
    done = [json.loads(process.communicate()[0]) for process in running]
    return sum(tokens for tokens, _ in done) / max(seconds for _, seconds in done)


def cpu_seconds() -> float:
    """Of this process and those it has waited for: what a busy machine does not change."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))


def busy_seconds() -> float:
    """Of all CPUs together, whoever used them (what a hypervisor took away too)."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Quiet:
    """Repeats a measurement until others leave the machine alone."""

    def __init__(self, others: float, patience: float) -> None:
        self.others, self.until = others, time.monotonic() + patience
        self.worst, self.again = 0.0, 0

    def measure(self, what: Callable[[], float]) -> tuple[float, float]:
        """(what it gives, CPU seconds used)."""
        while True:
            begin, own, busy = time.perf_counter(), cpu_seconds(), busy_seconds()
            value = what()
            used = cpu_seconds() - own
            spent = (time.perf_counter() - begin) * (os.cpu_count() or 1)
            share = max(0.0, busy_seconds() - busy - used) / spent
            if share <= self.others or time.monotonic() > self.until:
                self.worst = max(self.worst, share)
                return value, used
            self.again += 1
            print(f"others used {share:.0%} of the CPUs: measured again", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=Path, required=True, help="JSON lines in ShareGPT's shape")
    parser.add_argument("--peer", type=Path, help="folder with specforge in it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--others", type=float, default=0.05, help="share of the CPUs that others may use")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds in which measurements are made again")
    parser.add_argument("--peer-share", type=int, default=20, help="the peer gets every n-th conversation")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="tokenize-speed-"))
    text = (
        f"{{name: speed, target: {{model: {args.model}}}, train: {{row_tokens: 3072, steps: 1}}, tokenize: "
        f"{{conversations: {args.conversations}, long_prompt: drop, max_bad_lines: 1000000, workers: {args.processes}}}}}"
    )
    config = parse_config(text, "benchmark", [f"data_dir={work}/0"])
    recipe = recipe_of(config, load_tokenizer(config.target))
    texts: list[str] = []
    worker = Worker(recipe)
    encode = worker.encoder.encode

    def listening(some: list[str], spans: list):
        """The worker's encoder, noting down the texts of whole chunks."""
        texts.extend(some if len(some) > 1 else ())
        return encode(some, spans)

    worker.encoder.encode = listening  # type: ignore[method-assign]
    plain = worker.tokenizer.encode_batch

    def count(path: Path) -> int:
        """Tokens of what a file holds, its texts noted down."""
        texts.clear()
        for chunk in read_chunks(path, "conversations"):
            worker.chunk(chunk)
        parts = (texts[i : i + 512] for i in range(0, len(texts), 512))
        return sum(len(e) for part in parts for e in plain(part, add_special_tokens=False))

    tokens = count(args.conversations)
    whole_texts = list(texts)
    print(f"{len(texts)} texts, {tokens} tokens", flush=True)
    few = work / "few.jsonl"
    usable = (x for x in args.conversations.open(encoding="utf-8") if json.loads(x).get("conversations"))
    chosen = (x for i, x in enumerate(usable) if i % args.peer_share == 0)
    first = ("human", "user", "system")
    few.write_text("".join(x for x in chosen if json.loads(x)["conversations"][0]["from"] in first), encoding="utf-8")
    short = work / "short.jsonl"  # enough of it that every process gets a piece
    with args.conversations.open("rb") as handle:
        short.write_bytes(b"".join(handle.readlines(args.processes * CHUNK_BYTES)))
    first = config.model_copy(update={"tokenize": config.tokenize.model_copy(update={"conversations": short})})
    short_tokens = count(short)
    more = tokens - short_tokens
    quiet, wholes = Quiet(args.others, args.patience), []
    speeds: dict[str, list[float]] = {"ours": [], "threads": [], "processes": [], "peer": []}
    cpu: dict[str, list[float]] = {name: [] for name in speeds}
    folders = (work / str(n) for n in itertools.count())

    def stage(config: Config) -> float:
        begin = time.perf_counter()
        tokenize(config.model_copy(update={"data_dir": next(folders)}))
        return time.perf_counter() - begin

    for _ in range(args.repeats):
        (whole, whole_cpu), (brief, brief_cpu) = (quiet.measure(lambda c=c: stage(c)) for c in (config, first))
        wholes.append((whole, brief))
        speeds["ours"].append(more / (whole - brief))
        cpu["ours"].append((whole_cpu - brief_cpu) * tokens / more)
        for name, bare in (("threads", bare_threads), ("processes", bare_processes)):
            seconds, used = quiet.measure(lambda bare=bare: bare(recipe.tokenizer, whole_texts, args.processes))
            speeds[name].append(tokens / seconds)
            cpu[name].append(used)
        if args.peer:
            speed, used = quiet.measure(lambda: peer_speed(args.peer, args.model, few, 3072, args.processes))
            speeds["peer"].append(speed)
            cpu["peer"].append(used)
        print({name: round(x[-1]) for name, x in speeds.items() if x}, flush=True)
    median = {name: statistics.median(x) for name, x in speeds.items() if x}

    def share(*names: str) -> float:
        """Of the bare tokenizer: the median over the rounds, in each of which the faster of the named counts."""
        rounds = zip(speeds["ours"], *(speeds[n] for n in names), strict=True)
        return round(statistics.median(own / max(bare) for own, *bare in rounds), 3)

    values = {
        "tokens_per_s": round(median["ours"]),
        "share_of_bare_tokenizer": share("threads", "processes"),
        "vs_peer": round(median["ours"] / median["peer"], 1) if args.peer else None,
        "peer": PEER if args.peer else None,
        "share_of_encode_batch_threads": share("threads"),
        "share_of_encode_batch_processes": share("processes"),
        "bare_tokens_per_s": {n: round(median[n]) for n in ("threads", "processes")},
        "peer_tokens_per_s": round(median["peer"]) if args.peer else None,
        "each": {name: [round(x) for x in each] for name, each in speeds.items()},
        "share_by_cpu_time": round(
            min(statistics.median(cpu[n]) for n in ("threads", "processes")) / statistics.median(cpu["ours"]), 3
        ),
        "cpu_seconds": {name: round(statistics.median(x), 1) for name, x in cpu.items() if x},
        "short_file": {"tokens": short_tokens, "seconds": round(statistics.median(b for _, b in wholes), 1)},
        "tokens_per_s_with_startup": round(statistics.median(tokens / w for w, _ in wholes)),
        "others_share_of_cpus": {"at_worst": round(quiet.worst, 3), "measured_again": quiet.again},
        "processes": args.processes,
        "conversations": len(whole_texts),
        "tokens": tokens,
        "text": args.conversations.name,
    }
    print(write_result("tokenize_speed", values))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
