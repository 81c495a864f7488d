"""A tritonserver that runs: its start, its health, its end; and the supervisor that starts the next."""

import asyncio
import contextlib
import logging
import os
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
from cog_triton.deployment.restart_policy import RestartPolicy
from cog_triton.deployment.template_variables import Values
from cog_triton.errors import ConfigurationError, TritonUnavailable
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
# In which the end of a server is noticed.
NOTICE_SECONDS = 2.0
CHECK_SECONDS = 0.1
# Cog waits five for a health check.
PROBE_SECONDS = 4.0
# Cog's server loses what a worker logs right before its end.
LOG_SECONDS = 2.0
# EX_SOFTWARE of sysexits.h: the restarts of tritonserver have been given up.
EXIT_STATUS = 70


@dataclass(eq=False)
class RunningServer:
    """A tritonserver that has started, until its end."""

    server: TritonServer
    client: TritonClient
    tokenizer: Tokenizer
    # The setting TRITON_HANG_TIMEOUT.
    hang_timeout: float
    probe: asyncio.Task[None] | None = None
    _probe_end: float = 0.0
    _patience: float = PROBE_SECONDS
    # Why it is killed; empty while it is not.
    _killed_because: str = ""

    def __post_init__(self) -> None:
        self.client.on_given_up = self.kill_because_given_up

    async def warm_up(self) -> None:
        """Run a short request, whose time is a measure for later probes."""
        began = time.monotonic()
        try:
            await self._generate()
        except errors.UserError as error:
            raise ConfigurationError(f"the warm-up request was refused: {error.message}") from error
        self._patience = max(PROBE_SECONDS, 10 * (time.monotonic() - began))

    async def ended(self) -> str:
        """Wait until the server has ended, or hangs and is killed; return why."""
        while self.server.alive:
            silence = self.client.silence()
            if self.hang_timeout and silence > self.hang_timeout:
                self._kill(
                    f"Triton hangs: no running request has received a response for {silence:.0f} s"
                )
            await asyncio.sleep(CHECK_SECONDS)
        # Its log may have more to say.
        await asyncio.to_thread(self.server.wait)
        return self._killed_because or self.server.end

    async def is_ending(self) -> bool:
        """Return whether the server is about to end: it is killed, or does not listen any more.

        Its guard may take a while to clear up, and ``ended`` waits for the guard.
        """
        return bool(self._killed_because) or not await asyncio.to_thread(self.server.listens)

    def kill_because_given_up(self, model: str) -> None:
        """Kill a server that no longer waits for the process of a model.

        Triton 2.51 waits for a sign of life for one second. Then it frees the memory of the request, while
        the process may go on later, with that memory: it crashes, or each later request gets the response
        to the one before it, which may be another client's.
        """
        self._kill(f"Triton gave up the process of model {model}: no sign of life for a second")

    def _kill(self, reason: str) -> None:
        """Kill the server, once."""
        if not self._killed_because:
            self._killed_because = reason
            logger.error("%s", reason)
            self.server.kill()

    async def healthy(self) -> bool:
        """Return whether the server is ready, and answers a request while no other is running."""
        if not await asyncio.to_thread(self.server.is_ready):
            return False
        if self.probe is None or self.probe.done():
            if self.client.busy:
                # ``ended`` notices a hang.
                return True
            self.probe = asyncio.create_task(self._generate())
            self.probe.add_done_callback(_read_error)
            self._probe_end = time.monotonic() + self._patience
        left = max(self._probe_end - time.monotonic(), 0)
        await asyncio.wait([self.probe], timeout=min(left, PROBE_SECONDS))
        if self.probe.done():
            return self.probe.exception() is None
        return time.monotonic() < self._probe_end

    def cancel_probe(self) -> None:
        """End the request that ``healthy`` may have sent."""
        if self.probe is not None:
            self.probe.cancel()

    async def _generate(self) -> None:
        async for _ in generate(WARM_UP, self.client, self.tokenizer):
            pass


def _read_error(probe: "asyncio.Task[None]") -> None:
    """Read the error of a probe, also if nobody asks for the health again: asyncio would log it."""
    if not probe.cancelled():
        probe.exception()


@dataclass(eq=False)
class Supervisor:
    """Keeps a server running from ``start`` to ``stop``, by the rules of a RestartPolicy."""

    settings: Settings
    run_server: Callable[[Settings], contextlib.AbstractAsyncContextManager[RunningServer]]
    # None between two servers.
    running: RunningServer | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    # Why it has given up.
    failure: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.policy = RestartPolicy(self.settings)

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

    def kill_because_given_up(self, model: str) -> None:
        """Kill the running server, if there is one: a request of another process got that error."""
        if self.running is not None:
            self.running.kill_because_given_up(model)

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
        is_ending = False
        while True:
            server = self.running
            if server is not None and server is not failed:
                return server
            if server is None and self.failure is not None:
                raise TritonUnavailable(
                    f"Triton failed too often and will not be restarted: {self.failure}"
                )
            may_be_well = server is not None and not is_ending
            limit = min(NOTICE_SECONDS, timeout) if may_be_well else timeout
            left = began + limit - clock()
            if left <= 0:
                if server is None or is_ending:
                    raise TritonUnavailable(f"Triton did not come back within {timeout:g} s")
                is_ending = await server.is_ending()
                if not is_ending:
                    return server
                continue
            # Not wait_for, which before Python 3.12 continues when it is cancelled at the very moment of
            # the change: a request whose client is gone would run on the next server.
            await asyncio.wait([self._changed], timeout=left)

    async def _supervise(self) -> None:
        """Run one server after the other until the policy gives up."""
        policy = self.policy
        reason = ""
        while not policy.gives_up:
            if reason:
                pause = f" in {policy.pause:g} s" if policy.pause else ""
                logger.warning("restarting Triton%s", pause)
                await asyncio.sleep(policy.pause)
            try:
                reason = await self._run_one()
                policy.on_end()
            except Exception as error:
                # Whatever it is: without a next server all requests would wait.
                if policy.repeats_at_once(error):
                    reason = ""
                    continue
                if not policy.has_started:
                    raise
                reason = _reason(error)
                policy.on_failed_start(error)
        await self._give_up(reason)

    async def _run_one(self) -> str:
        """Start a server and wait for its end; return why it ended."""
        began = time.monotonic()
        limited = {"start_timeout": self.policy.start_timeout()}
        async with self.run_server(self.settings.model_copy(update=limited)) as server:
            if self.policy.has_started:
                self.restarts += 1
                logger.warning("Triton is back (restart %d)", self.restarts)
            self.policy.on_started(time.monotonic() - began)
            self._set(server)
            try:
                return await server.ended()
            finally:
                self._set(None)

    async def _give_up(self, reason: str) -> None:
        """Tell those that wait for a server that there will be none; end the process if it is to end."""
        self.failure = reason.splitlines()[0]
        logger.error(
            "not restarting Triton: it failed %d times within %g s",
            *(self.policy.recent, self.settings.restart_window),
        )
        if self.settings.exit_on_failure:
            # At once: what watches the process starts another.
            progress.critical("exiting: %s (EXIT_ON_FAILURE)", self.failure)
            await asyncio.sleep(LOG_SECONDS)
            logging.shutdown()
            os._exit(EXIT_STATUS)
        self._set(None)

    def _set(self, server: RunningServer | None) -> None:
        """Set the server that runs, and wake all that wait for a change."""
        changed = self._changed
        self.running = server
        self._changed = asyncio.get_running_loop().create_future()
        changed.set_result(None)


def _reason(error: Exception) -> str:
    """Return why a start failed, and log it: with a trace, if it is an error that nobody expected."""
    if isinstance(error, errors.CogTritonError):
        logger.error("%s", error)
        return str(error)
    logger.error("the supervision of tritonserver failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


@contextlib.asynccontextmanager
async def run_server(
    settings: Settings, values: Values, load_tokenizer: Callable[[], Awaitable[Tokenizer]]
) -> AsyncIterator[RunningServer]:
    """Fill a repository, start tritonserver on it, and yield it warm; leave nothing of a failed start."""
    async with contextlib.AsyncExitStack() as cleanup:
        runtime = await cleanup.enter_async_context(_filled_runtime_directory(settings, values))
        repository = runtime / "repository"
        check_streaming(repository)
        is_temporary = settings.runtime_directory is None
        server = TritonServer(repository, runtime, settings, temporary=is_temporary)
        cleanup.push_async_callback(asyncio.to_thread, server.stop)
        # The models take longer to load than the tokenizer: start them first.
        await asyncio.to_thread(server.spawn)
        _, tokenizer = await asyncio.gather(
            asyncio.to_thread(server.wait_until_ready), load_tokenizer()
        )
        client = create_client(settings, server)
        cleanup.push_async_callback(client.aclose)
        running = RunningServer(server, client, tokenizer, settings.hang_timeout)
        cleanup.callback(running.cancel_probe)
        try:
            with timed("warmed up"):
                await running.warm_up()
        except TritonUnavailable as error:
            # The server may have died, and then its end says more than the request that noticed it.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(server.wait), NOTICE_SECONDS)
                raise errors.TritonStartError(server.end) from error
            raise
        yield running


@contextlib.asynccontextmanager
async def _filled_runtime_directory(settings: Settings, values: Values) -> AsyncIterator[Path]:
    """Make a directory with a filled repository in it.

    It is removed at the end; below RUNTIME_DIR only if it could not be filled, since its owner may
    want to look at it.
    """
    parent = settings.runtime_directory
    remove = partial(shutil.rmtree, ignore_errors=True)
    async with contextlib.AsyncExitStack() as cleanup:
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            prefix = f"cog-triton-{process_name(os.getpid())}-" if parent is None else "run-"
            runtime = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            cleanup.push_async_callback(asyncio.to_thread, remove, runtime)
            fill_repository(settings.model_repository, runtime / "repository", values)
        except OSError as error:
            raise ConfigurationError(errors.file_problem(error)) from error
        if parent is not None:
            cleanup.pop_all()
        yield runtime


def create_client(settings: Settings, server: TritonServer) -> TritonClient:
    """Return a client of the transport that the settings name."""
    if settings.transport == "http":
        # Imported here, because it brings aiohttp.
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(server.endpoints.http, response_timeout=settings.response_timeout)
    return GrpcClient(server.endpoints.grpc, response_timeout=settings.response_timeout)


@contextlib.contextmanager
def timed(done: str) -> Iterator[None]:
    """Log what has been done, and how long it took; nothing if it failed."""
    started = time.monotonic()
    yield
    progress.info("%s in %.1f s", done, time.monotonic() - started)
