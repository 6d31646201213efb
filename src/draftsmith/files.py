"""Files are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def make_folder(path: Path) -> None:
    """With its parents, unless it is there.  Raises InputError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {path} ({error.strerror}: {error.filename}): set data_dir, runs_dir or "
            f"export.output to another place"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name in the same folder, flush to disk, rename."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """As safetensors, in a folder that is written whole.  What the system refuses (a full disk) is an OSError with its
    number, as for every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise RuntimeError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextlib.contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """A temporary sibling folder to fill; renamed to `path` if the block ends well, removed otherwise."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest is not in Python 3.10, in which the stand-alone capture may run
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
