from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.download import Download
from tests.unit.weights.support import FILES, OTHER, Site, contents, names_in, tar

PGET = """#!{python}
import json, os, sys, urllib.request
*flags, url, target = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(flags) + "\\n")
print(url, file=sys.stderr)
with open(target, "wb") as file:
    file.write(urllib.request.urlopen(url).read(){cut})
sys.exit({status})
"""


@pytest.fixture
def pget(tmp_path: Path) -> Callable[..., Path]:
    def install(status: int = 0, cut: str = "") -> Path:
        (tmp_path / "bin").mkdir()
        log = tmp_path / "pget.log"
        text = PGET.format(python=sys.executable, log=str(log), status=status, cut=cut)
        (tmp_path / "bin" / "pget").write_text(text)
        (tmp_path / "bin" / "pget").chmod(0o755)
        return log

    return install


def test_pget_downloads_if_it_is_there(
    site: Site, cache: Path, pget: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    log = pget()
    site.serve()
    found = fetch(f"{site.url}/m.tar?secret", cache=cache)
    assert contents(found) == FILES
    assert log.read_text() == '["--force", "--log-level", "error"]\n'
    assert "secret" not in "".join(capfd.readouterr())
    assert [h.get("user-agent", "")[:6] for _, h in site.requests] == ["cog-tr", "Python", "cog-tr"]
    assert site.statuses[-1] == 304
    assert names_in(cache) == set()
    assert fetch(f"{site.url}/m.tar?secret", cache=cache) == found
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("how", [{"status": 3}, {"cut": "[1000::-1]"}], ids=["fails", "cuts short"])
def test_what_pget_cannot_do_is_done_without_it(
    how: dict[str, Any], site: Site, cache: Path, pget: Callable[..., Path], caplog: Any
) -> None:
    pget(**how)
    site.serve()
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert "trying again" in caplog.text
    assert names_in(cache) == set()


def test_what_pget_has_begun_takes_no_room(
    site: Site, cache: Path, pget: Callable[..., Path]
) -> None:
    log = pget()
    site.serve(drops=[1000] * 99)
    with pytest.raises(ConfigurationError, match="ended early 5 times"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert len(log.read_text().splitlines()) == 1
    assert names_in(cache) == {"download.tar", "download.json"}


def test_a_checksum_is_checked_after_pget(
    site: Site, cache: Path, pget: Callable[..., Path]
) -> None:
    pget()
    site.serve()
    with pytest.raises(ConfigurationError, match="has the SHA-256"):
        fetch(f"{site.url}/m.tar", cache=cache, checksum="0" * 64)


def test_a_file_that_changes_under_pget_is_fetched_again(
    site: Site, cache: Path, pget: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pget()
    site.serve()

    run_pget = Download._run_pget

    def change(download: Download) -> None:
        run_pget(download)
        site.serve(tar(OTHER), etag='"2"')

    monkeypatch.setattr(Download, "_run_pget", change)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == OTHER


def test_pget_is_not_asked_for_what_is_missing_there(
    site: Site, cache: Path, pget: Callable[..., Path]
) -> None:
    log = pget()
    with pytest.raises(ConfigurationError, match="HTTP 404"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert not log.exists()
