from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from cog_triton.weights.cache import display_url, local_path
from tests.unit.weights.support import FILES, OTHER, contents, names_in, tar

# What a source is


@pytest.mark.parametrize("text", ["a" * 63, "g" * 64, "md5:" + "a" * 64, "sha256:", "x"])
def test_anything_else_is_no_checksum(text: str, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        fetch("m.tar", cache=cache, checksum=text)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("/a/b", "/a/b"),
        ("a/b", "a/b"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("FILE:/a", "/a"),
        ("~no-such-user-xyz/a", "~no-such-user-xyz/a"),
    ],
)
def test_paths(source: str, path: str) -> None:
    assert local_path(source) == Path(path)


def test_a_tilde_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert local_path("~/a") == Path("/h/a")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("s3://bucket/m.tar", r"cannot be fetched by s3://; give an https:// URL \(a presigned"),
        ("ftp://u:secret@h/m.tar", "fetched by ftp://"),
        ("file://other/m.tar", "another machine"),
        ("http://", "malformed"),
        ("https:///m.tar?secret", "malformed"),
        ("http://h:secret/m.tar", "malformed"),
        ("http://[secret/m.tar", "malformed"),
        ("no such thing", "neither a URL nor a Hugging Face id"),
        ("a/b/c", "neither a URL nor a Hugging Face id"),
        ("./a", "neither a URL nor a Hugging Face id"),
        ("gpt2", "neither a URL nor a Hugging Face id"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_what_is_no_source(source: str, problem: str, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match=problem) as error:
        fetch(source, cache=cache)
    assert "secret" not in str(error.value)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/a/m.tar", "https://h/a/m.tar"),
        ("https://user:pass@h:1/m.tar?X-Amz-Signature=s#f", "https://h:1/m.tar"),
        ("https://user:p@ss@h/m.tar", "https://h/m.tar"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert display_url(url) == shown


# Directories


def test_a_directory_is_returned_as_it_is(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fetch(str(tmp_path), cache=cache) == tmp_path
    assert fetch(tmp_path.as_uri(), cache=cache) == tmp_path
    assert not cache.exists()


def test_an_empty_directory_is_an_error(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="is empty"):
        fetch(str(tmp_path), cache=cache)


def test_a_relative_directory_comes_before_a_hub_id(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert fetch("org/name", cache=cache) == Path("org/name")


@pytest.mark.parametrize("source", [".", "org/name"])
def test_a_checksum_of_what_is_no_tar_file_is_an_error(source: str, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no tar file"):
        fetch(source, cache=cache, checksum="0" * 64)


def test_a_pipe_is_no_source(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="neither a file nor a directory"):
        fetch(str(tmp_path / "pipe"), cache=cache)


# Local tar files


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
def test_a_local_tar_file_is_unpacked(
    tmp_path: Path, cache: Path, compress: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "with space.tar"
    file.write_bytes(compress(tar()))
    found = fetch(str(file), cache=cache)
    assert contents(found) == FILES
    assert found.is_absolute()
    assert fetch(file.as_uri(), cache=cache) == found
    assert names_in(cache) == set()
    assert file.exists()


def test_a_changed_local_tar_file_is_unpacked_again(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.tar"
    file.write_bytes(tar())
    first = fetch(str(file), cache=cache)
    file.write_bytes(tar(OTHER))
    second = fetch(str(file), cache=cache)
    assert contents(second) == OTHER
    assert not first.exists()


def test_a_local_tar_file_is_checked(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.tar"
    file.write_bytes(tar())
    digest = hashlib.sha256(tar()).hexdigest()
    with pytest.raises(ConfigurationError, match=f"has the SHA-256 {digest}, not 000"):
        fetch(str(file), cache=cache, checksum="0" * 64)
    assert file.exists()
    found = fetch(str(file), cache=cache, checksum=f" SHA256:{digest.upper()}\n")
    assert contents(found) == FILES
    file.unlink()
    file.write_bytes(tar(OTHER))
    # The checksum names the content, so the copy will do.
    assert fetch(str(file), cache=cache, checksum=digest) == found
    assert contents(fetch(str(file), cache=cache)) == OTHER
