"""HTTP of every port that this project opens: the limits of requests, and uvicorn behind them.

Imports nothing else of the package. After a change: pytest tests/unit/web tests/integration/test_limits.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

HEAD_END = b"\r\n\r\n"
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes:
        body_bytes: of its body, decoded.
        head_bytes: of its first line and headers, and of trailers.
        request_seconds: from its first byte to its last.
        idle_seconds: of a connection without a request.
    """

    body_bytes: int = 16 << 20
    head_bytes: int = 32 << 10
    request_seconds: float = 60.0
    idle_seconds: float = 75.0


class Refusal(Exception):
    """The answer to a request that is not served."""

    def __init__(self, status: int, detail: Any, *, retry_after: int | None = None) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


def head_problem(method: bytes, target: bytes, version: str, headers: Headers) -> Refusal | None:
    """Find what is wrong with a head that llhttp, or a lenient server, may let pass.

    Args:
        headers: with names in lower case.
    """
    if version not in ("1.0", "1.1"):
        return Refusal(505, f"HTTP/{version} is not supported")
    # A path ends at '#' for some servers, and would be another one than was checked.
    if method == b"CONNECT" or not target.startswith(b"/") or b"#" in target:
        return Refusal(400, "the request's target must be a path")
    names = [name for name, _ in headers]
    for name in (b"content-length", b"transfer-encoding", b"host"):
        if names.count(name) > 1:
            return Refusal(400, f"more than one {name.decode()}")
    values = dict(headers)
    length, coding = values.get(b"content-length"), values.get(b"transfer-encoding")
    if length is not None and (coding is not None or not length.isdigit()):
        return Refusal(400, "content-length must be a number and come without transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        return Refusal(501, "transfer-encoding must be chunked")
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            sent = value.decode(errors="replace")[:40]
            return Refusal(
                415, f"the body must be sent without a Content-Encoding, not as {sent!r}"
            )
    return None


def head_bytes(method: bytes, target: bytes, version: bytes, headers: Headers) -> bytes:
    """Return a request's head, with the empty line."""
    lines = [b"%s %s HTTP/%s" % (method, target, version), *(b"%s: %s" % pair for pair in headers)]
    return b"\r\n".join(lines) + HEAD_END
