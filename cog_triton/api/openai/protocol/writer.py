"""What a writer is: it makes the response of one API of the chunks of its answers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.protocol.error_response import client_error
from cog_triton.generation import Chunk


class Writer(Protocol):
    """Makes the response of one API: the events of a stream, or the whole body."""

    def events(self, number: int, chunk: Chunk, /) -> Iterable[bytes]:
        """Return the events that a next chunk of one of the answers makes."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the last events of a stream that an error ends."""

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """Return the body that all chunks make, by answers."""


async def event_stream(
    writer: Writer,
    chunks: AsyncIterable[tuple[int, Chunk]],
    ended: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream: those of each chunk together, and at an error its last ones.

    An error before the first event is raised, so that the response can have its status.

    Args:
        chunks: the chunks of all answers as they come, each with the number of its answer.
        ended: awaited when the last events of an answer are made, before they are sent.
    """
    begun = False
    try:
        async for number, chunk in chunks:
            data = b"".join(writer.events(number, chunk))
            if not data:
                continue
            if ended is not None and chunk.finish_reason is not None:
                await ended()
            begun = True
            yield data
    except Exception as error:
        if not begun:
            raise
        yield b"".join(writer.failed(client_error(error)))


async def merged(
    sources: Sequence[AsyncGenerator[Chunk, None]],
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of all sources as they come, with their numbers; an error of one ends all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    # One place for each source: none is read ahead of the client.
    arrived: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(len(sources))

    async def read(number: int, source: AsyncGenerator[Chunk, None]) -> None:
        end: Exception | None = None
        try:
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    await arrived.put((number, chunk))
        except Exception as error:
            end = error
        await arrived.put((number, end))

    tasks = [asyncio.create_task(read(number, source)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            number, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return one chunk with all that came."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        ids=tuple(id for chunk in chunks for id in chunk.ids),
        log_probs=tuple(token for chunk in chunks for token in chunk.log_probs),
        prompt_log_probs=chunks[0].prompt_log_probs,
    )
