"""Which requests reach Cog's server, and what the health routes say."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.faces.cog.front import Front
from cog_triton.faces.cog.predictions import VARIABLE
from cog_triton.faces.cog.rules import Passage, check, fields_of
from cog_triton.settings import read_settings
from cog_triton.web import Refusal
from cog_triton.web.server import bound


@pytest.fixture(autouse=True)
def channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize(
    "identifier", ["a", "A-b_c.9", "x" * 128, "gm3qorzdhgbfurvjtvhg6dckhu", "-"]
)
def test_a_good_id(identifier: str) -> None:
    assert check("PUT", f"/predictions/{identifier}", b"").starts == identifier


@pytest.mark.parametrize(
    "identifier", ["", ".", "..", ".a", "a/b", "a\0", "a\n", "ä", "x" * 129, " "]
)
def test_a_bad_id(identifier: str) -> None:
    with pytest.raises(Refusal) as refusal:
        check("PUT", f"/predictions/{quote(identifier, safe='')}", b"")
    assert refusal.value.status == 422
    assert refusal.value.detail[0]["loc"] == ["path", "prediction_id"]


@given(st.text())
def test_an_id_that_passes_names_a_directory_of_its_own(identifier: str) -> None:
    body = json.dumps({"id": identifier}).encode()
    try:
        check("POST", "/predictions", body)
    except Refusal:
        return
    assert Path("/base", identifier).resolve().parent == Path("/base")


@pytest.mark.parametrize(
    ("method", "target", "prediction"),
    [
        ("GET", "/health-check", None),
        ("POST", "/shutdown", None),
        ("GET", "/predictions/x", None),
        ("PUT", "/predictions/x", "x"),
        ("PUT", "/trainings/%61b?c", "ab"),
    ],
)
def test_what_passes_unchanged(method: str, target: str, prediction: str | None) -> None:
    assert check(method, target, b"") == Passage(method, target, b"", prediction)


def test_a_cancel() -> None:
    target = "/predictions/%61b/cancel"
    assert check("POST", target, b"") == Passage("POST", target, cancels="ab")
    assert check("GET", target, b"").cancels is None


@pytest.mark.parametrize(
    "target",
    ["/predictions/%00", "/predictions/..%2Fx/cancel", "/%70redictions/%2e", "/trainings/%20"],
)
def test_a_bad_id_in_the_path(target: str) -> None:
    for method in ("GET", "PUT", "POST"):
        with pytest.raises(Refusal):
            check(method, target, b"")


def test_a_prediction_without_an_id_gets_one() -> None:
    first, second = (check("POST", "/predictions?a=b", b"{}") for _ in range(2))
    assert first.starts != second.starts
    assert first == Passage("PUT", f"/predictions/{first.starts}?a=b", b"{}", first.starts)


def test_a_prediction_with_an_id_keeps_it() -> None:
    body = b'{"id": "mine", "input": {}}'
    assert check("POST", "/predictions", body) == Passage("POST", "/predictions", body, "mine")


def test_nulls_are_left_out() -> None:
    body = b'{"input": {"prompt": "Hi", "seed": null}, "webhook": null}'
    passed = check("POST", "/predictions", body, inputs=["prompt", "messages"]).body
    assert json.loads(passed) == {"input": {"prompt": "Hi"}, "webhook": None}
    body = b'{"input": {"prompt": ""}}'
    assert check("PUT", "/predictions/x", body).body is body


@pytest.mark.parametrize("body", ["", "{}", '{"input": null}', '{"input": {"prompt": null}}', "[]"])
def test_a_prediction_without_an_input_that_it_needs(body: str) -> None:
    for method, target in [("POST", "/predictions"), ("PUT", "/predictions/x")]:
        with pytest.raises(Refusal) as refusal:
            check(method, target, body.encode(), inputs=["prompt", "messages"])
        assert refusal.value.status == 422
        (problem,) = refusal.value.detail
        assert problem["loc"] == ["body", "input", "prompt"]
        assert problem["msg"] == "E1001 PromptRequired: prompt or messages is required"
        check(method, target, body.encode())
    check("POST", "/trainings", body.encode(), inputs=["prompt"])


def test_no_new_predictions_while_draining() -> None:
    for method, target in [("POST", "/predictions"), ("PUT", "/predictions/x")]:
        with pytest.raises(Refusal) as refusal:
            check(method, target, b"", draining=True)
        assert (refusal.value.status, refusal.value.retry_after) == (503, 5)
    check("POST", "/predictions/x/cancel", b"", draining=True)


@pytest.mark.parametrize(
    ("body", "identifier"),
    [
        (b"", None),
        (b'{"input": {"id": "inner"}}', None),
        (b'{"id": "a/b"}', "a/b"),
        (b'{"\\u0069d": "x"}', "x"),
        (b'{"input": %s, "id": "x"}' % (b"9" * 300), "x"),
        (b'{"id": null}', None),
        (b'["id"]', None),
    ],
)
def test_the_id_in_a_body(body: bytes, identifier: str | None) -> None:
    assert fields_of(body).get("id") == identifier


@pytest.mark.parametrize("body", [b'{"id": ', b'"id"' + b"[" * 100_000, b'{"id": "\xff"}', b"x"])
def test_a_body_that_is_not_json(body: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        fields_of(body)
    assert refusal.value.status == 400
    assert len(refusal.value.detail) < 300


# What the health routes say


async def ask_health(path: str, status: str | None, **state: Any) -> httpx.Response:
    settings = read_settings({"BUSY_TIMEOUT": "10"})
    front = Front(bound("127.0.0.1", 0), settings)
    front.predictions.progress = time.monotonic() - state.pop("busy_for", 0.0)
    front._busy_since = 1.0
    vars(front).update(state, ask=AsyncMock(return_value=status and {"status": status}))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(front), base_url="http://x"
    ) as client:
        reply = await client.get(f"/health/{path}")
    front.predictions.remove_all()
    assert reply.json()["status"] == (status or "UNKNOWN")
    return reply


@pytest.mark.parametrize(
    ("status", "busy_for", "draining", "ready"),
    [
        ("READY", 0.0, False, True),
        ("BUSY", 9.0, False, True),
        ("BUSY", 10.1, False, False),
        ("READY", 0.0, True, False),
        ("STARTING", 0.0, False, False),
        ("UNHEALTHY", 0.0, False, False),
        ("SETUP_FAILED", 0.0, False, False),
        (None, 0.0, False, False),
    ],
)
def test_ready(status: str | None, busy_for: float, draining: bool, ready: bool) -> None:
    state = {"busy_for": busy_for, "draining": draining}
    reply = asyncio.run(ask_health("ready", status, **state))
    assert (reply.status_code == 200) == ready
    assert (reply.headers.get("connection") == "close") == draining


@pytest.mark.parametrize(
    ("status", "ended", "draining", "live"),
    [
        ("READY", False, False, True),
        ("UNHEALTHY", False, False, True),
        ("READY", True, False, False),
        ("DEFUNCT", False, False, False),
        (None, False, False, False),
        (None, False, True, True),
    ],
)
def test_live(status: str | None, ended: bool, draining: bool, live: bool) -> None:
    state = {"_worker_ended": ended, "draining": draining}
    reply = asyncio.run(ask_health("live", status, **state))
    assert (reply.status_code == 200) == live
