"""torch as this process has it: build, effective switches, compile counters.  Read only if torch is loaded already."""

from __future__ import annotations

import re
import sys
from typing import Any

from draftsmith.provenance.facts import attempt, unknown

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def read_torch() -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return unknown("torch was not loaded in this process")
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "git": torch.version.git_version,
        "debug": torch.version.debug,
        "file": torch.__file__,
    }


def read_switches() -> Any:
    """Effective settings, whoever made them: a call, an environment variable or a default.

    inductor and dynamo through `get_config_copy()`, which unlike `codegen_config()` shows what the environment set;
    None where this process has not loaded them.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return unknown("torch was not loaded in this process")
    return {
        "torch": {name: attempt(read) for name, read in _readers(torch).items()},
        "dynamo": attempt(_config, "torch._dynamo.config"),
        "inductor": attempt(_config, "torch._inductor.config"),
    }


def read_counters() -> Any:
    """Graphs, breaks, cache hits and misses so far; empty if nothing was compiled."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    counters = utils.counters
    wanted = {
        "graphs": ("stats", "unique_graphs"),
        "cache_hits": ("inductor", "fxgraph_cache_hit"),
        "cache_misses": ("inductor", "fxgraph_cache_miss"),
        "cache_bypasses": ("inductor", "fxgraph_cache_bypass"),
    }
    out = {name: int(counters[a][b]) for name, (a, b) in wanted.items() if a in counters}
    return out | ({"graph_breaks": sum(counters["graph_break"].values())} if "graph_break" in counters else {})


def peak_gpu_bytes() -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    kept = getattr(sys.modules.get("draftsmith.cuda_graphs"), "kept_bytes", {})
    return max(torch.cuda.max_memory_allocated(i) + kept.get(i, 0) for i in range(torch.cuda.device_count()))


def _readers(torch: Any) -> dict[str, Any]:
    cuda, backends = torch.backends.cuda, torch.backends
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda_allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": lambda: backends.cudnn.allow_tf32,
        "cudnn_benchmark": lambda: backends.cudnn.benchmark,
        "cudnn_deterministic": lambda: backends.cudnn.deterministic,
        "cudnn_version": lambda: backends.cudnn.version(),
        "bf16_reduced_precision_reduction": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "sdp_flash": cuda.flash_sdp_enabled,
        "sdp_memory_efficient": cuda.mem_efficient_sdp_enabled,
        "sdp_math": cuda.math_sdp_enabled,
        "sdp_cudnn": cuda.cudnn_sdp_enabled,
        "mkldnn": lambda: backends.mkldnn.enabled,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "anomaly_detection": torch.is_anomaly_enabled,
        "grad_enabled": torch.is_grad_enabled,
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def _config(module: str) -> Any:
    loaded: Any = sys.modules.get(module)
    if loaded is None:
        return None
    return {name: _plain(value) for name, value in sorted(loaded.get_config_copy().items())}


def _plain(value: Any) -> Any:
    """As JSON; objects by their text, without the address in it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(v)) for v in value)
    return ADDRESS.sub("", repr(value))
