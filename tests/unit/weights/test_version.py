from __future__ import annotations

import httpx
import pytest

from cog_triton.weights.version import Version, same_version, version_of
from tests.unit.weights.support import MODIFIED


def test_versions() -> None:
    assert same_version(Version(etag='"1"'), Version(etag='W/"1"', size=3))
    assert not same_version(Version(etag='"1"', size=3), Version(etag='"2"', size=3))
    assert not same_version(Version(size=3), Version(size=3))
    dated = Version(last_modified=MODIFIED, size=3)
    assert same_version(dated, dated)
    assert not same_version(dated, Version(last_modified=MODIFIED, size=4))
    assert not same_version(dated, Version(etag='"1"', last_modified=MODIFIED, size=3))


@pytest.mark.parametrize(
    ("headers", "partial", "size", "start"),
    [
        ({"Content-Length": "5"}, False, 5, None),
        ({}, False, None, None),
        ({"Content-Length": "5", "Content-Range": "bytes 10-14/15"}, True, 15, 10),
        ({"Content-Range": "bytes 10-14/*"}, True, None, 10),
        ({"Content-Range": "parts 1-2/3", "Content-Length": "5"}, True, None, None),
        ({"Content-Type": "multipart/byteranges", "Content-Length": "5"}, True, None, None),
    ],
)
def test_sizes_are_of_the_whole_file(
    headers: dict[str, str], partial: bool, size: int | None, start: int | None
) -> None:
    version, found = version_of(httpx.Headers(headers), partial=partial)
    assert (version.size, found) == (size, start)


@pytest.mark.parametrize(
    ("date", "resume_with"),
    [
        ("Mon, 01 Jan 2024 00:00:01 GMT", MODIFIED),
        (MODIFIED, None),
        ("yesterday", None),
        (None, None),
    ],
)
def test_a_date_must_be_old_enough_to_resume_with(
    date: str | None, resume_with: str | None
) -> None:
    headers = {"Last-Modified": MODIFIED} | ({"Date": date} if date else {})
    assert version_of(headers, partial=False)[0].resume_with == resume_with
