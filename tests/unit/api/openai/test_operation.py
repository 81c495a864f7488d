"""What those who run the server see and set, on a backend that answers with what it is told to."""

import logging
import socket
import sys
from typing import Any

import pytest

from cog_triton.api.openai.server import Embedded, invitation
from cog_triton.client.tracing import tracer
from cog_triton.errors import ConfigurationError, TritonOverloaded, TritonTimeout
from cog_triton.generation import Chunk
from cog_triton.settings import read_settings
from tests.unit.api.openai.support import CHAT, CHUNKS, MESSAGES, Backend, ask, ask_in_turn

KEYED = {"OPENAI_API_KEYS": "sk-a"}
BODY = {"model": "m", "messages": MESSAGES}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Authorization": "Bearer sk-a"}, 200, id="OpenAI's header"),
        pytest.param({"authorization": "bearer  sk-a"}, 200, id="other case and two spaces"),
        pytest.param({"x-api-key": "sk-a"}, 200, id="Anthropic's header"),
        pytest.param({"api-key": "sk-a"}, 200, id="Azure's header"),
        pytest.param({"Authorization": "Bearer sk-b"}, 401, id="another key"),
        pytest.param({"Authorization": "Bearer "}, 401, id="no key after Bearer"),
        pytest.param({"Authorization": "Basic sk-a"}, 401, id="Basic"),
        pytest.param({"Authorization": "Bearer sk-ÿ"}, 401, id="key that is no ASCII"),
        pytest.param({}, 401, id="no header"),
    ],
)
def test_who_has_no_key_is_refused(headers: dict[str, str], status: int) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    reply = ask(Backend(*CHUNKS, **KEYED), "POST", CHAT, json=BODY, headers=sent)
    assert reply.status_code == status, reply.text
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-request-id"]
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert "sk-b" not in reply.text


@pytest.mark.parametrize(
    ("path", "open_metrics", "status"),
    [
        ("/health", "false", 200),
        ("/health/live", "false", 200),
        ("/health/ready", "false", 200),
        ("/metrics", "false", 401),
        ("/v1/models", "false", 401),
        ("/openapi.json", "false", 401),
        ("/nowhere", "false", 401),
        ("/metrics", "true", 200),
    ],
)
def test_only_health_is_open(path: str, open_metrics: str, status: int) -> None:
    backend = Backend(**KEYED, OPENAI_OPEN_METRICS=open_metrics)
    assert ask(backend, "GET", path).status_code == status


def test_browsers_are_told_what_they_may_read() -> None:
    own, allow = "https://a.example", "access-control-allow-origin"
    asked = {
        "Origin": own,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    backend = Backend(*CHUNKS, **KEYED, OPENAI_ALLOWED_ORIGINS=f"{own},https://b.example")
    reply = ask(backend, "OPTIONS", CHAT, headers=asked)
    assert (reply.status_code, reply.headers[allow]) == (200, own)
    refused = ask(backend, "POST", CHAT, json=BODY, headers={"Origin": own})
    assert (refused.status_code, refused.headers[allow]) == (401, own)
    other = ask(backend, "OPTIONS", CHAT, headers={**asked, "Origin": "https://c.example"})
    assert other.status_code == 400
    assert allow not in ask(Backend(), "GET", "/health", headers=asked).headers


def figures(backend: Backend, *bodies: dict[str, Any]) -> dict[str, float]:
    """What /metrics says after requests."""
    asked = [("POST", CHAT, {"json": {**BODY, **fields}}) for fields in bodies]
    text = ask_in_turn(backend, *asked, ("GET", "/metrics", {}))[-1].text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in lines}


def test_figures_have_the_names_of_vllm() -> None:
    seen = figures(Backend(*CHUNKS), {"stream": True}, {"n": 2}, {"model": "nothing"})
    expected = {
        'vllm:prompt_tokens_total{model_name="m"}': 9,
        'vllm:generation_tokens_total{model_name="m"}': 6,
        'vllm:request_success_total{finished_reason="stop",model_name="m"}': 3,
        'vllm:time_to_first_token_seconds_count{model_name="m"}': 2,
        'vllm:inter_token_latency_seconds_count{model_name="m"}': 3,
        'vllm:e2e_request_latency_seconds_count{model_name="m"}': 2,
        'vllm:request_queue_time_seconds_count{model_name="m"}': 2,
        'vllm:request_generation_tokens_bucket{le="2.0",model_name="m"}': 1,
        'vllm:num_requests_running{model_name="m"}': 0,
        'vllm:num_requests_waiting{model_name="m"}': 0,
        'cog_triton_errors_total{code="",status="404"}': 1,
    }
    assert seen.items() >= expected.items()


def test_routers_are_told_the_load_and_the_bounds() -> None:
    backend = Backend()
    backend.admission.running, backend.admission.waiting = 3, 2
    loads = ask(backend, "GET", "/v1/loads").json()["loads"]
    expected = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_total_reqs": 5}
    assert loads == [{**expected, "max_running_requests": 9, "utilization": 3 / 9}]
    info = ask(backend, "GET", "/server_info").json()
    assert (info["served_model_name"], info["max_running_requests"]) == ("m", 9)


def test_errors_are_counted_by_their_codes() -> None:
    seen = figures(Backend(TritonOverloaded("full", retry_after=2)), {}, {"stream": True})
    assert seen['cog_triton_errors_total{code="E2106",status="429"}'] == 2
    seen = figures(Backend(Chunk("a", 1, 3), TritonTimeout("gone")), {"stream": True})
    assert seen['cog_triton_errors_total{code="E2101",status="200"}'] == 1
    assert seen['vllm:request_success_total{finished_reason="error",model_name="m"}'] == 1


def test_a_line_of_the_log_has_no_text_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cog_triton.api.openai.operation")
    ask(Backend(**KEYED), "GET", "/health")
    ask(Backend(**KEYED), "GET", "/a%0Ab", headers={"Authorization": "Bearer wrong"})
    (line,) = caplog.messages
    assert " /a%0Ab 401 key=- model=- tokens=0+0 " in line
    assert "wrong" not in line


def test_without_its_packages_there_are_no_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, exporter, raising=False)
    tracer("http://127.0.0.1:9")
    assert "tracing is off: " in caplog.text
    assert "pip install cog-triton[otel]" in caplog.text


def test_the_ready_line_asks_for_a_key_where_one_is_needed() -> None:
    def text(**environment: str) -> str:
        return invitation(read_settings(environment), "m", "http://x:1", chat=False)

    assert "chat page at http://x:1/" in text()
    assert "Bearer" not in text()
    assert "page" not in text(CHAT_PAGE="false")
    assert '-H "Authorization: Bearer $OPENAI_API_KEY" -d ' in text(OPENAI_API_KEYS="secret")
    assert "secret" not in text(OPENAI_API_KEYS="secret")


def test_the_ready_line_asks_an_instruct_model_in_its_own_form() -> None:
    settings = read_settings({})
    completion = invitation(settings, "m", "http://x:1", chat=False)
    assert "/v1/completions " in completion
    assert '"prompt": "What is a KV cache?"' in completion
    chat = invitation(settings, "m", "http://x:1", chat=True)
    assert "/v1/chat/completions " in chat
    assert '"messages": [{"role": "user", "content": "What is a KV cache?"}]' in chat


def test_the_port_beside_cogs_is_taken_before_anything_slow_and_0_is_a_free_one() -> None:
    def listener_of(port: int) -> socket.socket:
        return Embedded(read_settings({"OPENAI_PORT": str(port)}), lambda _: None)._listener

    with listener_of(0) as free:
        assert free.getsockname()[1] > 0
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=f"OPENAI_PORT: .*port {port}: Address already"
        ):
            listener_of(port)
