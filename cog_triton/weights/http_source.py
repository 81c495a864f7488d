"""The HTTP client: its errors and its logs, without the URL."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import httpx

from cog_triton.errors import ConfigurationError
from cog_triton.weights.fetch_errors import Interrupted

TIMEOUT = httpx.Timeout(60.0, connect=10.0)
HTTP_LOGGERS = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
)

_TRANSIENT = {408, 429, 500, 502, 503, 504}


def open_client() -> httpx.Client:
    """A client that follows redirects, and takes a file as it is."""
    # Compression would change the bytes that a range counts.
    headers = {"User-Agent": "cog-triton", "Accept-Encoding": "identity"}
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers)


@contextmanager
def http_errors(shown: str) -> Iterator[None]:
    """Maps the errors of httpx. Their texts are used only where they cannot have a URL."""
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
    """Lets pass what has or concerns the file.

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
