"""What the tests of weights share: tar files, a look into the cache, and a server."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cog_triton.weights import fetch

ROOT = Path(__file__).resolve().parents[3]
FILES = {"config.json": b'{"a": 1}', "rank0.engine": bytes(range(256)) * 2000}
OTHER = {"config.json": b'{"a": 2}', "rank0.engine": b"other" * 5000}
MODIFIED = "Mon, 01 Jan 2024 00:00:00 GMT"


# Tar files


SYM, LNK, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


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


def unpacked(tmp_path: Path, content: bytes) -> dict[str, bytes]:
    (tmp_path / "m.tar").write_bytes(content)
    return contents(fetch(str(tmp_path / "m.tar"), cache=tmp_path / "cache"))


# The cache


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
