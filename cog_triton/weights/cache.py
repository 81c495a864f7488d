"""The cache of tar files, downloaded or local, that are unpacked.

Each has a directory, named after the SHA-256 of its URL or path:

    fetched.json    which tree is current, and of which version of the file; written last
    tree-…/         the files
    download.tar    a download under way, or one that is not unpacked yet
    download.json   the version of the file that it is a part of
    unpack-…/       what a killed process leaves; removed by the next

The directory itself is locked, so that processes that want the same thing take turns. A new version
gets a tree of its own, and the old one is removed: a process that still reads the old one finds files
missing, never files of both.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cog_triton.errors import ConfigurationError
from cog_triton.processes import locked
from cog_triton.weights.files import (
    NoSpace,
    full_disk,
    read_record,
    root_of,
    size_text,
    tally,
    write_record,
)
from cog_triton.weights.partial import Partial, Unreachable
from cog_triton.weights.tar import unpack, unpacked_size
from cog_triton.weights.version import Version

logger = logging.getLogger(__name__)


class Fetched(BaseModel):
    """The marker of a complete tree."""

    model_config = ConfigDict(frozen=True)

    source: str  # for people; without secrets
    source_sha256: str
    version: Version
    sha256: str | None  # of the tar file; None if nothing needed it
    tree: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Archive:
    """A tar file that is there."""

    path: Path
    version: Version
    sha256: str | None
    downloaded: bool


def fetch_archive(
    source: str,
    shown: str,
    cache: Path,
    expected: str | None,
    get: Callable[[Path, Version | None], Archive | None],
) -> Path:
    """Return the unpacked files of a tar file, those in the cache if ``get`` returns None."""
    key = hashlib.sha256(source.encode()).hexdigest()
    entry = cache.expanduser().absolute() / key
    entry.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        logger.info("waiting for another process to fetch %s", shown)

    with locked(entry, waiting), _room(entry, shown):
        fetched = _read_fetched(entry)
        _remove_leftovers(entry, fetched)
        if fetched and expected and fetched.sha256 == expected:
            return root_of(entry / fetched.tree)
        # A copy that is not what the checksum says is no copy, whatever the server says.
        known = None if expected else fetched
        try:
            archive = get(entry, known.version if known else None)
        except Unreachable as problem:
            if known is None:
                raise ConfigurationError(str(problem)) from None
            logger.warning("%s; using the copy fetched before", problem)
            archive = None
        if archive is not None:
            return _publish(archive, entry, key, shown, expected)
        assert known is not None
        return root_of(entry / known.tree)


@contextmanager
def _room(entry: Path, shown: str) -> Iterator[None]:
    # A full disk: make room, and say how much there is.
    try:
        with full_disk(lambda: None):
            yield
    except NoSpace as problem:
        Partial(entry).discard()
        free = shutil.disk_usage(entry).free
        raise ConfigurationError(
            no_space_problem(shown, entry.parent, problem.needed, free)
        ) from None


def no_space_problem(shown: str, cache: Path, needed: int | None, free: int) -> str:
    wanted = f"about {size_text(needed)}" if needed is not None else f"more than {size_text(free)}"
    return (
        f"no space left for {shown}: it needs {wanted} in {cache} while it is unpacked, and "
        f"{size_text(free)} is free; free some, or move the cache"
    )


def _publish(archive: Archive, entry: Path, key: str, shown: str, expected: str | None) -> Path:
    try:
        if expected is not None and archive.sha256 != expected:
            raise ConfigurationError(
                f"{shown} has the SHA-256 {archive.sha256}, not {expected}; the file or the checksum "
                "is not the one that was meant"
            )
        with tempfile.TemporaryDirectory(dir=entry, prefix="unpack-") as work:
            new = Path(work, "new")
            new.mkdir()
            with full_disk(lambda: _space_for(archive)):
                unpack(archive.path, new, shown)
            files, size = tally(new)
            if not files:
                raise ConfigurationError(f"{shown} holds no files; check how it was made")
            tree = entry / f"tree-{uuid.uuid4().hex[:12]}"
            new.rename(tree)
    except ConfigurationError:
        # It would be no better the next time. An interrupt, though, leaves it to be unpacked then.
        if archive.downloaded:
            Partial(entry).discard()
        raise
    fetched = Fetched(
        source=shown,
        source_sha256=key,
        version=archive.version,
        sha256=archive.sha256,
        tree=tree.name,
        files=files,
        bytes=size,
    )
    write_record(entry / "fetched.json", fetched)
    if archive.downloaded:
        Partial(entry).discard()
    _remove_leftovers(entry, fetched)
    return root_of(tree)


def _read_fetched(entry: Path) -> Fetched | None:
    fetched = read_record(Fetched, entry / "fetched.json")
    # Files may have gone since: directories for temporary files are swept file by file.
    if fetched and tally(entry / fetched.tree) == (fetched.files, fetched.bytes):
        return fetched
    return None


def _remove_leftovers(entry: Path, fetched: Fetched | None) -> None:
    for pattern in ("unpack-*", "pget-*", "tree-*"):
        for path in entry.glob(pattern):
            if fetched and path.name == fetched.tree:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _space_for(archive: Archive) -> int | None:
    size = unpacked_size(archive.path)
    if size is None:
        return None
    return size + (archive.path.stat().st_size if archive.downloaded else 0)
