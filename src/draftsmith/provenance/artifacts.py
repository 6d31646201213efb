"""The target model and the store as files: what they hold, never when they were written or in which inode."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftsmith import env
from draftsmith.files import sha256
from draftsmith.provenance.digests import sha256_cached

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
    "special_tokens_map.json", "spiece.model", "tiktoken.model",
)  # fmt: skip


def model_folder(name: str, revision: str | None) -> Path:
    """A local folder as it is; for a hub name the snapshot in the hub's cache, without asking the network."""
    if Path(name).is_dir():
        return Path(name)
    repository = env.hub_cache() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    return repository / "snapshots" / (commit or "main")


def read_target(folder: Path) -> dict[str, Any]:
    """Digests of a model folder in the Hugging Face layout.  Raises OSError if it cannot be read."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"there is no model in {folder}")
    shards = sorted(folder.glob("*.safetensors"))
    digests = sha256_cached(shards, beside=True)
    total = "".join(f"{p.name}:{digests[p]}\n" for p in shards)
    tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    settings, template = _tokenizer_config(folder)
    return {
        "folder": str(folder),
        "weights": {
            "files": {p.name: {"bytes": p.stat().st_size, "sha256": digests[p]} for p in shards},
            "bytes": sum(p.stat().st_size for p in shards),
            "sha256": hashlib.sha256(total.encode()).hexdigest(),
        },
        "config": _digest(folder / "config.json"),
        "generation_config": _digest(folder / "generation_config.json"),
        "tokenizer": {p.name: sha256(p) for p in tokenizer},
        "tokenizer_config": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "chat_template": hashlib.sha256(template.encode()).hexdigest() if template else None,
    }


def read_store(folder: Path, generation: int | None = None) -> dict[str, Any]:
    """What the manifest of a store's generation (default: the newest) states, with sums over its shards.  Raises
    OSError or ValueError if it cannot be read."""
    file = folder / "manifest.json" if generation is None else folder / "generations" / f"{generation:05d}.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    shards = manifest["shards"]
    content = hashlib.sha256("".join(s["sha256"] for s in shards).encode()).hexdigest()
    return {
        "folder": str(folder),
        "generation": manifest["generation"],
        "documents": sum(s["documents"] for s in shards),
        "tokens": sum(s["tokens"] for s in shards),
        "supervised": sum(s["supervised"] for s in shards),
        "shards": len(shards),
        "sha256": content,
        "tokenizer": manifest["tokenizer"],
        "counts": manifest["counts"],
        "sources": manifest["sources"],
    }


def altered_shards(folder: Path) -> list[str]:
    """Shards of a store whose bytes are not those that its manifest states, or that are gone."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    paths = {folder / s["file"]: s["sha256"] for s in manifest["shards"]}
    gone = [p for p in paths if not p.is_file()]
    digests = sha256_cached([p for p in paths if p not in gone], beside=True)
    return sorted([*(p.name for p in gone), *(p.name for p, digest in digests.items() if digest != paths[p])])


def _tokenizer_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Settings without the chat template, and the template: from its own file, else from the settings."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    inside = settings.pop("chat_template", None)
    own = folder / "chat_template.jinja"
    if own.is_file():
        return settings, own.read_text(encoding="utf-8")
    return settings, inside if isinstance(inside, str) else json.dumps(inside) if inside else ""


def _digest(path: Path) -> str | None:
    return sha256(path) if path.is_file() else None
