"""A TCP proxy that does to connections what networks do, and worse; by a seed, so that it can be repeated.

It splits what passes, delays it, cuts connections in the middle, and loses ranges of bytes of the answers.
TCP itself never loses a range; a broken middlebox or a starved server does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

PIECE = 65_536
HEAD = 512  # bytes


@dataclass(frozen=True)
class Faults:
    """What happens to the pieces that pass, each with a probability of its own, 0 to 1.

    Attributes:
        split: a piece is written in several parts, at random places; not the head of a request, since
            Triton 2.51 garbles a URL that comes in two parts.
        delay: a piece waits, up to ``longest_delay`` seconds.
        cut: the connection ends before this piece, by a reset or in good order.
        drop: bytes of an answer are lost: a whole piece, or a range of it. A request is left whole: a
            server cannot know that it was asked something else.
    """

    split: float = 0.0
    delay: float = 0.0
    longest_delay: float = 0.02
    cut: float = 0.0
    drop: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What happens to one piece.

    Attributes:
        parts: what is written of it, one after another.
        delay: seconds before that.
        cut: how the connection ends instead, if it does: ``reset`` or ``close``.
        dropped: bytes that are lost.
    """

    parts: tuple[bytes, ...]
    delay: float = 0.0
    cut: str | None = None
    dropped: int = 0


def plan(piece: bytes, faults: Faults, random: Random, *, answer: bool) -> Plan:
    """What happens to a piece of an answer, or of a request."""
    if random.random() < faults.cut:
        return Plan((), cut=random.choice(("reset", "close")))
    kept = piece
    if random.random() < faults.drop and answer:
        start, end = sorted(random.choices(range(len(piece) + 1), k=2))
        kept = b"" if random.random() < 0.5 else piece[:start] + piece[end:]
    parts: tuple[bytes, ...] = (kept,)
    if random.random() < faults.split and len(kept) > 1:
        places = sorted({0, len(kept), *random.choices(range(1, len(kept)), k=3)})
        if not answer:
            places = [0, *(place for place in places if place > min(HEAD, len(kept) - 1))]
        parts = tuple(kept[a:b] for a, b in pairwise(places))
    delay = random.random() * faults.longest_delay if random.random() < faults.delay else 0.0
    return Plan(parts, delay, dropped=len(piece) - len(kept))


class FaultyProxy:
    """Stands between clients and a server.

    Attributes:
        address: host:port at which it listens.
        counts: how often it did what.
    """

    def __init__(self, target: str, faults: Faults, seed: int) -> None:
        """Listens at nothing yet; see ``running``.

        Args:
            target: host:port of the server.
        """
        self.address = ""
        self.counts: Counter[str] = Counter()
        self._host, _, self._port = target.rpartition(":")
        self._faults = faults
        self._seed = seed
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultyProxy]:
        """Passes connections on; at the end it drops those that are left."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways of a connection, until one of them ends."""
        random = Random(f"{self._seed} {self.counts['connections']}")
        self.counts["connections"] += 1
        try:
            answers, requests = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(self._pass(reader, requests, random, answer=False)),
            asyncio.ensure_future(self._pass(answers, writer, random, answer=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            requests.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        random: Random,
        *,
        answer: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE):
                steps = plan(piece, self._faults, random, answer=answer)
                self._count(steps)
                if steps.cut == "reset":
                    writer.transport.abort()
                if steps.cut:
                    return
                await asyncio.sleep(steps.delay)
                for part in steps.parts:
                    writer.write(part)
                    await writer.drain()
                    if len(steps.parts) > 1:
                        await asyncio.sleep(0)

    def _count(self, steps: Plan) -> None:
        self.counts["pieces"] += 1
        self.counts["split"] += len(steps.parts) > 1
        self.counts["delayed"] += steps.delay > 0
        self.counts["dropped"] += steps.dropped > 0
        self.counts["cut"] += steps.cut is not None
