"""A tritonserver that runs: its start, its client, its health, its end; and the supervisor of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cog_triton.client.stream import TritonClient
from cog_triton.deployment.preparation import Values
from cog_triton.errors import (
    CogTritonError,
    ConfigurationError,
    TritonPortTaken,
    TritonStartError,
    TritonUnavailable,
    UserError,
    file_problem,
)
from cog_triton.generation import generate
from cog_triton.repository.fill import check_streaming, fill_repository
from cog_triton.request.request import Request
from cog_triton.server.guard import process_name
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer

logger = logging.getLogger("tritonserver")
progress = logging.getLogger("cog_triton.deployment")

WARM_UP = Request(prompt="Hello", seed=0, max_tokens=2, temperature=0.0)
NOTICE_SECONDS = 2.0  # in which the end of a server is noticed
CHECK_SECONDS = 0.5
PROBE_SECONDS = 4.0  # Cog waits five for a health check
PROBE_FACTOR = 10.0  # on the time of the warm-up
PORT_CHOICES = 3
FIRST_PAUSE = 0.5  # after a start that failed; each further one doubles it
LONGEST_PAUSE = 30.0
FULL_DISK_PAUSE = 5.0
RESTART_SECONDS = 60.0
RESTART_FACTOR = 10.0  # on the longest start so far


@dataclass(eq=False)
class RunningServer:
    """A tritonserver that has started, until its end."""

    server: TritonServer
    client: TritonClient
    tokenizer: Tokenizer
    cleanup: contextlib.ExitStack  # stops the server, and removes its files
    # Seconds without a response, while requests run, after which it hangs; 0 for never.
    hang_timeout: float

    def __post_init__(self) -> None:
        self._probe: asyncio.Task[None] | None = None
        self._probe_began = 0.0
        self._patience = PROBE_SECONDS

    async def warm_up(self) -> None:
        """Run a short request, and take its time as a measure for later probes.

        Raises:
            ConfigurationError: the settings make the server refuse every request.
            CogTritonError: it failed.
        """
        began = time.monotonic()
        try:
            await self._generate()
        except UserError as error:
            raise ConfigurationError(f"the first request was refused: {error.message}") from error
        self._patience = max(PROBE_SECONDS, PROBE_FACTOR * (time.monotonic() - began))

    async def ended(self) -> str:
        """Wait until the server has ended, or hangs and is killed; return why."""
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()

        def wait() -> None:
            self.server.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end.set_result, None)

        # Not a thread of asyncio's, which Python waits for when it exits: the server ends after that.
        threading.Thread(target=wait, name="tritonserver-end", daemon=True).start()
        while not end.done():
            # Not wait_for, which before Python 3.12 continues when it is cancelled at the very moment of
            # the end: a server that dies as it is stopped would be started again.
            await asyncio.wait([end], timeout=CHECK_SECONDS)
            silence = self.client.silence()
            if self.hang_timeout and silence > self.hang_timeout and not end.done():
                reason = f"Triton hangs: requests run, and none had a response for {silence:.0f} s"
                logger.error("%s", reason)
                self.server.kill()
                await asyncio.wait([end])
                return reason
        return self.server.end

    async def healthy(self) -> bool:
        """Return whether the server is ready, and answers a request while no other is running."""
        if not await asyncio.to_thread(self.server.is_ready):
            return False
        if self._probe is None or self._probe.done():
            if self.client.busy:
                return True  # ``ended`` notices a hang
            self._probe = asyncio.create_task(self._generate())
            self._probe_began = time.monotonic()
        patience = self._patience - (time.monotonic() - self._probe_began)
        await asyncio.wait([self._probe], timeout=min(max(patience, 0), PROBE_SECONDS))
        if self._probe.done():
            return self._probe.exception() is None
        return time.monotonic() - self._probe_began < self._patience

    async def stop(self) -> None:
        """Stop the server and remove everything that belongs to it."""
        if self._probe is not None:
            self._probe.cancel()
        await self.client.aclose()
        await asyncio.to_thread(self.cleanup.close)

    async def _generate(self) -> None:
        async for _ in generate(WARM_UP, self.client, self.tokenizer):
            pass


@dataclass(eq=False)
class Supervisor:
    """Keeps a server running from ``start`` to ``stop``, in one event loop.

    It gives up when the server has ended more than ``max_restarts`` times within ``window`` seconds.
    A failed start counts as an end, except for a full disk.
    """

    start_server: Callable[[], Awaitable[RunningServer]]
    max_restarts: int
    window: float
    resume_timeout: float = 60.0  # seconds that ``client`` waits for a server
    on_failure: Callable[[str], object] = lambda _: None  # called with the reason when it gives up
    running: RunningServer | None = field(default=None, init=False)  # None between two
    restarts: int = field(default=0, init=False)
    failure: str | None = field(default=None, init=False)  # why it has given up

    async def start(self) -> None:
        """Start the first server. An error of that is the caller's: there is no second attempt."""
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running = await self.start_server()
        self._supervision = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Stop the server, and start no other."""
        self._supervision.cancel()
        await asyncio.wait([self._supervision])
        server, self.running = self.running, None
        if server is not None:
            await server.stop()

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """Return the server's client, or the next one after ``failed``; see ``client.resume.Clients``."""
        server = self.running
        if server is None or server.client is failed:
            server = await self.after(server, self.resume_timeout)
        return server.client

    async def after(self, failed: RunningServer | None, timeout: float) -> RunningServer:
        """Return the server on which to retry what failed on ``failed``.

        That is the next one, or the same if it turns out to be well.

        Raises:
            TritonUnavailable: there is none within ``timeout`` seconds, or ever.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        if failed is not None and self.running is failed:
            await self._wait_for_change(min(NOTICE_SECONDS, timeout))
            if self.running is failed:
                return failed
        while self.running is None:
            if self.failure is not None:
                raise TritonUnavailable(f"Triton has been given up: {self.failure}")
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise TritonUnavailable(f"Triton was not back after {timeout:g} s")
            await self._wait_for_change(left)
        return self.running

    async def _wait_for_change(self, seconds: float) -> None:
        # Not wait_for, which before Python 3.12 continues when it is cancelled at the very moment of the
        # change: a request whose client is gone would run on the next server.
        await asyncio.wait([self._changed], timeout=seconds)

    async def _supervise(self) -> None:
        ends: deque[float] = deque()
        while self.running is not None:
            server = self.running
            reason = await server.ended()
            self._set(None)
            await server.stop()
            self._set(await self._restart(ends, reason))

    async def _restart(self, ends: deque[float], reason: str) -> RunningServer | None:
        """Start the next server; None if it gives up.

        Args:
            ends: times of earlier ends within the window.
        """
        pause = 0.0
        while True:
            now = time.monotonic()
            ends.append(now)
            while ends[0] < now - self.window:
                ends.popleft()
            if len(ends) > self.max_restarts:
                break
            logger.warning("starting Triton again%s", f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
            try:
                server = await self.start_server()
            except CogTritonError as error:
                reason = str(error)
                logger.error("%s", reason)
                cause, longest = error.__cause__, LONGEST_PAUSE
                if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                    ends.pop()  # not the server's fault, and over when there is space
                    longest = FULL_DISK_PAUSE
                pause = min(2 * pause or FIRST_PAUSE, longest)
            else:
                self.restarts += 1
                logger.warning("Triton is back (restart %d)", self.restarts)
                return server
        self.failure = reason.splitlines()[0]
        logger.error(
            "Triton is not started again: it ended %d times within %g s",
            self.max_restarts + 1,
            self.window,
        )
        self.on_failure(self.failure)
        return None

    def _set(self, server: RunningServer | None) -> None:
        self.running = server
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


def server_starter(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> Callable[[], Awaitable[RunningServer]]:
    """Return the function that starts each server in turn; arguments as for ``start_server``.

    A restart gets less time than the first start: a stub may hang as it starts (seen once in 200).
    """
    longest = 0.0

    async def start() -> RunningServer:
        nonlocal longest
        began = time.monotonic()
        timeout = start_timeout(settings.start_timeout, longest)
        timed_settings = settings.model_copy(update={"start_timeout": timeout})
        for choice in range(1, PORT_CHOICES + 1):
            try:
                server = await start_server(timed_settings, values, loading)
                break
            except TritonPortTaken:  # of a fixed port, the error names the setting
                if choice == PORT_CHOICES:
                    raise
        longest = max(longest, time.monotonic() - began)
        return server

    return start


def start_timeout(setting: float, longest: float) -> float:
    """Return the seconds that a server may take to become ready, after the longest start so far."""
    return min(setting, max(RESTART_SECONDS, RESTART_FACTOR * longest)) if longest else setting


async def start_server(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> RunningServer:
    """Fill a repository, start tritonserver on it, and return after its first request.

    Args:
        values: of the template variables of each model.
        loading: the tokenizer, which may still be loading.

    Raises:
        CogTritonError: it did not start; nothing is left of it.
    """
    temporary = settings.runtime_directory is None
    with contextlib.ExitStack() as cleanup:
        try:
            prefix = f"cog-triton-{process_name(os.getpid())}-" if temporary else "run-"
            if settings.runtime_directory is not None:
                settings.runtime_directory.mkdir(parents=True, exist_ok=True)
            runtime = Path(tempfile.mkdtemp(prefix=prefix, dir=settings.runtime_directory))
            cleanup.callback(shutil.rmtree, runtime, ignore_errors=True)
            fill_repository(settings.model_repository, runtime / "repository", values)
        except OSError as error:
            raise ConfigurationError(file_problem(error)) from error
        if not temporary:
            cleanup.pop_all()
        check_streaming(runtime / "repository")
        server = TritonServer(runtime / "repository", runtime, settings, temporary=temporary)
        cleanup.callback(server.stop)
        _, tokenizer = await asyncio.gather(asyncio.to_thread(server.start), loading)
        client = create_client(settings, server)
        running = RunningServer(server, client, tokenizer, cleanup.pop_all(), settings.hang_timeout)
    try:
        with timed("warmed up"):
            await running.warm_up()
    except BaseException as error:
        gone = isinstance(error, TritonUnavailable)
        ended = gone and await asyncio.to_thread(server.ends_within, NOTICE_SECONDS)
        await running.stop()
        if ended:  # which is the cause; the request only noticed
            raise TritonStartError(server.end) from error
        raise
    return running


def create_client(settings: Settings, server: TritonServer) -> TritonClient:
    """Return a client of the transport that the settings name."""
    if settings.transport == "http":
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(server.endpoints.http, response_timeout=settings.response_timeout)
    from cog_triton.client.grpc_transport import GrpcClient

    return GrpcClient(server.endpoints.grpc, response_timeout=settings.response_timeout)


@contextlib.contextmanager
def timed(done: str) -> Iterator[None]:
    """Log what has been done, and how long it took; nothing if it failed."""
    started = time.monotonic()
    yield
    progress.info("%s in %.1f s", done, time.monotonic() - started)
