"""Files of URLs: whole, checked, resumed, and without a secret in any text."""

import copy
import gzip
import hashlib
import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.weights.cache import fetch
from cog_triton.weights.download import TRIES, Download
from tests.unit.weights.support import FILES, OTHER, SAME_SIZE, Site, contents, refused, tar

DATE = "Mon, 01 Jan 2024 00:00:00 GMT"


def digest(files: dict[str, bytes]) -> str:
    return hashlib.sha256(tar(files)).hexdigest()


@pytest.mark.parametrize(
    ("how", "has_size"),
    [
        ({}, True),
        ({"headers": {"Content-Encoding": "gzip"}}, True),  # the server made it up
        ({"length": False}, False),
    ],
)
def test_a_url_is_downloaded_and_unpacked(how: dict[str, Any], has_size: bool, site: Site) -> None:
    content = gzip.compress(tar())
    site.serve(content, **how)
    size = len(content) if has_size else None
    assert contents(site.fetch()) == FILES
    assert site.requests[0][1]["accept-encoding"] == "identity"
    assert site.left() == set()
    assert site.marker() | {"tree": ""} == {
        "source": f"{site.url}/m.tar",
        "version": {"etag": '"1"', "last_modified": None, "size": size},
        "sha256": None,
        "tree": "",
        "files": 2,
        "bytes": sum(map(len, FILES.values())),
    }


def test_secrets_are_sent_and_neither_logged_nor_stored(
    site: Site, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    site.serve(moved_to="/b.tar?X-Amz-Signature=secret")
    site.serve(path="/b.tar", drops=[1000], statuses=[503])
    url = f"{site.url}/m.tar?X-Amz-Signature=secret".replace("//", "//user:secret@")
    assert contents(fetch(url, cache=site.cache)) == FILES
    assert site.requests[0][1]["authorization"].startswith("Basic ")
    assert "HTTP 503; trying again" in caplog.text
    assert "secret" not in caplog.text + "".join(capfd.readouterr())
    assert "secret" not in json.dumps(site.marker())
    assert not any("secret" in str(path.relative_to(site.cache)) for path in site.cache.rglob("*"))


# Errors


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        pytest.param(
            {"moved_to": "/m.tar"}, "maximum allowed redirects", id="redirection to itself"
        ),
        pytest.param(
            {"moved_to": "ftp://secret/x"}, "unsupported protocol", id="redirection to FTP"
        ),
        pytest.param(
            {"drops": [1000] * 5}, "failed 5 times .* resume it", id="connections that break"
        ),
    ],
)
def test_the_tries_have_an_end(how: dict[str, Any], problem: str, site: Site) -> None:
    site.serve(**copy.deepcopy(how))
    with refused(problem):
        site.fetch()
    assert len(site.requests) >= TRIES


def test_waits_for_busy_servers_grow(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("cog_triton.weights.download.BACKOFF", 8.0)
    monkeypatch.setattr("cog_triton.weights.download.time.sleep", waits.append)
    site.serve(statuses=[503, 429, 500, 502])
    assert contents(site.fetch()) == FILES
    assert waits == [8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (401, "HTTP 401: it requires a login"),
        (403, "HTTP 403: access denied; if this is a presigned URL, it may have expired"),
        (404, "HTTP 404: the file does not exist"),
        (410, "HTTP 410: the file no longer exists"),
        (451, "HTTP 451: it did not send the file"),
        (204, "HTTP 204: it did not send the file"),
    ],
)
def test_a_refusal_is_final_also_where_there_is_a_copy(
    status: int, problem: str, site: Site
) -> None:
    file = site.serve(statuses=[status])
    secret = "/m.tar?X-Amz-Signature=secret#secret"
    with refused(f"{site.url}/m.tar answered {problem}"):
        site.fetch(secret)
    assert len(site.requests) == 1
    assert site.left() == set()
    site.fetch(secret)
    file.statuses = [status]
    with refused(problem):
        site.fetch(secret)


@pytest.mark.parametrize(("listens", "problem"), [(0, ".*refused"), (1, "timed out")])
def test_a_server_that_is_away_or_says_nothing(
    listens: int, problem: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.weights.download.TIMEOUT", httpx.Timeout(0.02))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/m.tar?secret"
        with refused(rf"cannot be reached \({problem}\)"):
            fetch(url, cache=cache)


def test_the_checksum_of_a_download_and_of_its_copy(site: Site) -> None:
    file = site.serve()
    with refused(r"has the SHA-256 checksum .*, not 0000"):
        site.fetch(checksum="0" * 64)
    assert site.left() == set()
    found = site.fetch(checksum=digest(FILES))
    assert contents(found) == FILES
    with refused("has the SHA-256"):
        site.fetch(checksum=digest(OTHER))  # though the server says that the copy is current
    file.statuses = [503] * 99
    assert site.fetch(checksum=digest(FILES)) == found  # which needs no server
    with refused("cannot be reached"):
        site.fetch(checksum=digest(OTHER))
    site.serve(tar(OTHER), etag='"2"')
    assert contents(site.fetch(checksum=digest(OTHER))) == OTHER


# Parts


def test_a_broken_download_goes_on_from_there(site: Site) -> None:
    site.serve(drops=[100_000, 200_000])
    assert contents(site.fetch()) == FILES
    assert site.statuses == [200, 206, 206]
    assert site.bodies == [100_000, 200_000, len(tar()) - 300_000]
    assert site.requests[2][1]["range"] == "bytes=300000-"
    assert site.requests[2][1]["if-range"] == '"1"'


@pytest.fixture
def part(site: Site) -> Site:
    """A site of which a download of 5,000 bytes is left."""
    site.serve(drops=[1000] * TRIES)
    with refused("failed 5 times"):
        site.fetch()
    assert site.left() == {"download.tar", "download.json"}
    return site


@pytest.mark.parametrize(
    ("now", "statuses", "expected"),
    [
        ({}, [206], FILES),
        ({"content": tar(OTHER), "etag": '"2"'}, [200], OTHER),
        # A server that ignores If-Range is found out; here a date passes for the condition.
        ({"content": tar(SAME_SIZE), "etag": '"2"', "modified": '"1"'}, [206, 200], SAME_SIZE),
    ],
    ids=["goes on", "changed", "ignores if-range"],
)
def test_a_later_start_goes_on_from_there_with_the_same_file_only(
    now: dict[str, Any], statuses: list[int], expected: dict[str, bytes], part: Site
) -> None:
    part.serve(**now)
    assert contents(part.fetch(checksum=digest(expected))) == expected
    assert part.statuses[TRIES:] == statuses
    assert part.requests[TRIES][1]["range"] == "bytes=5000-"
    assert part.requests[TRIES][1]["if-range"] == '"1"'
    assert part.left() == set()


def test_a_download_that_lost_its_notes_starts_over(part: Site) -> None:
    (notes,) = part.cache.glob("*/download.json")
    notes.write_text("{")
    assert contents(part.fetch()) == FILES
    assert part.statuses[-1] == 200


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"modified": DATE, "etag": None}, id="date"),
        pytest.param({"etag": None}, id="no version"),
        pytest.param({"etag": 'W/"1"'}, id="weak ETag"),
        pytest.param({"ranges": False}, id="no ranges"),
    ],
)
def test_only_a_sure_version_is_resumed(how: dict[str, Any], site: Site) -> None:
    site.serve(drops=[100_000], **how)
    assert contents(site.fetch()) == FILES
    assert site.statuses == [200, 200]


def test_progress_earns_more_tries_and_the_same_bytes_again_do_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.weights.download.PROGRESS", 10_000)
    site.serve(drops=[10_000] * 20)
    assert contents(site.fetch()) == FILES
    assert len(site.requests) == 21
    site.serve(path="/n.tar", ranges=False, drops=[10_000] * 99)
    with refused("failed 5 times"):
        site.fetch("/n.tar")
    assert len(site.requests) == 21 + TRIES


# pget

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


def install_pget(directory: Path, status: int = 0, cut: str = "") -> Path:
    """Put a pget in PATH that may fail or cut a file short; return its log."""
    (directory / "bin").mkdir()
    log, program = directory / "pget.log", directory / "bin" / "pget"
    program.write_text(PGET.format(python=sys.executable, log=str(log), status=status, cut=cut))
    program.chmod(0o755)
    return log


def test_pget_downloads(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = install_pget(tmp_path)
    with refused("HTTP 404"):
        site.fetch("/missing.tar")
    assert not log.exists()  # it is not asked for what is missing there
    site.serve()
    found = site.fetch("/m.tar?secret")
    assert contents(found) == FILES
    assert log.read_text() == '["--force", "--log-level", "error"]\n'
    assert "secret" not in "".join(capfd.readouterr())
    asked = [headers.get("user-agent", "")[:6] for _, headers in site.requests[1:]]
    assert asked == ["cog-tr", "Python", "cog-tr"]
    assert site.statuses[-1] == 304
    assert site.fetch("/m.tar?secret") == found
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("how", [{"status": 3}, {"cut": "[1000::-1]"}], ids=["fails", "cuts short"])
def test_what_pget_cannot_do_is_done_without_it(
    how: dict[str, Any], site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_pget(tmp_path, **how)
    site.serve()
    assert contents(site.fetch()) == FILES
    assert "trying again" in caplog.text
    assert site.left() == set()


def test_a_file_that_changes_while_pget_reads_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pget(tmp_path)
    site.serve()
    run_pget = Download._run_pget

    def change(download: Download) -> None:
        run_pget(download)
        site.serve(tar(OTHER), etag='"2"')

    monkeypatch.setattr(Download, "_run_pget", change)
    assert contents(site.fetch()) == OTHER
