"""The input file of a batch: its lines, and the checks before any of them runs."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.pacing import ThreadPace
from cog_triton.api.openai.schemas.files_and_batches import LineBody
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.storage.batches import BatchError
from cog_triton.api.openai.storage.files import INPUT, FileStore, LineRow
from cog_triton.api.openai.validation import validated
from cog_triton.errors import shown

MAX_LINES = 50_000
MAX_ERRORS = 100
INVALID_LINE = "invalid_json_line"


@dataclass(frozen=True)
class InputLine:
    """A line as it was uploaded, with its number in the file, from 1."""

    number: int
    data: bytes


async def lines_of(files: FileStore, file_id: str) -> AsyncIterator[list[InputLine]]:
    """Yield the lines of an upload that are not blank, some at a time."""
    async for rows in files.rows(file_id, INPUT):
        yield await asyncio.to_thread(split_lines, rows)


def split_lines(rows: Iterable[LineRow]) -> list[InputLine]:
    """Return the lines in some rows of an upload without blank ones, which have numbers all the same."""
    lines: list[InputLine] = []
    for row in rows:
        if not row.data.strip():
            continue
        for number, data in enumerate(row.data.split(b"\n"), row.line):
            if data.strip():
                lines.append(InputLine(number, data))
    return lines


def parsed_line(data: bytes, served: Served) -> LineBody:
    """Return the request of a line, or raise ApiError."""
    return validated(data, LineBody, served)


class Checks:
    """The errors of an input file, and the number of its requests."""

    def __init__(self, endpoint: str, served: Served) -> None:
        self.errors: list[BatchError] = []
        self.total = 0
        self._endpoint = endpoint
        self._served = served
        self._seen: set[str] = set()

    def read(self, lines: Sequence[InputLine]) -> bool:
        """Check some lines; return whether more may follow."""
        pace = ThreadPace()
        for line in lines:
            pace.rest_if_due()
            self.total += 1
            try:
                self._check(line.data)
            except ApiError as error:
                self.errors.append(_line_error(error, line.number))
        if self.total > MAX_LINES:
            self.add("too_many_tasks", f"a batch may have at most {MAX_LINES} requests")
        return self.total <= MAX_LINES and len(self.errors) < MAX_ERRORS

    def add(self, code: str, message: str) -> None:
        """Add an error of the whole file."""
        self.errors.append(BatchError(code=code, message=message))

    def _check(self, data: bytes) -> None:
        if len(data) > self._served.settings.max_request_bytes:
            text = "This line is larger than the maximum size of a request."
            raise invalid(text, code=INVALID_LINE)
        line = parsed_line(data, self._served)
        if line.url != self._endpoint:
            text = f"url must be the batch's endpoint, {self._endpoint}"
            raise invalid(text, "url", "url_mismatch")
        if line.custom_id in self._seen:
            text = f"the custom_id {shown(line.custom_id)} is already used by an earlier line"
            raise invalid(text, "custom_id", "duplicate_custom_id")
        self._seen.add(line.custom_id)


def _line_error(error: ApiError, number: int) -> BatchError:
    if error.code is None:
        text = "This line is not parseable as a JSON object."
        return BatchError(code=INVALID_LINE, message=text, param=error.param, line=number)
    return BatchError(code=error.code, message=error.message, param=error.param, line=number)
