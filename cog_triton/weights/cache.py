"""fetch(), and the cache of tar files, downloaded or local, that are unpacked.

Each tar file has a directory in the cache, named after the SHA-256 of its URL or path:

    fetched.json    which tree is current, and of which version of the file; written last
    tree-…/         the files
    download.tar    a download under way, or one that is not unpacked yet
    download.json   the version of the file that it is a part of
    unpack-…/       left by a killed process; removed by the next

The directory is locked. A new version gets a tree of its own, and the old one is removed: a process
that still reads the old one finds files missing, never files of both.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import tarfile
import tempfile
import uuid
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx
from pydantic import BaseModel
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.processes import locked
from cog_triton.weights.download import Download, Unreachable, Version, fetch_from_hub
from cog_triton.weights.tar import ZSTD, unpack

logger = logging.getLogger(__name__)


class Fetched(BaseModel, frozen=True):
    """The marker of a complete tree."""

    source: str  # for people; without secrets
    version: Version
    sha256: str | None  # of the tar file; None if no checksum was given
    tree: str
    files: int
    bytes: int


class LocalFile:
    """A tar file on this machine, with the interface of a ``Download``."""

    def __init__(self, path: Path) -> None:
        status = path.stat()
        etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"'
        self.path, self.version = path, Version(etag=etag, size=status.st_size)

    def run(self, current: Version | None) -> bool:
        return current is None or not current.is_same(self.version)


def fetch(
    source: str, *, cache: Path, checksum: str | None = None, token: str | None = None
) -> Path:
    """Return a local directory with the files that ``source`` names.

    A tar file (plain, or compressed with gzip, bzip2 or xz) is unpacked into the cache; if all of it
    is in one directory, that directory is returned. It is not fetched again while its server says
    that it is the same, or cannot be reached, or if the checksum is that of the copy.

    Args:
        source: a local directory or tar file, by path or file:// URL; the http(s):// URL of a tar
            file; or a Hugging Face id, org/name or org/name@revision. Paths that exist come first.
        cache: where tar files are unpacked; made if need be.
        checksum: SHA-256 of the tar file in hexadecimal, "sha256:" before it or not.
        token: access token for Hugging Face; the one that ``hf auth login`` keeps when None.

    Raises:
        ConfigurationError: there is nothing to return, with the reason and what to do.
    """
    expected = checksum.strip().lower().removeprefix("sha256:") if checksum else None
    if expected is not None and not re.fullmatch("[0-9a-f]{64}", expected):
        raise ConfigurationError(
            f"checksum {checksum!r} is not 64 hexadecimal digits, with or without sha256: before them"
        )
    try:
        if source.lower().startswith(("http://", "https://")):
            return _fetch_tar(source, display_url(source), cache, expected)
        path = local_path(source)
        if path.is_file():
            path = path.resolve()
            return _fetch_tar(path.as_uri(), str(path), cache, expected, path)
        if expected is not None:
            raise ConfigurationError(
                f"a checksum was given, but {source} is no tar file; for Hugging Face, pin a commit "
                "with org/name@commit"
            )
        directory = path if path.exists() else fetch_from_hub(source, token)
        if not directory.is_dir():
            raise ConfigurationError(f"{directory} is neither a file nor a directory")
        if not any(directory.iterdir()):
            raise ConfigurationError(f"{directory} is empty; it should hold the model's files")
        return directory
    except OSError as error:
        problem = f"{error.filename or cache}: {error.strerror or error}"
        raise ConfigurationError(f"the weights could not be fetched: {problem}") from None


def local_path(source: str) -> Path:
    """Return the path that ``source`` is, or names by a file: URL; it need not exist."""
    if source.lower().startswith("file:"):
        url = urlsplit(source)
        if url.netloc not in ("", "localhost"):
            raise ConfigurationError(f"{source} names another machine's file; write file:///path")
        return Path(url2pathname(url.path))
    scheme, separator, _ = source.partition("://")
    if separator:
        raise ConfigurationError(
            f"weights cannot be fetched by {scheme}://; give an https:// URL (a presigned one, for "
            "what is in a bucket), a path, or a Hugging Face id"
        )
    return Path(os.path.expanduser(source))


def display_url(url: str) -> str:
    """Return ``url`` without what may be secret: user, password, query and fragment."""
    try:
        if httpx.URL(url).host:
            parts = urlsplit(url)
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except (httpx.InvalidURL, ValueError):
        pass
    raise ConfigurationError("the URL of the weights is malformed; write https://host/path.tar")


def _fetch_tar(
    source: str, shown: str, cache: Path, expected: str | None, local: Path | None = None
) -> Path:
    zstd = shown.lower().endswith((".tar.zst", ".tzst"))
    if zstd and "zst" not in tarfile.TarFile.OPEN_METH:  # before the download
        raise ConfigurationError(f"{shown} {ZSTD}")
    entry = cache.expanduser().absolute() / hashlib.sha256(source.encode()).hexdigest()
    entry.mkdir(parents=True, exist_ok=True)
    with locked(entry, lambda: logger.info("waiting for another process to fetch %s", shown)):
        fetched = _read_fetched(entry)
        _sweep(entry, fetched)
        if expected and fetched and fetched.sha256 != expected:
            fetched = None  # whatever the server says of its version
        try:
            if fetched is None or not expected:
                file = LocalFile(local) if local else Download(source, shown, entry)
                if file.run(fetched.version if fetched else None):
                    fetched = _publish(file.path, file.version, entry, shown, expected)
        except Unreachable as problem:
            if fetched is None:
                raise ConfigurationError(str(problem)) from None
            logger.warning("%s; using the copy fetched before", problem)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _discard_download(entry)
            free = tqdm.format_sizeof(shutil.disk_usage(entry).free, "B")
            raise ConfigurationError(
                f"no space left for {shown} in {cache}, where {free} is free ({error.strerror}); free "
                "some, or move the cache"
            ) from None
        assert fetched is not None
        tree = entry / fetched.tree
        inside = [path for path in tree.iterdir() if not path.name.startswith("._")]  # of macOS
        if len(inside) == 1 and inside[0].is_dir() and not inside[0].is_symlink():
            return inside[0]
        return tree


def _publish(
    archive: Path, version: Version, entry: Path, shown: str, expected: str | None
) -> Fetched:
    try:
        digest = hashlib.sha256()
        with archive.open("rb") as file:
            while expected and (block := file.read(1 << 20)):
                digest.update(block)
        if expected and (found := digest.hexdigest()) != expected:
            raise ConfigurationError(
                f"{shown} has the SHA-256 {found}, not {expected}; the file or the checksum is wrong"
            )
        with tempfile.TemporaryDirectory(dir=entry, prefix="unpack-") as work:
            new = Path(work, "new")
            new.mkdir()
            unpack(archive, new, shown)
            files, size = _tally(new)
            if not files:
                raise ConfigurationError(f"{shown} holds no files; check how it was made")
            tree = entry / f"tree-{uuid.uuid4().hex[:12]}"
            new.rename(tree)
    except ConfigurationError:  # an interrupt leaves the download to be unpacked the next time
        _discard_download(entry)
        raise
    fetched = Fetched(
        source=shown, version=version, sha256=expected, tree=tree.name, files=files, bytes=size
    )
    marker = entry / "fetched.new"
    marker.write_text(fetched.model_dump_json(indent=2), encoding="utf-8")
    marker.replace(entry / "fetched.json")
    _discard_download(entry)
    _sweep(entry, fetched)
    return fetched


def _read_fetched(entry: Path) -> Fetched | None:
    try:
        fetched = Fetched.model_validate_json((entry / "fetched.json").read_bytes())
    except (OSError, ValueError):
        return None
    # Files may have gone since: directories for temporary files are swept file by file.
    whole = _tally(entry / fetched.tree) == (fetched.files, fetched.bytes)
    return fetched if whole else None


def _sweep(entry: Path, fetched: Fetched | None) -> None:
    for path in entry.iterdir():
        if fetched and path.name == fetched.tree:
            continue
        if path.name.startswith(("tree-", "unpack-")):
            shutil.rmtree(path)
        elif path.name.startswith("pget-"):
            path.unlink()


def _discard_download(entry: Path) -> None:
    for path in entry.glob("download.*"):
        path.unlink()


def _tally(tree: Path) -> tuple[int, int]:
    """Count the files in ``tree``, and their bytes."""
    paths = [Path(parent, name) for parent, _, names in os.walk(tree) for name in names]
    return len(paths), sum(path.lstat().st_size for path in paths)
