"""Chunks of several answers to one stream of events, and the end of that."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import pytest

from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.protocol.writer import event_stream, merged
from cog_triton.errors import TritonUnavailable
from cog_triton.generation import Chunk

FAILURE = TritonUnavailable("it died")


class Source:
    """The chunks of an answer, each of which waits until it is asked for."""

    def __init__(self, *items: Chunk | Exception) -> None:
        self.items = items
        self.read = 0
        self.closed = False

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                self.read += 1
                yield item
        finally:
            self.closed = True


class Writer:
    def events(self, number: int, chunk: Chunk, /) -> Iterable[bytes]:
        return [f"{number}:{chunk.text}".encode()]

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [f"failed {error.status}".encode()]

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        return {"answers": len(answers)}


def chunks(count: int) -> list[Chunk]:
    return [Chunk(str(number), number, 3) for number in range(count)]


@pytest.mark.parametrize("answers", [1, 3])
def test_all_chunks_come_in_the_order_of_their_answers(answers: int) -> None:
    async def read() -> list[tuple[int, Chunk]]:
        sources = [Source(*chunks(5)) for _ in range(answers)]
        return [item async for item in merged([source.chunks() for source in sources])]

    came = asyncio.run(read())
    for number in range(answers):
        assert [chunk for answer, chunk in came if answer == number] == chunks(5)


@pytest.mark.parametrize("answers", [1, 3])
def test_an_error_ends_the_stream_and_all_answers(answers: int) -> None:
    sources = [Source(*chunks(1), FAILURE)] + [Source(*chunks(99)) for _ in range(answers - 1)]

    async def read() -> list[bytes]:
        came = merged([source.chunks() for source in sources])
        return [data async for data in event_stream(Writer(), came)]

    *events, last = asyncio.run(read())
    assert b"0:0" in events
    assert last == b"failed 503"
    assert all(source.closed for source in sources)


def test_an_error_before_the_first_event_is_raised() -> None:
    async def read() -> None:
        async for _ in event_stream(Writer(), merged([Source(FAILURE).chunks()])):
            raise AssertionError

    with pytest.raises(TritonUnavailable):
        asyncio.run(read())


@pytest.mark.parametrize("answers", [1, 3])
def test_no_answer_runs_ahead_of_its_client(answers: int) -> None:
    """A client that reads slowly holds up the engine's tokens, and not this server's memory."""
    sources = [Source(*chunks(99)) for _ in range(answers)]

    async def read_one() -> None:
        came = merged([source.chunks() for source in sources])
        await anext(came)
        for _ in range(200):
            await asyncio.sleep(0)
        assert sum(source.read for source in sources) <= 2 * answers + 1
        await came.aclose()

    asyncio.run(read_one())
    assert all(source.closed for source in sources)
