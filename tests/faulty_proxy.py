"""A TCP proxy that does to connections what networks do, and worse; by seeds, so that it can be repeated.

It splits what passes, delays it, cuts connections in the middle, and loses ranges of bytes of the answers.
TCP itself never loses a range; a broken middlebox or a starved server does.
"""

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

PIECE = 65_536
HEAD = 512  # bytes
LONGEST_DELAY = 0.02  # seconds
CERTAIN_CUT = 50  # that piece of all, if any are cut: on a busy machine there may be few


@dataclass(frozen=True)
class Faults:
    """What happens to the pieces that pass, each with a probability of its own, 0 to 1."""

    # Written in several parts, at random places; not the head of a request, since Triton 2.51 garbles a URL
    # that comes in two parts.
    split: float = 0.0
    delay: float = 0.0
    cut: float = 0.0  # the connection ends before the piece, by a reset or in good order
    # All of an answer's piece, or a range of it. A server cannot know that it was asked something else.
    drop: float = 0.0


class FaultyProxy:
    """Stands between clients and the server at ``target``, host:port; ``counts`` says what it did."""

    def __init__(self, target: str, faults: Faults) -> None:
        self.address = ""
        self.counts: Counter[str] = Counter()
        self._target = target.rsplit(":", 1)
        self._faults = faults
        self._connections: set[Any] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FaultyProxy"]:
        """Passes connections on; at the end it drops those that are left."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await cancel(self._connections)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._connections.add(asyncio.ensure_future(self._connection(reader, writer)))

    async def _connection(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Both ways of a connection, until one of them ends."""
        random = Random(f"1 {self.counts['connections']}")
        self.counts["connections"] += 1
        answers, requests = await asyncio.open_connection(*self._target)
        ways = {
            asyncio.ensure_future(self._pass(reader, requests, random, answer=False)),
            asyncio.ensure_future(self._pass(answers, writer, random, answer=True)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(ways)
            writer.close()
            requests.close()

    async def _pass(
        self, reader: StreamReader, writer: StreamWriter, random: Random, *, answer: bool
    ) -> None:
        def happens(fault: str, certain: bool = False) -> bool:
            hit: bool = certain or random.random() < getattr(self._faults, fault)
            self.counts[fault] += hit
            return hit

        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE):
                self.counts["pieces"] += 1
                certain = self._faults.cut > 0 and self.counts["pieces"] == CERTAIN_CUT
                if happens("cut", certain):
                    if random.random() < 0.5:
                        writer.transport.abort()
                    return
                if answer and happens("drop"):
                    start, end = sorted(random.choices(range(len(piece) + 1), k=2))
                    piece = random.choice([b"", piece[:start] + piece[end:]])
                if happens("delay"):
                    await asyncio.sleep(random.random() * LONGEST_DELAY)
                places = random.choices(range(len(piece) + 1), k=3) if happens("split") else []
                cuts = sorted(place for place in places if place > (0 if answer else HEAD))
                for start, end in pairwise([0, *cuts, len(piece)]):
                    writer.write(piece[start:end])
                    await writer.drain()
                    await asyncio.sleep(0)


async def cancel(tasks: set[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
