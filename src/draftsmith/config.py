"""The configuration of a whole run: one YAML, a section for each part of the flow, no defaults hidden elsewhere.

Written by hand as YAML; what a run resolved it to is dumped as JSON, so nobody mistakes one for the other.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from draftsmith.errors import InputError


class Section(BaseModel):
    """Frozen, unknown keys refused, every number finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetConfig(Section):
    """The frozen language model."""

    model: str
    """A local folder in the Hugging Face layout, or a hub name where there is a network."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU (where bfloat16 is about six times slower)."""
    forward: Literal["auto", "packed", "per_document"] = "auto"
    """packed: one forward a row, documents kept apart inside attention. per_document: one forward a document, which
    wastes nothing on a CPU and gives the same bits whatever shares the row. auto: packed on a GPU."""
    trust_remote_code: bool = False


class GenerateConfig(Section):
    """Prompts in, conversations answered by the target itself out."""

    prompts: Path | None = None
    """JSONL, JSON (a list) or Parquet: `prompt` (a string), `messages` (OpenAI shape) or `conversations` (ShareGPT
    shape), with optional `id`, `category`, `system` and `tools`."""
    limit: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(512, ge=1)
    batch_size: int = Field(16, ge=1)
    """Of the embedded engine: prompts answered together."""
    engine: Literal["auto", "static", "continuous"] = "auto"
    """The embedded one. static: transformers' generation, whole batches. continuous: a finished answer makes room for
    the next prompt at once, on a GPU by CUDA graphs. auto: continuous on a GPU."""
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0)
    multi_turn: Literal["regenerate", "last"] = "regenerate"
    """Assistant turns given in a prompt. regenerate: the target writes each anew, in turn. last: they stay as context,
    unsupervised, and only the answer after the last message is written."""
    reasoning: Literal["keep", "drop", "apart"] = "keep"
    """What the target thinks before it answers. keep: in the message (`reasoning_content`), trained on where the chat
    template shows it. drop: nowhere. apart: in the record beside the messages, not trained on."""
    max_bad_lines: int = Field(0, ge=0)
    """Lines of the prompts that cannot be read: named, counted and skipped up to so many, an error beyond."""
    servers: tuple[str, ...] = ()
    """Base URLs of OpenAI-compatible servers (http://host:port or .../v1); none: the embedded engine."""
    server_model: str | None = None
    """The model to ask for; default: the one the servers list first."""
    concurrency: int = Field(32, ge=1)
    """Requests in flight, per server."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds for one answer."""
    attempts: int = Field(10, ge=1)
    """Tries for one answer; after them the prompt is counted as failed and left to the next run."""
    retry_seconds: float = Field(1.0, gt=0)
    """Back-off: about so long after the first failure, twice as long after each further one, at most a minute."""
    server_patience: float = Field(300.0, gt=0)
    """Seconds without any answer after which a server is given up."""
    api_key_file: Path | None = None
    """A file whose first line is sent as bearer token."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking: used to ask and, the same, to tokenize."""


class TokenizeConfig(Section):
    """Conversations in, a store of token ids and supervised spans out."""

    conversations: Path | None = None
    """JSONL, JSON (a list) or Parquet, in any of the shapes of `generate.prompts`, with answers."""
    max_tokens: int | None = Field(None, ge=4)
    """Longest document kept; default `train.row_tokens`."""
    heldout_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of prompts, chosen by a hash of the prompt's text, that is never trained on."""
    length_cut: Literal["drop", "keep"] = "drop"
    """What to do with an answer that ran into `generate.max_new_tokens`."""
    long_prompt: Literal["error", "drop"] = "error"
    """What to do with a prompt that leaves no room for an answer in `max_tokens`."""
    long_documents: Literal["turns", "windows", "refuse"] = "turns"
    """A conversation of more than `max_tokens`. turns: whole turns are taken off its end. windows: pieces of
    `max_tokens` that overlap by an eighth; each supervised token counts in the first piece that holds it, and each
    piece begins at position 0. refuse: an error."""
    rewritten_history: Literal["refuse", "per_turn"] = "refuse"
    """Chat templates that show earlier turns otherwise than they were generated (dropping their reasoning).
    per_turn: one document for each answer, with the history as the target saw it."""
    max_bad_lines: int = Field(0, ge=0)
    """Lines that cannot be read: named, counted and skipped up to so many, an error beyond."""
    workers: int | None = Field(None, ge=0)
    """Processes; 0: none but this one. Default: one for each CPU, none for small files."""


class DrafterConfig(Section):
    """Geometry of the drafter.  None takes the target's value."""

    block_size: int = Field(16, ge=2)
    num_layers: int = Field(5, ge=1)
    num_features: int = Field(5, ge=1)
    feature_layers: tuple[int, ...] | None = None
    """0-based decoder layers whose outputs are the features; default: spread evenly, the last layer never."""
    mask_token_id: int | None = Field(None, ge=0)
    hidden_size: int | None = None
    """Only to state it: it must be the target's, whose embedding and head the drafter uses."""
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    rope_theta: float | None = Field(None, gt=0)
    rms_norm_eps: float | None = Field(None, gt=0)
    max_position_embeddings: int | None = Field(None, ge=1)
    attention_bias: bool = False
    layer_types: Literal["full", "sliding"] | tuple[Literal["full", "sliding"], ...] = "full"
    sliding_window: int | None = Field(None, ge=1)
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    initializer_range: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        types = (self.layer_types,) if isinstance(self.layer_types, str) else self.layer_types
        if not isinstance(self.layer_types, str) and len(types) != self.num_layers:
            raise ValueError(f"drafter.layer_types lists {len(types)} layers, drafter.num_layers is {self.num_layers}")
        if "sliding" in types and self.sliding_window is None:
            raise ValueError("drafter.layer_types has sliding layers: set drafter.sliding_window (in tokens)")
        if self.feature_layers is not None and len(self.feature_layers) != self.num_features:
            raise ValueError(
                f"drafter.feature_layers lists {len(self.feature_layers)} layers, "
                f"drafter.num_features is {self.num_features}"
            )
        return self


class LossConfig(Section):
    """Cross entropy of a block's slots, weighted (shared maths: drafter/blocks.py and drafter/loss.py)."""

    kind: Literal["decay", "dpace"] = "decay"
    gamma: float | None = Field(None, gt=0)
    """Decay of the slot weights, exp(-(k-1)/gamma); default 7, 5, 4 for blocks of 16, 10, 8."""
    dpace_alpha: float = Field(0.5, ge=0, lt=1)
    chunk_rows: int | None = Field(None, ge=1)
    """Rows of logits that exist at a time; default 512, or at most 2,560 where the loss is compiled."""
    softmax: Literal["auto", "torch", "triton"] = "auto"
    """Between the two products with the head: torch, compiled in a compiled run; or our own kernel, on a GPU.
    auto: ours in a compiled run on a GPU, unless the target caps or scales its logits."""


Beta = Annotated[float, Field(ge=0, lt=1)]
Off = BeforeValidator(lambda value: "off" if value is False else value)
"""To YAML 1.1 a bare off is a boolean."""


class TrainConfig(Section):
    row_tokens: int = Field(3072, ge=8)
    anchors: int = Field(512, ge=1)
    rows_per_step: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    """Exactly one of `steps` and `epochs`."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices, with AdamW for norms and biases."""
    learning_rate: float = Field(6e-4, gt=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_fraction: float = Field(0.04, ge=0, lt=1)
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """wsd only: the share of the steps, at the end, in which the rate falls to `min_lr_ratio`."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip_norm: float = Field(1.0, gt=0)
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    attention: Literal["auto", "sdpa", "flex", "triton"] = "auto"
    """auto: on a GPU our own kernels (triton) where they do such heads, else flex; sdpa on a CPU."""
    fp8: Annotated[Literal["off", "target", "drafter", "both"], Off] = "off"
    """Whose linear layers compute in 8 bits: needs a compiled run on a GPU of the Hopper generation or later."""
    features: Literal["online", "files"] = "online"
    """files: the target runs once over every document, its features are kept beside the store and read back."""
    feature_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    log_every: int = Field(10, ge=1)
    heldout_every: int = Field(0, ge=0)
    """Held-out loss and accuracy by slot every so many steps; 0: only at the end."""
    heldout_rows: int = Field(4, ge=1)
    accept_every: int = Field(0, ge=0)
    """Accepted length every so many steps, and at the end; 0: never."""
    accept_prompts: int = Field(4, ge=1)
    """For the serving loop; with `evaluate.replay` it is `evaluate.prompts`."""
    checkpoint_every: int = Field(500, ge=1)
    keep_checkpoints: int = Field(3, ge=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of train.steps and train.epochs")
        return self


class PlacementConfig(Section):
    """Which processes there are.  `placement: colocated` is short for mode: colocated."""

    mode: Literal["colocated", "split"] = "colocated"
    """colocated: every process holds target and drafter. split: `targets` processes run the frozen target and send its
    features to `drafters` processes."""
    targets: int = Field(0, ge=0)
    drafters: int = Field(1, ge=1)
    """colocated: the number of processes."""
    run_ahead: int = Field(4, ge=1)
    """Rows a target may have finished that no drafter has taken yet; and rows a drafter asks for beforehand."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a process waits for another before it gives up and names it."""
    max_restarts: int = Field(0, ge=0)
    """How often `draftsmith train` starts all processes again from the last checkpoint after one was lost."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _modes(self) -> PlacementConfig:
        if self.mode == "split" and self.targets == 0:
            raise ValueError("placement.mode=split needs placement.targets, at least 1")
        if self.mode == "colocated" and self.targets:
            raise ValueError("placement.targets belongs to placement.mode=split")
        return self

    @property
    def processes(self) -> int:
        return self.targets + self.drafters


class CompileConfig(Section):
    """torch.compile: what is compiled is compiled before step 0, and nothing after it."""

    enabled: bool | None = None
    """Default: on a GPU."""
    on_fallback: Literal["error", "warn"] = "error"
    """What a recompile, a graph break or uncompiled attention during training does."""
    start: Literal["auto", "together", "first"] = "auto"
    """Whether the processes of a machine compile at once, or one before the others, which then find its results.
    auto: together on a GPU, first on a CPU."""
    cache_dir: Path | None = None
    """Holds one folder per fingerprint; default ~/.cache/draftsmith/compile."""
    graphs: bool = False
    """On a GPU: a row's forward and backward pass, and the target's forward, as one CUDA graph each, for models so
    small that the GPU waits for the host.  Takes memory of its own.  Targets of a split placement run without."""


class FloorConfig(Section):
    """Throughput while training, held against the last good run of the same hardware and config."""

    share: float = Field(0.7, gt=0, le=1)
    """Of the last good run's rows per second: below it in two windows on end is a drop."""
    window_seconds: float = Field(120.0, gt=0)
    """Of training; shorter windows vary by nearly a factor of two on a healthy machine."""
    action: Annotated[Literal["off", "warn", "stop"], Off] = "warn"
    """What a drop does. stop: after a checkpoint, with exit code 3."""


class TrackingConfig(Section):
    """Where metrics go besides metrics.jsonl, offline, below `tracking/` in the run's folder."""

    wandb: bool = False
    tensorboard: bool = False
    trackio: bool = False
    mlflow: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(name for name, on in self.model_dump().items() if on)


class EvaluateConfig(Section):
    drafter: Path | None = None
    """An exported folder or a checkpoint; default: the newest checkpoint of the newest attempt that has one."""
    output: Path | None = None
    """Folder for results; default: `evaluation/` in the run's folder."""
    prompts: int = Field(32, ge=1)
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    rule: Literal["match", "reject"] = "match"
    """Acceptance at temperature > 0. match: greedy drafts, accepted where the target's own sample is the same.
    reject: sampled drafts, rejection sampling.  Both leave the target's distribution as it is."""
    graphs: bool | None = None
    """Decode with fixed shapes, a round as one CUDA graph; default: on a GPU, where the target allows it."""
    untrained: bool = False
    """Also measure a drafter with fresh weights, for comparison."""
    heldout: Path | None = None
    """Prompts of their own, in any of the shapes of `generate.prompts`, of several turns the first; none that the store
    trains on.  Default: the store's held-out documents."""
    replay: bool = False
    """Temperature 0: instead of the serving loop, drafts at every position of the target's own greedy answers, many
    prompts at a time, and the rounds that the loop would have made of them.  `train.accept_every` then does it too."""
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _greedy(self) -> EvaluateConfig:
        if self.replay and self.temperature > 0:
            raise ValueError("evaluate.replay is for evaluate.temperature=0: at a temperature there is no one answer")
        return self


class ExportConfig(Section):
    drafter: Path | None = None
    output: Path | None = None
    """Default: `export/` in the run's folder."""


class Config(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its folder is `<runs_dir>/<name>/attempt_<n>`."""
    runs_dir: Path = Path("runs")
    data_dir: Path | None = None
    """Where generate and tokenize write; default `data/<name>`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    target: TargetConfig
    generate: GenerateConfig = GenerateConfig()
    tokenize: TokenizeConfig = TokenizeConfig()
    drafter: DrafterConfig = DrafterConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig
    placement: PlacementConfig = PlacementConfig()
    compile: CompileConfig = CompileConfig()
    floor: FloorConfig = FloorConfig()
    tracking: TrackingConfig = TrackingConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _across(self) -> Config:
        if self.max_document > self.train.row_tokens:
            raise ValueError(
                f"tokenize.max_tokens {self.max_document} is more than a row holds (train.row_tokens "
                f"{self.train.row_tokens}): a document is never split, so lower the one or raise the other"
            )
        rows, drafters = self.train.rows_per_step, self.placement.drafters
        if rows % drafters:
            below, above = rows // drafters * drafters, -(-rows // drafters) * drafters
            raise ValueError(
                f"train.rows_per_step {rows} cannot be shared by {drafters} drafters (placement.drafters): the nearest "
                f"that can is {f'{below} or {above}' if below else above}"
            )
        if self.placement.mode == "split" and self.train.features == "files":
            raise ValueError("train.features=files needs no targets: set placement.mode=colocated")
        if self.placement.mode == "split" and self.train.accept_every:
            raise ValueError(
                "train.accept_every needs target and drafter in one process: set it to 0 with placement.mode=split, "
                "and run `draftsmith evaluate` on the checkpoints"
            )
        return self

    @property
    def data(self) -> Path:
        return self.data_dir or Path("data") / self.name

    @property
    def conversations(self) -> Path:
        return self.tokenize.conversations or self.data / "conversations.jsonl"

    @property
    def store(self) -> Path:
        return self.data / "store"

    @property
    def max_document(self) -> int:
        return self.tokenize.max_tokens or self.train.row_tokens

    def dump(self) -> str:
        """The resolved config as JSON text, keys in the order of the flow."""
        return json.dumps(self.model_dump(mode="json"), indent=2)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `a.b=c` overrides (c is YAML), validate.

    Raises InputError naming the key, the file, and for an unknown key the closest known one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error
    return parse_config(text, str(path), overrides)


def parse_config(text: str, source: str, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, from text; `source` is what error messages call it."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{source} must hold sections (target:, train:, ...), not {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{source}: " + "; ".join(_explain(e) for e in error.errors())) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise InputError(f"override {override!r} must look like section.key=value")
    *sections, last = key.split(".")
    node = tree
    for name in sections:
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise InputError(f"override {override!r}: {name} is not a section")
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"override {override!r}: the value is not valid YAML") from error


def _explain(error: Any) -> str:
    # of a union, pydantic names the branch too: that is no part of the key
    where = [str(part) for part in error["loc"] if not str(part).startswith(("literal[", "tuple["))]
    key = ".".join(where)
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(where[-1], _fields(where[:-1]), n=1, cutoff=0.4)
        hint = f", did you mean {'.'.join([*where[:-1], close[0]])}?" if close else ""
        return f"unknown key {key}{hint}"
    if error["type"] == "missing":
        return f"{key} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(error["input"], (dict, BaseModel)) else f" (given {error['input']!r})"
    return f"{key}: {message}{given}" if key else message


def _fields(section: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for name in section:
        field = model.model_fields.get(name)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
