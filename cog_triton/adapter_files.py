"""Puts LoRA adapters into their directory and takes them out of it, while a server may be reading it.

A server looks for adapters anew with each request (``cog_triton.adapters``) and passes over names with a
dot before them: under such a name an adapter is copied, and under another it is deleted.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from cog_triton.adapters import CONFIG, WEIGHTS, is_whole
from cog_triton.errors import ConfigurationError
from cog_triton.request.limits import NAME_CHARACTERS


def place_adapter(name: str, files: Path, directory: Path) -> None:
    """Copies an adapter's files to ``directory``/``name``; takes the place of one of that name.

    Raises:
        ConfigurationError: they are no adapter's, or the name cannot be one's.
        OSError: they cannot be copied; what was there before is still there.
    """
    check_name(name)
    if not is_whole(files):
        raise ConfigurationError(
            f"{files} is no adapter: it needs {CONFIG} and {' or '.join(WEIGHTS)}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / f".{name}.{os.getpid()}"
    try:
        shutil.copytree(files, copy)
        with suppress(FileNotFoundError):
            _delete(directory / name)
        copy.rename(directory / name)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def remove_adapter(name: str, directory: Path) -> None:
    """Deletes an adapter's files.

    Raises:
        ConfigurationError: there is none of that name.
        OSError: they cannot be deleted.
    """
    check_name(name)
    try:
        _delete(directory / name)
    except FileNotFoundError:
        raise ConfigurationError(f"there is no adapter {name!r} in {directory}") from None


def check_name(name: str) -> None:
    """Refuses what cannot be an adapter's name.

    Raises:
        ConfigurationError: it is empty, too long, no directory's, or hidden.
    """
    if not 0 < len(name) <= NAME_CHARACTERS or name.startswith(".") or Path(name).name != name:
        raise ConfigurationError(
            f"an adapter's name must be a directory's of at most {NAME_CHARACTERS} characters, with no "
            f"dot before it, not {name!r}"
        )


def _delete(adapter: Path) -> None:
    """Deletes a directory that is gone for everyone at once; a link is deleted and not what it leads to."""
    gone = adapter.with_name(f".{adapter.name}.{os.getpid()}.gone")
    adapter.rename(gone)
    if gone.is_symlink():
        gone.unlink()
    else:
        shutil.rmtree(gone)
