"""One load generator process: ``python -m tools.benchmark.worker``.

Standard input brings the specification as a line of JSON, and then for each load a line of JSON and a line
that starts it. Standard output says of each load, each on a line: ``ready``, ``done`` when the last request
has ended, and the result as JSON. The end of standard input ends the process: no more loads are wanted, or,
while one runs, whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from tools.benchmark.driver import Answer, Context, Driver, Failed
from tools.benchmark.drivers import DRIVERS
from tools.benchmark.load import Planned
from tools.benchmark.vocabulary import load_vocabulary

# So many requests of a warm-up run at once in an open loop, whose streams have no number.
OPEN_LOOP_WARMUP = 8
# A text has about as many tokens as it was made of: less than this share of them is an answer cut short.
UNCOUNTED_SHARE = 0.8


@dataclass
class Sent:
    """A request that was sent: its answer's pieces, or why there are none."""

    request: Planned
    start: float
    end: float = 0.0
    pieces: list[Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Record:
    """One request. Times in seconds of ``time.perf_counter``, which all processes share.

    Attributes:
        times: of each chunk with content.
        tokens: of each of these chunks.
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


def main() -> None:
    # What an engine prints must not get between the lines of the result.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = json.loads(sys.stdin.readline())
    with contextlib.suppress(ImportError):
        import uvloop  # type: ignore[import-not-found, unused-ignore]

        uvloop.install()
    asyncio.run(run(spec, out))


async def run(spec: Mapping[str, Any], out: TextIO) -> None:
    """One worker's life; see the module's docstring."""
    vocabulary = load_vocabulary(spec["tokenizer"])
    driver = DRIVERS[spec["target"]](
        Context(
            vocabulary,
            spec["tokenizer"],
            spec["temperature"],
            spec["ignore_eos"],
            **spec["endpoints"],
        )
    )
    while line := await asyncio.to_thread(sys.stdin.readline):
        if not await run_load(driver, json.loads(line), out):
            return
    await driver.close()


async def run_load(driver: Driver, load: Mapping[str, Any], out: TextIO) -> bool:
    """One load; False if its start never came."""
    concurrency, timeout = load["concurrency"], load["timeout"]
    warmup, requests = (
        [
            (request, driver.prepare(request))
            for request in (Planned(**fields) for fields in load[name])
        ]
        for name in ("warmup", "requests")
    )
    await closed_loop(driver, warmup, concurrency or OPEN_LOOP_WARMUP, timeout)
    print("ready", file=out)
    if not await asyncio.to_thread(sys.stdin.readline):
        return False
    with no_garbage_collection(), ended_with_starter():
        cpu = driver.own_cpu_s
        sent = await (
            open_loop(driver, requests, timeout)
            if concurrency is None
            else closed_loop(driver, requests, concurrency, timeout)
        )
        cpu = driver.own_cpu_s - cpu
    print("done", file=out)
    records = [asdict(record(driver, request)) for request in sent]
    print(json.dumps({"records": records, "cpu_s": cpu}), file=out)
    return True


async def closed_loop(
    driver: Driver, requests: list[tuple[Planned, Any]], concurrency: int, timeout: float
) -> list[Sent]:
    """Each of so many streams sends the next request when its last has ended."""
    sent: list[Sent] = []
    left = iter(requests)

    async def stream() -> None:
        for request, prepared in left:
            sent.append(await send(driver, request, prepared, timeout))

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return sent


async def open_loop(
    driver: Driver, requests: list[tuple[Planned, Any]], timeout: float
) -> list[Sent]:
    """Sends each request at its time, whatever became of the others."""
    start = time.perf_counter()
    running = []
    for request, prepared in requests:
        wait = start + request.at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        running.append(asyncio.create_task(send(driver, request, prepared, timeout)))
    return list(await asyncio.gather(*running))


async def send(driver: Driver, request: Planned, prepared: Any, timeout: float) -> Sent:
    """Sends one request. An error is part of the result: the load goes on."""
    sent = Sent(request, time.perf_counter())
    try:
        sent.pieces = await asyncio.wait_for(driver.send(prepared), timeout)
    except asyncio.TimeoutError:
        sent.error = f"no end after {timeout:g} s"
    except Exception as error:
        sent.error = error_text(error)
    sent.end = time.perf_counter()
    return sent


def record(driver: Driver, sent: Sent) -> Record:
    """Return the record of a request that was sent; an answer that is too short is an error."""
    answer, error = Answer(), sent.error
    if sent.pieces is not None:
        try:
            answer = driver.parse(sent.pieces)
            if is_short(answer, sent.request.output_tokens):
                error = "short answer"
        except Exception as failure:
            answer, error = Answer(), error_text(failure)
    return Record(
        sent.start,
        sent.end,
        answer.times,
        answer.tokens,
        sent.request.input_tokens,
        answer.total,
        error,
    )


def is_short(answer: Answer, asked: int) -> bool:
    """Return whether an answer has no content, or fewer tokens than were asked for."""
    least = asked if answer.counted else asked * UNCOUNTED_SHARE
    return not answer.times or answer.total < least


def error_text(error: Exception) -> str:
    """One line that is the same for the same error, so that they can be counted."""
    if isinstance(error, Failed):
        text = str(error)
    else:
        details = getattr(error, "details", None)  # of a grpc.RpcError
        text = f"{type(error).__name__}: {details() if callable(details) else error}"
    return " ".join(text.split())[:300]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collections would be measured as the server's latency."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def ended_with_starter() -> Iterator[None]:
    """Within it, this process ends when standard input does."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    loop.add_reader(stdin, os._exit, 1)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        os.set_blocking(stdin, True)  # which uvloop has changed, and the next load is read from it


if __name__ == "__main__":
    main()
