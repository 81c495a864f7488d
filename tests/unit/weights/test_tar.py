"""Tar files: whole or refused, and nothing outside their directory."""

import bz2
import gzip
import itertools
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights.cache import unpack
from tests.unit.weights.support import Site, contents, entry, refused, tar, tar_of, unpacked


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is neither a tar file nor a GGUF file, or is truncated"),
        (b"some text" * 1000, "is neither a tar file nor a GGUF file, or is truncated"),
        (b" \n<!DOCTYPE html><p>Please log in", "is a web page"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "compressed with zstd"),
        (tar()[:100], "is neither a tar file nor a GGUF file, or is truncated"),
        (tar()[:1024], "truncated or damaged"),  # where the second header should be
        (tar()[:1024] + b"x" * 512 + tar()[1536:], "truncated or damaged"),
        (gzip.compress(tar())[:-9], "truncated or damaged"),
        (gzip.compress(tar())[:-8] + bytes(8), r"m\.tar is damaged \(CRC"),
        (bz2.compress(tar())[:-30], "or is truncated"),
        (lzma.compress(tar())[:-30], "truncated or damaged"),
        (tar_of(entry("directory", "m")), "contains no files"),
        # tarfile would look for what it links to, which is itself, and so on; or leave it out.
        (tar_of(entry("file", "ok"), entry("symlink", "x" * 300, "x" * 300)), "damaged"),
        (tar_of(entry("file", "ok"), entry("symlink", "x" * 300, "y")), "damaged"),
        (tar_of(entry("symlink", "s", "d"), entry("file", "s/x")), "its member 's/x' leads"),
    ],
    ids=itertools.count(),  # gzip writes the time: the bytes would be another name in each process
)
def test_what_is_no_whole_tar_file(content: bytes, problem: str, tmp_path: Path) -> None:
    with refused(problem):
        unpacked(tmp_path, content)
    (kept,) = (tmp_path / "cache").iterdir()
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("path", ["/m.tar.zst", "/m.TZST"])
@pytest.mark.skipif("zst" in tarfile.TarFile.OPEN_METH, reason="this Python reads zstd")
def test_zstd_is_refused_before_the_download(path: str, site: Site) -> None:
    with refused("compressed with zstd"):
        site.fetch(f"{path}?x")
    assert site.requests == []


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([entry("file", "../x")], id="parent"),
        pytest.param([entry("file", "a/../../x")], id="inner parent"),
        pytest.param([entry("directory", "../d")], id="directory"),
        pytest.param([entry("symlink", "s", "/etc/passwd")], id="absolute symlink"),
        pytest.param([entry("symlink", "s", "../x")], id="symlink out"),
        pytest.param([entry("symlink", "a/s", "../../x")], id="deep symlink out"),
        pytest.param(
            [entry("symlink", "s", "a/b/up/.."), entry("symlink", "a/b/up", "../..")],
            id="symlink up by a later link",
        ),
        pytest.param(
            [entry("directory", "d"), entry("symlink", "s", "d"), entry("file", "s/x")],
            id="file through a link",
        ),
        pytest.param(
            [entry("symlink", "s", "d"), entry("file", "s")], id="file in place of a link"
        ),
        pytest.param(
            [entry("symlink", "s", "d"), entry("directory", "s")], id="directory in place of a link"
        ),
        pytest.param([entry("hardlink", "h", "/etc/passwd")], id="absolute hardlink"),
        pytest.param([entry("hardlink", "h", "../x")], id="hardlink out"),
        pytest.param([entry("hardlink", "h", "x")], id="hardlink to nothing"),
        pytest.param(
            [entry("symlink", "a/b/s", "../../x"), entry("hardlink", "h", "a/b/s")],
            id="hardlink to a link",
        ),
        pytest.param([entry("file", "x"), entry("file", "x/y")], id="file through a file"),
        pytest.param(
            [entry("directory", "d"), entry("file", "d")], id="file in place of a directory"
        ),
        pytest.param([entry("character device", "d")], id="character device"),
        pytest.param([entry("block device", "d")], id="block device"),
        pytest.param([entry("pipe", "d")], id="pipe"),
    ],
)
def test_an_unsafe_member_is_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError):
        unpacked(tmp_path, tar_of(entry("file", "ok"), *members))
    (kept,) = (tmp_path / "cache").iterdir()
    assert list(kept.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar", "cache"}


def test_a_link_whose_name_ends_in_a_slash_is_refused_before_it_is_written(tmp_path: Path) -> None:
    archive, tree = tmp_path / "m.tar", tmp_path / "tree"
    archive.write_bytes(tar_of(entry("symlink", "a//", "..")))
    tree.mkdir()
    with refused("outside"):
        unpack(archive, tree, "it")
    assert list(tree.iterdir()) == []


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    links = [
        entry("file", "blobs/1"),
        entry("symlink", "snapshots/main/model", "../../blobs/1"),
        entry("symlink", "snapshots/main/again", "model"),
        entry("hardlink", "snapshots/main/hard", "blobs/1"),
        entry("symlink", "current", "snapshots/./main"),
        entry("symlink", "latest", "."),
    ]
    found = unpacked(tmp_path, tar_of(*links))
    for name in ("model", "again", "hard"):
        assert (found / "current" / name).read_bytes() == b"1"
    assert (found / "current").is_symlink()
    assert (found / "latest" / "current" / "model").read_bytes() == b"1"


def test_owners_and_dangerous_modes_are_not_kept(tmp_path: Path) -> None:
    run, secret, directory = entry("file", "run"), entry("file", "secret"), entry("directory", "d")
    run[0].mode, run[0].uid, run[0].gid, run[0].uname = 0o6777, 12345, 12345, "nobody"
    secret[0].mode = directory[0].mode = 0
    found = unpacked(tmp_path, tar_of(run, secret, directory, entry("file", "d/x")))
    status = (found / "run").stat()
    assert status.st_mode & 0o7022 == 0
    assert status.st_mode & 0o100
    assert status.st_uid == os.getuid()
    assert (found / "secret").stat().st_mode & 0o600 == 0o600
    assert (found / "d").stat().st_mode & 0o700 == 0o700


def test_dots_in_names_do_not_count_and_a_later_file_wins(tmp_path: Path) -> None:
    members = [
        entry("file", "a"),
        entry("file", "./d//x"),
        entry("symlink", "l", "./d/./x"),
        entry("hardlink", "h", "./d//x"),
        entry("file", "a", content=b"2"),
    ]
    found = unpacked(tmp_path, tar_of(*members))
    assert contents(found) == {"a": b"2", "d/x": b"1", "l": b"1", "h": b"1"}


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["./config.json"], ""),
        (["m/n/config.json"], "n"),
        (["./m/config.json", "._m"], "m"),
        (["m/inner/config.json", "m/inner/model.safetensors"], "inner"),
        (["README.md", "m/config.json"], "m"),
        (["README.md", "__MACOSX/m/x", "a/LICENSE", "a/b/config.json"], "b"),
        (["config.json", "m/config.json"], ""),
        (["a/config.json", "b/config.json"], ""),
        (["docs/x", "m/rank0.engine", "m/config.json"], "m"),
        (["engine/rank0.engine", "tokenizer/tokenizer.json"], ""),
        (["run/README", "run/engine/rank0.engine", "run/tokenizer/tokenizer.json"], "run"),
        (["m/config.json", "README"], "m"),
    ],
)
def test_the_root_is_the_directory_of_the_model(
    names: list[str], root: str, tmp_path: Path
) -> None:
    found = unpacked(tmp_path, tar(dict.fromkeys(names, b"x")))
    assert found.name == root or (not root and found.name.startswith("tree-"))
