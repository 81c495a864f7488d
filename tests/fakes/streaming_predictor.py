"""A predictor that needs no Triton: for tests of what stands between Cog's server and its clients."""

import asyncio
import time
from collections.abc import Iterator

import cog
from cog import ConcatenateIterator


class Predictor(cog.BasePredictor):  # type: ignore[misc, unused-ignore]
    """Numbers its chunks, at a pace."""

    @cog.concurrent(max=4)  # type: ignore[untyped-decorator, unused-ignore]
    @cog.streaming  # type: ignore[untyped-decorator, unused-ignore]
    async def predict(
        self, chunks: int = 3, ms: float = 1.0, size: int = 10, wait_s: float = 0.0
    ) -> ConcatenateIterator[str]:
        """Waits, then streams."""
        await asyncio.sleep(wait_s)
        return stream(chunks, ms, size)  # type: ignore[return-value, unused-ignore]


def stream(chunks: int, ms: float, size: int) -> Iterator[str]:
    for i in range(chunks):
        time.sleep(ms / 1000)
        yield f"{i} " + "x" * size
