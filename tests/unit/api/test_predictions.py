"""Which requests reach Cog's server, the predictions that run, and the health routes."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.api.cog import prediction_files
from cog_triton.api.cog import predictions as module
from cog_triton.api.cog.front import Front
from cog_triton.api.cog.messages import VARIABLE
from cog_triton.api.cog.passage import Inputs, Passage, Route, fields_of
from cog_triton.api.cog.predictions import Predictions
from cog_triton.request.limits import TextLimits
from cog_triton.settings import read_settings
from cog_triton.web import Refusal
from cog_triton.web.server import bound
from tests.support import run_until_killed, wait_until

pytestmark = pytest.mark.anyio
NO_INPUTS = Inputs()
INPUTS = Inputs(
    needed=("prompt", "messages"),
    names=("prompt", "system_prompt", "messages", "lora", "seed"),
    limits=TextLimits(100_000, " here"),
)
HELLO = json.loads(orjson.dumps(INPUTS))
LARGE = "x" * (1 << 16)


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(module, "REMOVE_SECONDS", 0.0)
    return tmp_path / "predictions"


@pytest.fixture
def predictions(base: Path) -> Predictions:
    return Predictions(base)


async def is_there(predictions: Predictions, directory: Path) -> bool:
    """Whether a directory is there once all that are to be removed are."""
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.wrap_future(predictions.files.after_removals())
    return directory.exists()


def check(method: str, target: str, body: bytes = b"", inputs: Inputs = NO_INPUTS) -> Passage:
    return Route.parse(method, target).passage(body, inputs)


@given(st.text())
def test_an_id_that_passes_names_a_directory_of_its_own(identifier: str) -> None:
    with contextlib.suppress(Refusal):
        check("POST", "/predictions", json.dumps({"id": identifier}).encode())
        assert Path("/base", identifier).resolve().parent == Path("/base")


@pytest.mark.parametrize(
    "passage",
    [
        pytest.param(Passage("GET", "/health-check"), id="health"),
        pytest.param(Passage("POST", "/shutdown"), id="end of the server"),
        pytest.param(Passage("GET", "/predictions/x"), id="query of a prediction"),
        pytest.param(Passage("PUT", "/predictions/x", starts="x"), id="prediction with an id"),
        pytest.param(
            Passage("PUT", "/trainings/%61b?c", starts="ab"), id="training with an escaped id"
        ),
        pytest.param(
            Passage("POST", "/predictions", b'{"id": "mine", "input": {}}', starts="mine"),
            id="prediction with an id in its body",
        ),
        pytest.param(
            Passage("POST", "/predictions/%61b/cancel", cancels="ab"),
            id="cancellation with an escaped id",
        ),
        pytest.param(Passage("GET", "/predictions/%61b/cancel"), id="query of a path that cancels"),
    ],
)
def test_what_passes_unchanged(passage: Passage) -> None:
    assert check(passage.method, passage.target, passage.body) == passage


@pytest.mark.parametrize("body", [b'{"id": ', b'"id"' + b"[" * 100_000, b'{"id": "\xff"}', b"x"])
def test_a_body_that_is_not_json(body: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        fields_of(body)
    assert refusal.value.status == 400
    assert len(refusal.value.detail) < 300


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"webhook": ["http://x"]}, "webhook"),
        ({"webhook": "x"}, "webhook"),
        ({"webhook": ""}, "webhook"),
        ({"webhook": "ftp://x/"}, "webhook"),
        ({"webhook": "file:///etc/passwd"}, "webhook"),
        ({"webhook": "http://"}, "webhook"),
        ({"webhook": "http://x:99999/"}, "webhook"),
        ({"webhook": "http://[::1/"}, "webhook"),
        ({"webhook": "http://x/" + "y" * 3000}, "webhook"),
        ({"webhook": "http://a b/"}, "webhook"),
        ({"webhook": "http://a\r\nX: y/"}, "webhook"),
        ({"webhook": "http://x\0/"}, "webhook"),
        ({"webhook": "http://x/\n"}, "webhook"),
        ({"webhook": " http://x/"}, "webhook"),
        ({"webhook": "http://1.2.3.4.5/"}, "webhook"),
        ({"webhook": "http://%00/"}, "webhook"),
        ({"webhook": "http://xn--/"}, "webhook"),
        ({"webhook_events_filter": "start"}, "webhook_events_filter"),
        ({"webhook_events_filter": ["begin"]}, "webhook_events_filter"),
        ({"webhook_events_filter": [["start"]]}, "webhook_events_filter"),
        ({"webhook_events_filter": {"start": 1}}, "webhook_events_filter"),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["/predictions", "/trainings"])
def test_webhooks_that_cannot_be_called(fields: dict[str, Any], field: str, target: str) -> None:
    with pytest.raises(Refusal) as refusal:
        check("POST", target, json.dumps(fields).encode())
    assert refusal.value.status == 422
    assert refusal.value.detail[0]["loc"] == ["body", field]


@pytest.mark.parametrize(
    "fields",
    [
        {"webhook": "http://x"},
        {"webhook": "https://user:password@[::1]:8443/a?b=c", "webhook_events_filter": []},
        {"webhook": None, "webhook_events_filter": ["start", "output", "logs", "completed"]},
    ],
    ids=str,
)
def test_webhooks_that_pass(fields: dict[str, Any]) -> None:
    passage = check("POST", "/predictions", json.dumps(fields).encode())
    assert json.loads(passage.body) == fields
    assert passage.has_webhook == bool(fields["webhook"])


TOO_LARGE = {
    "a prompt": (
        {"prompt": "é" * 100_001},
        "prompt",
        "the prompt has 100001 characters; the limit is 100000",
    ),
    "a system prompt": (
        {"prompt": "x", "system_prompt": "x" * 100_001},
        "system_prompt",
        "the system prompt has 100001 characters",
    ),
    "a chat": ({"messages": "x" * 1_300_000}, "messages", "the inputs have 1300000 characters"),
    "a name": (
        {"prompt": "xx", "lora": "x" * 1_300_000},
        "lora",
        "the inputs have 1300002 characters; the limit is 1248576",
    ),
}


@pytest.mark.parametrize("path", ["/predictions", "/predictions/x"])
@pytest.mark.parametrize(("inputs", "name", "text"), TOO_LARGE.values(), ids=TOO_LARGE)
async def test_texts_that_are_too_long_are_refused_before_cogs_server_parses_them(
    predictions: Predictions, path: str, inputs: dict[str, Any], name: str, text: str
) -> None:
    predictions.receive("hello", HELLO)
    method = "POST" if path == "/predictions" else "PUT"
    with pytest.raises(Refusal) as caught:
        predictions.check(method, path, orjson.dumps({"input": inputs}))
    assert caught.value.status == 422
    (problem,) = caught.value.detail
    assert problem["loc"] == ["body", "input", name]
    assert problem["msg"].startswith(f"E1002 PromptTooLong: {text}")


@pytest.mark.parametrize("value", [["x"], {"a": 1}], ids=["list", "object"])
def test_a_large_input_that_is_a_list_or_an_object_is_refused(value: Any) -> None:
    body = orjson.dumps({"input": {"prompt": LARGE, "lora": value}})
    with pytest.raises(Refusal) as caught:
        check("POST", "/predictions", body, INPUTS)
    assert caught.value.detail[0]["loc"] == ["body", "input", "lora"]


@pytest.mark.parametrize("collection", ["predictions", "trainings"])
def test_of_a_large_body_only_what_cogs_server_needs_is_passed_on(collection: str) -> None:
    needed = {"id": "x", "input": {"prompt": LARGE, "seed": 1}, "webhook": "http://host/"}
    body = orjson.dumps({**needed, "context": {"a": LARGE}, "unknown": [[]] * 100})
    assert orjson.loads(check("POST", f"/{collection}", body, INPUTS).body) == needed


def test_unknown_inputs_and_spaces_of_a_large_body_are_not_passed_on() -> None:
    body = b'{"input": {"prompt": "x", "unknown": [[], {}]}' + b" " * (1 << 16) + b"}"
    assert check("POST", "/predictions", body, INPUTS).body == b'{"input":{"prompt":"x"}}'


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/trainings/x/cancel"),
        ("PUT", "/predictions/x/y"),
        ("POST", "/unknown"),
        ("PATCH", "/predictions"),
    ],
)
def test_no_body_is_passed_on_that_begins_no_prediction(method: str, path: str) -> None:
    assert check(method, path, b'{"input": {"prompt": "x"}}').body == b""


@dataclass(frozen=True)
class State:
    """What Cog's server says, or None where it does not answer, and what is known beside it."""

    cog_status: str | None
    busy_for: float = 0.0  # seconds
    draining: bool = False
    worker_ended: bool = False


@pytest.mark.parametrize(
    ("route", "state", "status"),
    [
        pytest.param("ready", State("READY"), 200, id="ready when idle"),
        pytest.param("ready", State("BUSY", busy_for=9.0), 200, id="ready when busy"),
        pytest.param(
            "ready", State("BUSY", busy_for=10.1), 503, id="not ready when busy for too long"
        ),
        pytest.param("ready", State("READY", draining=True), 503, id="not ready when draining"),
        pytest.param("ready", State("STARTING"), 503, id="not ready when starting"),
        pytest.param("ready", State("UNHEALTHY"), 503, id="not ready when unhealthy"),
        pytest.param("ready", State(None), 503, id="not ready without an answer"),
        pytest.param("live", State("READY"), 200, id="alive when idle"),
        pytest.param("live", State("UNHEALTHY"), 200, id="alive when unhealthy"),
        pytest.param("live", State("DEFUNCT"), 503, id="dead when defunct"),
        pytest.param("live", State(None), 503, id="dead without an answer"),
        pytest.param("live", State("READY", worker_ended=True), 503, id="dead without a worker"),
        pytest.param(
            "live", State(None, draining=True), 200, id="alive without an answer while draining"
        ),
    ],
)
async def test_health(route: str, state: State, status: int) -> None:
    front = Front(bound("127.0.0.1", 0), read_settings({"BUSY_TIMEOUT": "10"}))
    front.predictions.progress = time.monotonic() - state.busy_for
    front.predictions.draining = state.draining
    front.health._busy_since = 1.0
    front.health.worker_ended = state.worker_ended
    answer = None if state.cog_status is None else {"status": state.cog_status}
    vars(front.cog_server)["ask"] = AsyncMock(return_value=answer)
    transport = httpx.ASGITransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        reply = await client.get(f"/health/{route}")
    front.predictions.files.remove_all()
    assert reply.json()["status"] == (state.cog_status or "UNKNOWN")
    assert reply.status_code == status
    assert ("connection" in reply.headers) == state.draining


@pytest.mark.parametrize("status", [200, 409, 0])
async def test_a_directory_goes_when_the_last_request_of_its_prediction_has_ended(
    predictions: Predictions, base: Path, status: int
) -> None:
    async def request(ending: asyncio.Event) -> None:
        predictions.begin("x")
        await ending.wait()
        predictions.end("x", status)

    ends = asyncio.Event(), asyncio.Event()
    first, second = (asyncio.create_task(request(end)) for end in ends)
    await asyncio.sleep(0)  # both have begun
    ends[0].set()
    await first
    assert predictions.left() == "1 prediction"
    assert await is_there(predictions, base / "x")
    ends[1].set()
    await second
    assert predictions.left() == ""
    assert not await is_there(predictions, base / "x")


@pytest.mark.parametrize("over_first", [True, False])
async def test_an_asynchronous_prediction_runs_until_the_predictor_says_that_it_has_ended(
    predictions: Predictions, base: Path, over_first: bool
) -> None:
    predictions.receive("hello", HELLO)
    predictions.begin("x")
    if over_first:
        predictions.receive("ended", "x")
    predictions.end("x", 202)
    assert predictions.runs("x") != over_first
    assert await is_there(predictions, base / "x") != over_first
    predictions.receive("ended", "x")
    predictions.receive("ended", "unknown")
    assert not predictions.runs("x")
    assert not await is_there(predictions, base / "x")


async def test_what_a_killed_server_leaves_is_removed_by_the_next(
    predictions: Predictions, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until_killed(
        f"""
        import asyncio, os, signal
        from pathlib import Path
        from cog_triton.api.cog.predictions import Predictions

        async def begin():
            Predictions(Path({str(base)!r})).begin("left")

        asyncio.run(begin())
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert (base / "left").exists()
    (base / "of_others" / "outputs").mkdir(parents=True)
    predictions.begin("running")
    # The server's process id means nothing in another container that shares the directory.
    monkeypatch.setattr(prediction_files, "process_name", lambda _: "1_1")
    other = Predictions(base)
    wait_until(lambda: not (base / "left").exists(), 60, "the removal")
    assert sorted(path.name for path in base.iterdir()) == ["of_others", "running"]
    other.files.remove_all()
    predictions.files.remove_all()
    wait_until(lambda: not list(base.parent.glob("*.lock")), 60, "the removal of all locks")


async def test_cancels_reach_a_predictor_that_listens(
    predictions: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr(predictions, "send", lambda *words: sent.append(words))
    predictions.begin("x")
    assert not predictions.cancel("x"), "only Cog's server can"
    predictions.receive("hello", HELLO)
    assert not predictions.cancel("y"), "there is no such prediction"
    assert predictions.cancel("x")
    assert predictions.cancel("x")
    for _ in range(2):  # of the second, nothing is to be forgotten
        predictions.end("x", 200)
        predictions.begin("x")
    assert sent == [("cancel", "x"), ("cancel", "x"), ("forget", "x")]
