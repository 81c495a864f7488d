"""Predictions of Replicate's API end, whatever Cog's server sends; and so does a front that fails."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.routing import Router

from cog_triton.api.cog import front, server
from cog_triton.api.cog.answer import Answer
from cog_triton.api.cog.cog_server import CogServer, Reply
from cog_triton.api.cog.front import EXIT_STATUS, Front
from cog_triton.api.cog.messages import VARIABLE
from cog_triton.api.cog.predictions import Predictions
from cog_triton.api.cog.replicate import kept, routes
from cog_triton.api.cog.replicate.creation import _webhook_fields
from cog_triton.api.cog.replicate.kept import Kept
from cog_triton.api.cog.replicate.routes import Replicate
from cog_triton.settings import read_settings
from cog_triton.web import Refusal
from cog_triton.web.server import bound
from tests.support import limit

pytestmark = pytest.mark.anyio


class CogsEvents(CogServer):
    """Answers every request with these bytes."""

    def __init__(self, events: bytes, status: int = 200) -> None:
        self._events = events
        self._status = status

    @contextlib.asynccontextmanager
    async def exchange(self, *_: Any) -> AsyncIterator[Reply]:
        answer = Answer(1 << 16, ())
        answer.feed_data(self._events)
        answer.feed_eof()
        yield Reply(self._status, [], answer)


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        (b'event: completed\ndata: {"status":"succeeded"}\n\n', "succeeded", None),
        (b"", "failed", "E2105"),
        (b"event: output\ndata: {\n\n", "failed", "E2104"),
        (b"event: output\ndata: {}\n\n", "failed", "E2104"),
        (b"event: completed\ndata: []\n\n", "failed", "E2104"),
    ],
    ids=["whole", "broken off", "no JSON", "no chunk", "no object"],
)
async def test_a_prediction_ends_whatever_comes(
    events: bytes,
    status: str,
    error: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    predictions = Predictions(tmp_path / "predictions")
    router = Router(Replicate(CogsEvents(events), predictions, None).routes)
    transport = httpx.ASGITransport(router)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        headers = {"prefer": "wait=20"}
        reply = await client.post("/v1/predictions", json={"input": {}}, headers=headers)
    predictions.files.remove_all()
    fields = reply.json()
    assert (reply.status_code, fields["status"]) == (201, status)
    assert (fields["error"] or "").startswith(error or "")


async def test_without_a_free_slot_a_client_is_told_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    predictions = Predictions(tmp_path / "predictions")
    cog_server = CogsEvents(b'{"detail":"all slots are taken"}', status=409)
    transport = httpx.ASGITransport(Router(Replicate(cog_server, predictions, None).routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(Refusal) as refused:  # which the front answers
            await client.post("/v1/predictions", json={"input": {}})
    predictions.files.remove_all()
    assert (refused.value.status, refused.value.retry_after) == (409, 1)


async def test_the_wait_begins_with_the_request_not_when_cogs_server_has_accepted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicate's client gives up half a second after the time that it asked the server to wait."""
    now = 0.0

    class BusyCogServer(CogServer):
        """Accepts after 30 seconds, and never ends."""

        def __init__(self) -> None:
            pass

        @contextlib.asynccontextmanager
        async def exchange(self, *_: Any) -> AsyncIterator[Reply]:
            nonlocal now
            now += 30.0
            yield Reply(200, [], Answer(1 << 16, ()))

    timeouts: list[float] = []
    wait = asyncio.wait

    async def wait_not(tasks: Any, timeout: float | None = None, **options: Any) -> Any:
        if timeout is not None:
            timeouts.append(timeout)
            timeout = 0.0
        return await wait(tasks, timeout=timeout, **options)

    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(routes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(asyncio, "wait", wait_not)
    predictions = Predictions(tmp_path / "predictions")
    transport = httpx.ASGITransport(Router(Replicate(BusyCogServer(), predictions, None).routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for seconds in ("40", "20"):
            headers = {"prefer": f"wait={seconds}"}
            reply = await client.post("/v1/predictions", json={"input": {}}, headers=headers)
            assert (reply.status_code, reply.json()["status"]) == (201, "starting")
    predictions.files.remove_all()
    assert timeouts == [10.0, 0.0]


def test_the_oldest_that_can_go_make_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT", 3)
    monkeypatch.setattr(kept, "KEPT_BYTES", 10)
    items: Kept[Any] = Kept()
    for number, (size, can_go) in enumerate([(1, False), (1, True), (1, True), (1, True)]):
        items.add(SimpleNamespace(id=str(number), size=size, can_go=can_go))
    assert [item.id for item in items.newest(2)] == ["3", "2"]
    assert [item.id for item in items.newest(9)] == ["3", "2", "0"]
    items.add(SimpleNamespace(id="large", size=9, can_go=True))
    assert [item.id for item in items.newest(9)] == ["large", "0"]


def test_a_front_that_fails_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    async def serve(*_: Any) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("no sockets left")

    failing = SimpleNamespace(serve=serve, cog_server=SimpleNamespace(source="127.0.0.1"))
    server.run_front(cast(Any, failing), 0)
    assert statuses == [EXIT_STATUS]
    assert "no sockets left" in capsys.readouterr().err


class Exited(Exception):
    """In place of the end of the process; its argument is the status."""


@pytest.mark.parametrize(
    ("told_to_stop", "status"),
    [
        pytest.param(True, 0, id="after a stop, however long Cog's server takes to follow"),
        pytest.param(False, EXIT_STATUS, id="by itself"),
    ],
)
async def test_the_exit_status_when_the_worker_has_ended(
    told_to_stop: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_process(status: int) -> None:
        raise Exited(status)

    async def ask(method: str, path: str) -> dict[str, str]:
        assert (method, path) == ("POST", "/shutdown")
        worker_ended.set()
        return {}

    worker_ended = asyncio.Event()
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(os, "_exit", exit_process)
    monkeypatch.setattr(front, "worker_end", worker_ended.wait)
    # Cog's server takes longer than it has.
    monkeypatch.setattr(front, "_FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(front, "_END_SECONDS", 0.0)
    predictions = Predictions(tmp_path / "predictions")
    running = Front(bound("127.0.0.1", 0), read_settings({}), predictions)
    monkeypatch.setattr(running.cog_server, "status", AsyncMock(return_value="READY"))
    monkeypatch.setattr(running.cog_server, "ask", ask)
    readable_on_stop, writer = os.pipe()
    serving = asyncio.create_task(running.serve(lambda: 1, readable_on_stop))
    while not running._server.started:
        await asyncio.sleep(0.01)
    if told_to_stop:
        os.write(writer, b"x")
    else:
        worker_ended.set()
    with pytest.raises(Exited) as exited:
        await asyncio.wait_for(serving, limit(60))
    assert exited.value.args == (status,)
    running._server.should_exit = True
    predictions.files.remove_all()
    for descriptor in (readable_on_stop, writer):
        os.close(descriptor)


async def test_a_front_that_does_not_listen_any_more_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cog's server would go on, with nobody who can reach it."""
    monkeypatch.setenv(VARIABLE, "")
    predictions = Predictions(tmp_path / "predictions")
    running = Front(bound("127.0.0.1", 0), read_settings({}), predictions)
    monkeypatch.setattr(running, "_end_with_worker", asyncio.Event().wait)
    never_readable, writer = os.pipe()
    serving = asyncio.create_task(running.serve(lambda: 1, never_readable))
    while not running._server.started:
        await asyncio.sleep(0.01)
    running._server.should_exit = True
    with pytest.raises(RuntimeError, match="does not listen"):
        await asyncio.wait_for(serving, limit(60))
    predictions.files.remove_all()
    for descriptor in (never_readable, writer):
        os.close(descriptor)


def test_replicates_older_name_of_a_webhook_is_one_for_the_end() -> None:
    older = {"webhook_completed": "https://a.example", "input": {}}
    assert _webhook_fields(older) == {
        "webhook": "https://a.example",
        "webhook_events_filter": ["completed"],
    }
    both = {"webhook_completed": None, "webhook": "https://b.example"}
    assert _webhook_fields(both) == {"webhook": "https://b.example"}
