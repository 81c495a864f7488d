from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from tests.unit.weights.support import (
    DIR,
    LNK,
    SYM,
    Site,
    entry,
    tar,
    tar_of,
    unpacked,
)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a tar file, or cut short"),
        (b"some text" * 1000, "is not a tar file, or cut short"),
        (b" \n<!DOCTYPE html><p>Please log in", "is a web page"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "compressed with zstd"),
        (gzip.compress(b"some text" * 1000), "is not a tar file, or cut short"),
        (tar()[:100], "is not a tar file, or cut short"),
        (tar()[:3000], "cut short or damaged"),
        (tar()[:1024], "cut short or damaged"),  # where the second header should be
        (tar()[:1500], "cut short or damaged"),
        (tar()[:1024] + b"x" * 512 + tar()[1536:], "cut short or damaged"),
        (gzip.compress(tar())[:-9], "cut short or damaged"),
        (gzip.compress(tar())[:-8] + bytes(8), r"m\.tar is damaged \(CRC"),
        (bz2.compress(tar())[:-30], "or cut short"),
        (lzma.compress(tar())[:-30], "cut short or damaged"),
        (tar({}), "holds no files"),
        (tar_of(entry("m", kind=tarfile.DIRTYPE)), "holds no files"),
    ],
    ids=itertools.count(),  # gzip writes the time: the bytes would be another name in each process
)
def test_what_is_no_whole_tar_file(content: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        unpacked(tmp_path, content)
    (entry,) = (tmp_path / "cache").iterdir()
    assert list(entry.iterdir()) == []


def test_a_link_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """tarfile would look for what it links to, which is itself, and so on; or leave it out."""
    for target in ("x" * 300, "y"):
        with pytest.raises(ConfigurationError, match="cut short or damaged"):
            unpacked(tmp_path, tar_of(entry("ok", b"1"), entry("x" * 300, kind=SYM, link=target)))


def test_owners_and_dangerous_modes_are_not_kept(tmp_path: Path) -> None:
    run, secret = entry("run", b"1"), entry("secret", b"2")
    run[0].mode, run[0].uid, run[0].gid, run[0].uname = 0o6777, 12345, 12345, "nobody"
    secret[0].mode = 0
    directory = entry("d", kind=DIR)
    directory[0].mode = 0
    (tmp_path / "m.tar").write_bytes(tar_of(run, secret, directory, entry("d/x", b"3")))
    found = fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")
    status = (found / "run").stat()
    assert status.st_mode & 0o7022 == 0
    assert status.st_mode & 0o100
    assert status.st_uid == os.getuid()
    assert (found / "secret").stat().st_mode & 0o600 == 0o600
    assert (found / "d").stat().st_mode & 0o700 == 0o700


def test_dots_in_names_do_not_count(tmp_path: Path) -> None:
    link, hard = entry("l", kind=SYM, link="./d/./x"), entry("h", kind=LNK, link="./d//x")
    found = unpacked(tmp_path, tar_of(entry("./d//x", b"1"), link, hard))
    assert found == {"d/x": b"1", "l": b"1", "h": b"1"}


def test_a_later_file_of_the_same_name_wins(tmp_path: Path) -> None:
    assert unpacked(tmp_path, tar_of(entry("a", b"1"), entry("a", b"2"))) == {"a": b"2"}


@settings(deadline=None, max_examples=100)
@given(
    damage=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=8),
    compressed=st.booleans(),
)
def test_damage_is_an_error_or_nothing(
    damage: list[tuple[int, int]], compressed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("damage")
    content = bytearray(tar({"a" * 150: b"1" * 600, "b": b"2"}))
    content = bytearray(gzip.compress(content)) if compressed else content
    for at, value in damage:
        content[at % len(content)] = value
    (directory / "m.tar").write_bytes(content)
    try:
        fetch(str(directory / "m.tar"), cache=directory / "cache")
    except ConfigurationError:
        assert not list((directory / "cache").glob("*/*"))
    shutil.rmtree(directory)


@pytest.mark.parametrize("path", ["/m.tar.zst", "/m.TZST"])
@pytest.mark.skipif("zst" in tarfile.TarFile.OPEN_METH, reason="this Python reads zstd")
def test_zstd_is_refused_before_the_download(path: str, site: Site, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="compressed with zstd"):
        fetch(f"{site.url}{path}?x", cache=cache)
    assert site.requests == []


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["./config.json"], ""),
        (["m/n/config.json"], "m"),
        (["./m/config.json", "._m"], "m"),
        (["m/config.json", "README"], ""),
    ],
)
def test_a_single_top_directory_is_the_root(names: list[str], root: str, tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar(dict.fromkeys(names, b"x")))
    found = fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")
    assert found.name == root or (not root and found.name.startswith("tree-"))
