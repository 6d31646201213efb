"""What a change can do, in the order in which changes explain a difference: numbers first, then speed.

The first rule whose pattern fits a field speaks for it, and a rule's place in the list is its rank in the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

LOSS, SPEED, NEITHER, FOLDED = "loss", "speed", "neither", "folded"

RESTORE = "draftsmith runs restore {run} NEW_FOLDER"
CACHE_VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "HOME", "TMPDIR", "TEMP", "TMP", "USER", "LOGNAME",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    pattern: str
    effect: str
    why: str
    back: str = RESTORE
    """How to put it back; {name} last part of the field, {was}, {run} the earlier run."""
    back_absent: str = ""
    """The same where there was nothing before."""
    follows: tuple[str, ...] = ()
    """Fields whose change explains this one."""


PIP = "pip install '{name}=={was}'"
UNPIP = "pip uninstall {name}"
SET = "export {name}='{was}'"
UNSET = "unset {name}"
TORCH = ("packages.torch", "packages.nvidia-*", "packages.files.torch", "environment.LD_*")
SOURCES = ("packages.*", "code.*", "config.*", "environment.*", "patches.*", "switches.*")


def _package(name: str, effect: str, why: str, follows: tuple[str, ...] = ()) -> Rule:
    return Rule(f"packages.{name}", effect, why, PIP, UNPIP, follows)


def _variable(name: str, effect: str, why: str) -> Rule:
    return Rule(f"environment.{name}", effect, why, SET, UNSET)


RULES = (
    # --- numbers: what is trained on, and against what
    Rule("target.weights", LOSS, "the features and the logits to match come from these weights",
         "put the earlier weights back, or set target.model to a folder that holds them"),
    Rule("target.config", LOSS, "layers, scales, rope: the same weights compute something else",
         "put the earlier config.json back into the target's folder"),
    Rule("target.chat_template", LOSS, "prompts are rendered as other text, to the target and to the drafter",
         "put the earlier chat template back, or tokenize anew with this one"),
    Rule("target.tokenizer", LOSS, "the same text gives other token ids",
         "put the earlier tokenizer files back, or tokenize anew with these"),
    Rule("target.tokenizer_config", LOSS, "special tokens and the handling of spaces may differ",
         "put the earlier tokenizer_config.json back"),
    Rule("target.generation_config", LOSS, "it names the tokens that end an answer",
         "put the earlier generation_config.json back"),
    Rule("data.store", LOSS, "other documents, another order, another number of steps per epoch",
         "set data_dir to the earlier store, or `draftsmith tokenize` the earlier conversations"),
    Rule("data.tokenizer", LOSS, "the store was made with another tokenizer or chat template", follows=("target.*",)),
    Rule("processes", LOSS, "another number of processes sums in another order and shares the work differently",
         "start {was} processes"),
    # --- configuration
    Rule("config.name", FOLDED, ""),
    Rule("config.runs_dir", FOLDED, ""),
    Rule("config.data_dir", FOLDED, ""),
    Rule("config.target.model", NEITHER, "only its name or place: the contents are compared by themselves"),
    Rule("config.generate.*", NEITHER, "it acts through the store, which is compared by itself"),
    Rule("config.tokenize.*", NEITHER, "it acts through the store, which is compared by itself"),
    Rule("config.evaluate.*", NEITHER, "it is what measurements on the way are made with; no weight depends on it"),
    Rule("config.export.*", NEITHER, "training does not read it"),
    Rule("config.floor.*", NEITHER, "it only watches the throughput", "{key}={was}"),
    Rule("config.tracking.*", NEITHER, "where metrics go besides metrics.jsonl", "{key}={was}"),
    Rule("config.loss.chunk_rows", SPEED, "it trades memory for speed", "loss.chunk_rows={was}"),
    Rule("config.train.*_every", SPEED, "how often training pauses to log, check or save", "train.{name}={was}"),
    Rule("config.train.keep_checkpoints", NEITHER, "only disk space", "train.{name}={was}"),
    Rule("config.train.heldout_rows", NEITHER, "other rows are measured, none trained", "train.{name}={was}"),
    Rule("config.train.accept_prompts", NEITHER, "other prompts are measured, none trained", "train.{name}={was}"),
    Rule("config.*", LOSS, "a setting of the run", "{key}={was}"),
    # --- code, in place of what one believes to run
    Rule("patches.*", LOSS, "a function was replaced at run time: neither its version nor its file shows that",
         "do not import or call what replaces it (see the name and file under `is`)"),
    Rule("packages.files.*", LOSS, "its files were edited in place: the version and `pip check` do not show that",
         "pip install --force-reinstall --no-deps '{name}=={version}'"),
    Rule("code.*.commit", LOSS, "other source; `git diff {was} {is}` shows it", "git checkout {was}, or " + RESTORE),
    Rule("code.*.edits", LOSS, "uncommitted edits; `draftsmith runs show RUN code` shows them", RESTORE),
    Rule("code.*.untracked", LOSS, "source files that git does not know", RESTORE),
    Rule("code.*", LOSS, "other source code", RESTORE),
    # --- installed packages
    _package("torch", LOSS, "every kernel, and with another CUDA build every library under it"),
    _package("transformers", LOSS, "the target's modeling code, attention and default dtype"),
    _package("tokenizers", LOSS, "the same text may give other ids"),
    _package("triton", LOSS, "it compiles the GPU kernels", ("packages.torch",)),
    _package("flash-attn*", LOSS, "attention kernels"),
    _package("liger-kernel", LOSS, "it replaces losses and layers"),
    _package("nvidia-*", LOSS, "CUDA libraries under torch", ("packages.torch",)),
    _package("numpy", LOSS, "packing, anchors and weights are computed with it"),
    _package("safetensors", LOSS, "weights are read with it"),
    Rule("packages.startup.*", LOSS, "it runs before anything else in every process and can change everything",
         "put the earlier file back", "remove it from site-packages", follows=("packages.*",)),
    Rule("packages.shadowed", LOSS, "a package is installed twice and the first on sys.path is the one that runs"),
    _package("draftsmith", LOSS, "this project's own version"),
    _package("*", LOSS, "the run imports it"),
    Rule("python.version", LOSS, "another interpreter"),
    Rule("python.optimize", LOSS, "asserts are on or off"),
    Rule("python.path", NEITHER, "modules may be found elsewhere; the packages are compared by themselves"),
    Rule("python.executable", FOLDED, ""),
    Rule("torch.build", LOSS, "another build of torch is loaded", follows=TORCH),
    Rule("torch.file", NEITHER, "torch is loaded from another place"),
    Rule("libraries.libnccl*", LOSS, "it adds the gradients up; ranks with different ones can hang",
         follows=TORCH),
    Rule("libraries.*", LOSS, "another native library is mapped", follows=TORCH),
    # --- the cards
    Rule("gpu.throttled", SPEED, "the clocks are held down: heat or power", "cool the card, then compare again"),
    Rule("gpu.others", SPEED, "somebody else holds memory, and perhaps time, of the card",
         "nvidia-smi shows who; end it or use another card"),
    Rule("gpu.mig", SPEED, "the card is partitioned: a run sees a part of it", "nvidia-smi -mig {was}"),
    Rule("gpu.power_limit", SPEED, "the card may draw less and clocks lower", "nvidia-smi -pl {was}"),
    Rule("gpu.clock*", SPEED, "the card clocks differently", "nvidia-smi -rac"),
    Rule("gpu.pcie", SPEED, "the link to the host is narrower or older: copies take longer", "reseat the card, reboot"),
    Rule("gpu.nvlinks", SPEED, "links between the cards are down or up", "nvidia-smi nvlink -s"),
    Rule("gpu.ecc", SPEED, "error correction costs memory bandwidth", "nvidia-smi -e {was}"),
    # --- switches and variables
    Rule("switches.torch.threads", SPEED, "threads share the work, and sum in another order",
         follows=("environment.OMP_*", "environment.MKL_*", "host.cpus")),
    Rule("switches.torch.nccl", LOSS, "the version of NCCL in use", follows=("libraries.libnccl*", *TORCH)),
    Rule("switches.torch.cudnn_version", LOSS, "the version of cuDNN in use", follows=("libraries.libcudnn*", *TORCH)),
    Rule("switches.torch.cuda_allow_tf32", LOSS, "TF32 for matrix products",
         follows=("switches.torch.float32_matmul_precision", "environment.*")),
    Rule("switches.torch.*", LOSS, "an effective setting of torch: it picks kernels and precision",
         follows=("packages.torch", "environment.*")),
    _variable("LD_PRELOAD", LOSS, "a library is put in front of all others"),
    _variable("LD_LIBRARY_PATH", LOSS, "other native libraries may be found"),
    _variable("PYTHONPATH", LOSS, "other Python code may be found"),
    _variable("PYTHONHASHSEED", LOSS, "the order of sets"),
    _variable("NVIDIA_TF32_OVERRIDE", LOSS, "it switches TF32 on or off behind torch's back"),
    _variable("CUBLAS_WORKSPACE_CONFIG", LOSS, "it decides whether cuBLAS sums in the same order each time"),
    *(_variable(name, SPEED, "it decides where compiled kernels are kept: the caches of before are not found")
      for name in CACHE_VARIABLES),
    _variable("XDG_CACHE_HOME", SPEED, "it moves caches"),
    _variable("PYTORCH_*ALLOC_CONF", SPEED, "it changes how GPU memory is reused"),
    *(_variable(name, SPEED, "threads and how they wait and are placed")
      for name in ("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*")),
    *(_variable(name, SPEED, "how processes talk to each other")
      for name in ("NCCL_*", "GLOO_*", "UCX_*", "NVSHMEM_*")),
    _variable("CUDA_LAUNCH_BLOCKING", SPEED, "each kernel waits for the one before"),
    _variable("CUDA_VISIBLE_DEVICES", SPEED, "other cards are used"),
    _variable("TORCHINDUCTOR_*", LOSS, "it changes what inductor generates"),
    _variable("TRITON_*", LOSS, "it changes what Triton generates"),
    *(_variable(name, LOSS, "it changes what torch does") for name in ("TORCH_*", "PYTORCH_*", "CUDNN_*", "CUBLAS_*")),
    *(_variable(name, LOSS, "it can change which model, tokenizer or kernel is loaded")
      for name in ("HF_*", "HUGGING*", "TRANSFORMERS_*")),
    *(Rule(f"environment.{name}", FOLDED, "") for name in (
        "RANK", "LOCAL_*", "MASTER_*", "TORCHELASTIC_*", "SLURM_*", "OMPI_*", "WANDB_*", "PIP_*", "LC_*", "LANG*")),
    _variable("WORLD_SIZE", LOSS, "the number of processes"),
    *(_variable(name, NEITHER, "training does not depend on it")
      for name in ("TZ", "VIRTUAL_ENV", "HTTP_PROXY", "HTTPS_PROXY", "TOKENIZERS_PARALLELISM")),
    _variable("*", SPEED, "what it does is not known here"),
    Rule("switches.dynamo*", LOSS, "what torch.compile captures", follows=("packages.torch", "environment.TORCH*")),
    Rule("switches.inductor*", LOSS, "what torch.compile generates", follows=("packages.torch", "environment.TORCH*")),
    # --- what came of all that
    Rule("built.resumed_from", FOLDED, ""),
    Rule("built.*", LOSS, "the model that was really built", follows=SOURCES),
    Rule("gpu.name", LOSS, "another GPU picks other kernels"),
    Rule("host.cpu", LOSS, "another CPU has other vector instructions and sums in another order"),
    # --- speed
    Rule("compile_cache.*", SPEED, "what is not in the cache is compiled again, minutes a graph",
         "copy the earlier run's cache to the path it had", follows=tuple(f"environment.{v}" for v in CACHE_VARIABLES)),
    Rule("gpu.driver", SPEED, "it compiles what the library holds for no card, and schedules",
         "install driver {was}"),
    Rule("host.cpu_limit", SPEED, "the control group gives this process more or less CPU time"),
    Rule("host.memory_limit", SPEED, "the control group gives this process more or less memory"),
    Rule("host.cpus", SPEED, "more or fewer cores for loading and packing"),
    Rule("gpu.persistence", SPEED, "without it the driver is unloaded between runs", "nvidia-smi -pm {was}"),
    Rule("gpu.compute_mode", SPEED, "whether processes may share the card", "nvidia-smi -c {was}"),
    Rule("host.kernel", SPEED, "another kernel schedules and copies differently"),
    Rule("host.glibc", LOSS, "mathematical functions of the C library"),
    Rule("outcome.fallbacks", SPEED, "something ran another way than meant", follows=SOURCES),
    Rule("outcome.*", SPEED, "more or fewer graphs were compiled while it ran", follows=(*SOURCES, "compile_cache.*")),
    # --- names and places
    Rule("gpu.uuid", NEITHER, "another card of the same kind"),
    Rule("host.*", NEITHER, "another machine, or its memory counted at another time"),
    Rule("target.folder", FOLDED, ""),
    Rule("data.folder", FOLDED, ""),
    Rule("process.*", FOLDED, ""),
    Rule("*", NEITHER, "what it does is not known here"),
)  # fmt: skip


def rule_for(field: str) -> tuple[int, Rule]:
    """The rule that speaks for a field, and its rank."""
    return next((i, rule) for i, rule in enumerate(RULES) if fnmatchcase(field, rule.pattern))
