"""fetch(): from a directory, a tar file, a URL or a Hugging Face id to a local directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx

from cog_triton.errors import ConfigurationError
from cog_triton.weights.cache import Archive, fetch_archive
from cog_triton.weights.download import Download
from cog_triton.weights.files import hash_of, require_files
from cog_triton.weights.hub import fetch_from_hub
from cog_triton.weights.partial import Partial
from cog_triton.weights.tar import check_name
from cog_triton.weights.version import Version, same_version


def fetch(
    source: str,
    *,
    cache: Path,
    checksum: str | None = None,
    token: str | None = None,
    progress: bool = True,
) -> Path:
    """Return a local directory with the files that ``source`` names.

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
        return require_files(path) if path.exists() else fetch_from_hub(source, token, progress)
    except OSError as error:
        problem = f"{error.filename or cache}: {error.strerror or error}"
        raise ConfigurationError(f"the weights could not be fetched: {problem}") from None


def parse_checksum(text: str) -> str:
    """Return the 64 lower-case hexadecimal digits of "sha256:<digits>" or "<digits>".

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
    """Return the path that ``source`` is, or names by a file: URL; nothing need be there.

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
    """Return ``url`` without what may be secret: user, password, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _fetch_url(url: str, cache: Path, expected: str | None, progress: bool) -> Path:
    try:
        shown, host = display_url(url), httpx.URL(url).host
    except (httpx.InvalidURL, ValueError):
        host = ""
    if not host:
        raise ConfigurationError("the URL of the weights is malformed; write https://host/path.tar")
    check_name(shown)

    def get(entry: Path, current: Version | None) -> Archive | None:
        partial = Partial(entry)
        if not Download(url, shown, partial, current, progress).run():
            return None
        return Archive(partial.path, partial.version, partial.sha256(), downloaded=True)

    return fetch_archive(url, shown, cache, expected, get)


def _fetch_file(path: Path, cache: Path, expected: str | None) -> Path:
    path = path.resolve()

    def get(_: Path, current: Version | None) -> Archive | None:
        status = path.stat()
        etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"'
        version = Version(etag=etag, size=status.st_size)
        if current and same_version(version, current):
            return None
        digest = hash_of(path).hexdigest() if expected else None
        return Archive(path, version, digest, downloaded=False)

    return fetch_archive(path.as_uri(), str(path), cache, expected, get)
