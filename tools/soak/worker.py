"""A soak's worker: starts a server, puts streams on it, and says what came, a line of JSON each.

    python -m tools.soak.worker

Standard input has a line of JSON, see ``Spec``; its end, or a further line, ends the load. What is logged
goes to standard error. On standard output come, with times of ``time.monotonic()``:

    {"ready": time}                     the server is up, and the streams begin
    {"expected": [[text, ids], …]}      the answers, if they were asked for instead of a load
    {"outcome": {…}}                    of a request, see ``streams.Outcome``
    {"tokens": [time, number]}          that came within TICK of that time, on all streams
    {"unfinished": text}                what still runs after that
    {"health": [begun, ended, healthy]} an answer to the question
    {"done": time}                      every stream has ended
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.soak.expected import Expected
from tools.soak.faces import Face
from tools.soak.plan import Case
from tools.soak.servers import SERVERS, Healthy, Place
from tools.soak.streams import Streams

TICK = 0.05
POLL_SECONDS = 0.25
STUCK = 40.0  # seconds after the end of the load, when it is told where the last streams are
IDLE_SECONDS = 30.0  # for which the engine may go on with what nobody waits for any more


@dataclass(frozen=True)
class Spec:
    """A worker's orders.

    Attributes:
        kind, transport: of the phase.
        environment: of the server.
        log: file for what Cog's server prints.
        expected: text and ids of each case; empty to have them made instead of a load.
    """

    kind: str
    transport: str
    environment: Mapping[str, str]
    log: str
    streams: int
    seed: int
    cases: tuple[Case, ...]
    expected: tuple[Expected, ...] = ()

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Spec:
        """Reads what ``line`` wrote."""
        values = json.loads(line)
        values["cases"] = tuple(Case(**case) for case in values["cases"])
        expected = values["expected"]
        values["expected"] = tuple(Expected(e["text"], tuple(e["ids"])) for e in expected)
        return cls(**values)


class Output:
    """Lines of JSON, with the tokens of a tick in one of them."""

    def __init__(self) -> None:
        self._since = 0.0
        self._tokens = 0

    def __call__(self, message: dict[str, Any]) -> None:
        if "tokens" not in message:
            print(json.dumps(message), flush=True)
            return
        at, tokens = message["tokens"]
        if self._tokens and at - self._since > TICK:
            self.flush()
        if not self._tokens:
            self._since = at
        self._tokens += tokens

    def flush(self) -> None:
        if self._tokens:
            print(json.dumps({"tokens": [self._since, self._tokens]}), flush=True)
        self._tokens = 0


async def work(spec: Spec, emit: Output) -> None:
    """Does what a worker is to do.

    Raises:
        CogTritonError, BenchmarkError: the server could not be set up.
    """
    place = Place(spec.transport, spec.environment, Path(spec.log), spec.streams)
    async with SERVERS[spec.kind](place) as server:
        if not spec.expected:
            emit({"expected": await answers(server.faces[0], spec.cases)})
            return
        streams = Streams(server.faces, spec.cases, spec.expected, emit, spec.seed)
        stop = asyncio.create_task(_end_of_input())
        stop.add_done_callback(lambda _: streams.stop())
        stop.add_done_callback(lambda _: asyncio.get_running_loop().call_later(STUCK, tell_stuck))
        polling = asyncio.create_task(_poll(server.healthy, emit))
        emit({"ready": time.monotonic()})
        await streams.run(spec.streams)
        polling.cancel()
        emit.flush()
        if still := await server.busy_after(IDLE_SECONDS):
            emit(
                {
                    "unfinished": f"{still:g} requests still ran in the engine {IDLE_SECONDS:g} s later"
                }
            )
        emit({"done": time.monotonic()})


async def answers(face: Face, cases: tuple[Case, ...]) -> list[tuple[str, list[int]]]:
    """The answers to the cases, asked for together."""

    async def answer(case: Case) -> tuple[str, list[int]]:
        text = ""
        ids: list[int] = []
        async for piece in face.ask(case, ""):
            text += piece.text
            ids += piece.ids
        return text, ids

    return await asyncio.gather(*map(answer, cases))


async def _poll(healthy: Healthy, emit: Output) -> None:
    while True:
        begun = time.monotonic()
        state = await healthy()
        emit({"health": [begun, time.monotonic(), state]})
        await asyncio.sleep(POLL_SECONDS)


async def _end_of_input() -> None:
    """Waits for a line, or the end of whoever would write it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), readable.set)
    await readable.wait()
    loop.remove_reader(sys.stdin.fileno())


def tell_stuck() -> None:
    """Logs where every task and every asynchronous generator stands."""
    generators = [g for g in gc.get_objects() if inspect.isasyncgen(g) and g.ag_running]
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    for awaited in [*coroutines, *generators]:
        logging.getLogger("soak").warning("has not ended: %s", " > ".join(places(awaited)))


def places(awaited: Any) -> Iterator[str]:
    """Return the places at which a coroutine or generator waits, as far as they are known."""
    while awaited is not None:
        kind = {"coroutine": "cr", "async_generator": "ag"}.get(type(awaited).__name__)
        if kind is None:
            yield repr(awaited)[:200]
            return
        if frame := getattr(awaited, f"{kind}_frame"):
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        awaited = getattr(awaited, f"{kind}_await")


def main() -> int:
    """Runs a worker; returns its exit status, with a reason on standard error if that is not 0."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Without a buffer, which would hold the line that ends the load.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        spec = Spec.of(stdin.readline().decode())
    try:
        asyncio.run(work(spec, Output()))
    except Exception as error:
        logging.getLogger("soak").exception("the worker ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
