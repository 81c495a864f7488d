"""The connections of a client, made when they are needed.

One is enough, unless what is between here and Triton limits the calls of a connection at one time, or asks
to leave one (GOAWAY): what a connection does not take goes on another.

At most one connection is being made at a time. Requests that need it wait for it together and fail
together; all others use the connections that there are. Nothing waits for a lock.
"""

import asyncio
from functools import partial

from cog_triton import errors
from cog_triton.client.connection import Connection

CLOSED = "the connection was closed before the last response"
CONNECT_SECONDS = 10.0


class Connections:
    """Connections to one address, to be used from one event loop."""

    def __init__(self, address: str) -> None:
        """Connect to nothing yet; the address is host:port."""
        self.address = address
        self.all: list[Connection] = []
        self._attempt: asyncio.Task[Connection] | None = None
        self._closed = False

    async def with_room(self) -> Connection:
        """Return a connection that takes a call in this turn of the event loop.

        Raises:
            TritonUnavailable: blameless; there is no connection, or ``close`` was called.
        """
        while True:
            if self._closed:
                raise errors.blameless(errors.TritonUnavailable(CLOSED))
            self.all = [each for each in self.all if not each.closed]
            for connection in self.all:
                if connection.has_room:
                    return connection
            new = await self._new_connection()
            if not new.takes_calls:
                # Otherwise the next turn would connect again, and so on.
                raise unreachable("a new connection was closed at once")

    def close(self, reason: str) -> None:
        """End all connections, their calls, and the wait for another one."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        for connection in self.all:
            connection.close(reason)

    async def _new_connection(self) -> Connection:
        """Wait for the connection that is being made; make one if there is none."""
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._connect())
            self._attempt.add_done_callback(self._note_end)
        attempt = self._attempt
        # Whoever is cancelled here leaves the attempt to the others.
        await asyncio.wait([attempt])
        if attempt.cancelled():
            raise errors.blameless(errors.TritonUnavailable(CLOSED))
        error = attempt.exception()
        if error is not None:
            raise unreachable(str(error))
        return attempt.result()

    async def _connect(self) -> Connection:
        """Make a connection, or raise OSError."""
        host, _, port = self.address.rpartition(":")
        connecting = asyncio.get_running_loop().create_connection(
            partial(Connection, self.address), host.strip("[]"), int(port)
        )
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except asyncio.TimeoutError:
            raise OSError(f"no connection in {CONNECT_SECONDS:g} s") from None
        if self._closed:
            # Before Python 3.12, wait_for ignores a cancellation that comes together with its result.
            connection.close(CLOSED)
            raise asyncio.CancelledError
        self.all.append(connection)
        return connection

    def _note_end(self, attempt: "asyncio.Task[Connection]") -> None:
        self._attempt = None
        if not attempt.cancelled():
            # Read also where nobody waits any more.
            attempt.exception()


def unreachable(problem: str) -> errors.TritonUnavailable:
    return errors.blameless(errors.TritonUnavailable(f"Triton cannot be reached: {problem}"))
