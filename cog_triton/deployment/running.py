"""One life of Triton as a deployment uses it: the server, its client, and whether they answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

from cog_triton.client.stream import TritonClient
from cog_triton.errors import ConfigurationError, UserError
from cog_triton.generation import generate
from cog_triton.request.request import Request
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer

logger = logging.getLogger("tritonserver")

WARM_UP = Request(prompt="Hello", seed=0, max_tokens=2, temperature=0.0)
CHECK_SECONDS = 0.5
PROBE_SECONDS = 4.0  # Cog waits five for a health check
PROBE_FACTOR = 10.0  # on what an answer took when the server had just started


class RunningServer:
    """A tritonserver that has started, from its first request to its end."""

    def __init__(
        self,
        server: TritonServer,
        client: TritonClient,
        tokenizer: Tokenizer,
        cleanup: contextlib.ExitStack,
        *,
        hang_timeout: float,
    ) -> None:
        """Takes over a server that is ready.

        Args:
            cleanup: stops the server, and removes what it had.
            hang_timeout: seconds of silence, while requests run, after which it is useless; 0 for never.
        """
        self.server = server
        self.client = client
        self._tokenizer = tokenizer
        self._cleanup = cleanup
        self._hang_timeout = hang_timeout
        self._probe: asyncio.Task[None] | None = None
        self._probe_began = 0.0
        self._patience = PROBE_SECONDS

    async def warm_up(self) -> None:
        """Runs a short request, whose time tells what may be expected of the next.

        Raises:
            ConfigurationError: the settings ask for something of every request that is refused.
            CogTritonError: it failed.
        """
        began = time.monotonic()
        try:
            await self._answer()
        except UserError as error:
            raise ConfigurationError(f"the first request was refused: {error.message}") from error
        self._patience = max(PROBE_SECONDS, PROBE_FACTOR * (time.monotonic() - began))

    async def ended(self) -> str:
        """Waits until the server has ended, or hangs; returns why."""
        end = _end_of(self.server)
        while not end.done():
            # Not wait_for, which before Python 3.12 goes on when it is cancelled at the very moment of the
            # end: a server that dies as it is stopped would be started again.
            await asyncio.wait([end], timeout=CHECK_SECONDS)
            silence = self.client.silence()
            if self._hang_timeout and silence > self._hang_timeout and not end.done():
                reason = f"Triton hangs: requests run, and none had a response for {silence:.0f} s"
                logger.error("%s", reason)
                self.server.kill()
                await asyncio.wait([end])
                return reason
        return self.server.end

    async def healthy(self) -> bool:
        """Whether the server is ready, and answers a request when no other is running."""
        if not await asyncio.to_thread(self.server.is_ready):
            return False
        if self._probe is None or self._probe.done():
            if self.client.busy:
                return True  # a hang shows in its silence
            self._probe = asyncio.create_task(self._answer())
            self._probe_began = time.monotonic()
        patience = self._patience - (time.monotonic() - self._probe_began)
        await asyncio.wait([self._probe], timeout=min(max(patience, 0), PROBE_SECONDS))
        if self._probe.done():
            return self._probe.exception() is None
        return time.monotonic() - self._probe_began < self._patience

    async def stop(self) -> None:
        """Stops the server and everything that belongs to it."""
        if self._probe is not None:
            self._probe.cancel()
        await self.client.aclose()
        await asyncio.to_thread(self._cleanup.close)

    async def _answer(self) -> None:
        async for _ in generate(WARM_UP, self.client, self._tokenizer):
            pass


def _end_of(server: TritonServer) -> asyncio.Future[None]:
    """What is done when the server has ended."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()

    def wait() -> None:
        server.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(end.set_result, None)

    # Not a thread of asyncio's, which Python waits for when it exits: the server ends after that.
    threading.Thread(target=wait, name="tritonserver-end", daemon=True).start()
    return end
