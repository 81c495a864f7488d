"""deploy/nginx/cog-triton.conf, run by a real nginx before a real Cog server."""

import contextlib
import http.client
import os
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cog_triton.api.openai.server import FORM_BYTES
from cog_triton.settings import read_settings
from tests.integration.conftest import PACE_MS
from tests.support import ROOT, CogServer, QuietHandler, free_port, http_server, limit, wait_until

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
PLAIN = (ROOT / "tests" / "fakes" / "nginx.conf").read_text()
SHORT = {"input": {"prompt": "What is machine learning?", "max_tokens": 2}}
TOKENS = 100
LONG = {"input": {"prompt": "What is machine learning?", "max_tokens": TOKENS}}
EVENTS = {"Accept": "text/event-stream"}


@pytest.fixture(scope="module")
def proxy(
    paced_cog_server: CogServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of the proxy that has a user's password."""
    directory = tmp_path_factory.mktemp("nginx")
    password = subprocess.run(
        ["openssl", "passwd", "-apr1", "secret"], capture_output=True, text=True, check=True
    )
    (directory / "users").write_text(f"user:{password.stdout}")
    changes = {
        "http://127.0.0.1:5000": paced_cog_server.url,
        "limit_conn cog_users 64": "limit_conn cog_users 2",
    }
    with nginx("nginx/cog-triton.conf", directory, changes) as client:
        client.auth = ("user", "secret")
        yield client


def openssl(*arguments: str, directory: Path) -> None:
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "certificate.pem")]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(["openssl", *arguments, *files, *name], capture_output=True, check=True)


@contextlib.contextmanager
def nginx(config: str, directory: Path, changes: dict[str, str]) -> Iterator[httpx.Client]:
    """Runs a file of deploy/ with changes; yields a client of it."""
    if NGINX is None or shutil.which("openssl") is None:
        pytest.skip("no nginx or no openssl: apt-get install nginx-light openssl")
    port = free_port()
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", directory=directory)
    text = (ROOT / "deploy" / config).read_text()
    for there, here in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/nginx/cog-triton": str(directory),
        **changes,
    }.items():
        assert there in text
        text = text.replace(there, here)
    (directory / "cog-triton.conf").write_text(text)
    # The directory is this user's alone, and root's nginx would read it as another one.
    user = "user root;" if os.geteuid() == 0 else ""
    (directory / "nginx.conf").write_text(PLAIN.format(directory=directory, user=user))
    trusted = ssl.create_default_context(cafile=str(directory / "certificate.pem"))
    url = f"https://localhost:{port}"
    server = subprocess.Popen([NGINX, "-c", str(directory / "nginx.conf"), "-p", str(directory)])
    try:
        wait_until((directory / "pid").exists, 60, "the start of nginx")
        with httpx.Client(
            base_url=url, verify=trusted, trust_env=False, timeout=limit(30)
        ) as client:
            yield client
    finally:
        server.terminate()
        assert server.wait(limit(10)) == 0


def raw(proxy: httpx.Client, method: str, path: str) -> int:
    """The status of a request whose path is sent as it is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(
        "localhost", proxy.base_url.port, timeout=limit(30), context=context
    )
    with contextlib.closing(connection):
        headers = {"Authorization": "Basic dXNlcjpzZWNyZXQ=", "Content-Type": "application/json"}
        connection.request(method, path, b'{"input": {"prompt": "hi", "max_tokens": 1}}', headers)
        return connection.getresponse().status


def test_streams_come_as_they_are_made_and_can_be_cancelled(proxy: httpx.Client) -> None:
    path = f"/predictions/{'a' * 128}"
    with proxy.stream("PUT", path, json=LONG, headers=EVENTS) as stream:
        lines = stream.iter_lines()
        assert "event: output" in lines
        # At PACE_MS a token it goes on for a while: a proxy that buffers would have shown nothing yet.
        assert PACE_MS * TOKENS > 1000
        assert proxy.post(f"{path}/cancel").status_code == 200
        assert any('"canceled"' in line for line in lines)


@pytest.mark.parametrize(
    ("method", "paths"),
    [
        ("GET", ["/health-check", "/", "/predictions"]),
        ("POST", ["/shutdown", "//shutdown", "/trainings"]),
        ("POST", ["/predictions/../shutdown", "/predictions/%2e%2e/shutdown"]),
        ("PUT", ["/predictions/a%2F..%2Fb", "/predictions/%00", "/predictions/"]),
        ("PUT", [f"/predictions/{'a' * 129}"]),
    ],
)
def test_nothing_else_is_let_through(proxy: httpx.Client, method: str, paths: list[str]) -> None:
    for path in paths:
        assert raw(proxy, method, path) in (400, 404), path
        assert proxy.post("/predictions", json=SHORT).json()["status"] == "succeeded"


def test_who_has_no_password_gets_nothing(proxy: httpx.Client) -> None:
    for auth in (None, ("user", "wrong")):
        with httpx.Client(
            base_url=proxy.base_url, verify=False, trust_env=False, auth=auth, timeout=limit(30)
        ) as stranger:
            assert stranger.post("/predictions", json=SHORT).status_code == 401


def test_a_user_has_only_so_many_requests_at_once(proxy: httpx.Client) -> None:
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            stream = proxy.stream("POST", "/predictions", json=LONG, headers=EVENTS)
            assert streams.enter_context(stream).status_code == 200
        assert proxy.post("/predictions", json=SHORT).status_code == 429
    wait_until(
        lambda: proxy.post("/predictions", json=SHORT).status_code == 200, 60, "a free place"
    )


def test_a_body_that_is_too_large_is_refused(proxy: httpx.Client) -> None:
    large = {"input": {"prompt": "x" * (1 << 20)}}
    assert proxy.post("/predictions", json=large).status_code == 413


def test_a_file_is_uploaded_through_the_proxy_of_the_openai_face_as_it_comes(
    tmp_path: Path,
) -> None:
    """The proxy lets through what the API accepts: MAX_FILE_BYTES here, MAX_REQUEST_BYTES elsewhere."""
    defaults = read_settings({})
    began, received = threading.Event(), dict[str, int]()

    class Upstream(QuietHandler):
        def do_POST(self) -> None:
            left = int(self.headers["Content-Length"])
            received[self.path] = left
            while left:
                left -= len(self.rfile.read(min(left, 1 << 20)))
                began.set()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def body(size: int) -> Iterator[bytes]:
        yield bytes(1 << 20)
        assert began.wait(limit(60)), "the proxy waits for the whole file"
        for start in range(1 << 20, size, 1 << 20):
            yield bytes(min(size - start, 1 << 20))

    with http_server(Upstream) as url:
        changes = {"http://127.0.0.1:3000": url}
        with nginx("openai/nginx.conf", tmp_path, changes) as client:
            for path, size in (
                ("/v1/files", defaults.max_file_bytes + FORM_BYTES),
                ("/v1/chat/completions", defaults.max_request_bytes),
            ):
                began.clear()
                if path != "/v1/files":
                    began.set()  # a request may be read as a whole
                headers = {"Content-Length": str(size)}
                assert client.post(path, content=body(size), headers=headers).status_code == 200
                assert received[path] == size
            larger = bytes(defaults.max_request_bytes + 1)
            assert client.post("/v1/chat/completions", content=larger).status_code == 413
            assert client.post("/v1/files/file-1", content=larger).status_code == 413


def test_the_page_names_what_is_let_through() -> None:
    config = (ROOT / "deploy" / "nginx" / "cog-triton.conf").read_text()
    page = " ".join((ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split())
    assert (
        "bodies of up to {} MB".format(*re.findall(r"client_max_body_size (\d+)m", config)) in page
    )
    assert "up to 128 letters, digits" in page
