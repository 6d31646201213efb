"""Fixtures: a tiny random target with a byte-level tokenizer and a chat template, made once a session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from draftsmith.config import Config, parse_config
from draftsmith.target.model import Target, load_target

torch.set_num_threads(1)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 272
"""4 special tokens, 256 bytes, 12 rows of the embedding that the tokenizer does not use."""


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(SPECIAL)} | {c: i + len(SPECIAL) for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_target(folder: Path, **changes: Any) -> Path:
    """A tiny random Qwen3 model in the Hugging Face layout."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.1,
        **changes,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "tiny")


def make_config(folder: Path, work: Path, *overrides: str) -> Config:
    """A config for the tiny target with everything under `work`."""
    text = f"""
name: tiny
runs_dir: {work}/runs
data_dir: {work}/data
device: cpu
target: {{model: {folder}}}
generate: {{prompts: {work}/prompts.jsonl, max_new_tokens: 24, batch_size: 8}}
tokenize: {{heldout_fraction: 0.3, length_cut: keep}}
drafter: {{block_size: 4, num_layers: 2, num_features: 3, mask_token_id: 270}}
train: {{row_tokens: 128, anchors: 16, steps: 6, learning_rate: 1.0e-3, log_every: 1, heldout_rows: 1,
        checkpoint_every: 3}}
evaluate: {{prompts: 2, max_new_tokens: 12}}
"""
    return parse_config(text, "test config", overrides)


def write_prompts(work: Path, count: int = 12) -> Path:
    work.mkdir(parents=True, exist_ok=True)
    path = work / "prompts.jsonl"
    lines = [
        {"id": f"p{i}", "category": ("a", "b")[i % 2], "prompt": f"Question {i}: {'x' * i}?"} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_conversations(path: Path, count: int = 12) -> Path:
    """Conversations without a model: answers are a pattern, of 20 to 40 characters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as out:
        for i in range(count):
            messages = [
                {"role": "user", "content": f"Question {i}?"},
                {"role": "assistant", "content": ("abcdefgh" * 5)[: 20 + i % 20]},
            ]
            line = {"id": f"p{i}", "messages": messages, "finish_reason": "stop", "completion_tokens": 20}
            out.write(json.dumps({**line, "category": ("a", "b")[i % 2]}) + "\n")
    return path


@pytest.fixture
def config(target_folder: Path, tmp_path: Path) -> Config:
    """Config with prompts written; nothing generated yet."""
    write_prompts(tmp_path)
    return make_config(target_folder, tmp_path)


@pytest.fixture
def stored(target_folder: Path, tmp_path: Path) -> Config:
    """Config with conversations and store made."""
    from draftsmith.data.tokenize import tokenize

    config = make_config(target_folder, tmp_path)
    write_conversations(config.conversations)
    tokenize(config)
    return config


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    from draftsmith.config import TargetConfig

    return load_target(TargetConfig(model=str(target_folder)), "cpu")
