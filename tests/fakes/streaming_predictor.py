"""A predictor that needs no Triton: for tests of what stands between Cog's server and its clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import cog
from cog import ConcatenateIterator

from cog_triton.api.cog import live_stream


class Predictor(cog.BasePredictor):  # type: ignore[misc, unused-ignore]
    """Numbers its chunks, at a pace."""

    @cog.concurrent(max=4)  # type: ignore[untyped-decorator, unused-ignore]
    @cog.streaming  # type: ignore[untyped-decorator, unused-ignore]
    async def predict(
        self,
        chunks: int = 3,
        ms: float = 1.0,
        size: int = 10,
        wait_s: float = 0.0,
        until: str = "",
    ) -> ConcatenateIterator[str]:
        """Waits, streams, and ends when there is a file ``until``, if that is not empty."""
        await asyncio.sleep(wait_s)
        return stream(chunks, ms, size, until)  # type: ignore[return-value, unused-ignore]


def stream(chunks: int, ms: float, size: int, until: str) -> Iterator[str]:
    for text in texts(chunks, size):
        time.sleep(ms / 1000)
        yield text
    while not may_end(until):
        time.sleep(0.01)


def texts(chunks: int, size: int) -> Iterator[str]:
    for i in range(chunks):
        yield f"{i} " + "x" * size


def may_end(until: str) -> bool:
    return not until or Path(until).exists()


class Listening(Predictor):
    """Tells the front of each end, as the real one."""

    async def setup(self) -> None:
        live_stream.listen({})

    @cog.concurrent(max=4)  # type: ignore[untyped-decorator, unused-ignore]
    @cog.streaming  # type: ignore[untyped-decorator, unused-ignore]
    async def predict(
        self,
        chunks: int = 3,
        ms: float = 1.0,
        size: int = 10,
        wait_s: float = 0.0,
        until: str = "",
    ) -> ConcatenateIterator[str]:
        async def source() -> AsyncGenerator[str, None]:
            await asyncio.sleep(wait_s)
            for text in texts(chunks, size):
                await asyncio.sleep(ms / 1000)
                yield text
            while not may_end(until):
                await asyncio.sleep(0.01)

        return live_stream.live(source())  # type: ignore[return-value, unused-ignore]
