from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import inspect
import io
import json
import logging
import lzma
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton import weights
from cog_triton.errors import ConfigurationError
from cog_triton.weights import (
    Layout,
    Partial,
    UnsafeMember,
    Version,
    check_status,
    display_url,
    fetch,
    local_path,
    next_step,
    no_space_problem,
    parse_checksum,
    pget_command,
    request_headers,
    root_of,
    same_version,
    unpack,
    version_of,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = {"config.json": b'{"a": 1}', "rank0.engine": bytes(range(256)) * 2000}
OTHER = {"config.json": b'{"a": 2}', "rank0.engine": b"other" * 5000}
MODIFIED = "Mon, 01 Jan 2024 00:00:00 GMT"
TLS = ssl.create_default_context()
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "BACKOFF", 0.0)
    # Reading every certificate for each client would be most of the time of these tests.
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: TLS)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), "/usr/bin", "/bin"]))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# Tar files


def entry(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mtime = kind, link, len(content), 1_700_000_000
    return info, content


def tar_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar(files: dict[str, bytes] = FILES) -> bytes:
    return tar_of(*[entry(name, content) for name, content in files.items()])


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def names_in(cache: Path) -> set[str]:
    """What is in the only entry of the cache, the marker and the tree apart."""
    (entry,) = cache.iterdir()
    return {path.name for path in entry.iterdir() if not path.name.startswith("tree-")} - {
        "fetched.json"
    }


def marker(cache: Path) -> dict[str, Any]:
    (found,) = cache.glob("*/fetched.json")
    loaded: dict[str, Any] = json.loads(found.read_text())
    return loaded


# A server


@dataclass
class Served:
    """A file on the server, and how the server serves it."""

    content: bytes
    etag: str | None = '"1"'
    modified: str | None = None
    ranges: bool = True
    length: bool = True
    conditional: bool = True
    drops: list[int] = field(default_factory=list)  # bytes after which the connection breaks
    statuses: list[int] = field(default_factory=list)  # answered first
    moved_to: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None


class Site:
    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.statuses: list[int] = []
        self.bodies: list[int] = []  # bytes of the bodies sent
        self.arrived = threading.Semaphore(0)
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, content: bytes | None = None, path: str = "/m.tar", **how: Any) -> Served:
        self.files[path] = Served(tar() if content is None else content, **how)
        return self.files[path]

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        self.requests.append((to.path, {name.lower(): value for name, value in to.headers.items()}))
        self.arrived.release()
        file = self.files.get(to.path.partition("?")[0])
        if file is None:
            self._send(to, 404)
        elif file.statuses:
            self._send(to, file.statuses.pop(0))
        elif file.moved_to:
            self._send(to, 302, {"Location": file.moved_to})
        else:
            self._send_file(to, file)

    def _send(
        self, to: BaseHTTPRequestHandler, status: int, headers: dict[str, str] | None = None
    ) -> None:
        self.statuses.append(status)
        to.send_response(status)
        for name, value in ({"Content-Length": "0"} | (headers or {})).items():
            if value:
                to.send_header(name, value)
        to.end_headers()

    def _send_file(self, to: BaseHTTPRequestHandler, file: Served) -> None:
        known = {"ETag": file.etag or "", "Last-Modified": file.modified or "", **file.headers}
        if file.conditional and file.etag and to.headers["If-None-Match"] == file.etag:
            return self._send(to, 304, known | {"Content-Length": ""})
        start, status = 0, 200
        wanted, condition = to.headers["Range"], to.headers["If-Range"]
        if wanted and file.ranges and condition in (None, file.etag, file.modified):
            start, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
            end, size = len(file.content) - 1, len(file.content)
            if start > end:
                return self._send(to, 416, {"Content-Range": f"bytes */{size}"})
            known["Content-Range"] = f"bytes {start}-{end}/{size}"
        body = file.content[start:]
        known["Content-Length"] = str(len(body)) if file.length else ""
        to.close_connection = not file.length
        self._send(to, status, known)
        if file.wait:
            file.wait.wait(10)
        if file.drops:
            body = body[: file.drops.pop(0)]
            to.close_connection = True
        self.bodies.append(len(body))
        with contextlib.suppress(ConnectionError):  # who reads the headers alone
            to.wfile.write(body)
        return None


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


# What a source is


@pytest.mark.parametrize(
    "text", ["a" * 64, "A" * 64, f"sha256:{'a' * 64}", f"SHA256:{'A' * 64}", f" {'a' * 64}\n"]
)
def test_a_checksum_is_64_digits(text: str) -> None:
    assert parse_checksum(text) == "a" * 64


@pytest.mark.parametrize("text", ["a" * 63, "g" * 64, "md5:" + "a" * 64, "sha256:", "x"])
def test_anything_else_is_no_checksum(text: str) -> None:
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        parse_checksum(text)


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
    found = fetch(str(file), cache=cache, checksum=f"sha256:{digest}")
    assert contents(found) == FILES
    file.unlink()
    file.write_bytes(tar(OTHER))
    # The checksum names the content, so the copy will do.
    assert fetch(str(file), cache=cache, checksum=digest) == found
    assert contents(fetch(str(file), cache=cache)) == OTHER


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


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["config.json"], ""),
        (["./config.json"], ""),
        (["m/config.json"], "m"),
        (["m/n/config.json"], "m"),
        (["./m/config.json", "._m"], "m"),
        (["m/config.json", "README"], ""),
    ],
)
def test_a_single_top_directory_is_the_root(names: list[str], root: str, tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar(dict.fromkeys(names, b"x")))
    found = fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")
    assert found.name == root or (not root and found.name.startswith("tree-"))


def test_a_link_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "m").symlink_to(tmp_path)
    assert root_of(tmp_path / "tree") == tmp_path / "tree"


# Damaged and unsafe tar files


def unpacked(tmp_path: Path, content: bytes) -> dict[str, bytes]:
    (tmp_path / "m.tar").write_bytes(content)
    return contents(fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is no tar file, or cut short"),
        (b"some text" * 1000, "is no tar file, or cut short"),
        (b" \n<!DOCTYPE html><p>Please log in", "is a web page"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "compressed with zstd"),
        (gzip.compress(b"some text" * 1000), "is no tar file, or cut short"),
        (tar()[:100], "is no tar file, or cut short"),
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
)
def test_what_is_no_whole_tar_file(content: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        unpacked(tmp_path, content)
    (entry,) = (tmp_path / "cache").iterdir()
    assert list(entry.iterdir()) == []


def as_before_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tarfile what it was before it had filters, which later versions warn about."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(
        tarfile.TarFile, "extraction_filter", lambda _, member, __: member, raising=False
    )


SYM, LNK, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
UNSAFE: dict[str, tuple[list[Any], str]] = {
    "absolute": ([("/etc/x", b"1")], "has the absolute name '/etc/x'"),
    "parent": ([("../x", b"1")], r"has \.\. in the name"),
    "inner parent": ([("a/../../x", b"1")], r"has \.\. in the name"),
    "directory": ([("../d", b"", DIR)], r"has \.\. in the name"),
    "absolute symlink": ([("s", b"", SYM, "/etc/passwd")], "links to the absolute path"),
    "symlink out": ([("s", b"", SYM, "../x")], "outside the directory"),
    "deep symlink out": ([("a/s", b"", SYM, "../../x")], "outside the directory"),
    "symlink out and back": ([("s", b"", SYM, "../tree/x")], "outside the directory"),
    "symlink up by a link": (
        [("a/b/up", b"", SYM, "../.."), ("s", b"", SYM, "a/b/up/..")],
        "leads through a link or a file",
    ),
    "symlink up by a later link": (
        [("s", b"", SYM, "a/b/up/.."), ("a/b/up", b"", SYM, "../..")],
        "in the place of another",
    ),
    "file through a link": (
        [("d", b"", DIR), ("s", b"", SYM, "d"), ("s/x", b"1")],
        "leads through a link or a file",
    ),
    "file through a later link": ([("s/x", b"1"), ("s", b"", SYM, "d")], "in the place of another"),
    "file in place of a link": ([("s", b"", SYM, "d"), ("s", b"1")], "in the place of another"),
    "link in place of a file": ([("s", b"1"), ("s", b"", SYM, "d")], "in the place of another"),
    "directory in place of a link": (
        [("s", b"", SYM, "d"), ("s", b"", DIR)],
        "in the place of another",
    ),
    "nameless link": ([(".", b"", SYM, "d")], "in the place of another"),
    "absolute hardlink": ([("h", b"", LNK, "/etc/passwd")], "has the absolute name"),
    "hardlink out": ([("h", b"", LNK, "../x")], r"has \.\. in the name"),
    "hardlink to nothing": ([("h", b"", LNK, "x")], "no file before it"),
    "hardlink to a link": (
        [("a/b/s", b"", SYM, "../../x"), ("h", b"", LNK, "a/b/s")],
        "no file before it",
    ),
    "hardlink in place of a file": (
        [("x", b"1"), ("y", b"2"), ("y", b"", LNK, "x")],
        "in the place of another",
    ),
    "file through a file": ([("x", b"1"), ("x/y", b"2")], "leads through a link or a file"),
    "file in place of a directory": ([("d", b"", DIR), ("d", b"1")], "in the place of another"),
    "directory in place of a file": ([("d", b"1"), ("d", b"", DIR)], "in the place of another"),
    "dotted link in place of a directory": (
        [("d/x", b"1"), ("d/.", b"", SYM, "e")],
        "in the place of another",
    ),
    "character device": ([("d", b"", tarfile.CHRTYPE)], "is a device or a pipe"),
    "block device": ([("d", b"", tarfile.BLKTYPE)], "is a device or a pipe"),
    "pipe": ([("d", b"", tarfile.FIFOTYPE)], "is a device or a pipe"),
}


@pytest.mark.parametrize(("members", "problem"), UNSAFE.values(), ids=UNSAFE.keys())
def test_an_unsafe_member_is_refused(
    members: list[Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = members[-1][0]
    with pytest.raises(ConfigurationError, match=problem) as error:
        unpacked(tmp_path, tar_of(entry("ok", b"1"), *[entry(*member) for member in members]))
    assert f"its member {last!r} " in str(error.value)
    (kept,) = (tmp_path / "cache").iterdir()
    assert list(kept.iterdir()) == []
    # By the checks alone, and not because tarfile's filter agrees.
    as_before_filters(monkeypatch)
    with pytest.raises(ConfigurationError, match=problem):
        unpacked(tmp_path, tar_of(entry("ok", b"1"), *[entry(*member) for member in members]))
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar", "cache"}


def test_a_link_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """tarfile would look for what it links to, which is itself, and so on; or leave it out."""
    for target in ("x" * 300, "y"):
        with pytest.raises(ConfigurationError, match="cut short or damaged"):
            unpacked(tmp_path, tar_of(entry("ok", b"1"), entry("x" * 300, kind=SYM, link=target)))


@pytest.mark.parametrize("name", ["a\0b", "a/\0"])
def test_a_nul_in_a_name_is_refused(name: str) -> None:
    with pytest.raises(UnsafeMember, match="NUL"):
        Layout().place(tarfile.TarInfo(name))


LINKS = [
    entry("blobs/1", b"one"),
    entry("snapshots/main/model", kind=SYM, link="../../blobs/1"),
    entry("snapshots/main/again", kind=SYM, link="model"),
    entry("snapshots/main/hard", kind=LNK, link="blobs/1"),
    entry("current", kind=SYM, link="snapshots/./main"),
]


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(tar_of(*LINKS))
    found = fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")
    for name in ("model", "again", "hard"):
        assert (found / "current" / name).read_bytes() == b"one"
    assert (found / "current").is_symlink()


@pytest.mark.parametrize("has_filter", [True, False])
def test_owners_and_dangerous_modes_are_not_kept(
    has_filter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filter:
        as_before_filters(monkeypatch)
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
    link, hard = entry("l/.", kind=SYM, link="./d/./x"), entry("h", kind=LNK, link="./d//x")
    found = unpacked(tmp_path, tar_of(entry("./d//x", b"1"), link, hard))
    assert found == {"d/x": b"1", "l": b"1", "h": b"1"}


def test_a_later_file_of_the_same_name_wins(tmp_path: Path) -> None:
    assert unpacked(tmp_path, tar_of(entry("a", b"1"), entry("a", b"2"))) == {"a": b"2"}


PARTS = st.sampled_from(["a", "b", "c", "..", ".", "/"])
MEMBERS = st.lists(
    st.tuples(
        st.lists(PARTS, min_size=1, max_size=4).map("/".join),
        st.sampled_from([tarfile.REGTYPE, DIR, SYM, SYM, LNK]),
        st.lists(PARTS, min_size=1, max_size=5).map("/".join),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=100)
@given(members=MEMBERS)
def test_whatever_is_unpacked_stays_inside(
    members: list[tuple[str, bytes, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("unpack")
    tree = directory / "outer" / "tree"
    tree.mkdir(parents=True)
    content = tar_of(
        *[entry(name, b"x" * (kind == b"0"), kind, link) for name, kind, link in members]
    )
    (directory / "m.tar").write_bytes(content)
    with contextlib.suppress(
        ConfigurationError, OSError
    ):  # what it left must be inside all the same
        unpack(directory / "m.tar", tree, "it")
    assert [path.name for path in (directory / "outer").iterdir()] == ["tree"]
    assert {path.name for path in directory.iterdir()} == {"outer", "m.tar"}
    for path in tree.rglob("*"):
        if path.is_symlink() and path.exists():
            assert path.resolve().is_relative_to(tree)
    shutil.rmtree(directory)


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
        "source_sha256": hashlib.sha256(f"{site.url}/m.tar".encode()).hexdigest(),
        "version": {
            "etag": '"1"',
            "last_modified": None,
            "size": len(content),
            "resume_with": '"1"',
        },
        "sha256": hashlib.sha256(content).hexdigest(),
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


@pytest.mark.parametrize(
    ("target", "problem"),
    [("/m.tar", "redirects in a circle"), ("ftp://secret/x", "something other than HTTP")],
)
def test_redirects_to_nowhere(target: str, problem: str, site: Site, cache: Path) -> None:
    site.serve(moved_to=target)
    with pytest.raises(ConfigurationError, match=problem) as error:
        fetch(f"{site.url}/m.tar", cache=cache)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (401, "HTTP 401: it asks for a login"),
        (403, "HTTP 403: access is refused; a presigned URL may have expired"),
        (404, "HTTP 404: there is no such file"),
        (410, "HTTP 410: the file is gone"),
        (451, "HTTP 451: it sends no file"),
        (204, "HTTP 204: it sends no file"),
    ],
)
def test_a_refusal_is_final(status: int, problem: str, site: Site, cache: Path) -> None:
    site.serve(statuses=[status])
    url = f"http://user:secret@{site.host}/m.tar?X-Amz-Signature=secret#secret"
    with pytest.raises(ConfigurationError, match=problem) as error:
        fetch(url, cache=cache)
    assert f"{site.url}/m.tar answered" in str(error.value)
    assert "secret" not in str(error.value)
    assert len(site.requests) == 1
    assert names_in(cache) == set()


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
    assert len(site.requests) == weights.TRIES


def test_the_waits_grow(site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(weights, "BACKOFF", 8.0)
    monkeypatch.setattr("cog_triton.weights.time.sleep", waits.append)
    site.serve(statuses=[503] * 4)
    fetch(f"{site.url}/m.tar", cache=cache)
    assert waits == [8.0, 16.0, 30.0, 30.0]


def test_a_refused_connection(cache: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"cannot be reached \(.*refused\)") as error:
            fetch(f"http://127.0.0.1:{port}/m.tar?secret", cache=cache)
    assert "secret" not in str(error.value)


def test_a_server_that_says_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "TIMEOUT", httpx.Timeout(0.02))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"cannot be reached \(timed out\)"):
            fetch(f"http://127.0.0.1:{port}/m.tar", cache=cache)


@pytest.mark.parametrize("path", ["/m.tar.zst", "/m.TZST"])
@pytest.mark.skipif("zst" in tarfile.TarFile.OPEN_METH, reason="this Python reads zstd")
def test_zstd_is_refused_before_the_download(path: str, site: Site, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="compressed with zstd"):
        fetch(f"{site.url}{path}?x", cache=cache)
    assert site.requests == []


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


# Checksums of downloads


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
    site.serve(drops=[10_000] * weights.TRIES)
    digest = hashlib.sha256(tar()).hexdigest()
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    found = fetch(f"{site.url}/m.tar", cache=cache, checksum=digest)
    assert contents(found) == FILES
    assert site.requests[-1][1]["range"] == f"bytes={10_000 * weights.TRIES}-"


# Resuming


def test_a_broken_download_goes_on_from_there(site: Site, cache: Path) -> None:
    site.serve(drops=[100_000, 200_000])
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 206, 206]
    assert site.bodies == [100_000, 200_000, len(tar()) - 300_000]
    assert site.requests[2][1]["range"] == "bytes=300000-"
    assert site.requests[2][1]["if-range"] == '"1"'


def test_a_later_start_goes_on_from_there(site: Site, cache: Path) -> None:
    site.serve(drops=[1000] * weights.TRIES)
    with pytest.raises(ConfigurationError, match=r"ended early 5 times .* go on from where"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == {"download.tar", "download.json"}
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.bodies[-1] == len(tar()) - 5000
    assert names_in(cache) == set()


def test_progress_earns_more_tries(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PROGRESS", 10_000)
    site.serve(drops=[10_000] * 20)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert len(site.requests) == 21


def test_the_same_bytes_again_are_no_progress(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PROGRESS", 10_000)
    site.serve(ranges=False, drops=[10_000] * 99)
    with pytest.raises(ConfigurationError, match="ended early 5 times"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert len(site.requests) == weights.TRIES


def test_a_server_without_ranges_starts_over(site: Site, cache: Path) -> None:
    site.serve(ranges=False, drops=[100_000])
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 200]


def test_a_file_that_changes_meanwhile_is_not_mixed(site: Site, cache: Path) -> None:
    first = site.serve(drops=[1000] * weights.TRIES)
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert first.drops == []
    site.serve(tar(OTHER), etag='"2"')
    found = fetch(f"{site.url}/m.tar", cache=cache)
    assert contents(found) == OTHER
    assert site.requests[-1][1]["if-range"] == '"1"'
    assert site.statuses[-1] == 200


def test_a_server_that_ignores_if_range_is_found_out(site: Site, cache: Path) -> None:
    site.serve(drops=[5000] * weights.TRIES)
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache)
    site.serve(tar(OTHER), etag='"2"').modified = '"1"'  # which passes for the condition here
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == OTHER
    assert site.statuses[-2:] == [206, 200]


@pytest.mark.parametrize(
    ("how", "statuses"),
    [
        ({"etag": None, "modified": MODIFIED}, [200, 206]),
        ({"etag": None, "modified": formatdate(usegmt=True)}, [200, 200]),
        ({"etag": None}, [200, 200]),
        ({"etag": 'W/"1"'}, [200, 200]),
    ],
    ids=["old date", "date of now", "nothing", "weak etag"],
)
def test_only_a_sure_version_is_resumed(
    how: dict[str, Any], statuses: list[int], site: Site, cache: Path, monkeypatch: Any
) -> None:
    # A request may take a while, but time stands still on this server.
    monkeypatch.setattr(
        BaseHTTPRequestHandler, "date_time_string", lambda *_: formatdate(usegmt=True)
    )
    now = how.get("modified")
    if now and now != MODIFIED:
        monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: now)
    site.serve(drops=[100_000], **how)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == statuses


def test_a_download_that_was_not_unpacked_is_not_repeated(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == {"download.tar", "download.json"}
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses == [200, 304]
    assert marker(cache)["sha256"] == hashlib.sha256(tar()).hexdigest()


def test_a_download_that_lost_its_notes_starts_over(site: Site, cache: Path) -> None:
    site.serve(drops=[1000] * weights.TRIES)
    with pytest.raises(ConfigurationError, match="ended early"):
        fetch(f"{site.url}/m.tar", cache=cache)
    (notes,) = cache.glob("*/download.json")
    notes.write_text("{")
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == FILES
    assert site.statuses[-1] == 200


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
    assert len(site.requests) == 1 + weights.CHECK_TRIES
    site.close()
    assert fetch(f"{site.url}/m.tar?secret", cache=cache) == found
    warnings = [r.getMessage() for r in caplog.records if "using the copy" in r.getMessage()]
    assert len(warnings) == 2
    assert "refused" in warnings[1]
    assert "secret" not in caplog.text


def test_the_copy_does_not_serve_for_what_is_known_to_have_changed(site: Site, cache: Path) -> None:
    site.serve()
    fetch(f"{site.url}/m.tar", cache=cache)
    site.serve(tar(OTHER), etag='"2"', drops=[1000] * weights.TRIES)
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


def test_a_failed_unpack_leaves_nothing(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()

    def broken(_: Path, directory: Path, __: str) -> None:
        (directory / "half").touch()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(weights, "unpack", broken)
    with pytest.raises(ConfigurationError, match="Input/output error"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == {"download.tar", "download.json"}
    assert not list(cache.glob("*/tree-*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from cog_triton import weights

def unpack(archive, directory, shown):
    (directory / "half").touch()
    (directory.parents[1] / "pget-1").touch()
    os.kill(os.getpid(), signal.SIGKILL)

weights.unpack = unpack
weights.fetch(sys.argv[1], cache=Path(sys.argv[2]))
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


FETCH = """
import sys
from pathlib import Path
from cog_triton.weights import fetch
print(fetch(sys.argv[1], cache=Path(sys.argv[2]), progress=False))
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
    weights.logger.addHandler(watch)
    found: list[Path] = []
    thread = threading.Thread(
        target=lambda: found.append(fetch(f"{site.url}/m.tar", cache=cache, progress=False))
    )
    thread.start()
    try:
        assert waiting.wait(10)
        assert site.statuses == [200]
    finally:
        file.wait.set()
        weights.logger.removeHandler(watch)
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


# Secrets


def test_secrets_are_neither_logged_nor_stored(
    site: Site, cache: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    site.serve(moved_to="/b.tar?X-Amz-Signature=secret", drops=[])
    site.serve(path="/b.tar", drops=[1000], statuses=[503])
    fetch(f"http://user:secret@{site.host}/m.tar?X-Amz-Signature=secret", cache=cache)
    assert "HTTP 503; trying again" in caplog.text
    assert "secret" not in caplog.text
    assert "secret" not in "".join(capfd.readouterr())
    assert "secret" not in json.dumps(marker(cache))
    assert not any("secret" in str(path.relative_to(cache)) for path in cache.rglob("*"))


def test_other_threads_may_log_their_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="httpx")
    other = threading.Thread(target=logging.getLogger("httpx").info, args=("theirs",))
    with weights._quiet(["httpx"]):
        logging.getLogger("httpx").info("mine")
        other.start()
        other.join()
    logging.getLogger("httpx").info("after")
    assert caplog.messages == ["theirs", "after"]


# Progress


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar(
    progress: bool, site: Site, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site.serve(drops=[100_000])
    fetch(f"{site.url}/m.tar", cache=cache, progress=progress)
    bar = capfd.readouterr().err
    if progress:
        assert "Downloading m.tar" in bar
        assert "522k/522k" in bar
        assert "B/s" in bar
    else:
        assert bar == ""


# A full disk


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
    with pytest.raises(ConfigurationError, match=r"needs about 1\.04MB") as error:
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
    with pytest.raises(ConfigurationError, match=r"no space left for .* needs about 51[0-9]kB"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == set()
    assert not list(cache.glob("*/tree-*"))


def test_a_disk_that_has_too_little_room_is_not_filled(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(ConfigurationError, match=r"about 1\.04MB in .*, and 1\.00MB is free"):
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


def test_a_disk_that_has_no_room_for_the_notes(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve()

    def full(*_: Any) -> None:
        raise NO_SPACE

    monkeypatch.setattr(weights, "_write", full)
    with pytest.raises(ConfigurationError, match="no space left for"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert names_in(cache) == set()


def test_a_disk_that_is_full_from_the_start(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve(length=False)
    monkeypatch.setattr(Path, "open", written_until(0))
    with pytest.raises(ConfigurationError, match=r"it needs more than .* is free; free some"):
        fetch(f"{site.url}/m.tar", cache=cache)


def test_the_message_of_a_full_disk() -> None:
    assert no_space_problem("m.tar", Path("/c"), 2_000_000_000, 1_000_000) == (
        "no space left for m.tar: it needs about 2.00GB in /c while it is unpacked, and 1.00MB is "
        "free; free some, or move the cache"
    )


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


def test_the_command_of_pget() -> None:
    assert pget_command("https://h/m.tar", Path("/c/m")) == [
        "pget", "--force", "--log-level", "error", "https://h/m.tar", "/c/m",
    ]  # fmt: skip


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
    assert marker(cache)["sha256"] == hashlib.sha256(tar()).hexdigest()
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
    run = weights._run_silently

    def change(command: list[str]) -> int:
        status = run(command)
        site.serve(tar(OTHER), etag='"2"')
        return status

    monkeypatch.setattr(weights, "_run_silently", change)
    assert contents(fetch(f"{site.url}/m.tar", cache=cache)) == OTHER


def test_pget_is_not_asked_for_what_is_missing_there(
    site: Site, cache: Path, pget: Callable[..., Path]
) -> None:
    log = pget()
    with pytest.raises(ConfigurationError, match="HTTP 404"):
        fetch(f"{site.url}/m.tar", cache=cache)
    assert not log.exists()


# Small decisions


def test_versions() -> None:
    assert same_version(Version(etag='"1"'), Version(etag='W/"1"', size=3))
    assert not same_version(Version(etag='"1"', size=3), Version(etag='"2"', size=3))
    assert not same_version(Version(size=3), Version(size=3))
    dated = Version(last_modified=MODIFIED, size=3)
    assert same_version(dated, dated)
    assert not same_version(dated, Version(last_modified=MODIFIED, size=4))
    assert not same_version(dated, Version(etag='"1"', last_modified=MODIFIED, size=3))


@pytest.mark.parametrize(
    ("headers", "partial", "size", "start"),
    [
        ({"Content-Length": "5"}, False, 5, None),
        ({}, False, None, None),
        ({"Content-Length": "5", "Content-Range": "bytes 10-14/15"}, True, 15, 10),
        ({"Content-Range": "bytes 10-14/*"}, True, None, 10),
        ({"Content-Range": "parts 1-2/3", "Content-Length": "5"}, True, None, None),
        ({"Content-Type": "multipart/byteranges", "Content-Length": "5"}, True, None, None),
    ],
)
def test_sizes_are_of_the_whole_file(
    headers: dict[str, str], partial: bool, size: int | None, start: int | None
) -> None:
    version, found = version_of(httpx.Headers(headers), partial=partial)
    assert (version.size, found) == (size, start)


@pytest.mark.parametrize(
    ("date", "resume_with"),
    [
        ("Mon, 01 Jan 2024 00:00:01 GMT", MODIFIED),
        (MODIFIED, None),
        ("yesterday", None),
        (None, None),
    ],
)
def test_a_date_must_be_old_enough_to_resume_with(
    date: str | None, resume_with: str | None
) -> None:
    headers = {"Last-Modified": MODIFIED} | ({"Date": date} if date else {})
    assert version_of(headers, partial=False)[0].resume_with == resume_with


def a_partial(tmp_path: Path, size: int, complete: bool, version: Version) -> Partial:
    partial = Partial(tmp_path)
    partial.version, partial.size, partial.complete = version, size, complete
    return partial


ONE = Version(etag='"1"', size=9, resume_with='"1"')
TWO = Version(etag='"2"', size=9, resume_with='"2"')


def test_request_headers(tmp_path: Path) -> None:
    nothing = Partial(tmp_path)
    assert request_headers(nothing, None) == {}
    assert request_headers(nothing, ONE) == {"If-None-Match": '"1"'}
    assert request_headers(nothing, Version(last_modified=MODIFIED)) == {}
    some = a_partial(tmp_path, 4, False, TWO)
    assert request_headers(some, ONE) == {"Range": "bytes=4-", "If-Range": '"2"'}
    whole = a_partial(tmp_path, 9, True, TWO)
    assert request_headers(whole, ONE) == {"If-None-Match": '"2"'}
    unsure = a_partial(tmp_path, 4, False, Version(etag='W/"2"'))
    assert request_headers(unsure, None) == {}


@pytest.mark.parametrize(
    ("status", "version", "start", "size", "complete", "current", "step"),
    [
        (200, ONE, None, 0, False, None, "restart"),
        (200, ONE, None, 0, False, ONE, "unchanged"),
        (200, TWO, None, 0, False, ONE, "restart"),
        (200, TWO, None, 9, True, ONE, "restart"),
        (200, ONE, None, 9, True, None, "complete"),
        (200, ONE, None, 4, False, None, "restart"),
        (304, ONE, None, 0, False, ONE, "unchanged"),
        (304, ONE, None, 9, True, TWO, "complete"),
        (304, ONE, None, 0, False, None, "again"),
        (206, ONE, 4, 4, False, None, "resume"),
        (206, Version(size=9), 4, 4, False, None, "resume"),
        (206, TWO, 4, 4, False, None, "again"),
        (206, ONE, 3, 4, False, None, "again"),
        (206, ONE, None, 4, False, None, "again"),
        (206, Version(etag='"1"', size=10), 4, 4, False, None, "again"),
        (206, ONE, 0, 0, False, None, "again"),
        (416, Version(), None, 4, False, None, "again"),
    ],
)
def test_next_step(
    status: int,
    version: Version,
    start: int | None,
    size: int,
    complete: bool,
    current: Version | None,
    step: str,
    tmp_path: Path,
) -> None:
    partial = a_partial(tmp_path, size, complete, ONE if size else Version())
    assert next_step(status, version, start, partial, current) == step


@pytest.mark.parametrize("status", [200, 206, 304, 416])
def test_statuses_that_concern_the_file(status: int) -> None:
    check_status(status, "it")


# Hugging Face


@dataclass
class Hub:
    """Stands in for ``snapshot_download``."""

    found: Path
    error: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    bars: bool | None = None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").touch()
    hub = Hub(tmp_path / "snapshot")
    signature = inspect.signature(huggingface_hub.snapshot_download)

    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        hub.calls.append(dict(signature.bind(*args, **kwargs).arguments))
        hub.bars = not are_progress_bars_disabled()
        if hub.error:
            raise hub.error
        return str(hub.found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/na.me-1_b@main", "org/na.me-1_b", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_a_hub_id(source: str, name: str, revision: str | None, hub: Hub, cache: Path) -> None:
    assert fetch(source, cache=cache, token="hf_secret") == hub.found
    assert hub.calls == [
        {
            "repo_id": name,
            "revision": revision,
            "token": "hf_secret",
            "ignore_patterns": list(weights.UNUSED_FORMATS),
        }
    ]
    assert not cache.exists()


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bars_of_the_hub(progress: bool, hub: Hub, cache: Path) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    fetch("org/name", cache=cache, progress=progress)
    assert hub.bars == progress
    assert not are_progress_bars_disabled()


def response(status: int) -> Any:
    """What the library's errors hold: a response of the HTTP library it uses."""
    library = sys.modules[hub_errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    request = library.Request("GET", "https://huggingface.co/x?hf_secret")
    return library.Response(status, request=request)


def connection_error() -> Exception:
    library = sys.modules[hub_errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    error: Exception = library.ConnectError("no route, hf_secret")
    return error


HUB_ERRORS: list[tuple[Callable[[], Exception], str]] = [
    (lambda: hub_errors.GatedRepoError("hf_secret", response=response(403)), "is gated: accept"),
    (
        lambda: hub_errors.RepositoryNotFoundError("hf_secret", response=response(401)),
        "no directory that exists here, and Hugging Face has no such repository",
    ),
    (
        lambda: hub_errors.RevisionNotFoundError("hf_secret", response=response(404)),
        "no such revision",
    ),
    (lambda: hub_errors.HfHubHTTPError("hf_secret", response=response(401)), "check the token"),
    (lambda: hub_errors.HfHubHTTPError("hf_secret", response=response(503)), "answered HTTP 503"),
    (lambda: hub_errors.LocalEntryNotFoundError("hf_secret"), "cannot be reached or is turned off"),
    (lambda: hub_errors.OfflineModeIsEnabled("hf_secret"), "cannot be reached or is turned off"),
    (lambda: hub_errors.HFValidationError("hf_secret"), "no valid Hugging Face id"),
    (connection_error, "could not be fetched from Hugging Face: ConnectError"),
    (lambda: OSError(errno.ENOSPC, "hf_secret"), "no space left .* HF_HOME"),
    (lambda: OSError("hf_secret"), "could not be fetched from Hugging Face: OSError"),
    (lambda: ValueError("hf_secret"), "could not be fetched from Hugging Face: ValueError"),
]


@pytest.mark.parametrize(("make", "problem"), HUB_ERRORS, ids=[p for _, p in HUB_ERRORS])
def test_errors_of_the_hub(
    make: Callable[[], Exception],
    problem: str,
    hub: Hub,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.error = make()
    with pytest.raises(ConfigurationError, match=problem) as error:
        fetch("org/name@main", cache=cache, token="hf_secret")
    assert "org/name@main" in str(error.value)
    assert "hf_secret" not in str(error.value)
    assert error.value.__suppress_context__
    assert error.value.__cause__ is None
    assert "hf_secret" not in caplog.text


def test_an_empty_snapshot_is_an_error(hub: Hub, cache: Path) -> None:
    (hub.found / "config.json").unlink()
    with pytest.raises(ConfigurationError, match="is empty"):
        fetch("org/name", cache=cache)


def test_the_hub_itself_when_it_is_off(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real library, which is told to stay offline, with its real cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigurationError, match="cannot be reached or is turned off"):
        fetch("org/name", cache=cache, token="hf_secret")
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert fetch(f"org/name@{commit}", cache=cache) == snapshot


def test_importing_it_imports_no_hub() -> None:
    code = "import sys, cog_triton.weights; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
