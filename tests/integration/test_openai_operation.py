"""The operator's side of the OpenAI face, on real servers: keys, fairness, figures, spans."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.test_proxy import NGINX, PLAIN, nginx, openssl
from tests.openai_server import MESSAGES, OpenAIServer
from tests.support import ROOT, children, free_port, wait_until

CHAT = "/v1/chat/completions"
KEYS = """\
hog sk-hog
light sk-light weight=2
few sk-few max_running=1 tokens_per_minute=30
"""


def bearer(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "seed": 1, **fields}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def keyed(
    demo_model: Path, keys_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """With keys, and a queue that two requests fill."""
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "SIMULATED_INTER_TOKEN_MS": "10",
        "MAX_RUNNING": "2",
        "OPENAI_API_KEYS": "sk-env",
        "OPENAI_OPEN_METRICS": "true",
    }
    log = tmp_path_factory.mktemp("keyed") / "log"
    with OpenAIServer(environment, log, "--api-keys-file", str(keys_file)) as server:
        yield server


def figures(server: OpenAIServer) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines()]
    return {name: float(value) for name, value in lines if name[0] != "#"}


def test_keys_are_asked_for_and_read_again(keyed: OpenAIServer, keys_file: Path) -> None:
    assert keyed.get("/health/ready").status_code == 200
    assert keyed.post(CHAT, body()).status_code == 401
    assert keyed.post(CHAT, body(max_tokens=2), **bearer("sk-env")).status_code == 200
    assert keyed.get("/v1/models", **bearer("sk-light")).status_code == 200
    keys_file.write_text(KEYS + "new sk-new\n")
    wait_until(
        lambda: keyed.get("/v1/models", **bearer("sk-new")).status_code == 200, 10, "the new key"
    )
    keys_file.write_text(KEYS)
    wait_until(
        lambda: keyed.get("/v1/models", **bearer("sk-new")).status_code == 401, 10, "its end"
    )
    log = keyed.log.read_text()
    assert "API keys were read again: there are 5" in log
    assert not [key for key in ("sk-env", "sk-light", "sk-new") if key in log]


def test_triton_does_not_get_the_keys(keyed: OpenAIServer) -> None:
    environments = [
        Path(f"/proc/{pid}/environ").read_bytes() for pid in children(keyed.process.pid)
    ]
    assert environments
    assert not [text for text in environments if b"sk-env" in text]


def test_a_line_for_each_request_by_the_name_of_its_key(keyed: OpenAIServer) -> None:
    headers = {**bearer("sk-light")["headers"], "x-request-id": "mine"}
    reply = keyed.post(CHAT, body(max_tokens=3), headers=headers)
    assert reply.headers["x-request-id"] == "mine"
    prompt = reply.json()["usage"]["prompt_tokens"]
    line = f"mine {CHAT} 200 key=light model=demo tokens={prompt}+3 "
    wait_until(lambda: line in keyed.log.read_text(), 10, "the line")
    assert MESSAGES[0]["content"] not in keyed.log.read_text()


def test_a_key_that_has_used_up_its_tokens(keyed: OpenAIServer) -> None:
    first = keyed.post(CHAT, body(max_tokens=40), **bearer("sk-few"))
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    second = keyed.post(CHAT, body(), **bearer("sk-few"))
    assert (second.status_code, second.json()["error"]["type"]) == (429, "tokens")
    assert int(second.headers["retry-after"]) > 1
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    assert keyed.post(CHAT, body(max_tokens=2), **bearer("sk-hog")).status_code == 200


def test_a_light_key_overtakes_a_hog(keyed: OpenAIServer) -> None:
    ends: list[str] = []

    async def ask(client: httpx.AsyncClient, key: str) -> None:
        options = bearer(f"sk-{key}")
        reply = await client.post(keyed.url + CHAT, json=body(max_tokens=30), **options)  # type: ignore[arg-type]
        assert reply.status_code == 200
        ends.append(key)

    async def test() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            hogs = [asyncio.create_task(ask(client, "hog")) for _ in range(12)]
            waiting = 'vllm:num_requests_waiting{model_name="demo"}'
            await asyncio.to_thread(
                wait_until, lambda: figures(keyed)[waiting] == 10, 10, "the hog's queue"
            )
            await ask(client, "light")
            await asyncio.gather(*hogs)

    asyncio.run(test())
    assert ends.index("light") <= 5  # those that ran, and those that began before it


def test_figures_of_several_processes_are_one(demo_model: Path, tmp_path: Path) -> None:
    environment = {"MODEL": str(demo_model), "ENGINE": "simulated"}
    with OpenAIServer(environment, tmp_path / "log", "--workers", "2") as server:
        for _ in range(10):  # each on a connection of its own
            assert server.chat(max_tokens=5).status_code == 200
        server.chat(model="nothing")
        wait_until(
            lambda: figures(server).get('vllm:generation_tokens_total{model_name="demo"}') == 50,
            10,
            "the figures of all",
        )
        for _ in range(6):
            seen = figures(server)
            assert seen['vllm:time_to_first_token_seconds_count{model_name="demo"}'] == 10
            assert seen['cog_triton_requests_total{outcome="admitted"}'] == 10
            assert seen['vllm:num_requests_running{model_name="demo"}'] == 0
            assert seen['cog_triton_errors_total{code="",status="404"}'] == 1


@pytest.fixture(scope="module")
def proxy(keyed: OpenAIServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """deploy/openai/nginx.conf before the face."""
    if NGINX is None or shutil.which("openssl") is None:
        pytest.skip("no nginx or no openssl: apt-get install nginx-light openssl")
    directory, port = tmp_path_factory.mktemp("nginx"), free_port()
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", directory=directory)
    text = (ROOT / "deploy" / "openai" / "nginx.conf").read_text()
    for there, here in [
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/cog-triton", str(directory)),
        ("http://127.0.0.1:3000", keyed.url),
    ]:
        assert there in text
        text = text.replace(there, here)
    (directory / "cog-triton.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    (directory / "nginx.conf").write_text(PLAIN.format(directory=directory, user=user))
    trusted = ssl.create_default_context(cafile=str(directory / "certificate.pem"))
    url = f"https://localhost:{port}"
    with nginx(directory), httpx.Client(base_url=url, verify=trusted, trust_env=False) as client:
        yield client


def test_a_stream_through_nginx(proxy: httpx.Client, keyed: OpenAIServer) -> None:
    fields = body(stream=True, max_tokens=2000, ignore_eos=True)
    with proxy.stream("POST", CHAT, json=fields, **bearer("sk-env")) as reply:  # type: ignore[arg-type]
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert [next(lines)[:5] for _ in range(3)] == ["data:", "", "data:"]
        wait_until(lambda: keyed.engine["active"] == 1, 10, "the request, which runs on")
    wait_until(lambda: keyed.engine["active"] == 0, 10, "the end of what nobody reads")
    assert proxy.post(CHAT, json=body()).status_code == 401
    assert proxy.get("/health/ready").status_code == 200
    assert [proxy.get(path).status_code for path in ("/metrics", "/docs", "/")] == [404] * 3


class Collector(BaseHTTPRequestHandler):
    """Takes spans by OTLP over HTTP."""

    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_collector_gets_a_span_of_each_request(demo_model: Path, tmp_path: Path) -> None:
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[bytes] = []
    handler = type("Handler", (Collector,), {"received": received})
    collector = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "NO_PROXY": "127.0.0.1",
        "OTEL_SERVICE_NAME": "",
    }
    trace = "0af7651916cd43dd8448eb211c80319c"
    try:
        with OpenAIServer(environment, tmp_path / "log") as server:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            reply = server.post(CHAT, body(max_tokens=4), headers=headers)
            assert server.stop() == 0  # which sends what is left
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    (message,) = [trace_service.ExportTraceServiceRequest.FromString(data) for data in received]
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("chat demo", trace)
    values = {item.key: item.value for item in span.attributes}
    usage = reply.json()["usage"]
    assert values["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert values["gen_ai.usage.output_tokens"].int_value == 4
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert 0 < values["gen_ai.response.time_to_first_chunk"].double_value < 60
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert values["cog_triton.request_id"].string_value == reply.headers["x-request-id"]
    resource = {item.key: item.value for item in message.resource_spans[0].resource.attributes}
    assert resource["service.name"].string_value == "cog-triton"
