"""A tritonserver that runs: its start, its health, its end; and the supervisor that starts the next."""

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cog_triton import errors
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.stream import TritonClient
from cog_triton.deployment.preparation import Values
from cog_triton.errors import ConfigurationError, TritonUnavailable
from cog_triton.generation import generate
from cog_triton.repository.fill import check_streaming, fill_repository
from cog_triton.request.request import Request
from cog_triton.server.guard import GIVEN_UP, process_name
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer

logger = logging.getLogger("tritonserver")
progress = logging.getLogger("cog_triton.deployment")

WARM_UP = Request(prompt="Hello", seed=0, max_tokens=2, temperature=0.0)
NOTICE_SECONDS = 2.0  # in which the end of a server is noticed
CHECK_SECONDS = 0.1
PROBE_SECONDS = 4.0  # Cog waits five for a health check
PORT_CHOICES = 3
STARVED = re.compile(f"interprocess::lock_exception|{GIVEN_UP}")  # of a start on a busy machine
FIRST_PAUSE = 0.5  # after a start that failed; each further one doubles it
LONGEST_PAUSE = 30.0
FULL_DISK_PAUSE = 5.0
LOG_SECONDS = 2.0  # Cog's server loses what a worker logs right before its end
EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: its tritonserver has been given up


@dataclass(eq=False)
class RunningServer:
    """A tritonserver that has started, until its end."""

    server: TritonServer
    client: TritonClient
    tokenizer: Tokenizer
    hang_timeout: float  # see TRITON_HANG_TIMEOUT
    probe: asyncio.Task[None] | None = None
    _probe_end: float = 0.0
    _patience: float = PROBE_SECONDS

    async def warm_up(self) -> None:
        """Run a short request, whose time is a measure for later probes."""
        began = time.monotonic()
        try:
            await self._generate()
        except errors.UserError as error:
            raise ConfigurationError(f"the first request was refused: {error.message}") from error
        self._patience = max(PROBE_SECONDS, 10 * (time.monotonic() - began))

    async def ended(self) -> str:
        """Wait until the server has ended, or hangs and is killed; return why."""
        hang = ""
        while self.server.alive:
            silence = self.client.silence()
            if not hang and self.hang_timeout and silence > self.hang_timeout:
                hang = (
                    f"Triton hangs: requests run, but none has had a response for {silence:.0f} s"
                )
                logger.error("%s", hang)
                self.server.kill()
            await asyncio.sleep(CHECK_SECONDS)
        await asyncio.to_thread(self.server.wait)  # for the rest of its log
        return hang or self.server.end

    async def healthy(self) -> bool:
        """Return whether the server is ready, and answers a request while no other is running."""
        if not await asyncio.to_thread(self.server.is_ready):
            return False
        if self.probe is None or self.probe.done():
            if self.client.busy:
                return True  # ``ended`` notices a hang
            self.probe = asyncio.create_task(self._generate())
            self._probe_end = time.monotonic() + self._patience
        left = max(self._probe_end - time.monotonic(), 0)
        await asyncio.wait([self.probe], timeout=min(left, PROBE_SECONDS))
        if self.probe.done():
            return self.probe.exception() is None
        return time.monotonic() < self._probe_end

    async def _generate(self) -> None:
        async for _ in generate(WARM_UP, self.client, self.tokenizer):
            pass


@dataclass(eq=False)
class Supervisor:
    """Keeps a server running from ``start`` to ``stop``. A failed start is an end, but for a full disk."""

    settings: Settings
    run_server: Callable[[Settings], contextlib.AbstractAsyncContextManager[RunningServer]]
    running: RunningServer | None = field(default=None, init=False)  # None between two
    restarts: int = field(default=0, init=False)
    failure: str | None = field(default=None, init=False)  # why it has given up
    longest_start: float = field(default=0.0, init=False)  # seconds

    async def start(self) -> None:
        """Start the first server, or raise its error."""
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervision = asyncio.create_task(self._supervise())
        await asyncio.wait([self._changed, self._supervision], return_when=asyncio.FIRST_COMPLETED)
        if self._supervision.done():
            self._supervision.result()

    async def stop(self) -> None:
        """Stop the server, and start no other."""
        self._supervision.cancel()
        await asyncio.wait([self._supervision])

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """Return the server's client, or the next one after ``failed``; see ``client.resume.Clients``."""
        server = self.running
        if server is None or server.client is failed:
            server = await self.after(server, self.settings.resume_timeout)
        return server.client

    async def after(self, failed: RunningServer | None, timeout: float) -> RunningServer:
        """Return the next server, or ``failed`` if it turns out to be well, within ``timeout`` seconds."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while (server := self.running) is None or server is failed:
            if server is None and self.failure is not None:
                raise TritonUnavailable(
                    f"Triton failed too often and is not being restarted: {self.failure}"
                )
            most = timeout if server is None else min(NOTICE_SECONDS, timeout)
            if (left := began + most - clock()) <= 0:
                if server is not None:
                    return server
                raise TritonUnavailable(f"Triton was not back after {timeout:g} s")
            # Not wait_for, which before Python 3.12 continues when it is cancelled at the very moment of
            # the change: a request whose client is gone would run on the next server.
            await asyncio.wait([self._changed], timeout=left)
        return server

    async def _supervise(self) -> None:
        settings, ends, pause, choices = self.settings, list[float](), 0.0, 1
        while True:
            began, most = time.monotonic(), max(60.0, 10 * self.longest_start or math.inf)
            given = settings.model_copy(update={"start_timeout": min(settings.start_timeout, most)})
            try:
                async with self.run_server(given) as server:
                    if self.longest_start:
                        self.restarts += 1
                        logger.warning("Triton is back (restart %d)", self.restarts)
                    self.longest_start = max(self.longest_start, time.monotonic() - began)
                    self._set(server)
                    try:
                        reason, pause, choices, full = await server.ended(), 0.0, 1, False
                    finally:
                        self._set(None)
            except errors.CogTritonError as error:
                again = isinstance(error, errors.TritonPortTaken) or STARVED.search(str(error))
                if again and choices < PORT_CHOICES:
                    choices += 1  # of a fixed port, the error names the setting
                    continue
                if not self.longest_start:
                    raise
                reason = str(error)
                logger.error("%s", reason)
                full = getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
                pause = min(2 * pause or FIRST_PAUSE, FULL_DISK_PAUSE if full else LONGEST_PAUSE)
            now = time.monotonic()
            ends = [end for end in ends if end >= now - settings.restart_window]
            if not full:  # which is not the server's fault, and over when there is space
                ends.append(now)
            if len(ends) > settings.restarts:
                break
            logger.warning("starting Triton again%s", f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
        self.failure = reason.splitlines()[0]
        text = "not restarting Triton: it ended %d times within %g s"
        logger.error(text, len(ends), settings.restart_window)
        if settings.exit_on_failure:  # at once: what watches the process starts another
            progress.critical("exiting: %s (EXIT_ON_FAILURE)", self.failure)
            await asyncio.sleep(LOG_SECONDS)
            logging.shutdown()
            os._exit(EXIT_STATUS)
        self._set(None)

    def _set(self, server: RunningServer | None) -> None:
        self.running = server
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


@contextlib.asynccontextmanager
async def run_server(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> AsyncIterator[RunningServer]:
    """Fill a repository, start tritonserver on it, and yield it warm; leave nothing of a failed start."""
    parent, remove = settings.runtime_directory, partial(shutil.rmtree, ignore_errors=True)
    async with contextlib.AsyncExitStack() as cleanup:
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            prefix = "run-" if parent else f"cog-triton-{process_name(os.getpid())}-"
            runtime = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            cleanup.push_async_callback(asyncio.to_thread, remove, runtime)
            fill_repository(settings.model_repository, runtime / "repository", values)
        except OSError as error:
            raise ConfigurationError(errors.file_problem(error)) from error
        if parent is not None:
            cleanup.pop_all()  # for its owner to look at
        check_streaming(runtime / "repository")
        server = TritonServer(runtime / "repository", runtime, settings, temporary=parent is None)
        cleanup.push_async_callback(asyncio.to_thread, server.stop)
        _, tokenizer = await asyncio.gather(asyncio.to_thread(server.start), loading)
        client = create_client(settings, server)
        cleanup.push_async_callback(client.aclose)
        running = RunningServer(server, client, tokenizer, settings.hang_timeout)
        cleanup.callback(lambda: running.probe and running.probe.cancel())
        try:
            with timed("warmed up"):
                await running.warm_up()
        except TritonUnavailable as error:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(server.wait), NOTICE_SECONDS)
                raise errors.TritonStartError(server.end) from error  # the request only noticed
            raise
        yield running


def create_client(settings: Settings, server: TritonServer) -> TritonClient:
    """Return a client of the transport that the settings name."""
    if settings.transport == "http":
        from cog_triton.client.http_transport import HttpClient  # which brings aiohttp

        return HttpClient(server.endpoints.http, response_timeout=settings.response_timeout)
    return GrpcClient(server.endpoints.grpc, response_timeout=settings.response_timeout)


@contextlib.contextmanager
def timed(done: str) -> Iterator[None]:
    """Log what has been done, and how long it took; nothing if it failed."""
    started = time.monotonic()
    yield
    progress.info("%s in %.1f s", done, time.monotonic() - started)
