from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.download import TRIES, next_step, request_headers
from cog_triton.weights.partial import Partial
from cog_triton.weights.version import Version
from tests.unit.weights.support import FILES, MODIFIED, OTHER, Site, contents, marker, names_in, tar

# Downloads


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["tar", "gz"])
def test_a_url_is_downloaded_and_unpacked(
    site: Site, cache: Path, compress: Callable[[bytes], bytes]
) -> None:
    content = compress(tar())
    site.serve(content)
    found = fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(found) == FILES
    assert names_in(cache) == set()
    assert marker(cache) | {"tree": ""} == {
        "source": f"{site.url}/m.tar",
        "source_sha256": hashlib.sha256(f"{site.url}/m.tar".encode()).hexdigest(),
        "version": {
            "etag": '"1"',
            "last_modified": None,
            "size": len(content),
            "resume_with": '"1"',
        },
        "sha256": hashlib.sha256(content).hexdigest(),
        "tree": "",
        "files": 2,
        "bytes": sum(map(len, FILES.values())),
    }


def test_an_encoding_the_server_makes_up_is_ignored(site: Site, cache: Path) -> None:
    site.serve(gzip.compress(tar()), headers={"Content-Encoding": "gzip"})
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.requests[0][1]["accept-encoding"] == "identity"


def test_redirects_are_followed(site: Site, cache: Path) -> None:
    site.serve(moved_to="/b.tar?X-Amz-Signature=secret")
    site.serve(path="/b.tar")
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES


def test_a_refusal_counts_though_there_is_a_copy(site: Site, cache: Path) -> None:
    file = site.serve()
    fetch(f"{site.url}/m.tar", cache=cache)
    file.statuses = [404]
    with pytest.raises(ConfigurationError, match="HTTP 404"):
        fetch(f"{site.url}/m.tar", cache=cache)


def test_user_and_password_are_sent(site: Site, cache: Path) -> None:
    site.serve()
    fetch(f"http://user:secret@{site.host}/m.tar", cache=cache)
    assert site.requests[0][1]["authorization"].startswith("Basic ")


def test_busy_servers_are_asked_again(site: Site, cache: Path) -> None:
    site.serve(statuses=[503, 429, 500, 502])
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert len(site.requests) == 5


def test_the_tries_have_an_end(site: Site, cache: Path) -> None:
    site.serve(statuses=[503] * 99)
    with pytest.raises(ConfigurationError, match=r"cannot be reached \(HTTP 503\)"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert len(site.requests) == TRIES


def test_the_waits_grow(site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("cog_triton.weights.download.BACKOFF", 8.0)
    monkeypatch.setattr("tenacity.nap.time.sleep", waits.append)
    site.serve(statuses=[503] * 4)
    fetch(f"{site.url}/m.tar", cache=cache)
    assert waits == [8.0, 16.0, 30.0, 30.0]


def test_a_download_that_is_no_tar_file_is_removed(site: Site, cache: Path) -> None:
    site.serve(tar()[:3000])
    with pytest.raises(ConfigurationError, match="cut short or damaged"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == set()
    site.serve()
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES


def test_a_body_without_a_length_that_ends_early_is_found(site: Site, cache: Path) -> None:
    site.serve(length=False, drops=[3000])
    with pytest.raises(ConfigurationError, match="cut short or damaged"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES


# Checksums


def test_the_checksum_of_a_download(site: Site, cache: Path) -> None:
    site.serve()
    with pytest.raises(ConfigurationError, match=r"has the SHA-256 .*, not 0000"):
        fetch(f"{site.url}/m.tar", cache=cache, checksum="0" * 64)
    assert names_in(cache) == set()
    digest = hashlib.sha256(tar()).hexdigest()
    assert contents(fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)) == FILES


def test_with_a_checksum_the_copy_needs_no_server(site: Site, cache: Path) -> None:
    site.serve()
    digest = hashlib.sha256(tar()).hexdigest()
    found = fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    assert fetch(f"{site.url}/m.tar", cache=cache, checksum=digest) == found
    assert len(site.requests) == 1


def test_a_copy_with_another_checksum_is_not_used(site: Site, cache: Path) -> None:
    file = site.serve()
    fetch(f"{site.url}/m.tar", cache=cache)
    digest = hashlib.sha256(tar(OTHER)).hexdigest()
    with pytest.raises(ConfigurationError, match="has the SHA-256"):
        fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    file.statuses = [503] * 99
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    site.serve(tar(OTHER), etag='"2"')
    assert contents(fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)) == OTHER


def test_a_resumed_download_is_checked_as_a_whole(site: Site, cache: Path) -> None:
    site.serve(drops=[10_000] * TRIES)
    digest = hashlib.sha256(tar()).hexdigest()
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    found = fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    assert contents(found) == FILES
    assert site.requests[-1][1]["range"] == f"bytes={10_000 * TRIES}-"


# What is asked for, and what the answer means


def a_partial(tmp_path: Path, size: int, complete: bool, version: Version) -> Partial:
    partial = Partial(tmp_path)
    partial.version, partial.size, partial.complete = version, size, complete
    return partial


ONE = Version(etag='"1"', size=9, resume_with='"1"')
TWO = Version(etag='"2"', size=9, resume_with='"2"')


def test_request_headers(tmp_path: Path) -> None:
    nothing = Partial(tmp_path)
    assert request_headers(nothing, None) == {}
    assert request_headers(nothing, ONE) == {"If-None-Match": '"1"'}
    assert request_headers(nothing, Version(last_modified=MODIFIED)) == {}
    some = a_partial(tmp_path, 4, False, TWO)
    assert request_headers(some, ONE) == {"Range": "bytes=4-", "If-Range": '"2"'}
    whole = a_partial(tmp_path, 9, True, TWO)
    assert request_headers(whole, ONE) == {"If-None-Match": '"2"'}
    unsure = a_partial(tmp_path, 4, False, Version(etag='W/"2"'))
    assert request_headers(unsure, None) == {}


@pytest.mark.parametrize(
    ("status", "version", "start", "size", "complete", "current", "step"),
    [
        (200, ONE, None, 0, False, None, "restart"),
        (200, ONE, None, 0, False, ONE, "unchanged"),
        (200, TWO, None, 0, False, ONE, "restart"),
        (200, TWO, None, 9, True, ONE, "restart"),
        (200, ONE, None, 9, True, None, "complete"),
        (200, ONE, None, 4, False, None, "restart"),
        (304, ONE, None, 0, False, ONE, "unchanged"),
        (304, ONE, None, 9, True, TWO, "complete"),
        (304, ONE, None, 0, False, None, "again"),
        (206, ONE, 4, 4, False, None, "resume"),
        (206, Version(size=9), 4, 4, False, None, "resume"),
        (206, TWO, 4, 4, False, None, "again"),
        (206, ONE, 3, 4, False, None, "again"),
        (206, ONE, None, 4, False, None, "again"),
        (206, Version(etag='"1"', size=10), 4, 4, False, None, "again"),
        (206, ONE, 0, 0, False, None, "again"),
        (416, Version(), None, 4, False, None, "again"),
    ],
)
def test_next_step(
    status: int,
    version: Version,
    start: int | None,
    size: int,
    complete: bool,
    current: Version | None,
    step: str,
    tmp_path: Path,
) -> None:
    partial = a_partial(tmp_path, size, complete, ONE if size else Version())
    assert next_step(status, version, start, partial, current) == step
