"""The copies in the cache: current, whole, one for each URL, and what a full disk or a kill leaves."""

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from cog_triton.weights.download import TRIES
from tests.support import ROOT, run_until_killed
from tests.unit.weights.support import FILES, OTHER, SAME_SIZE, Site, contents, refused, tar

DATE = "Mon, 01 Jan 2024 00:00:00 GMT"
LATER = "Mon, 01 Jan 2024 00:00:01 GMT"


@pytest.mark.parametrize(
    ("how", "statuses"),
    [
        pytest.param({}, [200, 304], id="ETag"),
        pytest.param(
            {"conditional": False}, [200, 200], id="ETag that the server does not compare"
        ),
        pytest.param({"etag": None, "modified": DATE}, [200, 200], id="date"),
        pytest.param({"etag": 'W/"1"'}, [200, 304], id="weak ETag"),
    ],
)
def test_a_current_copy_is_used_at_once(
    how: dict[str, Any], statuses: list[int], site: Site
) -> None:
    """``how`` the file is served has fields of Served."""
    site.serve(**how)
    found = site.fetch()
    before = (found / "config.json").stat()
    assert site.fetch() == found
    assert site.statuses == statuses
    assert (found / "config.json").stat().st_ino == before.st_ino
    assert site.left() == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"etag": '"1"'}, {"etag": '"2"'}, id="another ETag"),
        pytest.param({"etag": '"1"'}, {"etag": None}, id="no ETag any more"),
        pytest.param(
            {"etag": None, "modified": DATE}, {"etag": None, "modified": LATER}, id="later date"
        ),
        pytest.param(
            {"etag": None, "modified": DATE},
            {"etag": '"2"', "modified": DATE},
            id="ETag beside the date",
        ),
        pytest.param({"etag": None}, {"etag": None}, id="neither"),
    ],
)
def test_what_may_have_changed_is_fetched_again(
    before: dict[str, Any], after: dict[str, Any], site: Site
) -> None:
    site.serve(**before)
    first = site.fetch()
    site.serve(tar(SAME_SIZE), **after)
    second = site.fetch()
    assert contents(second) == SAME_SIZE
    assert first != second
    assert len(list(site.cache.glob("*/tree-*"))) == 1


def test_the_copy_serves_without_a_server(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    file = site.serve()
    found = site.fetch("/m.tar?secret")
    file.statuses = [503] * 99
    assert site.fetch("/m.tar?secret") == found
    assert len(site.requests) == 1 + TRIES
    warning = "cannot be reached (HTTP 503); check the URL and the network; using the copy"
    assert warning in caplog.text
    assert "secret" not in caplog.text


def test_the_copy_does_not_serve_for_what_is_known_to_have_changed(site: Site) -> None:
    site.serve()
    site.fetch()
    site.serve(tar(OTHER), etag='"2"', drops=[1000] * TRIES)
    with refused("failed 5 times"):
        site.fetch()
    assert contents(site.fetch()) == OTHER


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tree, _: (tree / "config.json").unlink(),
        lambda tree, _: (tree / "config.json").write_bytes(b""),
        lambda tree, _: shutil.rmtree(tree),
        lambda _, marker: marker.unlink(),
        lambda _, marker: marker.write_text("{"),
        lambda _, marker: marker.write_text("{}"),
    ],
    ids=["file gone", "file cut", "tree gone", "no marker", "cut marker", "empty marker"],
)
def test_a_spoilt_copy_is_fetched_again(spoil: Callable[[Path, Path], Any], site: Site) -> None:
    site.serve()
    tree = site.fetch()
    spoil(tree, tree.parent / "fetched.json")
    assert contents(site.fetch()) == FILES
    assert site.statuses == [200, 200]
    assert len(list(site.cache.glob("*/tree-*"))) == 1


KILLED = """
    import os, signal
    from pathlib import Path
    from cog_triton.weights import cache
    from cog_triton.weights.cache import fetch

    def unpack(archive, directory, shown):
        (directory / "half").touch()
        (archive.parent / "pget-1").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    cache.unpack = unpack
    fetch({url!r}, cache=Path({cache!r}))
"""


def test_what_a_killed_process_leaves_is_removed(site: Site) -> None:
    site.serve()
    run_until_killed(KILLED.format(url=f"{site.url}/m.tar", cache=str(site.cache)))
    assert {"download.tar", "download.json", "pget-1"} <= site.left()
    assert list(site.cache.rglob("half"))
    found = site.fetch()
    assert contents(found) == FILES
    assert site.statuses == [200, 304]
    (found.parent / "pget-2").touch()  # beside a copy that is current
    assert site.fetch() == found
    assert site.left() == set()
    assert len(list(site.cache.glob("*/tree-*"))) == 1


def copied_half(source: Any, target: Any, length: int, *_: Any) -> None:
    target.write(source.read(length // 2))
    raise OSError(ENOSPC, os.strerror(ENOSPC))


def test_a_disk_that_fills_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.serve(gzip.compress(tar(), 0))
    monkeypatch.setattr(tarfile, "copyfileobj", copied_half)
    with refused("not enough disk space for"):
        site.fetch("/m.tar?secret")
    assert site.left() == set()
    assert not list(site.cache.glob("*/tree-*"))


def test_a_disk_with_little_room_is_not_filled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    free = [1_000_000, 1_000_000]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free.pop(0)))
    site.serve()
    with refused(r"1\.00MB free, it needs about 1\.04MB"):
        site.fetch()
    assert site.left() == set()
    free += [1_050_000, 950_000]  # a resumed download needs room for the rest
    site.serve(drops=[100_000])
    assert contents(site.fetch()) == FILES


FETCH = """
import sys
from pathlib import Path
from cog_triton.weights.cache import fetch
print(fetch(sys.argv[1], cache=Path(sys.argv[2])))
"""


def test_two_processes_take_turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, held = [], threading.Event()
    site.serve(wait=held)
    command = [sys.executable, "-c", FETCH, f"{site.url}/m.tar", str(site.cache)]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert site.arrived.acquire(timeout=60)  # so the other has the lock, and waits for the body

    def log(text: str, *_: object) -> None:
        waiting.append(text)
        held.set()

    monkeypatch.setattr("cog_triton.weights.cache.logger.info", log)
    found = site.fetch()
    assert found == Path(other.communicate(timeout=60)[0].strip())
    assert waiting == ["waiting for another process to fetch %s"]
    assert contents(found) == FILES
    assert site.statuses == [200, 304]
