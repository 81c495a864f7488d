"""Gets a model's files from wherever they are: a directory, a tar file, a URL, Hugging Face.

What is downloaded is complete or absent. A tar file of a URL, or a local one, is unpacked in the
cache, in a directory named after the SHA-256 of its URL or path:

    fetched.json    which tree is current, and of which version of the file; written last
    tree-…/         the files
    download.tar    a download under way, or one that is not unpacked yet
    download.json   the version of the file that it is a part of
    unpack-…/       what a killed process leaves; removed by the next

The directory itself is locked, so that processes that want the same thing take turns. A new version
gets a tree of its own, and the old one is removed: a process that still reads the old one finds files
missing, never files of both.

What Hugging Face has goes into its own cache, where ``transformers`` and ``hf`` find it as well.

URLs may carry secrets, in a password or a signature. Messages, logs and files have them without
(:func:`display_url`); only ``pget``, which knows no other way, gets one on its command line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar, cast
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import httpx
from pydantic import BaseModel, ConfigDict
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.locks import locked

logger = logging.getLogger(__name__)

TIMEOUT = httpx.Timeout(60.0, connect=10.0)
TRIES = 5
"""Requests in a row that bring nothing new before a download fails."""
CHECK_TRIES = 2
"""The same while there is a copy to fall back on."""
BACKOFF = 0.5
"""Seconds before the second try; doubled before each one after it, up to MAX_BACKOFF."""
MAX_BACKOFF = 30.0
PROGRESS = 16 << 20
"""Bytes that must have come before failed tries are forgotten."""

UNUSED_FORMATS = ("original/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Second copies of the weights that repositories on Hugging Face hold for programs other than ours."""

_TRANSIENT = {408, 429, 500, 502, 503, 504}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_BLOCK = 1 << 20
_TAR_BLOCK = 512  # bytes of a header; the archive ends with a block of zeros
_ZSTD_PROBLEM = (
    "is compressed with zstd, which Python reads from 3.14 on; give a plain tar file or a .tar.gz"
)
# What tarfile raises for an archive that is damaged, or made to do damage.
_DAMAGE = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    OverflowError,
    RecursionError,
)
_HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>\S+))?", re.ASCII)
_HTTP_LOGGERS = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
)

Record = TypeVar("Record", bound=BaseModel)


def fetch(
    source: str,
    *,
    cache: Path,
    checksum: str | None = None,
    token: str | None = None,
    progress: bool = True,
) -> Path:
    """Returns a local directory with the files that ``source`` names.

    A directory is returned as it is. A tar file (plain, or compressed with gzip, bzip2 or xz) is
    unpacked into the cache; if all of it is in one directory, that directory is returned. A tar file
    that was fetched before is not fetched again while its server says that it is the same, or while
    the server cannot be reached; with a checksum, the server is not even asked. A server that gives
    neither ETag nor Last-Modified can say neither, and the file is fetched anew.

    Args:
        source: a local directory or tar file, by path or file:// URL; an http:// or https:// URL of a
            tar file; or a Hugging Face id, org/name or org/name@revision. What exists as a path is
            taken as one.
        cache: where tar files are downloaded and unpacked; made if need be. There must be room for
            the tar file and its contents at once.
        checksum: SHA-256 of the tar file in hexadecimal, "sha256:" before it or not.
        token: access token for Hugging Face; the one that ``hf auth login`` keeps when None.
        progress: whether downloads show a progress bar on stderr.

    Raises:
        ConfigurationError: there is nothing to return, with the reason and what to do.
    """
    expected = parse_checksum(checksum) if checksum else None
    try:
        if source.lower().startswith(("http://", "https://")):
            return _fetch_url(source, cache, expected, progress)
        path = local_path(source)
        if path.is_file():
            return _fetch_file(path, cache, expected)
        if expected is not None:
            raise ConfigurationError(
                f"a checksum was given, but {source} is no tar file; for Hugging Face, pin a commit "
                "with org/name@commit"
            )
        return _require_files(path) if path.exists() else _fetch_from_hub(source, token, progress)
    except OSError as error:
        problem = f"{error.filename or cache}: {error.strerror or error}"
        raise ConfigurationError(f"the weights could not be fetched: {problem}") from None


# What a source is


def parse_checksum(text: str) -> str:
    """The 64 lower-case hexadecimal digits of "sha256:<digits>" or "<digits>".

    Raises:
        ConfigurationError: it is neither.
    """
    digits = text.strip().lower().removeprefix("sha256:")
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ConfigurationError(
            f"checksum {text!r} is not 64 hexadecimal digits, with or without sha256: before them"
        )
    return digits


def local_path(source: str) -> Path:
    """The path that ``source`` is, or names by a file: URL; nothing need be there.

    Raises:
        ConfigurationError: the URL has another scheme, or names another machine.
    """
    if source.lower().startswith("file:"):
        url = urlsplit(source)
        if url.netloc not in ("", "localhost"):
            raise ConfigurationError(
                f"{source} names a file of another machine; write file:///path"
            )
        return Path(url2pathname(url.path))
    scheme, separator, _ = source.partition("://")
    if separator:
        raise ConfigurationError(
            f"weights cannot be fetched by {scheme}://; give an https:// URL (a presigned one, for "
            "what is in a bucket), a path, or a Hugging Face id"
        )
    return Path(os.path.expanduser(source))


def display_url(url: str) -> str:
    """``url`` without what may be secret: user, password, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _require_files(directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is neither a file nor a directory")
    if not any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is empty; it should hold the model's files")
    return directory


# Hugging Face


def _fetch_from_hub(source: str, token: str | None, progress: bool) -> Path:
    match = _HUB_ID.fullmatch(source)
    if not match:
        raise ConfigurationError(
            f"{source!r} is no file or directory that exists, and neither a URL nor a Hugging Face "
            "id (org/name or org/name@revision)"
        )
    # Imported here, because it takes a while and most deployments have their files in place.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Its errors are OSErrors, ValueErrors and those of its HTTP library, which changes with its
    # version.
    foreseen = cast("tuple[type[Exception], ...]", (ValueError, *HfHubHTTPError.__bases__))
    try:
        with _hub_progress(progress):
            found = snapshot_download(
                match["name"],
                revision=match["revision"],
                token=token,
                ignore_patterns=list(UNUSED_FORMATS),
            )
        return _require_files(Path(found))
    except foreseen as error:
        # Not from the error: nobody can tell whether its text has the token.
        raise ConfigurationError(hub_problem(error, source)) from None


def hub_problem(error: Exception, source: str) -> str:
    """What an error of huggingface_hub means for ``source``, and what to do about it."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{source} is gated: accept its terms on huggingface.co, and set a token (HF_TOKEN) of "
            "the account that did"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source}: Hugging Face has no such revision; check what follows the @"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{source} is no directory that exists here, and Hugging Face has no such repository or "
            "shows it to others only; check the name, or set a token (HF_TOKEN) that may read it"
        )
    if status in (401, 403):
        return (
            f"Hugging Face refuses access to {source} (HTTP {status}); check the token (HF_TOKEN)"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{source} is no valid Hugging Face id; write org/name or org/name@revision"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"no space left for {source} in the Hugging Face cache; free some, or set HF_HOME"
    if isinstance(error, errors.HfHubHTTPError):
        return f"Hugging Face answered HTTP {status} for {source}; try again later"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            f"{source} is no directory that exists here, nor complete in the Hugging Face cache, and "
            "Hugging Face cannot be reached or is turned off (HF_HUB_OFFLINE); check the network, or "
            "name a local directory"
        )
    return f"{source} could not be fetched from Hugging Face: {type(error).__name__}; try again"


@contextmanager
def _hub_progress(wanted: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# The cache


class Version(BaseModel):
    """What tells one version of a file from another; see RFC 9110, section 8.8."""

    model_config = ConfigDict(frozen=True)

    etag: str | None = None
    last_modified: str | None = None
    size: int | None = None  # bytes
    resume_with: str | None = None  # what If-Range takes: bytes of two versions must never be mixed

    @property
    def comparable(self) -> bool:
        """Whether there is anything to tell it by. A size says little: tar files are padded."""
        return self.etag is not None or self.last_modified is not None


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


class Notes(BaseModel):
    """What is known about a download under way."""

    model_config = ConfigDict(frozen=True)

    version: Version
    complete: bool


@dataclass(frozen=True)
class Archive:
    """A tar file that is there, and what is known about it."""

    path: Path
    version: Version
    sha256: str | None
    downloaded: bool


class _Unreachable(Exception):
    """The server did not answer; the text is a message for the user."""


class _Interrupted(Exception):
    """A request came to nothing, and another may not."""


class _NoSpace(Exception):
    def __init__(self, needed: int | None) -> None:
        super().__init__(needed)
        self.needed = needed


def same_version(one: Version, other: Version) -> bool:
    """Whether they are surely of the same file: by ETag, else by Last-Modified and size."""
    if one.etag is not None or other.etag is not None:
        return _weak(one.etag) == _weak(other.etag)
    if one.last_modified is None:
        return False
    return (one.last_modified, one.size) == (other.last_modified, other.size)


def _weak(etag: str | None) -> str | None:
    return etag and etag.removeprefix("W/")


def _fetch_url(url: str, cache: Path, expected: str | None, progress: bool) -> Path:
    try:
        shown, host = display_url(url), httpx.URL(url).host
    except (httpx.InvalidURL, ValueError):
        host = ""
    if not host:
        raise ConfigurationError("the URL of the weights is malformed; write https://host/path.tar")
    if _is_zstd_name(shown) and not _reads_zstd():
        raise ConfigurationError(f"{shown} {_ZSTD_PROBLEM}")

    def get(entry: Path, current: Version | None) -> Archive | None:
        partial = Partial(entry)
        if not Download(url, shown, partial, current, progress).run():
            return None
        return Archive(partial.path, partial.version, partial.sha256(), downloaded=True)

    return _fetch_archive(url, shown, cache, expected, get)


def _fetch_file(path: Path, cache: Path, expected: str | None) -> Path:
    path = path.resolve()

    def get(_: Path, current: Version | None) -> Archive | None:
        found = path.stat()
        etag = f'"{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ino:x}"'
        version = Version(etag=etag, size=found.st_size)
        if current and same_version(version, current):
            return None
        digest = _hash(path).hexdigest() if expected else None
        return Archive(path, version, digest, downloaded=False)

    return _fetch_archive(path.as_uri(), str(path), cache, expected, get)


def _fetch_archive(
    source: str,
    shown: str,
    cache: Path,
    expected: str | None,
    get: Callable[[Path, Version | None], Archive | None],
) -> Path:
    """Returns the unpacked files of a tar file, those in the cache if ``get`` returns None."""
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
        except _Unreachable as problem:
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
    """Makes a full disk less full, and an error that says how full it is."""
    try:
        with _full_disk(lambda: None):
            yield
    except _NoSpace as problem:
        Partial(entry).discard()
        free = shutil.disk_usage(entry).free
        message = no_space_problem(shown, entry.parent, problem.needed, free)
        raise ConfigurationError(message) from None


def no_space_problem(shown: str, cache: Path, needed: int | None, free: int) -> str:
    """The message for a full disk; sizes in bytes."""
    wanted = f"about {_size(needed)}" if needed is not None else f"more than {_size(free)}"
    return (
        f"no space left for {shown}: it needs {wanted} in {cache} while it is unpacked, and "
        f"{_size(free)} is free; free some, or move the cache"
    )


def root_of(tree: Path) -> Path:
    """The only directory in ``tree`` if there is nothing beside it, else ``tree``."""
    entries = [entry for entry in tree.iterdir() if not entry.name.startswith("._")]  # of macOS
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        return entries[0]
    return tree


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
            with _full_disk(lambda: _space_for(archive)):
                unpack(archive.path, new, shown)
            files, size = _tally(new)
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
    _write(entry / "fetched.json", fetched)
    if archive.downloaded:
        Partial(entry).discard()
    _remove_leftovers(entry, fetched)
    return root_of(tree)


def _read_fetched(entry: Path) -> Fetched | None:
    fetched = _read(Fetched, entry / "fetched.json")
    # Files may have gone since: directories for temporary files are swept file by file.
    if fetched and _tally(entry / fetched.tree) == (fetched.files, fetched.bytes):
        return fetched
    return None


def _tally(tree: Path) -> tuple[int, int]:
    sizes = [
        Path(directory, name).lstat().st_size
        for directory, _, names in os.walk(tree)
        for name in names
    ]
    return len(sizes), sum(sizes)


def _remove_leftovers(entry: Path, fetched: Fetched | None) -> None:
    for pattern in ("unpack-*", "pget-*", "tree-*"):
        for path in entry.glob(pattern):
            if fetched and path.name == fetched.tree:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _read(model: type[Record], path: Path) -> Record | None:
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, record: BaseModel) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record.model_dump(), indent=2) + "\n", encoding="utf-8")
    new.replace(path)


@contextmanager
def _full_disk(needed: Callable[[], int | None]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _NoSpace(needed()) from None


def _space_for(archive: Archive) -> int | None:
    size = unpacked_size(archive.path)
    if size is None:
        return None
    return size + (archive.path.stat().st_size if archive.downloaded else 0)


def _size(count: int) -> str:
    return str(tqdm.format_sizeof(count, "B"))


def _hash(path: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest


# Downloading


class Partial:
    """A file that is being downloaded, as far as it has come: in this process or one before it."""

    def __init__(self, entry: Path) -> None:
        self.path = entry / "download.tar"
        self._notes = entry / "download.json"
        notes = _read(Notes, self._notes) if self.path.is_file() else None
        self.version = notes.version if notes else Version()
        self.size = self.path.stat().st_size if notes else 0
        whole = self.version.size in (None, self.size)
        self.complete = notes is not None and notes.complete and whole
        self._digest: hashlib._Hash | None = None

    def restart(self, version: Version) -> None:
        """Begins anew, with the first byte of ``version``."""
        self.discard()
        self.path.touch()
        self.version = version
        self._note()

    def receive(self, chunks: Iterable[bytes]) -> None:
        """Appends what comes; what came before an error stays.

        Raises:
            _Interrupted: that was not all.
        """
        self._digest = self._digest or _hash(self.path)
        with self.path.open("ab") as file:
            for chunk in chunks:
                file.write(chunk)
                self._digest.update(chunk)
                self.size += len(chunk)
        self._finish()

    def adopt(self, file: Path, version: Version) -> None:
        """Takes a whole file that something else has downloaded.

        Raises:
            _Interrupted: it is not whole.
        """
        self.restart(version)
        file.replace(self.path)
        self.size = self.path.stat().st_size
        self._finish()

    def sha256(self) -> str:
        """The SHA-256 of what has come so far, in hexadecimal."""
        self._digest = self._digest or _hash(self.path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Removes it."""
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)
        self.version, self.size, self.complete, self._digest = Version(), 0, False, None

    def _finish(self) -> None:
        if self.version.size not in (None, self.size):
            expected = self.version.size
            problem = f"{_size(self.size)} of {_size(expected or 0)} came"
            if self.size > (expected or 0):
                self.discard()
            raise _Interrupted(problem)
        self.complete = True
        self._note()

    def _note(self) -> None:
        _write(self._notes, Notes(version=self.version, complete=self.complete))


class Download:
    """Brings a URL's file into ``partial``, unless it is still the version that is ``current``."""

    def __init__(
        self, url: str, shown: str, partial: Partial, current: Version | None, progress: bool
    ) -> None:
        self._url = url
        self._shown = shown
        self._partial = partial
        self._current = current
        self._progress = progress
        self._pget = shutil.which("pget") is not None
        self._answered = False

    def run(self) -> bool:
        """Returns whether there is a new file.

        Raises:
            ConfigurationError: the server refuses, or what it sends ends early again and again.
            _Unreachable: the server does not answer.
            _NoSpace: the disk is full.
        """
        failures, most = 0, self._partial.size
        with _quiet(_HTTP_LOGGERS), _client() as client:
            while True:
                try:
                    return self._try(client)
                except _Interrupted as problem:
                    if self._partial.size >= most + PROGRESS:
                        failures, most = 0, self._partial.size
                    failures += 1
                    if failures >= self._tries:
                        self._give_up(str(problem))
                    logger.warning("%s: %s; trying again", self._shown, problem)
                time.sleep(min(BACKOFF * 2 ** (failures - 1), MAX_BACKOFF))

    @property
    def _tries(self) -> int:
        return TRIES if self._current is None or self._answered else CHECK_TRIES

    def _give_up(self, reason: str) -> None:
        if not self._answered:
            raise _Unreachable(
                f"{self._shown} cannot be reached ({reason}); check the URL and the network"
            )
        kept = " from where it stopped" if self._partial.version.resume_with else ""
        raise ConfigurationError(
            f"the download of {self._shown} ended early {self._tries} times ({reason}); start again "
            f"to go on{kept}"
        )

    def _try(self, client: httpx.Client) -> bool:
        partial = self._partial
        headers = request_headers(partial, self._current)
        with (
            _http_errors(self._shown),
            client.stream("GET", self._url, headers=headers) as response,
        ):
            check_status(response.status_code, self._shown)
            version, start = version_of(response.headers, partial=response.status_code == 206)
            step = next_step(response.status_code, version, start, partial, self._current)
            if step == "again":
                partial.discard()
                raise _Interrupted(f"HTTP {response.status_code} for another part than asked for")
            self._answered = True
            if step in ("unchanged", "complete"):
                return step == "complete"
            if step == "restart":
                partial.restart(version)
            self._check_space()
            if step == "resume" or not self._pget:
                self._receive(response)
                return True
        return self._run_pget(client, version)

    def _receive(self, response: httpx.Response) -> None:
        total = self._partial.version.size
        with (
            _full_disk(self._space),
            _bar(self._shown, self._partial.size, total, self._progress) as bar,
        ):
            # Raw: a tar.gz is a tar.gz, also when the server calls the gzip an encoding.
            self._partial.receive(_counted(response.iter_raw(), bar))

    def _run_pget(self, client: httpx.Client, version: Version) -> bool:
        self._pget = False
        # A name of its own, since pget outlives a killed parent, and would write beside the next.
        target = self._partial.path.with_name(f"pget-{uuid.uuid4().hex[:12]}")
        logger.info("downloading %s with pget", self._shown)
        try:
            status = _run_silently(pget_command(self._url, target))
            if status != 0 or not target.is_file():
                raise _Interrupted(f"pget ended with status {status} and is left out")
            self._partial.adopt(target, version)
        except _Interrupted:
            # Nothing to go on from: it does not write from the start to the end.
            self._partial.discard()
            target.unlink(missing_ok=True)
            raise
        # Its many connections may have brought parts of two versions, if the file changed meanwhile.
        return self._try(client) if version.comparable else True

    def _check_space(self) -> None:
        needed = self._space()
        free = shutil.disk_usage(self._partial.path.parent).free
        if needed is not None and free < needed - self._partial.size:
            raise _NoSpace(needed)

    def _space(self) -> int | None:
        # The file and what is in it, which is no less, compressed or not.
        size = self._partial.version.size
        return None if size is None else 2 * size


def _run_silently(command: list[str]) -> int:
    # What it prints has the URL.
    null = subprocess.DEVNULL
    return subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False).returncode


def pget_command(url: str, target: Path) -> list[str]:
    """The command that downloads ``url`` to the file ``target`` with replicate/pget.

    Without its ``-x``: it would unpack whatever the archive says, wherever that says.
    """
    return ["pget", "--force", "--log-level", "error", url, str(target)]


def request_headers(partial: Partial, current: Version | None) -> dict[str, str]:
    """The headers that ask for what is missing, and for nothing if nothing has changed."""
    if partial.complete:
        return {"If-None-Match": partial.version.etag} if partial.version.etag else {}
    if partial.size and partial.version.resume_with:
        return {"Range": f"bytes={partial.size}-", "If-Range": partial.version.resume_with}
    # No If-Modified-Since: an older file may take the place of a newer one.
    return {"If-None-Match": current.etag} if current and current.etag else {}


def next_step(
    status: int, version: Version, start: int | None, partial: Partial, current: Version | None
) -> Literal["unchanged", "complete", "resume", "restart", "again"]:
    """What a response says: the copy or the download is what the server has, or what comes now.

    Args:
        status: one that ``check_status`` lets pass.
        version: of the whole file, as the response tells.
        start: the first byte that the response has, if it tells.
        partial: the download so far.
        current: the version of the copy in the cache.
    """
    if status == 304:
        if partial.complete:
            return "complete"
        return "unchanged" if current else "again"
    if status == 206:
        same = version.etag is None or version.etag == partial.version.etag
        fits = start == partial.size and version.size in (None, partial.version.size)
        return "resume" if same and fits and partial.size else "again"
    if status == 416:
        return "again"
    if current and same_version(version, current):
        return "unchanged"
    if partial.complete and same_version(version, partial.version):
        return "complete"
    return "restart"


def version_of(headers: Mapping[str, str], *, partial: bool) -> tuple[Version, int | None]:
    """The version of the whole file that a response is about, and its first byte if it is a part."""
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    size, start = headers.get("Content-Length", ""), None
    if partial:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
        start, size = (int(match[1]), match[2]) if match else (None, "")
    return Version(
        etag=etag,
        last_modified=modified,
        size=int(size) if size.isdecimal() else None,
        resume_with=_strong(etag, modified, headers.get("Date")),
    ), start


def _strong(etag: str | None, modified: str | None, date: str | None) -> str | None:
    if etag is not None:
        return None if etag.startswith("W/") else etag
    # Within one second, a file may change and its date may not (RFC 9110, section 8.8.2.2).
    if modified is None or date is None:
        return None
    try:
        age = parsedate_to_datetime(date) - parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return None
    return modified if age.total_seconds() >= 1 else None


def check_status(status: int, shown: str) -> None:
    """Lets pass what has or concerns the file.

    Raises:
        ConfigurationError: the server refuses.
        _Interrupted: it may not refuse the next time.
    """
    if status in (200, 206, 304, 416):
        return
    if status in _TRANSIENT:
        raise _Interrupted(f"HTTP {status}")
    advice = {
        401: "it asks for a login; put user:password@ before the host, or give a presigned URL",
        403: "access is refused; a presigned URL may have expired, so make a new one",
        404: "there is no such file; check the URL",
        410: "the file is gone; check the URL",
    }.get(status, "it sends no file; check the URL")
    raise ConfigurationError(f"{shown} answered HTTP {status}: {advice}")


def _client() -> httpx.Client:
    # Compression would change the bytes that a range counts.
    headers = {"User-Agent": "cog-triton", "Accept-Encoding": "identity"}
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers)


@contextmanager
def _http_errors(shown: str) -> Iterator[None]:
    """Maps the errors of httpx. Their texts are used only where they cannot have a URL."""
    try:
        yield
    except httpx.TimeoutException:
        raise _Interrupted("timed out") from None
    except httpx.ConnectError as error:
        raise _Interrupted(str(error) or "no connection") from None
    except httpx.UnsupportedProtocol:
        raise ConfigurationError(f"{shown} redirects to something other than HTTP") from None
    except httpx.TransportError:
        raise _Interrupted("the connection broke") from None
    except httpx.TooManyRedirects:
        raise ConfigurationError(f"{shown} redirects in a circle; check the URL") from None


@contextmanager
def _quiet(names: Iterable[str]) -> Iterator[None]:
    """Keeps these loggers from what this thread does: they log whole URLs, and headers."""
    thread = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addFilter(elsewhere)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(elsewhere)


def _bar(shown: str, done: int, total: int | None, wanted: bool) -> tqdm:
    # In a log file each refresh is a line of its own.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        desc=f"Downloading {unquote(PurePosixPath(shown).name)}",
        initial=done,
        total=total,
        unit="B",
        unit_scale=True,
        mininterval=interval,
        disable=not wanted,
    )


def _counted(chunks: Iterable[bytes], bar: tqdm) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        bar.update(len(chunk))


# Unpacking


class UnsafeMember(Exception):
    """A member of a tar file that could reach outside the directory it is unpacked in."""


class Layout:
    """What the members of a tar file, one after the other, make of a directory.

    ``place`` goes by names alone. That is sound because it lets no name and no link's target lead
    *through* a link, whichever comes first, and nothing take the place of something else: then each
    ".." goes where it seems to. tarfile's own filter has let such members pass before.
    """

    def __init__(self) -> None:
        self._files: set[PurePosixPath] = set()
        self._links: set[PurePosixPath] = set()
        self._directories: set[PurePosixPath] = set()  # or what must be one, if it is there

    def place(self, member: tarfile.TarInfo) -> PurePosixPath:
        """Takes note of a member, and returns where it goes.

        Raises:
            UnsafeMember: it is none of the above, or neither file, directory nor link.
        """
        path = _inside(member.name)
        through = set(path.parents)
        if member.issym():
            through |= _steps(path.parent, member.linkname)
        elif member.islnk():
            if _inside(member.linkname) not in self._files:
                raise UnsafeMember(f"links to {member.linkname!r}, which is no file before it")
        elif not (member.isreg() or member.isdir()):
            raise UnsafeMember("is a device or a pipe")
        if self._is_taken(path, member):
            raise UnsafeMember("is in the place of another")
        if through & (self._links | self._files):
            raise UnsafeMember("leads through a link or a file")
        self._directories |= through
        if member.isdir():
            self._directories.add(path)
        else:
            (self._links if member.issym() else self._files).add(path)
        return path

    def _is_taken(self, path: PurePosixPath, member: tarfile.TarInfo) -> bool:
        if member.isdir():
            return path in self._files or path in self._links
        if not path.name or path in self._directories or path in self._links:
            return True
        return path in self._files and not member.isreg()  # a newer one of an older file may come


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute():
        raise UnsafeMember(f"has the absolute name {name!r}")
    if ".." in path.parts:
        raise UnsafeMember(f"has .. in the name {name!r}")
    if "\0" in name:
        raise UnsafeMember("has a NUL in its name")
    return path


def _steps(directory: PurePosixPath, target: str) -> set[PurePosixPath]:
    """The directories that lead to a symbolic link's target, which is itself not one of them."""
    if target.startswith("/") or "\0" in target:
        raise UnsafeMember(f"links to the absolute path {target!r}")
    steps, at = set(), directory
    for part in PurePosixPath(target).parts:
        steps.add(at)
        if part == ".." and not at.name:
            raise UnsafeMember(f"links to {target!r}, outside the directory")
        at = at.parent if part == ".." else at / part
    return steps


def unpack(archive: Path, directory: Path, shown: str) -> None:
    """Unpacks a tar file into an empty directory, which on an error is left as it is by then.

    Raises:
        ConfigurationError: it is no tar file, not all of one, or has an unsafe member.
        OSError: the disk is at fault.
    """
    layout, opened, name = Layout(), False, ""
    try:
        with tarfile.open(archive) as tar:
            opened = True
            for member in tar:
                name = member.name
                _extract(tar, member, layout.place(member), directory)
            _require_end(tar)
    except UnsafeMember as error:
        raise ConfigurationError(
            f"{shown} is not unpacked: its member {name!r} {error}; make the tar file without it"
        ) from None
    except _DAMAGE as error:
        problem = f"is cut short or damaged ({error})" if opened else _not_a_tar(archive)
        raise ConfigurationError(f"{shown} {problem}") from None
    except OSError as error:
        if error.errno is None:  # gzip's and bz2's word for damage
            raise ConfigurationError(f"{shown} is damaged ({error})") from None
        raise


def unpacked_size(archive: Path) -> int | None:
    """Bytes of the files in a tar file; None if it cannot be read to its end."""
    try:
        with tarfile.open(archive) as tar:
            return sum(member.size for member in tar)
    except (*_DAMAGE, OSError):
        return None


def _extract(
    tar: tarfile.TarFile, member: tarfile.TarInfo, path: PurePosixPath, directory: Path
) -> None:
    member = copy(member)
    member.name = str(path)  # without the dots that ``path`` does not count
    if member.islnk():
        member.linkname = str(PurePosixPath(member.linkname))
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, directory, filter="data")
    else:
        # Python 3.10 before 3.10.12: no owner, no set-user-id, nothing that others may write.
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        tar.extract(member, directory)
    if not os.path.lexists(directory / path):  # which tarfile may leave at that
        raise tarfile.ExtractError(f"{member.name!r} could not be made")


def _require_end(tar: tarfile.TarFile) -> None:
    # tarfile takes a missing or damaged header for the end of the archive.
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
        raise tarfile.ReadError("no end of archive")
    while file.read(_BLOCK):  # to where gzip has its checksum
        pass


def _not_a_tar(archive: Path) -> str:
    with archive.open("rb") as file:
        head = file.read(_TAR_BLOCK)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return _ZSTD_PROBLEM
    if head.lstrip().startswith(b"<"):
        return "is a web page instead of a tar file; check the URL"
    return "is no tar file, or cut short; check what it is"


def _is_zstd_name(name: str) -> bool:
    return name.lower().endswith((".tar.zst", ".tzst"))


def _reads_zstd() -> bool:
    return "zst" in tarfile.TarFile.OPEN_METH  # Python 3.14
