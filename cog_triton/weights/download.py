"""Downloads the file of a URL by httpx, or by pget where it is installed."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn
from urllib.parse import unquote

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.errors import ConfigurationError
from cog_triton.weights.files import NoSpace, full_disk
from cog_triton.weights.partial import Interrupted, Partial, Unreachable
from cog_triton.weights.version import Version, same_version, version_of

logger = logging.getLogger(__name__)

TRIES = 5
"""Requests in a row that bring nothing new before a download fails."""
CHECK_TRIES = 2
"""The same while there is a copy to fall back on."""
BACKOFF = 0.5
"""Seconds before the second try; doubled before each one after it, up to MAX_BACKOFF."""
MAX_BACKOFF = 30.0
PROGRESS = 16 << 20
"""Bytes that must have come before failed tries are forgotten."""
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
HTTP_LOGGERS = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
)

_TRANSIENT = {408, 429, 500, 502, 503, 504}


class Download:
    """Bring a URL's file into ``partial``, unless it is still the version that is ``current``."""

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
        self._counted_from = partial.size

    def run(self) -> bool:
        """Download; return whether there is a new file.

        Raises:
            ConfigurationError: the server refuses, or what it sends ends early again and again.
            Unreachable: the server does not answer.
            NoSpace: the disk is full.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(Interrupted),
            wait=wait_exponential(BACKOFF, MAX_BACKOFF),
            stop=lambda state: state.attempt_number >= self._tries,
            after=self._forget_failures,
            before_sleep=self._warn,
            retry_error_callback=self._give_up,
        )
        with quiet(HTTP_LOGGERS), open_client() as client:
            return retrying(self._try, client)

    @property
    def _tries(self) -> int:
        return TRIES if self._current is None or self._answered else CHECK_TRIES

    def _forget_failures(self, state: RetryCallState) -> None:
        if self._partial.size >= self._counted_from + PROGRESS:
            self._counted_from = self._partial.size
            state.attempt_number = 1  # tenacity counts the tries here

    def _warn(self, state: RetryCallState) -> None:
        logger.warning("%s: %s; trying again", self._shown, _problem(state))

    def _give_up(self, state: RetryCallState) -> NoReturn:
        if not self._answered:
            raise Unreachable(
                f"{self._shown} cannot be reached ({_problem(state)}); check the URL and the network"
            )
        kept = " from where it stopped" if self._partial.version.resume_with else ""
        raise ConfigurationError(
            f"the download of {self._shown} ended early {self._tries} times ({_problem(state)}); "
            f"start again to go on{kept}"
        )

    def _try(self, client: httpx.Client) -> bool:
        partial = self._partial
        headers = request_headers(partial, self._current)
        with (
            http_errors(self._shown),
            client.stream("GET", self._url, headers=headers) as response,
        ):
            check_status(response.status_code, self._shown)
            version, start = version_of(response.headers, partial=response.status_code == 206)
            step = next_step(response.status_code, version, start, partial, self._current)
            if step == "again":
                partial.discard()
                raise Interrupted(f"HTTP {response.status_code} for another part than asked for")
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
            full_disk(self._space),
            progress_bar(self._shown, self._partial.size, total, self._progress) as bar,
        ):
            # Raw: a tar.gz is a tar.gz, also when the server calls the gzip an encoding.
            self._partial.receive(counted(response.iter_raw(), bar))

    def _run_pget(self, client: httpx.Client, version: Version) -> bool:
        self._pget = False
        # A name of its own, since pget outlives a killed parent, and would write beside the next.
        target = self._partial.path.with_name(f"pget-{uuid.uuid4().hex[:12]}")
        logger.info("downloading %s with pget", self._shown)
        try:
            status = run_pget(self._url, target)
            if status != 0 or not target.is_file():
                raise Interrupted(f"pget ended with status {status} and is left out")
            self._partial.adopt(target, version)
        except Interrupted:
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
            raise NoSpace(needed)

    def _space(self) -> int | None:
        # The file and what is in it, which is no less, compressed or not.
        size = self._partial.version.size
        return None if size is None else 2 * size


def _problem(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def request_headers(partial: Partial, current: Version | None) -> dict[str, str]:
    """Return the headers that ask for what is missing, and for nothing if nothing has changed."""
    if partial.complete:
        return {"If-None-Match": partial.version.etag} if partial.version.etag else {}
    if partial.size and partial.version.resume_with:
        return {"Range": f"bytes={partial.size}-", "If-Range": partial.version.resume_with}
    # No If-Modified-Since: an older file may take the place of a newer one.
    return {"If-None-Match": current.etag} if current and current.etag else {}


def next_step(
    status: int, version: Version, start: int | None, partial: Partial, current: Version | None
) -> Literal["unchanged", "complete", "resume", "restart", "again"]:
    """Decide by a response: the copy or the download is what the server has, or what comes now.

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


def open_client() -> httpx.Client:
    """Return a client that follows redirects, and takes a file as it is."""
    # Compression would change the bytes that a range counts.
    headers = {"User-Agent": "cog-triton", "Accept-Encoding": "identity"}
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers)


@contextmanager
def http_errors(shown: str) -> Iterator[None]:
    """Map the errors of httpx. Their texts are used only where they cannot have a URL."""
    try:
        yield
    except httpx.TimeoutException:
        raise Interrupted("timed out") from None
    except httpx.ConnectError as error:
        raise Interrupted(str(error) or "no connection") from None
    except httpx.UnsupportedProtocol:
        raise ConfigurationError(f"{shown} redirects to something other than HTTP") from None
    except httpx.TransportError:
        raise Interrupted("the connection broke") from None
    except httpx.TooManyRedirects:
        raise ConfigurationError(f"{shown} redirects in a circle; check the URL") from None


def check_status(status: int, shown: str) -> None:
    """Accept a response that has or concerns the file.

    Raises:
        ConfigurationError: the server refuses.
        Interrupted: it may not refuse the next time.
    """
    if status in (200, 206, 304, 416):
        return
    if status in _TRANSIENT:
        raise Interrupted(f"HTTP {status}")
    advice = {
        401: "it asks for a login; put user:password@ before the host, or give a presigned URL",
        403: "access is refused; a presigned URL may have expired, so make a new one",
        404: "there is no such file; check the URL",
        410: "the file is gone; check the URL",
    }.get(status, "it sends no file; check the URL")
    raise ConfigurationError(f"{shown} answered HTTP {status}: {advice}")


@contextmanager
def quiet(names: Iterable[str]) -> Iterator[None]:
    """Silence these loggers in this thread: they log whole URLs, and headers."""
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


def progress_bar(shown: str, done: int, total: int | None, wanted: bool) -> tqdm:
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


def counted(chunks: Iterable[bytes], bar: tqdm) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        bar.update(len(chunk))


def run_pget(url: str, target: Path) -> int:
    """Download ``url`` to the file ``target``; return the exit status."""
    # What it prints has the URL.
    null = subprocess.DEVNULL
    return subprocess.run(
        pget_command(url, target), stdin=null, stdout=null, stderr=null, check=False
    ).returncode


def pget_command(url: str, target: Path) -> list[str]:
    """Return the command of replicate/pget, which downloads over many connections at once.

    Without its ``-x``: it would unpack whatever the archive says, wherever that says.
    """
    return ["pget", "--force", "--log-level", "error", url, str(target)]
