"""live() and install() by themselves; under the real Cog server they are in tests/integration."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from coglet import CancelationException

from cog_triton.errors import PromptRequired
from cog_triton.faces.cog import live_stream


@pytest.fixture
def run() -> Iterator[Callable[[Any], Future[Any]]]:
    """Runs a coroutine as coglet does: from another thread, by way of the asyncio module."""
    live_stream.install()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Source:
    """Yields numbers when it is let; notes how it ended."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.ended = threading.Event()

    async def texts(self, count: int = 1000) -> AsyncGenerator[str, None]:
        try:
            for i in range(count):
                await asyncio.to_thread(self.let.acquire)
                yield f"{i} "
        finally:
            self.ended.set()

    async def predict(self, count: int = 1000) -> Generator[str, None, None]:
        return live_stream.live(self.texts(count))


def test_pieces_come_as_they_are_made(run: Callable[[Any], Future[Any]]) -> None:
    source = Source()
    pieces = run(source.predict(2)).result()
    source.let.release()
    assert next(pieces) == "0 "
    source.let.release()
    assert list(pieces) == ["1 "]


def test_what_has_piled_up_is_one_piece(run: Callable[[Any], Future[Any]]) -> None:
    source = Source()
    pieces = run(source.predict(3)).result()
    source.let.release(3)
    assert source.ended.wait(5)
    assert list(pieces) == ["0 1 2 "]


def test_an_error_comes_after_the_text_before_it(run: Callable[[Any], Future[Any]]) -> None:
    async def failing() -> AsyncGenerator[str, None]:
        yield "text"
        raise ValueError("oops")

    async def predict() -> Generator[str, None, None]:
        return live_stream.live(failing())

    pieces = run(predict()).result()
    assert next(pieces) == "text"
    with pytest.raises(ValueError, match="oops"):
        next(pieces)


def test_closing_the_generator_ends_the_source(run: Callable[[Any], Future[Any]]) -> None:
    source = Source()
    pieces = run(source.predict()).result()
    source.let.release()
    next(pieces)
    pieces.close()
    source.let.release()  # a thread that waits cannot be cancelled
    assert source.ended.wait(5)


def test_closing_it_before_the_first_piece_ends_the_source(
    run: Callable[[Any], Future[Any]],
) -> None:
    source = Source()
    run(source.predict()).result().close()
    source.let.release()  # a thread that waits cannot be cancelled
    assert source.ended.wait(5)


def test_installing_twice_wraps_once() -> None:
    live_stream.install()
    wrapped = asyncio.run_coroutine_threadsafe
    live_stream.install()
    assert asyncio.run_coroutine_threadsafe is wrapped


# As coglet does, in the context of a prediction


IDENTIFIER: contextvars.ContextVar[str] = contextvars.ContextVar("_coglet_prediction_id")


async def in_prediction(identifier: str, coroutine: Any) -> Any:
    IDENTIFIER.set(identifier)
    return await coroutine


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    messages: list[tuple[str, ...]] = []
    monkeypatch.setattr(live_stream, "tell", lambda *words: messages.append(words))
    return messages


def test_a_cancel_by_id_ends_that_prediction_only(
    run: Callable[[Any], Future[Any]], told: list[tuple[str, ...]]
) -> None:
    source, other = Source(), Source()
    pieces = run(in_prediction("x", source.predict())).result()
    others = run(in_prediction("y", other.predict())).result()
    live_stream.cancel("x")
    with pytest.raises(CancelationException):
        next(pieces)
    source.let.release()
    assert told == [("ended", "x")]
    other.let.release()
    assert next(others) == "0 "
    others.close()
    other.let.release()
    assert told == [("ended", "x"), ("ended", "y")]


def test_a_cancel_that_comes_before_its_prediction(
    run: Callable[[Any], Future[Any]], told: list[tuple[str, ...]]
) -> None:
    live_stream.cancel("early")
    live_stream.cancel("late")
    live_stream._cancelled_early.discard("late")
    source = Source()
    with pytest.raises(CancelationException):
        next(run(in_prediction("early", source.predict())).result())
    source.let.release()
    for identifier in ("early", "late"):  # the cancel was for one prediction
        again = Source()
        pieces = run(in_prediction(identifier, again.predict(1))).result()
        again.let.release()
        assert list(pieces) == ["0 "]
    assert told == [("ended", "early"), ("ended", "early"), ("ended", "late")]


def test_a_prediction_that_is_refused_has_ended_and_names_its_error_once(
    run: Callable[[Any], Future[Any]], told: list[tuple[str, ...]]
) -> None:
    async def refuse() -> None:
        raise PromptRequired("none")

    with pytest.raises(Exception, match=r"^none$") as caught:
        run(in_prediction("x", refuse())).result()
    assert type(caught.value).__qualname__ == "E1001 PromptRequired"
    assert told == [("ended", "x")]


def test_an_error_that_does_not_name_itself_stays_as_it_is() -> None:
    error = ValueError("no: ValueError")
    assert live_stream.named_once(error) is error
