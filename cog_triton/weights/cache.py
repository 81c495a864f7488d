"""fetch(), and the cache of tar files, downloaded or local, that are unpacked inside their directory.

Each tar file has a directory in the cache, named after the SHA-256 of its URL or path:

    fetched.json    which tree is current, and of which version of the file; written last
    tree-…/         the files; what a killed process left of others is removed by the next
    download.tar    a download under way, or one that is not unpacked yet
    download.json   the version of the file that it is a part of

The directory is locked. A new version gets a tree of its own, and the old one is removed: a process
that still reads the old one finds files missing, never files of both.
"""

import errno
import hashlib
import logging
import lzma
import os
import re
import shutil
import tarfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx
from pydantic import BaseModel
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.processes import locked, write_whole
from cog_triton.redaction import name_of_url, shown_url
from cog_triton.weights import gguf
from cog_triton.weights.download import Download, Unreachable, Version
from cog_triton.weights.hub import fetch_from_hub

logger = logging.getLogger(__name__)

# The beginnings of names in an entry: what a killed process may have left, and a download.
_LEFTOVERS = ("tree-", "pget-")
_DOWNLOAD = ("download.",)
_MARKER = "fetched.json"
ZSTD = "is compressed with zstd, which requires Python 3.14; use a .tar or .tar.gz file"
# Exceptions beside tarfile's own for an archive that is damaged, or made to do damage.
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError)
_PYTHON_ERRORS = (ValueError, LookupError, OverflowError, RecursionError)
# How many directories there may be above a tar file's model.
DEEPEST_MODEL = 4
# The limit of a file's name in characters, without its suffix.
LONGEST_NAME = 200
# Bytes of a header. The archive ends with a block of zeros.
_BLOCK = 512
_MEGABYTE = 1 << 20


class Fetched(BaseModel, frozen=True):
    """The marker of a complete tree.

    Attributes:
        source: for people; without secrets.
        sha256: the checksum of the tar file; None if none was expected.
        files, bytes: what the tree holds, to notice if files have gone since.
    """

    source: str
    version: Version
    sha256: str | None
    tree: str
    files: int
    bytes: int


@dataclass(frozen=True)
class _Source:
    """A file to fetch.

    Attributes:
        url: what the entry of the cache is named after.
        shown: the same for people, without secrets.
        checksum: the expected SHA-256 in hexadecimal.
        path: of a local file; None for a URL.
    """

    url: str
    shown: str
    checksum: str | None
    path: Path | None = None


@dataclass(frozen=True)
class _Current:
    """The file as it is now.

    Attributes:
        has_changed: it is not the version that was unpacked before.
    """

    file: Path
    version: Version
    has_changed: bool


def fetch(
    source: str, *, cache: Path, checksum: str | None = None, token: str | None = None
) -> Path:
    """Return a local directory with the files that ``source`` names, or raise ConfigurationError.

    From a repository of GGUF files, the path of one is returned instead.

    A tar file (plain, or compressed with gzip, bzip2 or xz) is unpacked into the cache, and the
    directory of the model in it is returned (see ``model_directory``). It is not fetched again while
    its server says that it is the same, or cannot be reached, or if the checksum is that of the copy.

    Args:
        source: a local directory or tar file, by path or file:// URL; the http(s):// URL of a tar
            or GGUF file; or a Hugging Face id, see ``hub.fetch_from_hub``. Paths that exist come first.
        cache: where tar files are unpacked; made if need be.
        checksum: SHA-256 of the tar file in hexadecimal, "sha256:" before it or not.
        token: access token for Hugging Face; the one that ``hf auth login`` keeps when None.
    """
    expected = None if checksum is None else _parsed_checksum(checksum)
    try:
        if source.lower().startswith(("http://", "https://")):
            return _fetch_file(_Source(source, display_url(source), expected), cache)
        path = local_path(source)
        if path.is_file():
            path = path.resolve()
            return _fetch_file(_Source(path.as_uri(), str(path), expected, path), cache)
        if expected is not None:
            raise ConfigurationError(
                f"WEIGHTS_SHA256 is set, but {shown_url(source)} is not a tar file; to pin a Hugging Face "
                "model, use org/name@commit"
            )
        fetched = path if path.exists() else fetch_from_hub(source, token)
        # A repository of GGUF files gives a file.
        if not fetched.is_file():
            _check_directory(fetched)
        return fetched
    except OSError as error:
        problem = f"{error.filename or cache}: {error.strerror or error}"
        raise ConfigurationError(f"the weights could not be fetched: {problem}") from None


def _parsed_checksum(checksum: str) -> str | None:
    """Return a checksum in lower case without its prefix; None for an empty one."""
    if not checksum:
        return None
    parsed = checksum.strip().lower().removeprefix("sha256:")
    if not re.fullmatch("[0-9a-f]{64}", parsed):
        raise ConfigurationError(
            f"the checksum {checksum!r} is not valid; use 64 hexadecimal digits, optionally after sha256:"
        )
    return parsed


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is neither a file nor a directory")
    if not any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is empty; it should contain the model's files")


def local_path(source: str) -> Path:
    """Return the path that ``source`` is, or names by a file: URL; it need not exist."""
    if source.lower().startswith("file:"):
        url = urlsplit(source)
        if url.netloc not in ("", "localhost"):
            raise ConfigurationError(
                f"{shown_url(source)} is a file on another machine; write file:///path"
            )
        return Path(url2pathname(url.path))
    scheme, separator, _ = source.partition("://")
    if separator:
        raise ConfigurationError(
            f"weights cannot be fetched from {scheme}:// URLs; use an https:// URL (for a bucket, a "
            "presigned one), a path, or a Hugging Face id"
        )
    return Path(os.path.expanduser(source))


def display_url(url: str) -> str:
    """Return ``url`` without what may be secret: user, password, query and fragment."""
    with suppress(httpx.InvalidURL, ValueError):
        if httpx.URL(url).host and urlsplit(url).netloc:
            return shown_url(url)
    raise ConfigurationError("the URL of the weights is malformed; write https://host/path.tar")


def _fetch_file(source: _Source, cache: Path) -> Path:
    """Return the directory of the model in a tar or GGUF file, unpacked into the cache if need be."""
    shown = source.shown
    # What cannot be used is refused before the download.
    is_zstd = shown.lower().endswith((".tar.zst", ".tzst"))
    if is_zstd and "zst" not in tarfile.TarFile.OPEN_METH:
        raise ConfigurationError(f"{shown} {ZSTD}")
    gguf.refuse_split(shown, [_gguf_name(shown)])
    entry = cache.expanduser().absolute() / hashlib.sha256(source.url.encode()).hexdigest()
    entry.mkdir(parents=True, exist_ok=True)
    with locked(entry, lambda: logger.info("waiting for another process to fetch %s", shown)):
        try:
            fetched = _update(source, entry)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _remove(entry, _DOWNLOAD)
            free = tqdm.format_sizeof(shutil.disk_usage(entry).free, "B")
            raise ConfigurationError(
                f"not enough disk space for {shown} in {cache}: {free} free, {error.strerror}; free some "
                "space, or set WEIGHTS_CACHE to another disk"
            ) from None
        return model_directory(entry / fetched.tree)


def _update(source: _Source, entry: Path) -> Fetched:
    """Return the tree of the current version of a file, which is fetched unless it is there."""
    fetched = _read_fetched(entry)
    _remove(entry, _LEFTOVERS, but=fetched)
    if fetched is not None and source.checksum is not None:
        if fetched.sha256 == source.checksum:
            return fetched
        # Whatever the server says of its version.
        fetched = None
    known = None if fetched is None else fetched.version
    try:
        current = _download(source, entry, known) if source.path is None else _local(source, known)
        if fetched is None or current.has_changed:
            fetched = _publish(current, entry, source)
    except Unreachable as problem:
        if fetched is None:
            raise ConfigurationError(str(problem)) from None
        logger.warning("%s; using the copy downloaded earlier", problem)
    return fetched


def _local(source: _Source, known: Version | None) -> _Current:
    assert source.path is not None
    status = source.path.stat()
    etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"'
    version = Version(etag=etag, size=status.st_size)
    has_changed = known is None or not known.is_same(version)
    return _Current(source.path, version, has_changed)


def _download(source: _Source, entry: Path, known: Version | None) -> _Current:
    download = Download(source.url, source.shown, entry)
    has_changed = download.run(known)
    return _Current(download.path, download.version, has_changed)


def model_directory(tree: Path) -> Path:
    """Return the directory of the model in an unpacked tar file.

    Tar files have it at their top, below directories that hold nothing else, or beside a README. It is the
    only directory of its level that holds a model, else all that is in a single directory, else the top.
    """
    level = [tree]
    for _ in range(DEEPEST_MODEL + 1):
        models = [directory for directory in level if _holds_model(directory)]
        if len(models) == 1:
            return models[0]
        if models:
            break
        level = [inner for directory in level for inner in _directories(directory)]
    inside = [path for path in tree.iterdir() if not _is_metadata(path)]
    if len(inside) == 1 and inside[0].is_dir() and not inside[0].is_symlink():
        return inside[0]
    return tree


def _holds_model(directory: Path) -> bool:
    if any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        return True
    patterns = ("*.engine", "engine/*.engine", "*.gguf")
    return any(any(directory.glob(pattern)) for pattern in patterns)


def _directories(directory: Path) -> list[Path]:
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_dir() and not path.is_symlink() and not _is_metadata(path)
    )


def _is_metadata(path: Path) -> bool:
    """Return whether macOS has added a file to an archive."""
    return path.name.startswith("._") or path.name == "__MACOSX"


def _publish(current: _Current, entry: Path, source: _Source) -> Fetched:
    """Unpack a file into a new tree, and make that the current one."""
    tree = entry / f"tree-{uuid.uuid4().hex[:12]}"
    tree.mkdir()
    try:
        if source.checksum is not None:
            _check_checksum(current.file, source)
        if gguf.has_magic(current.file):
            _copy(current.file, tree / _gguf_name(source.shown))
        else:
            unpack(current.file, tree, source.shown)
        files, size = _tally(tree)
        if not files:
            raise ConfigurationError(f"{source.shown} contains no files; check how it was created")
    except BaseException as error:
        shutil.rmtree(tree)
        # After other errors, the download is unpacked the next time.
        if isinstance(error, ConfigurationError):
            _remove(entry, _DOWNLOAD)
        raise
    fetched = Fetched(
        source=source.shown,
        version=current.version,
        sha256=source.checksum,
        tree=tree.name,
        files=files,
        bytes=size,
    )
    write_whole(entry / _MARKER, fetched.model_dump_json(indent=2))
    _remove(entry, _LEFTOVERS + _DOWNLOAD, but=fetched)
    return fetched


def _check_checksum(file: Path, source: _Source) -> None:
    """Raise ConfigurationError unless a file has the expected checksum."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for block in iter(partial(opened.read, _MEGABYTE), b""):
            digest.update(block)
    if digest.hexdigest() != source.checksum:
        raise ConfigurationError(
            f"{source.shown} has the SHA-256 checksum {digest.hexdigest()}, not {source.checksum}; the "
            "file or WEIGHTS_SHA256 is wrong"
        )


def _gguf_name(shown: str) -> str:
    """Return a name for the GGUF file of a URL: the last part of its path, with the suffix."""
    name = re.sub(r"[^\w.+-]", "_", name_of_url(shown))[:LONGEST_NAME]
    return name if name.lower().endswith(gguf.SUFFIX) else f"{name}{gguf.SUFFIX}"


def _copy(file: Path, copy: Path) -> None:
    """Copy a file, without taking its place on the disk again where links can be made."""
    try:
        os.link(file, copy)
    except OSError:
        # It is another file system, or one without links.
        shutil.copyfile(file, copy)


def _read_fetched(entry: Path) -> Fetched | None:
    with suppress(OSError, ValueError):
        fetched = Fetched.model_validate_json((entry / _MARKER).read_bytes())
        # Files may have gone since: directories for temporary files are swept file by file.
        if _tally(entry / fetched.tree) == (fetched.files, fetched.bytes):
            return fetched
    return None


def _remove(entry: Path, prefixes: tuple[str, ...], but: Fetched | None = None) -> None:
    """Remove the files and directories whose names begin with one of the prefixes, but for one tree."""
    kept = None if but is None else but.tree
    for path in entry.iterdir():
        if not path.name.startswith(prefixes) or path.name == kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _tally(tree: Path) -> tuple[int, int]:
    """Return the number of files in a tree, and of their bytes."""
    paths = [Path(parent, name) for parent, _, names in os.walk(tree) for name in names]
    return len(paths), sum(path.lstat().st_size for path in paths)


def unpack(archive: Path, directory: Path, shown: str) -> None:
    """Unpack a tar file into an empty directory; refuse parts of one and members that are not safe."""
    if not hasattr(tarfile, "data_filter"):
        raise ConfigurationError(
            "unpacking tar files safely requires Python 3.10.12, 3.11.4 or later; upgrade Python"
        )
    opened = False
    try:
        with tarfile.open(archive, errorlevel=2) as tar:
            opened = True
            tar.extractall(directory, members=_safe_members(tar), filter="data")
            _require_end(tar)
        _check_links(directory)
    except tarfile.FilterError as error:
        raise ConfigurationError(
            f"{shown} is unsafe to unpack: its member {error}; recreate the tar file without it"
        ) from None
    except (tarfile.TarError, *_DECOMPRESSION_ERRORS, *_PYTHON_ERRORS) as error:
        problem = f"is truncated or damaged ({error})" if opened else _not_a_tar(archive)
        raise ConfigurationError(f"{shown} {problem}") from None
    except OSError as error:
        if error.errno is None:
            # gzip and bz2 report damage by an OSError.
            raise ConfigurationError(f"{shown} is damaged ({error})") from None
        raise


def _check_links(directory: Path) -> None:
    """Raise FilterError for a link out of a directory.

    tarfile's filter checks a link when it is unpacked. Links after it may change where it leads.
    """
    root = Path(os.path.realpath(directory))
    for path in directory.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise tarfile.FilterError(f"{path.name!r} is a link to a place outside the archive")


def _safe_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file, or raise FilterError for one that is not safe.

    Nothing is written through a link: the filter itself once let that pass (CVE-2025-4517).
    """
    links: set[PurePosixPath] = set()
    for member in tar:
        for name in (member.name, member.linkname if member.islnk() else ""):
            path = PurePosixPath(name)
            if ".." in path.parts or links & {path, *path.parents}:
                raise tarfile.FilterError(f"{member.name!r} leads through a link or through ..")
        if member.issym():
            # The filter takes "a/" for a directory, and its link's target for relative to it.
            member.name = member.name.rstrip("/")
            links.add(PurePosixPath(member.name))
        yield member


def _require_end(tar: tarfile.TarFile) -> None:
    """Raise ReadError unless the archive has its end: tarfile takes a damaged header for the end."""
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError("no end of archive")
    # On to the end of the file, where gzip has its checksum.
    while file.read(_MEGABYTE):
        pass


def _not_a_tar(archive: Path) -> str:
    with archive.open("rb") as file:
        head = file.read(_BLOCK)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return ZSTD
    if head.lstrip().startswith(b"<"):
        return "is a web page instead of a tar file; check the URL"
    return "is neither a tar file nor a GGUF file, or is truncated; check its contents"
