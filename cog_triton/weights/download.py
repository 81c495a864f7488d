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

TRIES = 5  # requests in a row without progress
PROGRESS = 16 << 20  # bytes after which failed tries are forgotten
BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds before the second try, doubled before each one after it
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


class Download:
    """The file of a URL on its way to ``path``, of one ``version``; a later process continues it."""

    def __init__(self, url: str, shown: str, directory: Path) -> None:
        self._url, self._shown = url, shown
        self.path, self._notes = directory / "download.tar", directory / "download.json"
        self.version, self._size = Version(), 0
        self._pget, self._answered = shutil.which("pget") is not None, False
        with contextlib.suppress(OSError, ValueError):  # nothing to continue
            version = Version.model_validate_json(self._notes.read_bytes())
            self._size, self.version = self.path.stat().st_size, version

    def run(self, current: Version | None) -> bool:
        """Download the file, unless it is still the ``current`` version; return whether it was not.

        Unreachable stands for a server that does not answer, and ENOSPC comes before the disk is full.
        """
        keep_urls_out_of_logs()
        failures, counted_from, problem = 0, self._size, ""
        with httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=_HEADERS) as client:
            while failures < TRIES:
                if failures:
                    logger.warning("%s: %s; trying again", self._shown, problem)
                    time.sleep(min(BACKOFF * 2 ** (failures - 1), MAX_BACKOFF))
                try:
                    return self._try(client, current)
                except httpx.ProtocolError:
                    problem = "the connection broke"
                except httpx.RequestError as error:  # whose text has no URL
                    problem = str(error) or type(error).__name__
                failures += 1
                if self._size >= counted_from + PROGRESS:
                    failures, counted_from = 1, self._size
        if not self._answered:
            raise Unreachable(
                f"{self._shown} cannot be reached ({problem}); check the URL and the network"
            )
        raise ConfigurationError(
            f"the download of {self._shown} failed {failures} times ({problem}); start again to resume it"
        )

    def _try(self, client: httpx.Client, current: Version | None) -> bool:
        etag, size, start = self.version.etag, self.version.size, self._size
        complete = size == start
        ranges = not complete and size and start and etag and not etag.startswith("W/")
        if ranges:  # of the same version, whose bytes must not be mixed with another's
            headers = {"Range": f"bytes={start}-", "If-Range": str(etag)}
        else:  # no If-Modified-Since: an older file may take the place of a newer one
            known = etag if complete else current and current.etag
            headers = {"If-None-Match": known} if known else {}
        with client.stream("GET", self._url, headers=headers) as response:
            status, received = response.status_code, response.headers
            if status in _TRANSIENT:
                raise httpx.RequestError(f"HTTP {status}")
            if status not in (200, 206, 304, 416):
                advice = _ADVICE.get(status, "it did not send the file; check the URL")
                raise ConfigurationError(f"{self._shown} answered HTTP {status}: {advice}")
            self._answered = True
            if status == 304 and "If-None-Match" in headers:
                return complete
            length = received.get("Content-Length", "")
            version = Version(
                etag=received.get("ETag"),
                last_modified=received.get("Last-Modified"),
                size=int(length) if length.isdecimal() else None,
            )
            span = f"bytes {start}-{(size or 0) - 1}/{size}" if ranges else "none"
            if status == 200:
                if current and current.is_same(version):
                    return False
                if complete and self.version.is_same(version):
                    return True
                self._restart(version)
            elif received.get("Content-Range") != span or version.etag not in (None, etag):
                self._restart(Version())
                raise httpx.RequestError(
                    f"HTTP {status} with a different byte range than requested"
                )
            # Room for the file and its contents, which are no smaller, compressed or not.
            needed = 2 * (self.version.size or 0)
            if needed - self._size > shutil.disk_usage(self.path.parent).free:
                raise OSError(errno.ENOSPC, f"it needs about {tqdm.format_sizeof(needed, 'B')}")
            # A file of pget's is checked by its size and a validator.
            if not (self._pget and self._size == 0 and version.size and version.is_same(version)):
                self._receive(response)
                return True
        self._run_pget()
        # Its many connections may have read two versions, if the file changed meanwhile.
        return self._try(client, current)

    def _restart(self, version: Version) -> None:
        self.path.unlink(missing_ok=True)
        self._notes.write_text(version.model_dump_json(), encoding="utf-8")
        self.path.touch()
        self.version, self._size = version, 0

    def _receive(self, response: httpx.Response) -> None:
        progress = tqdm(
            desc=f"Downloading {unquote(PurePosixPath(self._shown).name)}",
            initial=self._size,
            total=self.version.size,
            unit="B",
            unit_scale=True,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,  # each is a line of a log file
        )
        with self.path.open("ab") as file, progress:
            # Raw: a tar.gz is a tar.gz, also when the server calls the gzip an encoding.
            for chunk in response.iter_raw():
                file.write(chunk)
                self._size += len(chunk)
                progress.update(len(chunk))
        if self.version.size not in (None, self._size):
            raise httpx.RequestError(f"only {self._size} of {self.version.size} bytes arrived")

    def _run_pget(self) -> None:
        self._pget = False  # one try
        # A name of its own: pget outlives a killed parent, and would write beside the next one.
        target = self.path.with_name(f"pget-{uuid.uuid4().hex[:12]}")
        logger.info("downloading %s with pget", self._shown)
        # It prints the URL. Without -x, which would unpack whatever the archive says, wherever.
        command = ["pget", "--force", "--log-level", "error", self._url, str(target)]
        status = subprocess.run(command, capture_output=True, check=False).returncode
        if status != 0 or not target.is_file() or target.stat().st_size != self.version.size:
            target.unlink(missing_ok=True)
            raise httpx.RequestError(f"pget exited with status {status}; downloading without it")
        self._size = target.stat().st_size
        target.replace(self.path)
