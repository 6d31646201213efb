"""Features, online or from files: the same numbers, the same training code.

<store>/features-<key>/features.bin    [tokens of the store, K*H], document after document, in store order
<store>/features-<key>/manifest.json   what they are features of; written last
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.store import Store
from draftsmith.errors import InputError
from draftsmith.files import folder_written_whole, write_text
from draftsmith.progress import Progress
from draftsmith.records import PackedRow, read_json
from draftsmith.target.extract import FeatureExtractor


class FeatureSource(Protocol):
    """Whatever gives the features of a row, [T, K*H], on the drafter's device."""

    def row(self, row: PackedRow) -> Tensor: ...


class TimedFeatures:
    """A FeatureSource that knows how long its rows took.  On a GPU by events, since the host only queues the work: then
    it is the time in which the GPU had nothing else to do."""

    def __init__(self, source: FeatureSource, device: torch.device) -> None:
        self.source = source
        self.by_events = device.type == "cuda"
        self.events: list[tuple[Any, Any]] = []
        self.seconds = 0.0
        self.ended = 0
        """Rows whose seconds have been counted."""

    def row(self, row: PackedRow) -> Tensor:
        if not self.by_events:
            begin = time.monotonic()
            found = self.source.row(row)
            self.seconds += time.monotonic() - begin
            self.ended += 1
            return found
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        found = self.source.row(row)
        done.record()
        self.events.append((begun, done))
        return found

    def take(self, *, keep: int = 0) -> float:
        """Seconds since the last call.  Waits for the GPU, but for the newest `keep` rows, which count next time."""
        while len(self.events) > keep:
            begun, done = self.events.pop(0)
            done.synchronize()
            self.ended += 1
            self.seconds += begun.elapsed_time(done) / 1e3
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class FileFeatures:
    """Features read back from a memory-mapped file."""

    def __init__(self, folder: Path, store: Store, pins: dict[str, str], device: torch.device) -> None:
        manifest = read_json(folder / "manifest.json", "features manifest")
        anew = f"remove {folder} to compute them anew"
        try:
            found, width, self.dtype = dict(manifest["pins"]), int(manifest["width"]), getattr(torch, manifest["dtype"])
            stored_as = _numpy_type(self.dtype)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{folder}/manifest.json is not a features manifest ({error}): {anew}") from error
        if found != pins:
            changed = sorted(k for k in pins.keys() | found.keys() if found.get(k) != pins.get(k))
            raise InputError(f"{folder} holds features of another {', '.join(changed)}: {anew}")
        self.device = device
        self.first = np.concatenate([[0], np.cumsum(store.lengths)])
        shape = (int(self.first[-1]), width)
        size = shape[0] * shape[1] * self.dtype.itemsize
        file = folder / "features.bin"
        if not file.is_file() or file.stat().st_size != size:
            raise InputError(f"{file} is missing or cut short ({size} bytes expected): {anew}")
        self.values = np.memmap(file, dtype=stored_as, mode="r", shape=shape)

    def row(self, row: PackedRow) -> Tensor:
        pinned = self.device.type == "cuda"  # else the copy would wait for all queued work
        out = torch.zeros(len(row.tokens), self.values.shape[1], dtype=self.dtype, pin_memory=pinned)
        for number, start, end in zip(row.samples, row.starts, row.starts[1:], strict=False):
            at = int(self.first[number])
            piece = np.array(self.values[at : at + end - start])  # a copy: torch wants memory it may write to
            out[start:end] = torch.from_numpy(piece).view(self.dtype)
        return out.to(self.device, non_blocking=True)


def features_folder(store: Store, pins: dict[str, str]) -> Path:
    key = hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()[:12]
    return store.path / f"features-{key}"


def write_features(
    folder: Path, store: Store, extract: FeatureExtractor, pins: dict[str, str], tell: Callable[[], None] = lambda: None
) -> None:
    """Run the target once over every document, `tell` after each.  Whole or not at all."""
    width = 0
    with folder_written_whole(folder) as temporary, Progress("features", len(store), "documents") as progress:
        with open(temporary / "features.bin", "wb") as out:
            for number in range(len(store)):
                tokens = torch.from_numpy(store.document(number).tokens.astype(np.int64)).to(extract.target.device)
                values = extract.document(tokens).cpu().contiguous()
                if not torch.isfinite(values).all():
                    raise InputError(
                        f"the target's features of document {store.document(number).id!r} hold NaN or Inf "
                        f"({extract.target.name}, {extract.target.dtype}): check its weights, or target.dtype"
                    )
                width = values.shape[1]
                out.write(values.view(torch.uint8).numpy().tobytes())
                progress.advance()
                tell()
        dtype = str(extract.dtype).removeprefix("torch.")
        write_text(temporary / "manifest.json", json.dumps({"pins": pins, "dtype": dtype, "width": width}, indent=2))


def _numpy_type(dtype: torch.dtype) -> Any:
    return {torch.float32: np.float32, torch.bfloat16: np.int16, torch.float64: np.float64}[dtype]
