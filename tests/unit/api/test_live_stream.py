"""live() by itself; under the real Cog server it is in tests/integration."""

import asyncio
import contextlib
import contextvars
import json
import socket
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest
from coglet import CancelationException

from cog_triton.api.cog import live_stream
from cog_triton.api.cog.messages import VARIABLE, send_message
from cog_triton.api.cog.passage import Inputs
from cog_triton.errors import PromptRequired
from tests.support import limit

pytestmark = pytest.mark.anyio
IDENTIFIER: contextvars.ContextVar[str] = contextvars.ContextVar("_coglet_prediction_id")


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The front's end of the messages, which has so long for each."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.settimeout(60)
    monkeypatch.setattr(live_stream, "_front", own)
    with own, other:
        yield other


def told(front: socket.socket) -> Iterator[list[str]]:
    """The messages that have come, but those of texts."""
    front.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while message := json.loads(front.recv(1000)):
            if message[0] != "texts":
                yield message


class Source:
    """Yields numbers when it is let; notes that it ended."""

    def __init__(self) -> None:
        self.let = asyncio.Semaphore(0)
        self.ended = asyncio.Event()

    async def texts(self, count: int = 1000) -> AsyncGenerator[str, None]:
        try:
            for i in range(count):
                await self.let.acquire()
                yield f"{i} "
        finally:
            self.ended.set()


def started(source: AsyncGenerator[str, None], prediction: str = "") -> Generator[str, None, None]:
    context = contextvars.copy_context()
    context.run(IDENTIFIER.set, prediction)
    return context.run(live_stream.live, source)


async def rest(pieces: Generator[str, None, None]) -> list[Any]:
    """The pieces that are left, and the error if there is one; coglet waits for them on a thread."""

    def wait() -> list[Any]:
        found: list[Any] = []
        try:
            found.extend(pieces)
        except (Exception, CancelationException) as error:
            found.append(error)
        return found

    return await asyncio.to_thread(wait)


async def test_pieces_come_as_they_are_made_and_those_that_pile_up_are_one() -> None:
    source = Source()
    pieces = started(source.texts(4))
    source.let.release()
    assert await asyncio.to_thread(next, pieces) == "0 "
    for _ in range(3):
        source.let.release()
    await source.ended.wait()
    assert await rest(pieces) == ["1 2 3 "]


async def test_the_front_gets_each_text_at_once_and_cog_those_of_a_while_as_one(
    front: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_stream, "_COGS_SECONDS", 3600)
    source = Source()
    pieces = started(source.texts(4), "x")
    for i in range(4):
        source.let.release()
        message = await asyncio.to_thread(front.recv, 1000)
        assert json.loads(message) == ["texts", ["x", 2 * i, f"{i} "]]
    live_stream._texts.extend([("y", 0, "a" * 900)] * 100)  # more than one message may have
    live_stream._tell_texts()
    assert [len(json.loads(front.recv(1 << 17))) for _ in range(2)] == [65, 37]
    assert await rest(pieces) == ["0 1 2 3 "]


@pytest.mark.usefixtures("front")
async def test_cog_gets_texts_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "_COGS_SECONDS", 0.01)
    source = Source()
    pieces = started(source.texts(2), "x")
    for text in ("0 ", "1 "):
        source.let.release()
        assert await asyncio.to_thread(next, pieces) == text
    assert await rest(pieces) == []


async def test_texts_that_cannot_be_sent_hold_no_later_ones_back(front: socket.socket) -> None:
    live_stream._texts.append(("x", 0, "\ud800"))  # JSON for Cog cannot have it either
    with pytest.raises(TypeError):
        live_stream._tell_texts()
    source = Source()
    pieces = started(source.texts(1), "y")
    source.let.release()
    message = await asyncio.to_thread(front.recv, 1000)
    assert json.loads(message) == ["texts", ["y", 0, "0 "]]
    assert await rest(pieces) == ["0 "]


async def test_the_end_is_told_also_where_texts_are_dropped(front: socket.socket) -> None:
    for _ in range(10_000):
        live_stream.tell("texts", ["x", 0, "a" * 100], wait=False)
    ending = asyncio.create_task(rest(started(Source().texts(0), "x")))
    assert not (await asyncio.wait([ending], timeout=0.1))[0], "it waits for room"
    while json.loads(await asyncio.to_thread(front.recv, 1000)) != ["ended", "x"]:
        pass
    assert await ending == []


async def test_an_error_comes_after_the_text_before_it() -> None:
    async def failing() -> AsyncGenerator[str, None]:
        yield "text"
        raise ValueError("oops")

    text, error = await rest(started(failing()))
    assert (text, repr(error)) == ("text", "ValueError('oops')")


@pytest.mark.parametrize("pieces_read", [0, 1])
async def test_closing_the_generator_ends_the_source(pieces_read: int) -> None:
    source = Source()
    pieces = started(source.texts())
    for _ in range(pieces_read):
        source.let.release()
        await asyncio.to_thread(next, pieces)
    pieces.close()
    await source.ended.wait()


async def test_a_cancel_that_comes_before_its_prediction_is_for_that_one(
    front: socket.socket,
) -> None:
    live_stream.cancel("early")
    (error,) = await rest(started(Source().texts(), "early"))
    assert isinstance(error, CancelationException)
    again = Source()
    pieces = started(again.texts(1), "early")
    for _ in range(3):  # in which another cancel would come
        await asyncio.sleep(0)
    again.let.release()
    assert await rest(pieces) == ["0 "]
    assert [*told(front)] == [["ended", "early"]] * 2


async def test_a_refused_prediction_has_ended_and_names_its_error_once(
    front: socket.socket,
) -> None:
    async def refuse() -> AsyncGenerator[str, None]:
        raise PromptRequired("none")
        yield

    (error,) = await rest(started(refuse(), "x"))
    assert (type(error).__qualname__, str(error)) == ("E1001 PromptRequired", "none")
    assert [*told(front)] == [["ended", "x"]]
    (error,) = await rest(started(refuse()))  # without Cog, its own
    assert isinstance(error, PromptRequired)


async def test_it_says_that_it_listens_and_handles_the_messages_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(live_stream, "_front", None)
    monkeypatch.setenv(VARIABLE, str(worker.detach()))
    drained = asyncio.Event()
    with front:
        live_stream.listen({"drain": drained.set}, Inputs(names=("prompt",)))
        own = live_stream._front
        assert own is not None
        with own:
            said, inputs = json.loads(front.recv(1000))
            assert (said, inputs["names"]) == ("hello", ["prompt"])
            for words in (["of another release", 1], ["cancel", "x"], ["drain"]):
                send_message(front, *words)
            await asyncio.wait_for(drained.wait(), limit(30))
            asyncio.get_running_loop().remove_reader(own)
            (error,) = await rest(started(Source().texts(), "x"))
    assert isinstance(error, CancelationException)
