from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.download import TRIES, Version
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
        "version": {
            "etag": '"1"',
            "last_modified": None,
            "size": len(content),
        },
        "sha256": None,
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
    monkeypatch.setattr("cog_triton.weights.download.time.sleep", waits.append)
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


def test_versions() -> None:
    assert Version(etag='"1"').is_same(Version(etag='W/"1"', size=3))
    assert not Version(etag='"1"', size=3).is_same(Version(etag='"2"', size=3))
    assert not Version(size=3).is_same(Version(size=3))
    dated = Version(last_modified=MODIFIED, size=3)
    assert dated.is_same(dated)
    assert not dated.is_same(Version(last_modified=MODIFIED, size=4))
    assert not dated.is_same(Version(etag='"1"', last_modified=MODIFIED, size=3))
