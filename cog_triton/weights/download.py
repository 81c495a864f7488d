"""The file of a URL, by httpx or by pget where it is installed."""

import contextlib
import errno
import logging
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import httpx
from pydantic import BaseModel
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.redaction import keep_urls_out_of_logs

logger = logging.getLogger(__name__)

# How many requests in a row may fail. They are forgotten after PROGRESS bytes.
TRIES = 5
PROGRESS = 16 << 20
# The pause before the second try, in seconds. It is doubled before each further try.
BACKOFF = 0.5
MAX_BACKOFF = 30.0
TERMINAL_SECONDS = 0.1
# In a log file, each line on the progress stays.
LOG_SECONDS = 10.0
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
# Compression would change the bytes that a range counts.
_HEADERS = {"User-Agent": "cog-triton", "Accept-Encoding": "identity"}
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_ADVICE = {
    401: "it requires a login; put user:password@ before the host, or use a presigned URL",
    403: "access denied; if this is a presigned URL, it may have expired: create a new one",
    404: "the file does not exist; check the URL",
    410: "the file no longer exists; check the URL",
}


class Unreachable(Exception):
    """The server did not answer."""


class Version(BaseModel, frozen=True):
    """The validators of one version of a file (RFC 9110, section 8.8), and its size in bytes."""

    etag: str | None = None
    last_modified: str | None = None
    size: int | None = None

    def is_same(self, other: "Version") -> bool:
        """Compare ETags, else dates and sizes. A size alone says little: tar files are padded."""
        if self.etag or other.etag:
            return (self.etag or "").removeprefix("W/") == (other.etag or "").removeprefix("W/")
        return self.last_modified is not None and self == other


class _Failed(httpx.RequestError):
    """A try that may be repeated; its text has no URL."""


class Download:
    """The file of a URL on its way to ``path``, of one ``version``; a later process continues it."""

    def __init__(self, url: str, shown: str, directory: Path) -> None:
        """Continue the download in a directory, if there is one.

        Args:
            shown: the URL without secrets, for messages.
        """
        self._url = url
        self._shown = shown
        self.path = directory / "download.tar"
        self._notes = directory / "download.json"
        self.version = Version()
        self._size = 0
        self._uses_pget = shutil.which("pget") is not None
        self._has_answered = False
        # Raised if there is nothing to continue.
        with contextlib.suppress(OSError, ValueError):
            version = Version.model_validate_json(self._notes.read_bytes())
            self._size = self.path.stat().st_size
            self.version = version

    def run(self, current: Version | None) -> bool:
        """Download the file, unless it is still the ``current`` version; return whether it was not.

        Raises:
            ConfigurationError: the server refuses, or the download failed too often.
            OSError: with ENOSPC, before the disk is full.
            Unreachable: the server does not answer.
        """
        keep_urls_out_of_logs()
        failures = 0
        counted_from = self._size
        problem = ""
        with httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=_HEADERS) as client:
            while failures < TRIES:
                if failures:
                    logger.warning("%s: %s; trying again", self._shown, problem)
                    time.sleep(min(BACKOFF * 2 ** (failures - 1), MAX_BACKOFF))
                try:
                    return self._try(client, current)
                except httpx.ProtocolError:
                    problem = "the connection broke"
                except httpx.RequestError as error:
                    problem = str(error) or type(error).__name__
                failures += 1
                if self._size >= counted_from + PROGRESS:
                    failures = 1
                    counted_from = self._size
        if not self._has_answered:
            raise Unreachable(
                f"{self._shown} cannot be reached ({problem}); check the URL and the network"
            )
        raise ConfigurationError(
            f"the download of {self._shown} failed {failures} times ({problem}); start again to resume it"
        )

    @property
    def _is_complete(self) -> bool:
        return self.version.size == self._size

    def _can_continue(self) -> bool:
        """Return whether the rest can be asked for: of the same version, and never mixed with another."""
        etag = self.version.etag
        if self._is_complete or not self.version.size or not self._size or not etag:
            return False
        return not etag.startswith("W/")

    def _try(self, client: httpx.Client, current: Version | None) -> bool:
        """Make one request, and receive what is missing; return whether the file has changed."""
        continues = self._can_continue()
        headers = self._request_headers(current, continues=continues)
        with client.stream("GET", self._url, headers=headers) as response:
            self._check_status(response.status_code)
            if response.status_code == 304 and "If-None-Match" in headers:
                return self._is_complete
            version = _version_of(response)
            if response.status_code == 200:
                if current and current.is_same(version):
                    return False
                if self._is_complete and self.version.is_same(version):
                    return True
                self._restart(version)
            else:
                self._check_range(response, version, continues=continues)
            self._check_room()
            # A file of pget's is checked by its size and by a validator.
            has_validator = bool(version.size) and version.is_same(version)
            if not self._uses_pget or self._size or not has_validator:
                self._receive(response)
                return True
        self._run_pget()
        # Its many connections may have read two versions, if the file changed meanwhile.
        return self._try(client, current)

    def _request_headers(self, current: Version | None, *, continues: bool) -> dict[str, str]:
        etag = self.version.etag
        if continues:
            return {"Range": f"bytes={self._size}-", "If-Range": str(etag)}
        # No If-Modified-Since: an older file may take the place of a newer one.
        known = etag if self._is_complete else current and current.etag
        return {"If-None-Match": known} if known else {}

    def _check_status(self, status: int) -> None:
        """Raise an error unless the server answers with the file, or with what has become of it."""
        if status in _TRANSIENT:
            raise _Failed(f"HTTP {status}")
        if status not in (200, 206, 304, 416):
            advice = _ADVICE.get(status, "it did not send the file; check the URL")
            raise ConfigurationError(f"{self._shown} answered HTTP {status}: {advice}")
        self._has_answered = True

    def _check_range(self, response: httpx.Response, version: Version, *, continues: bool) -> None:
        """Start again unless the response has the rest of the same version."""
        size = self.version.size or 0
        expected = f"bytes {self._size}-{size - 1}/{size}" if continues else "none"
        is_expected = response.headers.get("Content-Range") == expected
        if is_expected and version.etag in (None, self.version.etag):
            return
        self._restart(Version())
        raise _Failed(f"HTTP {response.status_code} with a different byte range than requested")

    def _check_room(self) -> None:
        """Raise OSError unless the disk has room for the file and its contents, which are no smaller."""
        needed = 2 * (self.version.size or 0)
        if needed - self._size > shutil.disk_usage(self.path.parent).free:
            raise OSError(errno.ENOSPC, f"it needs about {tqdm.format_sizeof(needed, 'B')}")

    def _restart(self, version: Version) -> None:
        self.path.unlink(missing_ok=True)
        self._notes.write_text(version.model_dump_json(), encoding="utf-8")
        self.path.touch()
        self.version = version
        self._size = 0

    def _receive(self, response: httpx.Response) -> None:
        """Append a response's bytes to the file; raise an error if some are missing."""
        progress = tqdm(
            desc=f"Downloading {unquote(PurePosixPath(self._shown).name)}",
            initial=self._size,
            total=self.version.size,
            unit="B",
            unit_scale=True,
            mininterval=TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS,
        )
        with self.path.open("ab") as file, progress:
            # Raw: a tar.gz is a tar.gz, also when the server calls the gzip an encoding.
            for chunk in response.iter_raw():
                file.write(chunk)
                self._size += len(chunk)
                progress.update(len(chunk))
        if self.version.size not in (None, self._size):
            raise _Failed(f"only {self._size} of {self.version.size} bytes arrived")

    def _run_pget(self) -> None:
        """Download the whole file with pget, which is tried once."""
        self._uses_pget = False
        # A new name: pget outlives a killed parent, and would write beside the next one.
        target = self.path.with_name(f"pget-{uuid.uuid4().hex[:12]}")
        logger.info("downloading %s with pget", self._shown)
        # Its output has the URL. Without -x, which would unpack anything anywhere.
        command = ["pget", "--force", "--log-level", "error", self._url, str(target)]
        status = subprocess.run(command, capture_output=True, check=False).returncode
        if status != 0 or not target.is_file() or target.stat().st_size != self.version.size:
            target.unlink(missing_ok=True)
            raise _Failed(f"pget exited with status {status}; downloading without it")
        self._size = target.stat().st_size
        target.replace(self.path)


def _version_of(response: httpx.Response) -> Version:
    """Return the version that a response has or, for a part of a file, belongs to."""
    length = response.headers.get("Content-Length", "")
    return Version(
        etag=response.headers.get("ETag"),
        last_modified=response.headers.get("Last-Modified"),
        size=int(length) if length.isdecimal() else None,
    )
