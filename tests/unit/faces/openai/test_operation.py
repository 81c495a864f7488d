"""What those who run the server see and set, on a backend that answers with what it is told to."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.errors import TritonOverloaded, TritonTimeout
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.command import invitation
from cog_triton.faces.openai.metrics import attributes, tracing
from cog_triton.faces.openai.served import Call
from cog_triton.generation import Chunk
from cog_triton.request.admission import Tenant
from cog_triton.settings import read_settings
from tests.unit.faces.openai.support import CHUNKS, MESSAGES, Backend, ask, served

KEYED = {"OPENAI_API_KEYS": "sk-a"}
BODY = {"model": "m", "messages": MESSAGES}
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("sk-a"), 200),
        ({"authorization": "bearer  sk-a"}, 200),
        ({"x-api-key": "sk-a"}, 200),
        ({"api-key": "sk-a"}, 200),
        ({"api-key": "sk-b"}, 401),
        (bearer("sk-b"), 401),
        (bearer(""), 401),
        ({"Authorization": "Basic sk-a"}, 401),
        (bearer("sk-\xff"), 401),
        ({}, 401),
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
    ("path", "status"),
    [
        ("/health/live", 200),
        ("/health/ready", 200),
        ("/health", 200),
        ("/metrics", 401),
        ("/v1/models", 401),
        ("/openapi.json", 401),
        ("/health/../v1/models", 401),
        ("/nowhere", 401),
    ],
)
def test_only_health_is_open(path: str, status: int) -> None:
    assert ask(Backend(**KEYED), "GET", path).status_code == status


def test_metrics_can_be_open() -> None:
    reply = ask(Backend(**KEYED, OPENAI_OPEN_METRICS="true"), "GET", "/metrics")
    assert reply.status_code == 200


def test_a_key_has_its_share_and_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("light sk-a weight=4 requests_per_minute=2\n")
    backend = Backend(*CHUNKS, OPENAI_API_KEYS_FILE=str(file))

    async def test() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(served(backend)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.post(CHAT, json={**BODY, "max_tokens": 9}, headers=bearer("sk-a"))
                for _ in range(3)
            ]

    replies = asyncio.run(test())
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
    assert left == ["1", "0", "0"]
    assert replies[2].headers["retry-after"] == "30"
    assert replies[2].json()["error"]["code"] == "rate_limit_exceeded"
    prompt = len(backend.asked[0][0].prompt)
    assert backend.tenants[0] == Tenant("light", 4.0, prompt // 4 + 9)


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

    async def test() -> str:
        transport = httpx.ASGITransport(create_app(served(backend)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for body in bodies:
                await client.post(CHAT, json={**BODY, **body})
            return (await client.get("/metrics")).text

    lines = [line.rsplit(" ", 1) for line in asyncio.run(test()).splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in lines}


def test_figures_have_the_names_of_vllm() -> None:
    seen = figures(Backend(*CHUNKS), {"stream": True}, {"n": 2}, {"model": "nothing"})
    for name, value in {
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
    }.items():
        assert seen[name] == value, name


def test_errors_are_counted_by_their_codes() -> None:
    overloaded = Backend(TritonOverloaded("full", retry_after=2))
    seen = figures(overloaded, {}, {"stream": True})
    assert seen['cog_triton_errors_total{code="E2106",status="429"}'] == 2
    midway = Backend(Chunk("a", 1, 3), TritonTimeout("gone"))
    code = TritonTimeout("").code
    seen = figures(midway, {"stream": True})
    assert seen[f'cog_triton_errors_total{{code="{code}",status="200"}}'] == 1
    assert seen['vllm:request_success_total{finished_reason="error",model_name="m"}'] == 1


def test_a_line_of_the_log_has_no_text_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cog_triton.faces.openai.operation")
    headers = {**bearer("sk-a"), "x-request-id": "mine"}
    ask(Backend(*CHUNKS, **KEYED), "POST", CHAT, json=BODY, headers=headers)
    ask(Backend(**KEYED), "GET", "/health")
    ask(Backend(**KEYED), "GET", "/a%0Ab", headers=bearer("wrong"))
    first, second = caplog.messages
    assert first.startswith(f"mine {CHAT} 200 key=key-")
    assert " model=m tokens=3+2 " in first
    assert first.endswith(" ms")
    assert " /a%0Ab 401 key=- model=- tokens=0+0 " in second
    assert not [text for text in ("Hello", "sk-a", "wrong") if text in caplog.text]


def test_a_span_says_what_a_call_was() -> None:
    call = Call("id", CHAT, model="m", input_tokens=3, output_tokens=2, first_token=0.5, status=200)
    call.finish_reasons.append("stop")
    assert attributes(call) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cog-triton",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "http.response.status_code": 200,
        "url.path": CHAT,
        "cog_triton.request_id": "id",
    }
    assert attributes(Call("id", "/v1/completions", model="m", status=429))["error.type"] == "429"
    assert tracing(None) is None


def test_without_its_packages_there_are_no_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(
        sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", raising=False
    )
    assert tracing("http://127.0.0.1:9") is None
    assert "no traces: " in caplog.text
    assert "pip install cog-triton[otel]" in caplog.text


def test_the_ready_line_asks_for_a_key_where_one_is_needed() -> None:
    def text(**environment: str) -> str:
        return invitation(read_settings(environment), "m", "http://x:1")

    assert "page to chat at http://x:1/" in text()
    assert "Bearer" not in text()
    assert "page" not in text(CHAT_PAGE="false")
    assert '-H "Authorization: Bearer $OPENAI_API_KEY" -d ' in text(OPENAI_API_KEYS="secret")
    assert "secret" not in text(OPENAI_API_KEYS="secret")
