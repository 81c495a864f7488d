from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.download import TRIES
from tests.unit.weights.support import FILES, MODIFIED, OTHER, Site, contents, names_in, tar


def test_a_broken_download_goes_on_from_there(site: Site, cache: Path) -> None:
    site.serve(drops=[100_000, 200_000])
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 206, 206]
    assert site.bodies == [100_000, 200_000, len(tar()) - 300_000]
    assert site.requests[2][1]["range"] == "bytes=300000-"
    assert site.requests[2][1]["if-range"] == '"1"'


def test_a_later_start_goes_on_from_there(site: Site, cache: Path) -> None:
    site.serve(drops=[1000] * TRIES)
    with pytest.raises(ConfigurationError, match=r"ended early 5 times .* continue it"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == {"download.tar", "download.json"}
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.bodies[-1] == len(tar()) - 5000
    assert names_in(cache) == set()


def test_progress_earns_more_tries(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.weights.download.PROGRESS", 10_000)
    site.serve(drops=[10_000] * 20)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert len(site.requests) == 21


def test_the_same_bytes_again_are_no_progress(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.weights.download.PROGRESS", 10_000)
    site.serve(ranges=False, drops=[10_000] * 99)
    with pytest.raises(ConfigurationError, match="ended early 5 times"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert len(site.requests) == TRIES


def test_a_server_without_ranges_starts_over(site: Site, cache: Path) -> None:
    site.serve(ranges=False, drops=[100_000])
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 200]


def test_a_file_that_changes_meanwhile_is_not_mixed(site: Site, cache: Path) -> None:
    first = site.serve(drops=[1000] * TRIES)
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert first.drops == []
    site.serve(tar(OTHER), etag='"2"')
    found = fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(found) == OTHER
    assert site.requests[-1][1]["if-range"] == '"1"'
    assert site.statuses[-1] == 200


def test_a_server_that_ignores_if_range_is_found_out(site: Site, cache: Path) -> None:
    site.serve(drops=[5000] * TRIES)
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache)
    site.serve(tar(OTHER), etag='"2"').modified = '"1"'  # which passes for the condition here
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == OTHER
    assert site.statuses[-2:] == [206, 200]


@pytest.mark.parametrize("how", [{"modified": MODIFIED}, {}, {"etag": 'W/"1"'}])
def test_only_a_sure_version_is_resumed(how: dict[str, Any], site: Site, cache: Path) -> None:
    site.serve(drops=[100_000], **({"etag": None} | how))
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 200]


def test_a_download_that_was_not_unpacked_is_not_repeated(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cog_triton.weights.cache.unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == {"download.tar", "download.json"}
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 304]


def test_a_download_that_lost_its_notes_starts_over(site: Site, cache: Path) -> None:
    site.serve(drops=[1000] * TRIES)
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache)
    (notes,) = cache.glob("*/download.json")
    notes.write_text("{")
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses[-1] == 200
