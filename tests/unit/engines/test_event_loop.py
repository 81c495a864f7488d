"""An engine on an event loop, whose hooks raise: the request hears of it, and the others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from cog_triton.engines.base import EngineError, EngineUnavailable, GenerationRequest, Step
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.engines.serving import Output, Serving
from tests.engines import TIMEOUT, Requests, Stream, request

BROKEN = RuntimeError("the library broke")


class Scripted(EventLoopEngine):
    """Generates [7] and then, when the test says so, the last [8]; ``script`` replaces that."""

    context_length = 1000

    def __init__(self) -> None:
        self.script: Callable[[], Steps] | None = None
        super().__init__("scripted engine")
        self.released = asyncio.Event()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self.released.set)

    def steps(self, request: GenerationRequest) -> Steps:
        if request.key.startswith("scripted") and self.script is not None:
            return self.script()
        return self._usual()

    async def _usual(self) -> Steps:
        yield Step([7])
        await self.released.wait()
        yield Step([8], finished=True)


@pytest.fixture
def engine() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


async def at_once() -> Steps:
    raise BROKEN
    yield Step()


async def midway() -> Steps:
    yield Step([7])
    raise BROKEN


async def at_its_close() -> Steps:
    try:
        yield Step([7])
        yield Step([8])
        raise BROKEN
    finally:
        raise RuntimeError("the library broke while it dropped the request")


async def without_a_last_step() -> Steps:
    yield Step([7])


async def cancelled() -> Steps:
    yield Step([7])
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (at_once, "the library broke"),
        (midway, "the library broke"),
        (at_its_close, "while it dropped the request"),
        (without_a_last_step, "it made no last step"),
        (cancelled, "it was cancelled"),
    ],
)
@pytest.mark.parametrize("broken_hook", ["", "ends_engine", "request_error"])
def test_a_generator_that_raises_ends_its_request_alone(
    engine: Scripted, script: Callable[[], Steps], reason: str, broken_hook: str
) -> None:
    if broken_hook:
        setattr(engine, broken_hook, Mock(side_effect=KeyError("the hook broke as well")))
    requests = Requests(engine)
    other = requests.start()
    engine.script = script
    failed = requests.start(key="scripted").last()
    assert type(failed.error) is EngineUnavailable
    assert reason in str(failed.error)
    engine.release()
    assert other.wait().ids == [7, 8]
    assert not engine.running


def test_what_fails_behind_the_last_step_is_logged_and_changes_no_answer(
    engine: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async def finished_and_broken() -> Steps:
        yield Step([7], finished=True)
        raise BROKEN

    engine.script = finished_and_broken
    stream = Requests(engine).start(key="scripted").wait()
    engine.release()
    assert Requests(engine).ids() == [7, 8]
    assert len(stream.all) == 1
    assert "the library broke" in caplog.text


def test_a_check_that_raises_refuses_its_request_alone(engine: Scripted) -> None:
    engine.script = Mock(side_effect=BROKEN)
    with pytest.raises(RuntimeError, match="the library broke"):
        Requests(engine).start(key="scripted")
    assert not engine.running
    engine.release()
    assert Requests(engine).ids() == [7, 8]


async def exits() -> Steps:
    yield Step([7])
    raise SystemExit(3)


def test_a_loop_that_ends_ends_all_requests_and_says_so(
    engine: Scripted,
) -> None:
    died = threading.Event()
    engine.on_death = died.set
    requests = Requests(engine)
    other = requests.start()
    other.next()
    engine.script = exits
    for stream in (requests.start(key="scripted"), other):
        error = stream.last().error
        assert isinstance(error, EngineUnavailable)
        assert "the engine" in str(error)
    assert died.wait(TIMEOUT)
    assert not engine.running
    with pytest.raises(EngineUnavailable, match="the engine has stopped: its event loop has ended"):
        requests.start()


def test_a_library_that_has_died_ends_all_requests(engine: Scripted) -> None:
    died = threading.Event()
    engine.on_death = died.set
    setattr(engine, "ends_engine", Mock(return_value=True))  # noqa: B010
    requests = Requests(engine)
    other = requests.start()
    engine.script = midway
    for stream in (requests.start(key="scripted"), other):
        assert str(stream.last().error) == "the engine has stopped: the library broke"
    assert died.wait(TIMEOUT)


def test_a_loop_that_cannot_start_is_an_error_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(main: Any) -> None:
        main.close()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("cog_triton.engines.event_loop.uvloop.run", fail)
    with pytest.raises(OSError, match="Too many open files"):
        Scripted()


HOOKS = ("submit", "abort", "close")


@pytest.mark.parametrize("hook", HOOKS)
def test_serving_survives_a_hook_that_raises(engine: Scripted, hook: str) -> None:
    serving = Serving(engine)
    original = getattr(engine, hook)
    stream = Stream()

    def send(*outputs: Output) -> None:
        for output in outputs:
            stream(output)

    if hook == "submit":
        setattr(engine, hook, Mock(side_effect=BROKEN))
        with pytest.raises(RuntimeError, match="the library broke"):
            serving.start("broken", request(), send, streaming=True)
        setattr(engine, hook, original)
    serving.start("well", request(), send, streaming=True)
    assert stream.next().ids == [7]
    if hook == "abort":
        setattr(engine, hook, Mock(side_effect=BROKEN))
        serving.stop("well")
    else:
        engine.release()
    assert stream.last().error is None
    if hook == "close":
        setattr(engine, hook, Mock(side_effect=BROKEN))
        with pytest.raises(RuntimeError, match="the library broke"):
            serving.close()
        setattr(engine, hook, original)
    else:
        serving.close()
    assert not serving._thread.is_alive()
    engine.close()
    with pytest.raises(EngineError):
        Requests(engine).start()
