"""Runs batches in the slots that other requests leave free; each line is answered once.

An answer is written with its count, under its line's number. What was running when everything was killed is
asked again by the next process, with the same seed.
"""

import asyncio
import itertools
import logging
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from cog_triton.api.openai.batch_input import Checks, InputLine, lines_of, parsed_line
from cog_triton.api.openai.body_route import LARGE_BODY
from cog_triton.api.openai.call import BATCH_CALL, Call
from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.jobs import LOOK_SECONDS, Jobs
from cog_triton.api.openai.keys import Key
from cog_triton.api.openai.pacing import LoopPace
from cog_triton.api.openai.protocol.events import dumps, new_id
from cog_triton.api.openai.schemas.files_and_batches import LineBody
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.storable import STORAGE_LIMIT_EXCEEDED
from cog_triton.api.openai.storage.batches import (
    PARTS,
    ActiveBatch,
    BatchError,
    LineAnswer,
    RunningBatch,
    Status,
)
from cog_triton.api.openai.storage.limits import NoRoom
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.errors import JournalUnavailable

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
MAX_BATCHES = 8  # batches that run at once
MAX_BATCHES_OF_KEY = 4  # those of one key, if there are several keys
MAX_ATTEMPTS = 5  # how often a line is tried while the server is healthy
LONGEST_PAUSE = 30.0
ERRORS_AT_ONCE = 100  # errors that are written together; other writes wait meanwhile
JSON = {"content-type": "application/json"}
STORAGE_ERROR = BatchError(
    code=STORAGE_LIMIT_EXCEEDED,
    message=(
        "The API key of this batch has reached its storage limit."
        " The answers stored so far are kept."
    ),
)


@dataclass(frozen=True)
class LineError:
    """Why a line has no answer, as the error file has it."""

    code: str
    message: str


@dataclass(frozen=True)
class LineReply:
    """What the application has answered to a line."""

    call: Call
    status: int
    content: bytes


# Errors of the lines that a batch did not come to, by how it ended.
UNANSWERED: dict[Status, LineError] = {
    "cancelled": LineError(
        "batch_cancelled", "This request was not executed: the batch was cancelled."
    ),
    "expired": LineError(
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "failed": LineError("invalid_api_key", "The API key of this batch is no longer there."),
}


class Places:
    """How many of the places of all batches the lines of one batch have; its end gives all of them back."""

    def __init__(self, shared: asyncio.Semaphore) -> None:
        self._shared = shared
        self._taken = 0

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *_: object) -> None:
        while self._taken:  # lines that were cancelled have not released theirs
            self.release()

    async def acquire(self) -> None:
        await self._shared.acquire()
        self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        self._shared.release()


class Runner(Jobs[ActiveBatch]):
    """The batches of one application."""

    def __init__(self, app: ASGIApp, served: Served, storage: Storage) -> None:
        super().__init__(
            storage.journal,
            storage.batches,
            served.models[0],
            limit=MAX_BATCHES,
            limit_of_key=MAX_BATCHES_OF_KEY,
        )
        self._app = app
        self._served = served
        self._files = storage.files
        self._batches = storage.batches
        self._scopes: dict[str, anyio.CancelScope] = {}  # by the ids of the batches that run
        # As many lines again as can run are being prepared or written, of all batches together: lines that
        # are ready at the same moment keep the event loop from other requests.
        self._shared_places = asyncio.Semaphore(2 * served.backend.admission.max_running)
        self._pace = LoopPace()  # the pace at which lines begin
        self._checking = asyncio.Lock()  # the input of one batch is checked after the other
        self._full: set[str] = set()  # batches whose keys have reached their storage limit

    def look(self, jobs: Sequence[ActiveBatch]) -> None:
        """End the batches that are cancelled, or whose time is over."""
        now = self._journal.now()
        for job in jobs:
            is_over = job.status == "cancelling" or job.expires <= now
            if is_over and job.id in self._scopes:
                self._scopes[job.id].cancel()

    async def run(self, id: str) -> None:
        """Work on a batch until all is done, or its scope is cancelled; then write its end."""
        scope = anyio.CancelScope()
        self._scopes[id] = scope
        with scope:
            try:
                await self._work(await self._batches.running(id))
            finally:
                del self._scopes[id]
        batch = await self._batches.running(id)
        if batch.status == "failed":
            return
        if id in self._full:
            self._full.discard(id)
            await self._fail(batch, STORAGE_ERROR)
            return
        end = self._end_of(batch)
        if end != "completed" and batch.total:
            try:
                await self._end_open_lines(batch, UNANSWERED[end])
            except NoRoom:
                await self._fail(batch, STORAGE_ERROR)
                return
        await self._finish(batch, end)
        logger.info("batch %s: %s", batch.id, end)

    def _end_of(self, batch: RunningBatch) -> Status:
        """Return the last status of a batch whose lines do not run any more."""
        if batch.status == "cancelling":
            return "cancelled"
        if batch.status == "finalizing":
            return "completed"
        if batch.expires <= self._journal.now():
            return "expired"
        return "failed"  # the batch's key was removed

    async def give_up(self, id: str, reason: str) -> None:
        batch = await self._batches.running(id)
        await self._fail(batch, BatchError(code="server_error", message=reason))

    async def _fail(self, batch: RunningBatch, error: BatchError) -> None:
        """End a batch as failed; the answers that are there stay."""
        await self._finish(batch, "failed", errors=[error])
        logger.warning("batch %s failed: %s", batch.id, error.message)

    async def _finish(
        self, batch: RunningBatch, status: Status, errors: Sequence[BatchError] = ()
    ) -> None:
        file_ids = {part: new_id("file-") for part in PARTS}
        await self._batches.finish(batch, status, file_ids=file_ids, errors=errors)

    async def _work(self, batch: RunningBatch) -> None:
        """Check the input and answer its lines, as far as neither is done."""
        if batch.status == "validating":
            if not await self._check(batch):
                return
            batch = await self._batches.running(batch.id)
        if batch.status == "in_progress":
            logger.info("batch %s is running", batch.id)
            if await self._answer_lines(batch):
                await self._batches.change_status(batch.id, "finalizing", was=(batch.status,))

    async def _check(self, batch: RunningBatch) -> bool:
        """Check the input; return whether its lines are to be answered."""
        checks = Checks(batch.endpoint, self._served)
        async with self._checking:
            async for lines in lines_of(self._files, batch.input):
                if not await asyncio.to_thread(checks.read, lines):
                    break
        if not checks.total:
            checks.add("empty_file", "the input file has no requests")
        if checks.errors:
            await self._batches.change_status(
                batch.id, "failed", was=(batch.status,), errors=checks.errors
            )
            return False
        await self._batches.set_total(batch.id, checks.total)
        return await self._batches.change_status(batch.id, "in_progress", was=(batch.status,))

    async def _answer_lines(self, batch: RunningBatch) -> bool:
        """Answer the lines that have no answer; return False if the batch's key was removed."""
        with Places(self._shared_places) as places:
            async with anyio.create_task_group() as lines:
                async for line in self._open_lines(batch):
                    key = self._served.key(batch.owner)
                    if key is None:
                        lines.cancel_scope.cancel()
                        return False
                    await places.acquire()
                    await self._pace.wait_for_turn()
                    lines.start_soon(self._answer_line, batch, key, line, places)
        return True

    async def _open_lines(self, batch: RunningBatch) -> AsyncIterator[InputLine]:
        """Yield the lines that have no answer yet."""
        answered = await self._batches.answered_lines(batch.id)
        async for lines in lines_of(self._files, batch.input):
            for line in lines:
                if line.number not in answered:
                    yield line

    async def _answer_line(
        self, batch: RunningBatch, key: Key, line: InputLine, places: Places
    ) -> None:
        answer = await self._answer_of(batch, key, line)
        try:
            await self._write(batch, [answer])
        except NoRoom:
            self._full.add(batch.id)
            self._scopes[batch.id].cancel()
        places.release()

    async def _answer_of(self, batch: RunningBatch, key: Key, line: InputLine) -> LineAnswer:
        """Return the answer to a line, which may be an error."""
        custom_id: str | None = None
        try:
            request = await self._parsed(line)
            custom_id = request.custom_id
            seeded = self._served.backend.draws_seeds
            body = body_of(request, batch, line.number, seeded=seeded)
            reply = await self._ask(batch.endpoint, key, body)
        except ApiError as error:
            reply = LineReply(Call("", batch.endpoint), error.status, dumps(error.body()))
        response = {
            "status_code": reply.status,
            "request_id": reply.call.id,
            "body": orjson.Fragment(reply.content),
        }
        return LineAnswer(
            line=line.number,
            part="output" if reply.status == 200 else "error",
            data=output_line(custom_id, response=response),
            input_tokens=reply.call.input_tokens,
            output_tokens=reply.call.output_tokens,
        )

    async def _parsed(self, line: InputLine) -> LineBody:
        if len(line.data) > LARGE_BODY:
            return await asyncio.to_thread(parsed_line, line.data, self._served)
        return parsed_line(line.data, self._served)

    async def _ask(self, path: str, key: Key, body: bytes) -> LineReply:
        """Ask until the answer does not say to ask again."""
        served = self._served
        for attempt in itertools.count(1):
            while True:
                seconds = served.quotas.spend(key, 0)
                if not seconds:
                    break
                await asyncio.sleep(min(seconds, LONGEST_PAUSE))
            call = Call(new_id("req_"), path, key, batch=True)
            reply = await ask(self._app, call, body)
            served.quotas.spend(key, call.input_tokens + call.output_tokens)
            if "retry-after" not in reply.headers or attempt == MAX_ATTEMPTS:
                break
            await asyncio.sleep(min(2.0**attempt, LONGEST_PAUSE))
            while not await served.backend.healthy():
                await asyncio.sleep(LOOK_SECONDS)
        return LineReply(call, reply.status_code, reply.content)

    async def _end_open_lines(self, batch: RunningBatch, error: LineError) -> None:
        """Write an error for each line that has no answer yet, or raise NoRoom."""
        lines: list[InputLine] = []
        async for line in self._open_lines(batch):
            lines.append(line)
            if len(lines) == ERRORS_AT_ONCE:
                await self._write_errors(batch, lines, error)
                await self._pace.wait_for_turn()
                lines = []
        await self._write_errors(batch, lines, error)

    async def _write_errors(
        self, batch: RunningBatch, lines: Sequence[InputLine], error: LineError
    ) -> None:
        def answers() -> list[LineAnswer]:
            return [self._error_answer(line, error) for line in lines]

        await self._write(batch, await asyncio.to_thread(answers))

    def _error_answer(self, line: InputLine, error: LineError) -> LineAnswer:
        request = parsed_line(line.data, self._served)
        data = output_line(request.custom_id, error=error)
        return LineAnswer(line=line.number, part="error", data=data)

    async def _write(self, batch: RunningBatch, answers: Sequence[LineAnswer]) -> None:
        """Write answers; wait while the journal is not available. May raise NoRoom."""
        while True:
            try:
                await self._batches.add_answers(batch, answers)
                return
            except JournalUnavailable as error:
                logger.warning("batch %s is waiting: %s", batch.id, error)
                await asyncio.sleep(LONGEST_PAUSE)


def body_of(line: LineBody, batch: RunningBatch, number: int, *, seeded: bool) -> bytes:
    """Return the body of a line's request, or raise ApiError.

    Args:
        number: that of the line.
        seeded: give the request a seed if it has none, the same each time.
    """
    for name in ("stream", "background"):
        if line.body.get(name):
            text = f"{name} is not supported in a batch"
            raise invalid(text, name, "unsupported_parameter")
    body: dict[str, Any] = dict(line.body)
    if batch.endpoint == "/v1/responses":
        body.setdefault("store", False)
    if seeded and body.get("seed") in (None, -1):
        body["seed"] = zlib.crc32(f"{batch.id} {number}".encode())
    return dumps(body)


def output_line(
    custom_id: str | None,
    *,
    response: dict[str, Any] | None = None,
    error: LineError | None = None,
) -> bytes:
    """Return a line of an output or error file."""
    line = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return dumps(line) + b"\n"


async def ask(app: ASGIApp, call: Call, body: bytes) -> "httpx.Response":
    """Send a batch's request to the application, and return the whole response."""
    # Imported here: its command line, which comes with it, takes a tenth of a second.
    import httpx

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, BATCH_CALL: call}, receive, send)

    request = httpx.Request("POST", f"http://batch{call.path}", content=body, headers=JSON)
    reply = await httpx.ASGITransport(inside).handle_async_request(request)
    await reply.aread()
    return reply
