"""Files and directories, records of them as JSON, and full disks."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError

Record = TypeVar("Record", bound=BaseModel)

BLOCK = 1 << 20
"""Bytes that are read at once."""


class NoSpace(Exception):
    """The disk is full.

    Attributes:
        needed: bytes that it takes; None if unknown.
    """

    def __init__(self, needed: int | None) -> None:
        super().__init__(needed)
        self.needed = needed


def require_files(directory: Path) -> Path:
    """Return ``directory``.

    Raises:
        ConfigurationError: it is not a directory, or empty.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is neither a file nor a directory")
    if not any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is empty; it should hold the model's files")
    return directory


def root_of(tree: Path) -> Path:
    """Return the only directory in ``tree`` if there is nothing beside it, else ``tree``."""
    entries = [entry for entry in tree.iterdir() if not entry.name.startswith("._")]  # of macOS
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        return entries[0]
    return tree


def tally(tree: Path) -> tuple[int, int]:
    """Count the files in ``tree``, and their bytes."""
    sizes = [
        Path(directory, name).lstat().st_size
        for directory, _, names in os.walk(tree)
        for name in names
    ]
    return len(sizes), sum(sizes)


def hash_of(path: Path) -> hashlib._Hash:
    """Return the SHA-256 of a file, which more can be added to."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest


def read_record(model: type[Record], path: Path) -> Record | None:
    """Read a record; None if there is none that can be read."""
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: BaseModel) -> None:
    """Replace a record; it is whole or absent, whatever interrupts this."""
    new = path.with_suffix(".new")
    new.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    new.replace(path)


def is_full(error: OSError) -> bool:
    """Return whether the disk, or its user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disk(needed: Callable[[], int | None]) -> Iterator[None]:
    """Map the error of a full disk to NoSpace, with the bytes ``needed``."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise NoSpace(needed()) from None


def size_text(count: int) -> str:
    """Format a number of bytes for people."""
    return str(tqdm.format_sizeof(count, "B"))
