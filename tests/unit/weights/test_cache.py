from __future__ import annotations

import errno
import logging
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.download import TRIES
from tests.unit.weights.support import (
    FILES,
    MODIFIED,
    OTHER,
    ROOT,
    Site,
    contents,
    names_in,
    tar,
)

# The cache


def test_a_relative_cache_gives_an_absolute_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.tar").write_bytes(tar())
    monkeypatch.chdir(tmp_path)
    assert fetch("m.tar", cache=Path("cache")).is_absolute()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar())
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigurationError, match=r"cache.*: (Not a directory|File exists)"):
        fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")


# The copy


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({}, 304),
        ({"conditional": False}, 200),
        ({"etag": None, "modified": MODIFIED}, 200),
        ({"etag": 'W/"1"'}, 304),
    ],
    ids=["304", "etag alone", "date", "weak etag"],
)
def test_a_current_copy_is_used_at_once(
    how: dict[str, Any], status: int, site: Site, cache: Path
) -> None:
    site.serve(**how)
    found = fetch(f"{site.url}/m.tar", cache=cache)
    before = (found / "config.json").stat()
    assert fetch(f"{site.url}/m.tar", cache=cache) == found
    assert site.statuses == [200, status]
    assert (found / "config.json").stat().st_ino == before.st_ino
    assert names_in(cache) == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"etag": '"1"'}, {"etag": '"2"'}),
        ({"etag": '"1"'}, {"etag": None}),
        ({"etag": None, "modified": MODIFIED}, {"etag": None, "modified": MODIFIED[:-5] + "1 GMT"}),
        ({"etag": None, "modified": MODIFIED}, {"etag": '"2"', "modified": MODIFIED}),
        ({"etag": None}, {"etag": None}),
    ],
    ids=["etag", "no etag", "date", "new etag", "nothing"],
)
def test_what_may_have_changed_is_fetched_again(
    before: dict[str, Any], after: dict[str, Any], site: Site, cache: Path
) -> None:
    same_size = {"config.json": b'{"a": 9}', "rank0.engine": FILES["rank0.engine"]}
    site.serve(**before)
    first = fetch(f"{site.url}/m.tar", cache=cache)
    site.serve(tar(same_size), **after)
    second = fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(second) == same_size
    assert first != second
    assert len(list(cache.glob("*/tree-*"))) == 1


def test_another_url_is_another_file(site: Site, cache: Path) -> None:
    site.serve()
    site.serve(tar(OTHER), path="/n.tar")
    first = fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(fetch(f"{site.url}/n.tar", cache=cache)) == OTHER
    assert contents(fetch(f"{site.url}/m.tar?v=2", cache=cache)) == FILES
    assert fetch(f"{site.url}/m.tar", cache=cache) == first
    assert len(list(cache.iterdir())) == 3


def test_the_copy_serves_when_the_server_does_not(
    site: Site, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = site.serve()
    found = fetch(f"{site.url}/m.tar?secret", cache=cache)
    file.statuses = [503] * 99
    assert fetch(f"{site.url}/m.tar?secret", cache=cache) == found
    assert len(site.requests) == 1 + TRIES
    site.close()
    assert fetch(f"{site.url}/m.tar?secret", cache=cache) == found
    warnings = [r.getMessage() for r in caplog.records if "using the copy" in r.getMessage()]
    assert len(warnings) == 2
    assert "refused" in warnings[1]
    assert "secret" not in caplog.text


def test_the_copy_does_not_serve_for_what_is_known_to_have_changed(site: Site, cache: Path) -> None:
    site.serve()
    fetch(f"{site.url}/m.tar", cache=cache)
    site.serve(tar(OTHER), etag='"2"', drops=[1000] * TRIES)
    with pytest.raises(ConfigurationError, match="ended early 5 times"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == OTHER


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
def test_a_spoilt_copy_is_fetched_again(
    spoil: Callable[[Path, Path], Any], site: Site, cache: Path
) -> None:
    site.serve()
    tree = fetch(f"{site.url}/m.tar", cache=cache)
    spoil(tree, tree.parent / "fetched.json")
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 200]
    assert len(list(cache.glob("*/tree-*"))) == 1


# Leftovers


def test_a_failed_unpack_leaves_nothing(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()

    def broken(_: Path, directory: Path, __: str) -> None:
        (directory / "half").touch()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("cog_triton.weights.cache.unpack", broken)
    with pytest.raises(ConfigurationError, match="Input/output error"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == {"download.tar", "download.json"}
    assert not list(cache.glob("*/tree-*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from cog_triton.weights import cache, fetch

def unpack(archive, directory, shown):
    (directory / "half").touch()
    (directory.parents[1] / "pget-1").touch()
    os.kill(os.getpid(), signal.SIGKILL)

cache.unpack = unpack
fetch(sys.argv[1], cache=Path(sys.argv[2]))
"""


def test_what_a_killed_process_leaves_is_removed(site: Site, cache: Path) -> None:
    site.serve()
    command = [sys.executable, "-c", KILLED, f"{site.url}/m.tar", str(cache)]
    done = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    left = names_in(cache)
    assert {"download.tar", "download.json", "pget-1"} < left
    assert any(name.startswith("unpack-") for name in left)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert names_in(cache) == set()
    assert site.statuses == [200, 304]


def test_leftovers_go_though_the_copy_is_current(site: Site, cache: Path) -> None:
    site.serve()
    found = fetch(f"{site.url}/m.tar", cache=cache)
    (found.parent / "tree-old").mkdir()
    (found.parent / "unpack-old").mkdir()
    (found.parent / "pget-old").touch()
    assert fetch(f"{site.url}/m.tar", cache=cache) == found
    assert list(found.parent.glob("*-*")) == [found]


# Several at once


FETCH = """
import sys
from pathlib import Path
from cog_triton.weights import fetch
print(fetch(sys.argv[1], cache=Path(sys.argv[2])))
"""


def test_two_processes_take_turns(
    site: Site, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = site.serve(wait=threading.Event())
    assert file.wait is not None
    caplog.set_level(logging.INFO)
    command = [sys.executable, "-c", FETCH, f"{site.url}/m.tar", str(cache)]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert site.arrived.acquire(timeout=15)  # so the other has the lock, and waits for the body
    waiting = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for another process" in record.getMessage():
                waiting.set()

    watch = Watch()
    logging.getLogger("cog_triton.weights").addHandler(watch)
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(fetch(f"{site.url}/m.tar", cache=cache)))
    thread.start()
    try:
        assert waiting.wait(10)
        assert site.statuses == [200]
    finally:
        file.wait.set()
        logging.getLogger("cog_triton.weights").removeHandler(watch)
        thread.join(10)
        output = other.communicate(timeout=10)[0]
    assert found == [Path(output.strip())]
    assert contents(found[0]) == FILES
    assert site.statuses == [200, 304]


def test_many_at_once_in_one_process(site: Site, cache: Path) -> None:
    site.serve()
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(f"{site.url}/m.tar", cache=cache)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert site.statuses.count(200) == 1
