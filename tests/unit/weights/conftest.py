import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import QuietHandler, http_server
from tests.unit.weights.support import Site

TLS = ssl.create_default_context()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cog_triton.weights.download.BACKOFF", 0.0)
    # Reading every certificate for each client would be most of the time of these tests.
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: TLS)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), "/usr/bin", "/bin"]))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def site(cache: Path) -> Iterator[Site]:
    site = Site(cache)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            site.answer(self)

    with http_server(Handler) as site.url:
        yield site
