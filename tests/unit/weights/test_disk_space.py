from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from tests.unit.weights.support import FILES, Site, contents, names_in, tar

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def written_until(limit: int) -> Callable[..., Any]:
    """A stand-in for ``Path.open`` whose files in download.tar take ``limit`` bytes."""
    really = Path.open

    class Full(io.BufferedWriter):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > limit:
                raise NO_SPACE
            return super().write(data)

    def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name == "download.tar" and mode == "ab":
            return Full(really(path, "ab", buffering=0))
        return really(path, mode, *args, **kwargs)

    return open_


def test_a_disk_that_fills_up_during_the_download(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()
    monkeypatch.setattr(Path, "open", written_until(100_000))
    with pytest.raises(ConfigurationError, match="no space left for") as error:
        fetch(f"{site.url}/m.tar?secret", cache=cache)
    assert "secret" not in str(error.value)
    assert names_in(cache) == set()


def test_a_disk_that_fills_up_while_unpacking(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve(gzip.compress(tar()))
    really = tarfile.copyfileobj  # type: ignore[attr-defined]

    def full(source: Any, target: Any, length: int, *rest: Any) -> None:
        if length > 1000:
            target.write(b"half")
            raise NO_SPACE
        really(source, target, length, *rest)

    monkeypatch.setattr(tarfile, "copyfileobj", full)
    with pytest.raises(ConfigurationError, match="no space left for"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == set()
    assert not list(cache.glob("*/tree-*"))


def test_a_disk_that_has_too_little_room_is_not_filled(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(ConfigurationError, match=r"1\.00MB is free \(it needs about 1\.04MB\)"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == set()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_050_000))
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES


def test_a_resumed_download_needs_room_for_the_rest(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve(drops=[100_000])
    usage = shutil.disk_usage("/")
    free = iter([1_050_000, 950_000])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
