"""What the tests of weights share: tar files, a look into the cache, and a server."""

import contextlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights.cache import fetch

FILES = {"config.json": b'{"a": 1}', "rank0.engine": bytes(range(256)) * 2000}
OTHER = {"config.json": b'{"a": 2}', "rank0.engine": b"other" * 5000}
SAME_SIZE = {**FILES, "config.json": b'{"a": 9}'}

KINDS = {
    "file": tarfile.REGTYPE,
    "directory": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "character device": tarfile.CHRTYPE,
    "block device": tarfile.BLKTYPE,
    "pipe": tarfile.FIFOTYPE,
}


@contextlib.contextmanager
def refused(problem: str) -> Iterator[None]:
    """Expect an error with the problem and without a secret."""
    with pytest.raises(ConfigurationError, match=problem) as error:
        yield
    assert "secret" not in str(error.value)


def entry(
    kind: str, name: str, link: str = "", *, content: bytes | None = None
) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a tar file; one that is a file has a byte, if no content is given."""
    info = tarfile.TarInfo(name)
    if content is None:
        content = b"1" if kind == "file" else b""
    info.type, info.linkname, info.size, info.mtime = KINDS[kind], link, len(content), 1_700_000_000
    return info, content


def tar_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar(files: dict[str, bytes] = FILES) -> bytes:
    return tar_of(*[entry("file", name, content=content) for name, content in files.items()])


def unpacked(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "m.tar").write_bytes(content)
    return fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache")


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


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
    """A server of files, and a cache to fetch them into."""

    url: str

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.statuses: list[int] = []
        self.bodies: list[int] = []  # bytes of the bodies sent
        self.arrived = threading.Semaphore(0)

    def serve(self, content: bytes | None = None, path: str = "/m.tar", **how: Any) -> Served:
        self.files[path] = Served(tar() if content is None else content, **how)
        return self.files[path]

    def fetch(self, path: str = "/m.tar", checksum: str | None = None) -> Path:
        return fetch(f"{self.url}{path}", cache=self.cache, checksum=checksum)

    def left(self) -> set[str]:
        """What is in the only entry of the cache, the marker and the tree apart."""
        (entry,) = self.cache.iterdir()
        names = {path.name for path in entry.iterdir() if not path.name.startswith("tree-")}
        return names - {"fetched.json"}

    def marker(self) -> dict[str, Any]:
        (found,) = self.cache.glob("*/fetched.json")
        loaded: dict[str, Any] = json.loads(found.read_text())
        return loaded

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        self.requests.append((to.path, {name.lower(): value for name, value in to.headers.items()}))
        self.arrived.release()
        file = self.files.get(to.path.partition("?")[0])
        status, headers, body = self._reply(file, to.headers) if file else (404, {}, b"")
        self.statuses.append(status)
        to.send_response(status)
        if file is None or file.length:
            headers["Content-Length"] = str(len(body))
        else:
            to.close_connection = True
        for name, value in headers.items():
            to.send_header(name, value)
        to.end_headers()
        if file and body:
            self._send(to, file, body)

    def _reply(self, file: Served, asked: Any) -> tuple[int, dict[str, str], bytes]:
        if file.statuses:
            return file.statuses.pop(0), {}, b""
        if file.moved_to:
            return 302, {"Location": file.moved_to}, b""
        validators = {"ETag": file.etag, "Last-Modified": file.modified}
        headers = {name: value for name, value in validators.items() if value} | file.headers
        if file.conditional and file.etag and asked["If-None-Match"] == file.etag:
            return 304, headers, b""
        if asked["Range"] and file.ranges and asked["If-Range"] in (file.etag, file.modified):
            start, size = int(asked["Range"].removeprefix("bytes=").rstrip("-")), len(file.content)
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            return 206, headers, file.content[start:]
        return 200, headers, file.content

    def _send(self, to: BaseHTTPRequestHandler, file: Served, body: bytes) -> None:
        if file.wait:
            file.wait.wait(10)
        if file.drops:
            body = body[: file.drops.pop(0)]
            to.close_connection = True
        self.bodies.append(len(body))
        with contextlib.suppress(ConnectionError):  # who reads the headers alone
            to.wfile.write(body)
