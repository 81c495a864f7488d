"""Responses that run in the background, in whichever process has time, and their events for any client.

A background response is its records: the chunks as they were written, and an end. Its events follow from
these, so that every process has the same events under the same numbers.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from cog_triton.api.openai.call import CURRENT, Call
from cog_triton.api.openai.chats import from_responses
from cog_triton.api.openai.chats.turn import Turn, chat_turn
from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.jobs import Jobs
from cog_triton.api.openai.keys import ANYBODY
from cog_triton.api.openai.protocol.error_response import client_error
from cog_triton.api.openai.protocol.events import dumps
from cog_triton.api.openai.protocol.responses import ResponseWriter
from cog_triton.api.openai.schemas.responses import ResponsesBody
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.storable import STORAGE_LIMIT_EXCEEDED, no_room
from cog_triton.api.openai.storage.limits import NoRoom
from cog_triton.api.openai.storage.records import (
    CancelledRecord,
    ChunkRecord,
    FailedRecord,
    Record,
)
from cog_triton.api.openai.storage.responses import (
    ActiveResponse,
    BackgroundResponse,
    Conclusion,
    ResponseStore,
)
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.errors import TritonOverloaded, UserError
from cog_triton.request.request import Request

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks for the records of another process
REQUEST = TypeAdapter(Request)
_RUNNING = ("queued", "in_progress")


class BackgroundRun:
    """A background response: its records, and the events that follow from them.

    Attributes:
        ids: the tokens of the answer so far.
        shown: how many of the events are written, so that clients may have them.
        changed: set when ``shown`` changes; another event then takes its place.
        task: the task that runs it, if that is in this process.
        error: the error of a write, which has ended the task.
    """

    def __init__(self, owner: str, response: dict[str, Any], turn: Turn, served: Served) -> None:
        self.id: str = response["id"]
        self.owner = owner
        self.response = response
        self.request = turn.request
        letters = _letters_of(self.id)
        parser = turn.parser(draw=letters)
        self._writer = ResponseWriter(response, parser, served.backend.tokenizer, letters)
        self.records: list[Record] = []
        self.ids: list[int] = []
        self.events: list[bytes] = []
        self._add_events(self._writer.queued())
        self.shown = len(self.events)
        self.changed = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.response["status"] not in _RUNNING

    def feed(self, record: Record) -> None:
        """Take the next record, and make its events."""
        self.records.append(record)
        if isinstance(record, ChunkRecord):
            self.ids += record.ids
            self._add_events(self._writer.events(0, record.chunk()))
        elif isinstance(record, FailedRecord):
            error = ApiError(record.status, record.message, code=record.code)
            self._add_events(self._writer.failed(error))
        else:
            self._add_events(self._writer.cancelled())

    def feed_all(self, records: Sequence[Record]) -> None:
        for record in records:
            self.feed(record)

    def conclude(self, records: Sequence[Record]) -> Conclusion:
        """Take the last records, and cancel a response that has no end; see ``ResponseStore.end``."""
        if not self.ended:
            self.feed_all(records)
        if not self.ended:
            self.feed(CancelledRecord())
        return Conclusion(dumps(self.response), self.records)

    def show(self, count: int) -> None:
        """Let so many events be sent."""
        self.shown = max(self.shown, count)
        self._notify()

    def stop(self, error: BaseException | None) -> None:
        """End the task, because a write failed or another process has ended the response."""
        if self.task is not None:
            self.error = error
            self.task.cancel()
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _add_events(self, events: Iterator[bytes]) -> None:
        for number, event in enumerate(events, len(self.events)):
            self.events.append(b"id: %d\n%b" % (number, event))


class RecordWriter:
    """Writes the records of a run as they come.

    One write is under way at a time. What comes meanwhile is the next one, so a moment's records are one
    row of the log.
    """

    def __init__(self, run: BackgroundRun, responses: ResponseStore) -> None:
        self._run = run
        self._responses = responses
        self._submitted = len(run.records)
        self._writing: asyncio.Future[bool] | None = None

    def write(self) -> None:
        """Write what the run has, unless it has ended: its end is written with all records."""
        run = self._run
        position = self._submitted
        if self._writing is not None or run.ended or position == len(run.records):
            return
        self._submitted = len(run.records)
        self._writing = self._responses.append(run.id, run.owner, position, run.records[position:])
        self._writing.add_done_callback(partial(self._on_written, len(run.events)))

    def _on_written(self, events: int, writing: "asyncio.Future[bool]") -> None:
        self._writing = None
        if writing.cancelled():
            return
        error = writing.exception()
        if error is not None or not writing.result():
            self._run.stop(error)
            return
        self._run.show(events)
        self.write()


class BackgroundResponses(Jobs[ActiveResponse]):
    """The background responses of one application."""

    def __init__(
        self, served: Served, storage: Storage, on_ended: Callable[[Call], object]
    ) -> None:
        """Run nothing yet; ``on_ended`` is called for each answer that has ended here."""
        super().__init__(
            storage.journal,
            storage.responses,
            served.models[0],
            limit=max(1, served.backend.admission.max_running // 2),
        )
        self._served = served
        self._storage = storage
        self._responses = storage.responses
        self._runs: dict[str, BackgroundRun] = {}
        self._on_ended = on_ended

    def look(self, jobs: Sequence[ActiveResponse]) -> None:
        """End the tasks of responses that another process has cancelled or deleted."""
        worker = self._storage.journal.lease.worker
        mine = {job.id for job in jobs if job.runner == worker}
        for id in self.tasks.keys() - mine:
            self.tasks[id].cancel()

    async def run(self, id: str) -> None:
        """Answer, from where another process has ended."""
        await self._responses.start(id)
        row = await self._responses.find_background(id)
        if row is None:
            return  # deleted
        try:
            run = await self.run_of(row)
        except (ApiError, UserError) as error:  # this process cannot make its request
            await self.give_up(id, error.message)
            return
        served = self._served
        call = Call(id, "/v1/responses", served.key(row.owner) or ANYBODY, status=200)
        CURRENT.set(call)
        self._runs[id] = run
        run.task = asyncio.current_task()
        try:
            await self._answer(run)
        finally:
            del self._runs[id]
            run.show(0)
            served.quotas.spend(call.key, call.input_tokens + call.output_tokens)
            served.figures.on_end(call)
            self._on_ended(call)

    async def _answer(self, run: BackgroundRun) -> None:
        """Answer and write the end, or raise the error that kept it from that."""
        try:
            with self._served.answering():
                await self._generate(run)
        except asyncio.CancelledError:
            if run.error is None:
                raise
            if not isinstance(run.error, NoRoom):
                raise run.error from None  # the pause before the next attempt grows
            refusal = no_room(self._storage.journal.limits)
            run.feed(FailedRecord(500, STORAGE_LIMIT_EXCEEDED, refusal.message))
        if await self.end(run):
            run.show(len(run.events))

    async def _generate(self, run: BackgroundRun) -> None:
        """Write the rest of an answer, or its error; an engine's full queue is tried again."""
        writer = RecordWriter(run, self._responses)
        while True:
            (chunks,) = self._served.generate([replace(run.request, continued_ids=tuple(run.ids))])
            try:
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        run.feed(ChunkRecord.of_chunk(chunk))
                        writer.write()
                return
            except TritonOverloaded as error:
                await asyncio.sleep(error.retry_after)
            except Exception as error:
                if self._served.draining:  # the next start has it
                    raise
                failed = client_error(error)
                run.feed(FailedRecord(failed.status, failed.code, failed.message))
                return

    async def end(self, run: BackgroundRun) -> bool:
        """Write the end of a run, a cancel if it has none; return False if there is one already."""
        return await self._responses.end(run.id, lambda: len(run.records), run.conclude)

    async def cancel(self, id: str) -> None:
        """Cancel a response, wherever it runs."""
        row = await self._responses.find_background(id)
        if row is not None:
            await self.end(await self.run_of(row))
            self.wake.set()  # if it runs here, its task ends at once

    async def give_up(self, id: str, reason: str) -> None:
        row = await self._responses.find_background(id)
        if row is None:
            return
        error = {"code": "server_error", "message": reason}
        response = {**_loaded(row), "status": "failed", "error": error}
        content = dumps(response)
        failed = FailedRecord(500, "server_error", reason)

        def conclude(records: Sequence[Record]) -> Conclusion:
            return Conclusion(content, [*records, failed])

        await self._responses.end(id, lambda: 0, conclude)

    async def run_of(self, row: BackgroundResponse) -> BackgroundRun:
        """Return a background response as it is written, or raise an error of its request."""

        def requested_turn() -> Turn:
            body = ResponsesBody.model_validate(json.loads(row.body))
            return chat_turn(from_responses.chat_body(body), self._served)

        turn = await asyncio.to_thread(requested_turn)
        turn = replace(turn, request=REQUEST.validate_json(row.request))
        run = BackgroundRun(row.owner, _begun(json.loads(row.response)), turn, self._served)
        await self._catch_up(run)
        return run

    async def _catch_up(self, run: BackgroundRun) -> bool:
        """Take the records that are new; return False if there cannot be more."""
        progress = await self._responses.progress(run.id, len(run.records))
        if progress is None:
            return False
        if progress.records:
            await asyncio.to_thread(run.feed_all, progress.records)
        run.show(len(run.events))
        return not progress.has_ended

    async def events(self, id: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events behind a number as they are written, here or by another process."""
        next_number = after + 1
        followed: BackgroundRun | None = None  # a run of another process
        may_continue = True
        while True:
            local = self._runs.get(id)
            if local is None and followed is None:
                row = await self._responses.find_background(id)
                if row is None:
                    return
                followed = await self.run_of(row)
            elif local is None and followed is not None:
                may_continue = await self._catch_up(followed)
            run = local or followed
            assert run is not None
            changed = run.changed
            if next_number < run.shown:
                events = run.events[next_number : run.shown]
                next_number = run.shown
                yield b"".join(events)
            elif run.ended and run.shown == len(run.events):
                return
            elif local is not None:
                await changed.wait()
                followed = None  # it may have events that are not written yet
            elif self._served.draining or not may_continue:
                return
            else:
                await asyncio.sleep(POLL_SECONDS)


def _letters_of(id: str) -> Callable[[], str]:
    """Return a function that draws the letters of further ids, which are the same in every process."""
    texts = (f"{id} {number}".encode() for number in itertools.count())
    digests = (hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts)
    return lambda: next(digests)


def _begun(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response as it was at first; the stored one may have ended."""
    return {**response, "output": [], "usage": None, "error": None, "incomplete_details": None}


def _loaded(row: BackgroundResponse) -> dict[str, Any]:
    """Return the response of a row, or what is left of one that is no longer JSON."""
    try:
        response: dict[str, Any] = json.loads(row.response)
    except ValueError:
        return {
            "id": row.id,
            "object": "response",
            "created_at": int(row.created),
            "output": [],
        }
    return response
