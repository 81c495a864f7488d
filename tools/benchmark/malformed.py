"""Measure what a client notices while others send malformed requests, and then many files.

    python -m tools.benchmark.malformed

A server of OpenAI's API is started with the simulated engine. A process of its own streams answers from it
and notes the time to the first token and between tokens: before, while malformed requests come, while files
are uploaded, and after. The load generators share the machine with the server, so the figures of the two
loads have their processor time in them, too.
"""

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import aiohttp
import numpy as np

from tools.benchmark import servers
from tools.benchmark.targets import MODEL
from tools.command_line import begin, progress
from tools.demo_model import DIRECTORY

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is a KV cache?"}
ANSWER_TOKENS = 64
PACE_MS = 20.0
BEFORE_AND_AFTER_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """An answer as its client saw it.

    Attributes:
        began: when the request was sent, on the monotonic clock, which all processes share.
        first_token: seconds to it.
        gaps: seconds between two events.
    """

    began: float
    first_token: float
    gaps: Sequence[float]


@dataclass(frozen=True)
class Malformed:
    """A request that the server refuses."""

    path: str
    body: bytes
    content_type: str = "application/json"


@dataclass
class Phase:
    """A part of the measurement; ``replies`` counts the statuses that its load got."""

    name: str
    began: float
    ended: float = 0.0
    replies: Counter[int] = field(default_factory=Counter)


async def stream_answer(session: aiohttp.ClientSession) -> Answer:
    """Stream one answer, and note when its events came."""
    body = {
        "model": MODEL,
        "messages": [QUESTION],
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
    }
    began = time.monotonic()
    times = []
    async with session.post(CHAT, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if b'"content":"' in line and b'"content":""' not in line:
                times.append(time.monotonic())
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Answer(began=began, first_token=times[0] - began, gaps=gaps)


async def stream_until(url: str, clients: int, stop: Event) -> list[Answer]:
    """Stream answers, one behind another for each client, until told to stop."""
    answers: list[Answer] = []

    async def client(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            answers.append(await stream_answer(session))

    async with aiohttp.ClientSession(url) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return answers


def run_clients(url: str, clients: int, stop: Event) -> list[Answer]:
    return asyncio.run(stream_until(url, clients, stop))


def malformed_requests(count: int) -> Iterator[Malformed]:
    """Yield so many requests, each kind as often as the others, in an order that is always the same."""
    numbers = ",".join(["1"] * 200_000).encode()
    fields = {"model": MODEL, "messages": [QUESTION]}
    kinds = [
        Malformed(CHAT, b"{"),
        Malformed(CHAT, b"[1]"),
        Malformed(CHAT, b"{}", content_type="text/plain"),
        Malformed(CHAT, b"[" * 5_000 + b"]" * 5_000),
        Malformed(CHAT, json.dumps({**fields, "temperature": "warm"}).encode()),
        Malformed(CHAT, json.dumps({**fields, "messages": [{"role": 1}] * 2_000}).encode()),
        Malformed(CHAT, json.dumps({**fields, "tools": [{"type": "function"}] * 500}).encode()),
        Malformed(CHAT, b'{"model": "\\ud800", "messages": []}'),
        Malformed("/v1/completions", b'{"model": "' + MODEL.encode() + b'", "prompt": {}}'),
        Malformed("/v1/completions", b'{"prompt": ["x", ' + numbers + b"]}"),
        Malformed("/v1/responses", json.dumps({"input": [{"type": "none"}] * 1_000}).encode()),
        Malformed("/v1/messages", json.dumps({**fields, "max_tokens": -1}).encode()),
        Malformed("/v1/batches", b'{"input_file_id": "none"}'),
        Malformed("/v1/files", b"--x\r\n" * 100, content_type="multipart/form-data; boundary=x"),
        Malformed("/v1/none", b"{}"),
        Malformed("/tokenize", b'{"messages": "x"}'),
    ]
    order = random.Random(0)
    for _ in range(count):
        yield order.choice(kinds)


async def send_all(
    sends: Iterator[Callable[[], Awaitable[int]]],
    *,
    per_second: float,
    at_once: int,
    replies: Counter[int],
) -> None:
    """Send requests, at most so many in a second and at one time, and count the statuses."""
    began = time.monotonic()
    numbered = enumerate(sends)

    async def sender() -> None:
        for number, send in numbered:  # shared by all senders
            due = began + number / per_second
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            replies[await send()] += 1

    await asyncio.gather(*(sender() for _ in range(at_once)))


async def send_malformed(url: str, options: argparse.Namespace, replies: Counter[int]) -> None:
    async with aiohttp.ClientSession(url) as session:

        async def send(request: Malformed) -> int:
            headers = {"Content-Type": request.content_type}
            async with session.post(request.path, data=request.body, headers=headers) as reply:
                await reply.read()
                return reply.status

        requests = malformed_requests(options.requests)
        sends = ((lambda request=request: send(request)) for request in requests)
        await send_all(
            sends,
            per_second=options.requests_per_second,
            at_once=options.at_once,
            replies=replies,
        )


async def upload_files(url: str, options: argparse.Namespace, replies: Counter[int]) -> None:
    body = {"model": MODEL, "messages": [QUESTION]}
    line = json.dumps({"custom_id": "x", "method": "POST", "url": CHAT, "body": body}) + "\n"
    content = (line * (options.file_bytes // len(line))).encode()
    async with aiohttp.ClientSession(url) as session:

        async def send() -> int:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", content, filename="input.jsonl")
            async with session.post("/v1/files", data=form) as reply:
                await reply.read()
                return reply.status

        await send_all(
            itertools.repeat(send, options.files),
            per_second=options.files_per_second,
            at_once=options.at_once,
            replies=replies,
        )


async def run_phases(url: str, options: argparse.Namespace) -> list[Phase]:
    """Run the loads one after the other, with a quiet phase before and after."""
    phases: list[Phase] = []

    async def phase(name: str, load: Callable[[Counter[int]], Awaitable[None]]) -> None:
        progress(f"{name} ...")
        running = Phase(name, began=time.monotonic())
        await load(running.replies)
        running.ended = time.monotonic()
        phases.append(running)

    async def quiet(_: Counter[int]) -> None:
        await asyncio.sleep(BEFORE_AND_AFTER_SECONDS)

    async def malformed(replies: Counter[int]) -> None:
        await send_malformed(url, options, replies)

    async def uploads(replies: Counter[int]) -> None:
        await upload_files(url, options, replies)

    await phase("before", quiet)
    await phase("malformed requests", malformed)
    await phase("uploads", uploads)
    await phase("after", quiet)
    return phases


def milliseconds(seconds: Sequence[float], percentile: float) -> float:
    return 1000 * float(np.percentile(seconds, percentile)) if seconds else float("nan")


def row(phase: Phase, answers: Sequence[Answer]) -> str:
    """Return the line of a phase: the figures of the answers that began and ended in it."""
    within = [
        answer
        for answer in answers
        if phase.began <= answer.began
        and answer.began + answer.first_token + sum(answer.gaps) <= phase.ended
    ]
    first_tokens = [answer.first_token for answer in within]
    gaps = [gap for answer in within for gap in answer.gaps]
    seconds = phase.ended - phase.began
    load = f"{phase.replies.total() / seconds:.0f}/s" if phase.replies else "-"
    figures = [
        milliseconds(first_tokens, 50),
        milliseconds(first_tokens, 99),
        milliseconds(gaps, 50),
        milliseconds(gaps, 99),
    ]
    shown = "".join(f"{figure:>10.1f}" for figure in figures)
    return f"{phase.name:<20}{seconds:>8.1f}{load:>8}{len(within):>9}{shown}"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000, help="malformed requests")
    parser.add_argument("--files", type=int, default=200, help="files to upload")
    parser.add_argument("--file-bytes", type=int, default=2_000_000, help="size of each file")
    parser.add_argument(
        "--requests-per-second",
        type=float,
        default=math.inf,
        help="at most so many malformed requests; default: as fast as they are answered",
    )
    parser.add_argument(
        "--files-per-second",
        type=float,
        default=math.inf,
        help="at most so many files; default: as fast as they are taken",
    )
    parser.add_argument("--at-once", type=int, default=16, help="requests of a load at one time")
    parser.add_argument("--clients", type=int, default=8, help="clients that stream answers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    begin()
    options = options_of(arguments)
    with tempfile.TemporaryDirectory(prefix="cog-triton-malformed-") as name:
        directory = Path(name)
        environment = {
            **os.environ,
            **servers.simulated(directory, PACE_MS),
            "MODEL": str(DIRECTORY),
            "STORE": str(directory / "journal.db"),
        }
        progress("starting the server ...")
        with servers.api_server("openai", environment, directory / "openai.log") as endpoints:
            spawning = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawning) as pool, spawning.Manager() as manager:
                stop = manager.Event()
                running = pool.submit(run_clients, endpoints.url, options.clients, stop)
                try:
                    phases = asyncio.run(run_phases(endpoints.url, options))
                finally:
                    stop.set()
                answers = running.result()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; times in ms")
    print(f"{'':<20}{'seconds':>8}{'load':>8}{'answers':>9}{'TTFT p50':>10}{'p99':>10}", end="")
    print(f"{'gap p50':>10}{'p99':>10}")
    for phase in phases:
        print(row(phase, answers))
    for phase in phases:
        if phase.replies:
            counts = ", ".join(f"{count} x {status}" for status, count in phase.replies.items())
            print(f"{phase.name}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
