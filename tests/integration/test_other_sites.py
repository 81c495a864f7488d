"""Pages of other origins in headless Chromium, which try all that a page can send to this machine."""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.browser import chromium
from tests.support import CogServer, QuietHandler, free_port, http_server, limit, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.rare
BROWSER_MS = 120_000  # for one step of a browser on a busy machine
INPUT = {"prompt": "from a page", "max_tokens": 2}
# Of both ports: whatever a page knows to send. ID is that of a prediction that runs.
COG_ROUTES = (
    *("POST /predictions", "PUT /predictions/page", "POST /predictions/ID/cancel"),
    *("POST /v1/predictions", "POST /v1/models/a/b/predictions", "POST /v1/predictions/ID/cancel"),
    *("POST /v1/deployments/a/b/predictions", "POST /v1/files", "POST /trainings"),
    "POST /shutdown",
)
# A page's means of sending a request; each ends when its answer has come, whatever it is.
SEND = """async ([method, url, json]) => {
    const bodies = () => {
        const data = new FormData();
        data.append("purpose", "batch");
        data.append("file", new Blob(["{}\\n"]), "page.jsonl");
        return [json, data, new URLSearchParams({a: "b"}), new Blob([json]), null];
    };
    const options = {method, cache: "no-store"};
    for (const body of bodies()) {
        for (const mode of method === "POST" ? ["no-cors", "cors"] : ["cors"]) {
            await fetch(url, {...options, mode, body}).catch(() => {});
        }
    }
    const typed = {...options, headers: {"Content-Type": "application/json"}, body: json};
    await fetch(url, typed).catch(() => {});
    if (method !== "POST") return;
    navigator.sendBeacon(url, json);
    for (const enctype of ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"]) {
        const frame = document.createElement("iframe");
        frame.name = "frame" + Math.random();
        document.body.append(frame);
        const form = document.createElement("form");
        Object.assign(form, {method, action: url, enctype, target: frame.name});
        const field = document.createElement("input");
        field.name = json.slice(0, -1) + ', "a": "';
        field.value = '"}';
        form.append(field);
        document.body.append(form);
        const loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
        form.submit();
        await loaded;
        frame.remove();
    }
}"""
ASK = """async ([method, url, body]) => {
    const headers = {"Content-Type": "application/json", "X-Request-Id": "from-a-page"};
    const options = {method, headers, body: body ? JSON.stringify(body) : null};
    const reply = await fetch(url, options);
    return [reply.status, await reply.text()];
}"""


class BlankPage(QuietHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>A page</title><body>")


@dataclass
class Ports:
    """A Cog server with OpenAI's API beside it; pages of one origin may use both."""

    cog: CogServer
    openai_url: str
    allowed_page: str
    foreign_page: str
    webhook: str
    webhooks: list[str] = field(default_factory=list)

    def openai_routes(self) -> list[str]:
        paths = httpx.get(f"{self.openai_url}/openapi.json", trust_env=False).json()["paths"]
        routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        return [f"{method} {path}" for method, path in routes if method != "GET"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def ports(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    directory = tmp_path_factory.mktemp("sites")
    webhooks: list[str] = []

    class Webhook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            webhooks.append(self.path)
            self.send_response(200)
            self.end_headers()

    with ExitStack() as stack:
        allowed, foreign, webhook = (
            stack.enter_context(http_server(handler)) for handler in (BlankPage, BlankPage, Webhook)
        )
        openai_port = free_port()
        environment = {
            "MODEL": str(demo_model),
            "ENGINE": "simulated",
            "SIMULATED_INTER_TOKEN_MS": "5",
            "MAX_SEQUENCE_LENGTH": "1000000",  # for a prediction that only a cancel can end
            "OPENAI_PORT": str(openai_port),
            "STORE": str(directory / "journal.db"),
            "COG_ALLOWED_ORIGINS": allowed,
            "OPENAI_ALLOWED_ORIGINS": allowed,
            "DRAIN_SECONDS": "1",
        }
        cog = stack.enter_context(CogServer(environment, directory / "log"))
        cog.wait_until_ready()
        openai_url = f"http://127.0.0.1:{openai_port}"
        yield Ports(cog, openai_url, allowed, foreign, webhook, webhooks)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    context.set_default_timeout(BROWSER_MS)
    yield context.new_page()
    context.close()


def running_prediction(ports: Ports) -> dict[str, Any]:
    body = {"input": {**INPUT, "max_tokens": 500_000, "ignore_eos": True}}
    reply = httpx.post(
        f"{ports.cog.url}/v1/predictions", json=body, trust_env=False, timeout=limit(60)
    )
    assert reply.status_code == 201, reply.text
    prediction: dict[str, Any] = reply.json()
    wait_until(lambda: prediction["id"] in ports.cog.log.read_text(), 60, "the line of its start")
    wait_until(lambda: ports.cog.engine["active"] == 1, 60, "its start in the engine")
    return prediction


@pytest.mark.parametrize("site", ["another port", "another site"])
def test_a_foreign_page_starts_cancels_and_ends_nothing(
    ports: Ports, page: Page, site: str
) -> None:
    url = ports.foreign_page
    if site == "another site":
        url = url.replace("127.0.0.1", "evil.example")
    prediction = running_prediction(ports)
    log_size = len(ports.cog.log.read_text())
    statuses: dict[str, set[int]] = {}

    def note(response: Any) -> None:
        statuses.setdefault(response.request.method, set()).add(response.status)

    page.goto(url)
    page.on("response", note)
    json = (
        '{"input": {"prompt": "x", "max_tokens": 2}, "model": "demo", "prompt": "x", "max_tokens": 2,'
        f' "messages": [{{"role": "user", "content": "x"}}], "webhook": "{ports.webhook}/hook"}}'
    )
    for base, routes in ((ports.cog.url, COG_ROUTES), (ports.openai_url, ports.openai_routes())):
        for route in routes:
            method, path = route.replace("ID", prediction["id"]).split(" ")
            page.evaluate(SEND, [method, base + path, json])
    # A preflight gets no leave: what needs one is never sent.
    assert statuses["POST"] == {403}
    assert statuses.keys() <= {"POST", "OPTIONS"}
    assert ports.webhooks == []
    # The one that runs, and for a moment a probe of the health check.
    wait_until(lambda: ports.cog.engine["active"] == 1, 60, "nothing but the one that runs")
    log = ports.cog.log.read_text()[log_size:]
    started = [line for line in log.splitlines() if "Starting prediction" in line]
    assert [line for line in started if prediction["id"] not in line] == []
    # OpenAI's API logs a line for each request.
    requests = [line for line in log.splitlines() if "/v1/" in line]
    assert [line for line in requests if " 403 refused" not in line] == []
    # Nor was the one that runs cancelled, or the server ended.
    urls = prediction["urls"]
    assert httpx.get(urls["get"], trust_env=False).json()["status"] == "processing"
    ended = httpx.post(urls["cancel"], trust_env=False, timeout=limit(60)).json()
    assert ended["status"] == "canceled"
    files = httpx.get(f"{ports.openai_url}/v1/files", trust_env=False).json()
    assert files["data"] == []


def test_an_allowed_page_uses_both_apis(ports: Ports, page: Page) -> None:
    page.goto(ports.allowed_page)
    status, text = page.evaluate(ASK, ["POST", f"{ports.cog.url}/predictions", {"input": INPUT}])
    assert status == 200
    assert '"succeeded"' in text
    status, _ = page.evaluate(ASK, ["PUT", f"{ports.cog.url}/predictions/mine", {"input": INPUT}])
    assert status == 200
    prediction = running_prediction(ports)
    status, text = page.evaluate(ASK, ["POST", prediction["urls"]["cancel"], None])
    assert (status, '"canceled"' in text) == (200, True)
    body = {"model": "demo", "prompt": "x", "max_tokens": 2}
    status, _ = page.evaluate(ASK, ["POST", f"{ports.openai_url}/v1/completions", body])
    assert status == 200
    status, text = page.evaluate(ASK, ["DELETE", f"{ports.openai_url}/v1/files/file-none", None])
    assert status == 404
    assert '"error"' in text  # which the page may read


def test_a_site_that_rebinds_its_name_reads_nothing(ports: Ports, page: Page) -> None:
    for base, path in ((ports.cog.url, "/health-check"), (ports.openai_url, "/v1/models")):
        rebound = base.replace("127.0.0.1", "evil.example")
        reply = page.goto(rebound + path)
        assert reply is not None
        assert reply.status == 403
        assert "ALLOWED_HOSTS" in reply.text()
        # The browser takes it for a page of the server.
        assert page.evaluate(ASK, ["GET", rebound + path, None])[0] == 403
        assert page.evaluate(ASK, ["POST", f"{rebound}/shutdown", {}])[0] == 403
        page.goto(base.replace("127.0.0.1", "localhost") + path)
        assert page.evaluate(ASK, ["GET", path, None])[0] == 200
    wait_until(
        lambda: httpx.get(f"{ports.cog.url}/health/ready", trust_env=False).is_success, 60, ""
    )
