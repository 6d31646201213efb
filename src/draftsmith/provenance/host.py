"""The machine, the Python, the process and its environment, and the native libraries that are really mapped."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.provenance.digests import sha256_cached
from draftsmith.provenance.facts import attempt, unknown

PREFIXES = (
    "BLIS_", "CC", "CPATH", "CUBLAS", "CUDA", "CUDNN", "CXX", "DEEPSPEED_", "DRAFTSMITH_", "FLASH", "GGML_", "GLOO_",
    "GOMP_", "HF_", "HOME", "HTTP_PROXY", "HTTPS_PROXY", "HUGGING", "KMP_", "LANG", "LC_", "LD_", "LOCAL_", "LOGNAME",
    "MALLOC_", "MASTER_", "MKL_", "MODELSCOPE_", "NCCL_", "NUMEXPR_", "NVIDIA_", "NVSHMEM_", "OMP_", "OMPI_",
    "OPENAI_", "OPENBLAS_", "PIP_", "PYTHON", "PYTORCH_", "RANK", "SGLANG_", "SGL_", "SLURM_", "TEMP", "TF32_",
    "TMP", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON", "TZ", "UCX_", "USER", "VIRTUAL_ENV", "VLLM_", "WANDB_",
    "WORLD_", "XDG_CACHE_HOME", "XFORMERS_",
)  # fmt: skip
"""Environment variables whose names begin so are recorded."""

LIBRARIES = re.compile(
    r"(libcu(da|dnn|blas|fft|rand|solver|sparse|pti)|libnv|libnccl|libtorch|libc10|libtriton|libgomp|libomp|libiomp5"
    r"|libmkl|libopenblas|libblas|flash_attn|_C\.|libstdc\+\+|libc\.so)"
)
"""How the file names of native libraries begin that decide numbers or speed."""


def read_host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "glibc": " ".join(platform.libc_ver()),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cgroup": read_cgroup(),
    }


def read_python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "build": " ".join((platform.python_implementation(), platform.python_compiler())),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "path": list(sys.path),
        "optimize": sys.flags.optimize,
    }


def read_process(argv: list[str]) -> dict[str, Any]:
    """Who this process is; `identity` is what tells it from a later process with the same pid."""
    return {**identity(), "command": argv, "folder": os.getcwd(), "uid": os.getuid()}


def identity() -> dict[str, Any]:
    """pid, when it started (in clock ticks since boot), boot id, pid namespace, host."""
    return {
        "pid": os.getpid(),
        "started_ticks": start_ticks(os.getpid()),
        "boot_id": boot_id(),
        "pid_namespace": attempt(os.readlink, "/proc/self/ns/pid"),
        "host": platform.node(),
    }


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])


def process_began() -> float:
    """When this process started, in seconds since 1970."""
    lines = Path("/proc/stat").read_text().splitlines()
    booted = next((int(line.split()[1]) for line in lines if line.startswith("btime ")), 0)
    return booted + (start_ticks(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def read_environment() -> dict[str, Any]:
    """{"at_exec": {...}, "now": {...}}: what the process was started with, before any import, and what has changed
    since (None: removed).  The kernel keeps the first in /proc/self/environ."""
    now = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES)}
    try:
        raw = Path("/proc/self/environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        return {"at_exec": unknown(str(error)), "now": now}
    pairs = (entry.partition("=") for entry in raw.split("\0") if "=" in entry)
    at_exec = {k: v for k, _, v in pairs if k.startswith(PREFIXES)}
    changed = {k: now.get(k) for k in sorted(at_exec.keys() | now.keys()) if at_exec.get(k) != now.get(k)}
    return {"at_exec": at_exec, "now": changed}


def read_cgroup() -> dict[str, Any]:
    """Limits of this process's control group, version 1 or 2; None: no limit."""
    out: dict[str, Any] = {"memory_bytes": None, "cpus": None}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = Path("/sys/fs/cgroup") / path.lstrip("/")
            memory, cpu = _number(base / "memory.max"), _words(base / "cpu.max")
        else:
            base = Path("/sys/fs/cgroup") / controllers / path.lstrip("/")
            memory = _number(base / "memory.limit_in_bytes") if "memory" in controllers.split(",") else None
            cpu = None
            if "cpu" in controllers.split(","):
                cpu = [*_words(base / "cpu.cfs_quota_us"), *_words(base / "cpu.cfs_period_us")]
        if memory is not None and memory < 2**60:
            out["memory_bytes"] = memory
        if cpu and len(cpu) == 2 and cpu[0].isdigit():
            out["cpus"] = int(cpu[0]) / int(cpu[1])
    return out


def read_libraries() -> dict[str, Any]:
    """{name: path, bytes, sha256} of the mapped libraries that decide numbers or speed.

    The name is the file's without version and build hash, so that a library is found again under another version.
    """
    paths: set[Path] = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path((line.split(maxsplit=5)[5:] or [""])[0])
        if ".so" in path.name and LIBRARIES.match(path.name):
            paths.add(path)
    out: dict[str, Any] = {}
    digests = sha256_cached([p for p in paths if p.is_file()], beside=False)
    for path in sorted(paths):
        replaced = path.name.endswith(" (deleted)")
        name = re.sub(r"(-[0-9a-f]{8})?\.so.*", ".so", path.name)
        key = name if name not in out else f"{name} ({path.parent.name})"
        if path in digests:
            out[key] = {"path": str(path), "bytes": path.stat().st_size, "sha256": digests[path]}
        else:
            out[key] = unknown("its file was replaced while it was mapped" if replaced else "its file is gone")
    return out


def clock() -> dict[str, Any]:
    return {"time": time.time(), "iso": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None
