"""What is in a file or a directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cog_triton.errors import ConfigurationError

BLOCK = 1 << 20
"""Bytes that are read at once."""


def require_files(directory: Path) -> Path:
    """Returns ``directory``.

    Raises:
        ConfigurationError: it is none, or empty.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is neither a file nor a directory")
    if not any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is empty; it should hold the model's files")
    return directory


def root_of(tree: Path) -> Path:
    """The only directory in ``tree`` if there is nothing beside it, else ``tree``."""
    entries = [entry for entry in tree.iterdir() if not entry.name.startswith("._")]  # of macOS
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        return entries[0]
    return tree


def tally(tree: Path) -> tuple[int, int]:
    """How many files are in ``tree``, and their bytes."""
    sizes = [
        Path(directory, name).lstat().st_size
        for directory, _, names in os.walk(tree)
        for name in names
    ]
    return len(sizes), sum(sizes)


def hash_of(path: Path) -> hashlib._Hash:
    """The SHA-256 of a file, which more can be added to."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest
