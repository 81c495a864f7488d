"""The load of a soak: streams that ask, one case after another, and what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.soak.expected import Difference, Expected, compare
from tools.soak.faces import CANCELED, AskError, Face, new_id
from tools.soak.plan import Case

LEFT_SHARE = 0.2  # of the requests, which their client cancels or leaves
LATEST_DEPARTURE = 3.0  # seconds
HUNG = "hung"
SILENCE_SECONDS = 120.0  # after which a stream counts as hung
ATTEMPTS = 6
NOTE_LENGTH = 20_000
FIRST_PAUSE = 1.0  # seconds before the second attempt, and twice as many before each further one

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request.

    Attributes:
        end: ``whole``, ``left`` by its client, ``broken`` with the server or the process that gave it, or
            ``failed``.
        tokens: that came.
        lost, wrong: see ``Difference``.
        code: of the error that it broke or failed with in the end.
        tried: the codes of errors after which it was sent again, as they came.
        note: the beginning of what was expected and what came, where they differ, or the error's text.
    """

    face: str
    key: int
    request_id: str
    end: str
    seconds: float
    tokens: int
    lost: int = 0
    wrong: int = 0
    code: str = ""
    tried: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Answer:
    """The answer so far."""

    text: str = ""
    tokens: int = 0
    ids: list[int] = field(default_factory=list)


@dataclass
class Attempt:
    """A case that is asked for, and what has come of it."""

    face: Face
    case: Case
    request_id: str = field(default_factory=new_id)
    answer: Answer = field(default_factory=Answer)


def difference(face: Face, expected: Expected, answer: Answer, *, whole: bool) -> Difference:
    """Compare by token ids where the face has them, and by the text where it has that."""
    parts = []
    if face.has_ids:
        parts.append(compare(expected.ids, answer.ids, whole=whole))
    elif whole and answer.tokens != len(expected.ids):
        parts.append(Difference(lost=abs(len(expected.ids) - answer.tokens)))
    if face.has_text:
        parts.append(compare(expected.text, answer.text, whole=whole))
    return next(filter(None, parts), Difference())


@dataclass(frozen=True)
class Departure:
    """A client's leaving before the end of its answer.

    Attributes:
        seconds: after which it leaves.
        cancels: whether it asks the server to end the request, where the face has a way; else it is gone.
    """

    seconds: float
    cancels: bool


class Streams:
    """So many streams on the faces of one server."""

    def __init__(
        self,
        faces: Sequence[Face],
        cases: Sequence[Case],
        expected: Sequence[Expected],
        emit: Emit,
        seed: int,
    ) -> None:
        """Nothing runs yet.

        Args:
            emit: takes an ``outcome`` for each request, and the time and tokens of each piece.
        """
        self._faces = faces
        self._cases = cases
        self._expected = expected
        self._emit = emit
        self._random = Random(seed)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """No further request is begun."""
        self._stopping.set()

    async def run(self, count: int) -> None:
        """Runs so many streams until ``stop``, and their last requests to the end."""
        await asyncio.gather(*(self._stream() for _ in range(count)))

    async def _stream(self) -> None:
        while not self._stopping.is_set():
            case, face = self._random.choice(self._cases), self._random.choice(self._faces)
            outcome = await self._request(face, case, self._departure())
            self._emit({"outcome": vars(outcome)})

    def _departure(self) -> Departure | None:
        if self._random.random() >= LEFT_SHARE:
            return None
        return Departure(self._random.random() * LATEST_DEPARTURE, self._random.random() < 0.5)

    async def _request(self, face: Face, case: Case, departure: Departure | None) -> Outcome:
        """Asks until an answer has come, or no further attempt is left."""
        tried: list[str] = []
        began = time.monotonic()
        while True:
            attempt = Attempt(face, case)
            end, code, note = "failed", "", ""
            try:
                end = await self._ask(attempt, departure)
            except AskError as error:
                if error.code in face.breaks:
                    end, code = "broken", error.code
                    await asyncio.sleep(FIRST_PAUSE)
                elif error.retryable and len(tried) + 1 < ATTEMPTS:
                    tried.append(error.code)
                    await asyncio.sleep(FIRST_PAUSE * 2 ** (len(tried) - 1))
                    continue
                else:
                    code, note = error.code, str(error)
            except Exception as error:  # whatever it is, it is what came of the request
                code, note = type(error).__name__, repr(error)
            return self._outcome(attempt, time.monotonic() - began, end, code, tried, note)

    def _outcome(
        self,
        attempt: Attempt,
        seconds: float,
        end: str,
        code: str,
        tried: Sequence[str],
        note: str,
    ) -> Outcome:
        face, answer, key = attempt.face, attempt.answer, attempt.case.key
        differs = difference(face, self._expected[key], answer, whole=end == "whole")
        if differs:
            note = f"{note} expected {self._expected[key]}, came {answer}"
        return Outcome(
            *(face.name, key, attempt.request_id, end, seconds, answer.tokens),
            *(differs.lost, differs.wrong, code, tuple(tried), note[:NOTE_LENGTH]),
        )

    async def _ask(self, attempt: Attempt, departure: Departure | None) -> str:
        """Takes in an answer, or as much of it as is wanted; returns how it ended.

        Raises:
            AskError: it failed.
        """
        reading = asyncio.create_task(self._read(attempt))
        try:
            if departure is not None:
                await asyncio.wait([reading], timeout=departure.seconds)
                if not reading.done():
                    asked = departure.cancels and await attempt.face.cancel(attempt.request_id)
                    if not asked:
                        return "left"
            return await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, attempt: Attempt) -> str:
        face, answer = attempt.face, attempt.answer
        async with contextlib.aclosing(face.ask(attempt.case, attempt.request_id)) as pieces:
            while True:
                try:
                    piece = await asyncio.wait_for(anext(pieces), SILENCE_SECONDS)
                except StopAsyncIteration:
                    return "whole"
                except asyncio.TimeoutError:
                    message = f"nothing came for {SILENCE_SECONDS:g} s"
                    raise AskError(HUNG, message) from None
                except AskError as error:
                    if error.code == CANCELED:
                        return "left"
                    raise
                answer.text += piece.text
                answer.tokens += piece.tokens
                answer.ids.extend(piece.ids)
                self._emit({"tokens": [time.monotonic(), max(piece.tokens, bool(piece.text))]})
