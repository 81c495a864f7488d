"""One load generator: a process of its own that sends a share of a load to one target."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tools.benchmark.load import Load, Planned
from tools.benchmark.targets import Answer, Endpoints, Failed, Target

OPEN_LOOP_WARMUP = 8  # requests of a warm-up at once, where streams have no number
# A text has about as many tokens as it was made of: fewer than this share is an answer cut short.
UNCOUNTED_SHARE = 0.8
STOP_SECONDS = 60.0
_spawn = multiprocessing.get_context("spawn")


class BenchmarkError(Exception):
    """Something could not be measured."""


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds of ``time.perf_counter``, which all processes share.

    Attributes:
        times, tokens: of each chunk with content.
        output_tokens: the answer's; 0 for an error.
        error: None if it answered as it was asked to.
    """

    start: float
    end: float
    times: list[float]
    tokens: list[int]
    input_tokens: int
    output_tokens: int
    error: str | None


class Generator:
    """A load generator's process, until the end of the context."""

    def __init__(self, name: str, endpoints: Endpoints, load: Load) -> None:
        self.name = name
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_main, args=(theirs, name, endpoints, load))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # which ends it
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is noticed where its answer is read
            self._pipe.send(message)

    def read(self) -> Any:
        """Return the generator's next message. Raises ``BenchmarkError`` if it has ended."""
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            status = self._process.exitcode
            raise BenchmarkError(
                f"a load generator for {self.name} ended with status {status}"
            ) from None
        if isinstance(message, Exception):
            raise BenchmarkError(f"{self.name}: {error_text(message)}") from message
        return message


def _main(pipe: Connection, name: str, endpoints: Endpoints, load: Load) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark gets it too, and ends this process
    os.dup2(2, 1)  # standard output is the report's
    with contextlib.suppress(ImportError):
        import uvloop  # type: ignore[import-not-found, unused-ignore]

        uvloop.install()
    asyncio.run(_serve(pipe, name, endpoints, load))


async def _serve(pipe: Connection, name: str, endpoints: Endpoints, load: Load) -> None:
    """Run each share that the pipe brings, until it is closed."""
    from tools.benchmark.triton_targets import TARGETS, load_tokenizer

    target = TARGETS[name](endpoints, load_tokenizer(endpoints.tokenizer), load)
    with contextlib.suppress(EOFError):
        while True:
            share, timeout = await asyncio.to_thread(pipe.recv)
            warmup = [(request, target.prepare(request)) for request in share.warmup]
            requests = [(request, target.prepare(request)) for request in share.requests]
            await _loop(target, warmup, share.concurrency or OPEN_LOOP_WARMUP, timeout)
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            async with _undisturbed(pipe):
                # An engine's own threads are measured, and not the load generator's.
                clock = time.process_time if target.server else time.thread_time
                used = clock()
                sent = await _loop(target, requests, share.concurrency, timeout)
                used = clock() - used
            pipe.send("done")
            pipe.send(([_record(target, *one) for one in sent], used))
    await target.close()


async def _loop(
    target: Target, requests: list[tuple[Planned, Any]], streams: int | None, timeout: float
) -> list[tuple[Planned, float, float, Any]]:
    """Send the requests, in so many streams or each at its time."""
    sent = []

    async def send(request: Planned, prepared: Any) -> None:
        start = time.perf_counter()
        try:
            pieces: Any = await asyncio.wait_for(target.send(prepared), timeout)
        except asyncio.TimeoutError:
            pieces = Failed(f"no end after {timeout:g} s")
        except Exception as error:  # a part of the result: the load continues
            pieces = error
        sent.append((request, start, time.perf_counter(), pieces))

    if streams is None:
        began = time.perf_counter()
        running = []
        for request, prepared in requests:
            await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
            running.append(asyncio.create_task(send(request, prepared)))
        await asyncio.gather(*running)
        return sent
    left = iter(requests)

    async def stream() -> None:
        for request, prepared in left:
            await send(request, prepared)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return sent


def _record(target: Target, request: Planned, start: float, end: float, pieces: Any) -> Record:
    """Return the record of a request; an answer that is too short is an error."""
    answer, error = Answer(), None
    try:
        if isinstance(pieces, Exception):
            raise pieces
        answer = target.parse(pieces)
    except Exception as failure:
        error = error_text(failure)
    counted = answer.total is not None
    total = answer.total if answer.total is not None else sum(answer.tokens)
    least = request.output_tokens * (1 if counted else UNCOUNTED_SHARE)
    if error is None and (not answer.times or total < least):
        error = "short answer"
    return Record(start, end, answer.times, answer.tokens, request.input_tokens, total, error)


def error_text(error: Exception) -> str:
    """Return one line that is the same for the same error, so that they can be counted."""
    details = getattr(error, "details", None)  # of a grpc.RpcError
    text = str(details() if callable(details) else error)
    if not isinstance(error, Failed):
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split())[:300]


@contextlib.asynccontextmanager
async def _undisturbed(pipe: Connection) -> AsyncIterator[None]:
    """Without garbage collections, which would count as latency; ends the process with the pipe."""
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), os._exit, 1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        loop.remove_reader(pipe.fileno())
        os.set_blocking(pipe.fileno(), True)  # which uvloop has changed
