from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import httpx
import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.weights import fetch
from tests.unit.weights.support import Site, marker, names_in

# Errors


@pytest.mark.parametrize(
    ("target", "problem"),
    [("/m.tar", "maximum allowed redirects"), ("ftp://secret/x", "unsupported protocol")],
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


def test_a_refused_connection(cache: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"cannot be reached \(.*refused\)") as error:
            fetch(f"http://127.0.0.1:{port}/m.tar?secret", cache=cache)
    assert "secret" not in str(error.value)


def test_a_server_that_says_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cog_triton.weights.download.TIMEOUT", httpx.Timeout(0.02))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"cannot be reached \(timed out\)"):
            fetch(f"http://127.0.0.1:{port}/m.tar", cache=cache)


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
