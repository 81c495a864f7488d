"""The operator's side of OpenAI's API, on real servers: keys, fairness, figures, spans."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import SharedTriton, attached, engine_counters
from tests.integration.test_proxy import nginx
from tests.openai_server import QUESTION, OpenAIServer, chat_body
from tests.support import (
    EngineCounters,
    QuietHandler,
    http_server,
    limit,
    metrics,
    started_by,
    wait_until,
)

CHAT = "/v1/chat/completions"
KEYS = """\
hog sk-hog
light sk-light weight=2
few sk-few max_running=1 tokens_per_minute=30
"""


def bearer(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, list[bytes]]]:
    """A collector's URL, and what it got."""
    received: list[bytes] = []

    class Collector(QuietHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

    with http_server(Collector) as url:
        yield url, received


@pytest.fixture(scope="module")
def keyed(
    paced_triton: SharedTriton,
    demo_model: Path,
    keys_file: Path,
    spans: tuple[str, list[bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OpenAIServer]:
    """With keys, a queue that two requests fill, and a collector of spans."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": spans[0],
        "NO_PROXY": "127.0.0.1",
        "OTEL_SERVICE_NAME": "",
        "MAX_RUNNING": "2",
        "OPENAI_API_KEYS": "sk-env",
        "OPENAI_OPEN_METRICS": "true",
    }
    log = tmp_path_factory.mktemp("keyed") / "log"
    option = ("--api-keys-file", str(keys_file))
    with attached(paced_triton, demo_model, log, *option, **environment) as server:
        yield server


@pytest.fixture(scope="module")
def engine(paced_triton: SharedTriton) -> EngineCounters:
    return engine_counters(paced_triton)


def test_keys_are_asked_for_and_read_again(keyed: OpenAIServer, keys_file: Path) -> None:
    assert keyed.get("/health/ready").status_code == 200
    assert keyed.post(CHAT, chat_body()).status_code == 401
    assert keyed.post(CHAT, chat_body(max_tokens=2), **bearer("sk-env")).status_code == 200
    assert keyed.get("/v1/models", **bearer("sk-light")).status_code == 200
    keys_file.write_text(KEYS + "new sk-new\n")
    wait_until(
        lambda: keyed.get("/v1/models", **bearer("sk-new")).status_code == 200, 60, "the new key"
    )
    keys_file.write_text(KEYS)
    wait_until(
        lambda: keyed.get("/v1/models", **bearer("sk-new")).status_code == 401, 60, "its end"
    )
    log = keyed.log.read_text()
    assert "reloaded the API keys: there are 5 now" in log
    assert not [key for key in ("sk-env", "sk-light", "sk-new") if key in log]


def test_a_line_for_each_request_by_the_name_of_its_key(keyed: OpenAIServer) -> None:
    headers = {**bearer("sk-light")["headers"], "x-request-id": "mine"}
    reply = keyed.post(CHAT, chat_body(max_tokens=3), headers=headers)
    assert reply.headers["x-request-id"] == "mine"
    prompt = reply.json()["usage"]["prompt_tokens"]
    line = f"mine {CHAT} 200 key=light model=demo tokens={prompt}+3 "
    wait_until(lambda: line in keyed.log.read_text(), 60, "the line")
    assert QUESTION not in keyed.log.read_text()


def test_a_key_that_has_used_up_its_tokens(keyed: OpenAIServer) -> None:
    long = [{"role": "user", "content": "word " * 500}]
    first = keyed.post(CHAT, chat_body(messages=long, max_tokens=2), **bearer("sk-few"))
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    second = keyed.post(CHAT, chat_body(), **bearer("sk-few"))
    assert (second.status_code, second.json()["error"]["type"]) == (429, "tokens")
    assert int(second.headers["retry-after"]) > 1
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    assert keyed.post(CHAT, chat_body(max_tokens=2), **bearer("sk-hog")).status_code == 200


def test_a_light_key_overtakes_a_hog(keyed: OpenAIServer) -> None:
    ends: list[str] = []

    async def ask(client: httpx.AsyncClient, key: str) -> None:
        options = bearer(f"sk-{key}")
        reply = await client.post(keyed.url + CHAT, json=chat_body(max_tokens=30), **options)  # type: ignore[arg-type]
        assert reply.status_code == 200
        ends.append(key)

    async def wait(count: int) -> None:
        def queued() -> bool:
            return metrics(keyed.address)['vllm:num_requests_waiting{model_name="demo"}'] == count

        await asyncio.to_thread(wait_until, queued, 60, f"a queue of {count}")

    async def test() -> None:
        long = chat_body(max_tokens=2000, ignore_eos=True, stream=True)
        async with httpx.AsyncClient(trust_env=False, timeout=limit(60)) as client:
            async with contextlib.AsyncExitStack() as both_slots:
                for _ in range(2):
                    stream = client.stream("POST", keyed.url + CHAT, json=long, **bearer("sk-hog"))  # type: ignore[arg-type]
                    await both_slots.enter_async_context(stream)
                hogs = [asyncio.create_task(ask(client, "hog")) for _ in range(10)]
                await wait(10)
                light = asyncio.create_task(ask(client, "light"))
                await wait(11)
            await asyncio.gather(light, *hogs)

    asyncio.run(test())
    assert ends.index("light") <= 2  # one of the hog's runs beside it


@pytest.fixture(scope="module")
def proxy(keyed: OpenAIServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """deploy/openai/nginx.conf in front of OpenAI's API."""
    changes = {"http://127.0.0.1:3000": keyed.url}
    with nginx("openai/nginx.conf", tmp_path_factory.mktemp("nginx"), changes) as client:
        yield client


def test_a_stream_through_nginx(proxy: httpx.Client, engine: EngineCounters) -> None:
    fields = chat_body(stream=True, max_tokens=2000, ignore_eos=True)
    with proxy.stream("POST", CHAT, json=fields, **bearer("sk-env")) as reply:  # type: ignore[arg-type]
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert [next(lines)[:5] for _ in range(3)] == ["data:", "", "data:"]
        wait_until(lambda: engine["active"] == 1, 60, "the request, which runs on")
    wait_until(lambda: engine["active"] == 0, 60, "the end of what nobody reads")
    assert proxy.post(CHAT, json=chat_body()).status_code == 401
    assert proxy.get("/health/ready").status_code == 200
    assert [proxy.get(path).status_code for path in ("/metrics", "/docs", "/")] == [404] * 3


# The end: what is asked of the server above comes before it.

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACED_TOKENS = 60


@pytest.fixture(scope="module")
def ended(
    keyed: OpenAIServer, engine: EngineCounters, paced_triton: SharedTriton
) -> httpx.Response:
    """The answer to a traced request that ran when the server was told to stop."""
    headers = {**bearer("sk-env")["headers"], "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with ThreadPoolExecutor(1) as pool:
        body = chat_body(max_tokens=TRACED_TOKENS, ignore_eos=True)
        running = pool.submit(keyed.post, CHAT, body, headers=headers)
        wait_until(lambda: engine["active"] == 1, 60, "the request")
        (stub,) = started_by(paced_triton.guard_pid, "/tensorrt_llm/1/model.py")
        os.kill(stub, signal.SIGSTOP)  # so that it runs for as long as this
        keyed.process.send_signal(signal.SIGTERM)
        wait_until(lambda: keyed.get("/health/ready").status_code == 503, 60, "draining")
        assert keyed.get("/health/live").status_code == 200
        refused = keyed.post(CHAT, chat_body(), **bearer("sk-hog"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "takes no new requests" in refused.json()["error"]["message"]
        os.kill(stub, signal.SIGCONT)
        return running.result()


def test_running_requests_end_before_the_server_does(
    keyed: OpenAIServer, ended: httpx.Response, paced_triton: SharedTriton
) -> None:
    assert ended.json()["choices"][0]["finish_reason"] == "length"
    assert keyed.process.wait(timeout=limit(60)) == 0
    assert "Traceback" not in keyed.log.read_text()
    assert paced_triton.is_ready()  # it was there before the server


def test_a_collector_gets_a_span_of_each_request(
    keyed: OpenAIServer, ended: httpx.Response, spans: tuple[str, list[bytes]]
) -> None:
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    assert keyed.process.wait(timeout=limit(60)) == 0  # which sends what is left
    messages = map(trace_service.ExportTraceServiceRequest.FromString, spans[1])
    ((span, resource),) = (
        (span, part.resource)
        for message in messages
        for part in message.resource_spans
        for span in part.scope_spans[0].spans
        if span.trace_id.hex() == TRACE and span.name == "chat demo"
    )
    values = {item.key: item.value for item in span.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == ended.json()["usage"]["prompt_tokens"]
    assert values["gen_ai.usage.output_tokens"].int_value == TRACED_TOKENS
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert 0 < values["gen_ai.response.time_to_first_chunk"].double_value < 60
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert values["cog_triton.request_id"].string_value == ended.headers["x-request-id"]
    of_resource = {item.key: item.value for item in resource.attributes}
    assert of_resource["service.name"].string_value == "cog-triton"
