"""Versions of a file, on a server or in the cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from pydantic import BaseModel, ConfigDict


class Version(BaseModel):
    """Validators of one version of a file; see RFC 9110, section 8.8."""

    model_config = ConfigDict(frozen=True)

    etag: str | None = None
    last_modified: str | None = None
    size: int | None = None  # bytes
    resume_with: str | None = None  # what If-Range takes: bytes of two versions must never be mixed

    @property
    def comparable(self) -> bool:
        """Return whether it can be told from others. A size says little: tar files are padded."""
        return self.etag is not None or self.last_modified is not None


def same_version(first: Version, second: Version) -> bool:
    """Return whether they are surely of the same file: by ETag, else by Last-Modified and size."""
    if first.etag is not None or second.etag is not None:
        return _weak(first.etag) == _weak(second.etag)
    if first.last_modified is None:
        return False
    return (first.last_modified, first.size) == (second.last_modified, second.size)


def _weak(etag: str | None) -> str | None:
    return etag and etag.removeprefix("W/")


def version_of(headers: Mapping[str, str], *, partial: bool) -> tuple[Version, int | None]:
    """Return the version of the whole file that a response is about, and its first byte if it is a part."""
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
