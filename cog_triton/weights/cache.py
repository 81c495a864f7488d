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

_LEFTOVERS, _DOWNLOAD = ("tree-", "pget-"), ("download.",)
ZSTD = "is compressed with zstd, which requires Python 3.14; use a .tar or .tar.gz file"
# tarfile raises these, too, for an archive that is damaged, or made to do damage.
_LIBRARIES = (EOFError, zlib.error, lzma.LZMAError)
_PYTHON = (ValueError, LookupError, OverflowError, RecursionError)
DEEPEST_MODEL = 4  # directories above a tar file's model
LONGEST_NAME = 200  # characters of a file's name, its suffix left out
_BLOCK = 512  # bytes of a header; the archive ends with a block of zeros


class Fetched(BaseModel, frozen=True):
    """The marker of a complete tree."""

    source: str  # for people; without secrets
    version: Version
    sha256: str | None  # of the tar file; None if no checksum was given
    tree: str
    files: int
    bytes: int


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
    expected = checksum.strip().lower().removeprefix("sha256:") if checksum else None
    if expected is not None and not re.fullmatch("[0-9a-f]{64}", expected):
        raise ConfigurationError(
            f"the checksum {checksum!r} is not valid; use 64 hexadecimal digits, optionally after sha256:"
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
                f"WEIGHTS_SHA256 is set, but {shown_url(source)} is not a tar file; to pin a Hugging Face "
                "model, use org/name@commit"
            )
        directory = path if path.exists() else fetch_from_hub(source, token)
        if directory.is_file():  # in a repository of GGUF files
            return directory
        if not directory.is_dir():
            raise ConfigurationError(f"{directory} is neither a file nor a directory")
        if not any(directory.iterdir()):
            raise ConfigurationError(f"{directory} is empty; it should contain the model's files")
        return directory
    except OSError as error:
        problem = f"{error.filename or cache}: {error.strerror or error}"
        raise ConfigurationError(f"the weights could not be fetched: {problem}") from None


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


def _fetch_tar(
    source: str, shown: str, cache: Path, expected: str | None, local: Path | None = None
) -> Path:
    if shown.lower().endswith((".tar.zst", ".tzst")) and "zst" not in tarfile.TarFile.OPEN_METH:
        raise ConfigurationError(f"{shown} {ZSTD}")  # before the download
    gguf.refuse_split(shown, [_gguf_name(shown)])
    entry = cache.expanduser().absolute() / hashlib.sha256(source.encode()).hexdigest()
    entry.mkdir(parents=True, exist_ok=True)
    with locked(entry, lambda: logger.info("waiting for another process to fetch %s", shown)):
        fetched = _read_fetched(entry)
        _remove(entry, _LEFTOVERS, but=fetched)
        if expected and fetched and fetched.sha256 != expected:
            fetched = None  # whatever the server says of its version
        try:
            if fetched is None or not expected:
                if local is not None:
                    file, status = local, local.stat()
                    etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"'
                    version = Version(etag=etag, size=status.st_size)
                    changed = fetched is None or not fetched.version.is_same(version)
                else:
                    download = Download(source, shown, entry)
                    changed = download.run(fetched.version if fetched else None)
                    file, version = download.path, download.version
                if changed or fetched is None:
                    fetched = _publish(file, version, entry, shown, expected)
        except Unreachable as problem:
            if fetched is None:
                raise ConfigurationError(str(problem)) from None
            logger.warning("%s; using the copy downloaded earlier", problem)
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
    named = any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))
    patterns = ("*.engine", "engine/*.engine", "*.gguf")
    return named or any(any(directory.glob(pattern)) for pattern in patterns)


def _directories(directory: Path) -> list[Path]:
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_dir() and not path.is_symlink() and not _is_metadata(path)
    )


def _is_metadata(path: Path) -> bool:
    return path.name.startswith("._") or path.name == "__MACOSX"  # of macOS


def _publish(tar: Path, version: Version, entry: Path, shown: str, expected: str | None) -> Fetched:
    tree = entry / f"tree-{uuid.uuid4().hex[:12]}"
    tree.mkdir()
    try:
        digest = hashlib.sha256()
        with tar.open("rb") as file:
            while expected and (block := file.read(1 << 20)):
                digest.update(block)
        if expected and (found := digest.hexdigest()) != expected:
            raise ConfigurationError(
                f"{shown} has the SHA-256 checksum {found}, not {expected}; the file or WEIGHTS_SHA256 is "
                "wrong"
            )
        if gguf.has_magic(tar):
            _copy(tar, tree / _gguf_name(shown))
        else:
            unpack(tar, tree, shown)
        files, size = _tally(tree)
        if not files:
            raise ConfigurationError(f"{shown} contains no files; check how it was created")
    except BaseException as error:
        shutil.rmtree(tree)
        if isinstance(error, ConfigurationError):  # others leave it to be unpacked the next time
            _remove(entry, _DOWNLOAD)
        raise
    counts = {"files": files, "bytes": size}
    fetched = Fetched(source=shown, version=version, sha256=expected, tree=tree.name, **counts)
    write_whole(entry / "fetched.json", fetched.model_dump_json(indent=2))
    _remove(entry, _LEFTOVERS + _DOWNLOAD, but=fetched)
    return fetched


def _gguf_name(shown: str) -> str:
    """Return a name for the GGUF file of a URL: the last part of its path, with the suffix."""
    name = re.sub(r"[^\w.+-]", "_", name_of_url(shown))[:LONGEST_NAME]
    return name if name.lower().endswith(gguf.SUFFIX) else f"{name}{gguf.SUFFIX}"


def _copy(file: Path, copy: Path) -> None:
    """Copy a file, without taking its place on the disk again where links can be made."""
    try:
        os.link(file, copy)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, copy)


def _read_fetched(entry: Path) -> Fetched | None:
    with suppress(OSError, ValueError):
        fetched = Fetched.model_validate_json((entry / "fetched.json").read_bytes())
        # Files may have gone since: directories for temporary files are swept file by file.
        if _tally(entry / fetched.tree) == (fetched.files, fetched.bytes):
            return fetched
    return None


def _remove(entry: Path, prefixes: tuple[str, ...], but: Fetched | None = None) -> None:
    for path in entry.iterdir():
        if path.name.startswith(prefixes) and path.name != (but and but.tree):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tally(tree: Path) -> tuple[int, int]:
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
            tar.extractall(directory, members=_members(tar), filter="data")
            _require_end(tar)
        root = os.path.realpath(directory)
        for path in directory.rglob("*"):  # the filter saw a link before those that came after it
            if path.is_symlink() and not os.path.realpath(path).startswith(root + os.sep):
                raise tarfile.FilterError(f"{path.name!r} is a link to a place outside the archive")
    except tarfile.FilterError as error:
        raise ConfigurationError(
            f"{shown} is unsafe to unpack: its member {error}; recreate the tar file without it"
        ) from None
    except (tarfile.TarError, *_LIBRARIES, *_PYTHON) as error:
        problem = f"is truncated or damaged ({error})" if opened else _not_a_tar(archive)
        raise ConfigurationError(f"{shown} {problem}") from None
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damage so
            raise ConfigurationError(f"{shown} is damaged ({error})") from None
        raise


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    # Nothing is written through a link: the filter itself once let that pass (CVE-2025-4517).
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
    # tarfile takes a missing or damaged header for the end of the archive.
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError("no end of archive")
    while file.read(1 << 20):  # to gzip's checksum
        pass


def _not_a_tar(archive: Path) -> str:
    with archive.open("rb") as file:
        head = file.read(_BLOCK)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return ZSTD
    if head.lstrip().startswith(b"<"):
        return "is a web page instead of a tar file; check the URL"
    return "is neither a tar file nor a GGUF file, or is truncated; check its contents"
