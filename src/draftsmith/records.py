"""What crosses a process, file or stage boundary.  Every record says who writes it and who reads it.

Symbols: T tokens in a packed row, A anchor slots, B block size, K feature layers, H hidden size of the target.
Imports numpy but not torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """Written by people (JSONL, JSON or Parquet); read by generate.

    `messages` has the OpenAI shape.  Assistant turns in it that are listed in `regenerate` are only places: the target
    writes them anew, in turn.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    category: str = "all"
    tools: tuple[dict[str, Any], ...] = ()
    regenerate: tuple[int, ...] = ()
    """Indices of assistant messages to be written by the target; the last is len(messages), the answer still missing,
    unless a given answer stands there."""


@dataclass(frozen=True)
class Conversation:
    """One line of conversations.jsonl.  Written by generate (or by others); read by tokenize."""

    id: str
    messages: tuple[dict[str, Any], ...]
    finish_reason: str
    """stop: the target ended its answer; length: it was cut at max_new_tokens; of several turns, the first not stop."""
    completion_tokens: int
    """Tokens the target generated, all turns together; 0: not known."""
    category: str = "all"
    tools: tuple[dict[str, Any], ...] = ()
    generated: tuple[int, ...] | None = None
    """Indices of the messages the target wrote; only they are supervised.  None: every assistant message."""
    flags: tuple[str, ...] = ()
    """empty, refused, repeated: what generate noticed in the answers."""
    apart: tuple[str, ...] = ()
    """Reasoning of each generated turn, where generate.reasoning=apart kept it out of the messages."""
    prompt_digest: str = ""
    """Of the prompt that was asked, so that another prompt under the same id is noticed."""


@dataclass(frozen=True)
class GenerationSpeed:
    """A line of conversations.speed.jsonl, one a run.  Written by generate on the continuous engine; read by people."""

    tokens: int
    prompt_tokens: int
    seconds: float
    tokens_per_second: float
    steps: int
    slots: int
    capacity: int
    """Tokens that a slot held in the end."""
    traffic_bytes: int
    """Weights, keys and values that had to be read."""
    flops: int
    copy_tb_per_s: float
    gemm_tflops: float
    """Of this device, measured after the run."""
    roofline_tokens_per_second: float
    """Where nothing but that traffic, or those products, took time."""
    share: float


@dataclass(frozen=True)
class Shard:
    """One Arrow file of a store."""

    file: str
    documents: int
    tokens: int
    supervised: int
    sha256: str


@dataclass(frozen=True)
class StoreManifest:
    """manifest.json of a store.  Written by tokenize; read by the loader, training and `features: files`."""

    generation: int
    tokenizer: str
    """Fingerprint: sha256 of the rendering and ids of a fixed conversation and of its generation prompt."""
    eos_token_ids: tuple[int, ...]
    shards: tuple[Shard, ...]
    sources: dict[str, str]
    """Source file name -> sha256 of what was read of it."""
    counts: dict[str, int]
    """Conversations read, kept, held out, and left out by reason."""
    schema: int = 1
    source_bytes: dict[str, int] = field(default_factory=dict)
    """Source file name -> bytes read of it: a file that has only grown is read on from there."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What decides how a conversation becomes documents: the same for every generation."""

    @property
    def fingerprint(self) -> str:
        """Names this content: the shards' hashes in order."""
        import hashlib

        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()


@dataclass(frozen=True)
class DrafterSpec:
    """Everything that fixes a drafter's shape and meaning.  Written into checkpoints and exports; read by every
    stage that builds a drafter.  `feature_layers` are 0-based decoder layers whose *output* is the feature."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02

    def windows(self) -> tuple[int | None, ...]:
        """Per layer: the sliding window in tokens, or None for full attention."""
        return tuple(self.sliding_window if t == "sliding" else None for t in self.layer_types)


@dataclass(frozen=True)
class PackedRow:
    """One training row of fixed shape.  Written by the loader; read by target and drafter.

    Documents are whole, each with positions from 0; the tail is padding (document -1).
    """

    epoch: int
    index: int
    """Number of the row within its epoch."""
    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    document: np.ndarray  # int32 [T], 0.. within the row, -1 for padding
    supervised: np.ndarray  # bool [T]
    samples: tuple[int, ...]
    """Store index of each document in the row."""
    starts: tuple[int, ...]
    """Where each document begins, and the end of the last: len(samples) + 1 offsets."""
    anchors: np.ndarray  # int64 [A], ascending, the counting ones first
    anchor_count: int


@dataclass(frozen=True)
class Answer:
    """One prompt answered by the serving loop.  Written by evaluate/speculate.py; read by evaluate/acceptance.py.

    `rounds` has one entry a verification: tokens it produced (accepted drafts + the target's own).
    """

    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    drafted: tuple[int, ...]
    """Drafts offered in each round."""
    accepted: tuple[int, ...]
    """Drafts the target agreed with, before any cut by a stop token or the length limit."""
    full: tuple[bool, ...]
    """Rounds that neither a stop token nor the length limit could cut: a whole block still wanted, no stop token."""
    block_size: int
    seconds: float
    prefill_seconds: float
    slot_offered: tuple[int, ...] = ()
    slot_accepted: tuple[int, ...] = ()
    """By slot 1..B-1: rounds in which it was drafted, and in which it was accepted."""

    def full_rounds(self) -> list[int]:
        """Tokens of each full round."""
        return [r for r, full in zip(self.rounds, self.full, strict=True) if full]


@dataclass(frozen=True)
class GreedyAnswer:
    """What the target says to a held-out prompt at temperature 0.  Written and read by evaluate/replay.py."""

    id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The answer, and behind its stop token what the target would go on with: drafts reach beyond the stop."""
    length: int
    """How many of `tokens` are the answer, its stop token counted."""


@dataclass(frozen=True)
class CheckpointState:
    """state.json of a checkpoint.  Written and read by train/checkpoint.py."""

    step: int
    rows_done: int
    spec: DrafterSpec
    files: dict[str, dict[str, Any]]
    """Per file: bytes and sha256, so that a checkpoint cut short is noticed."""
    pins: dict[str, str]
    """What a resumed run must share: target weights, store content, feature layers, block size, loss."""
    schema: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


def to_json(record: Any, **kwargs: Any) -> str:
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False, **kwargs)


def spec_from_dict(values: dict[str, Any]) -> DrafterSpec:
    values = dict(values)
    for key in ("feature_layers", "layer_types"):
        values[key] = tuple(values[key])
    return DrafterSpec(**values)


def read_json(path: Path, what: str) -> Any:
    """Parse a JSON file of ours.  Raises InputError that names the file and what it should have been."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{what} not found: {path}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{what} cannot be read: {path}: {error}") from error
