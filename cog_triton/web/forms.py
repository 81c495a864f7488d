"""Bodies of multipart/form-data, read as they come, beside the event loop where they are large."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cog_triton.web.bodies import BadBody, off_loop

FORM_PARTS = 16
# Of all headers of a part.
FORM_HEADER_BYTES = 2**13
# Of a part that is read as a text.
FORM_TEXT_BYTES = 2**20
# Of a part; more of it is written to a file.
_SPOOLED_BYTES = 2**20


@dataclass
class Part:
    """One part of a form. Its content is kept in memory, or in a temporary file if it is large."""

    name: str
    filename: str | None
    content_type: str
    file: IO[bytes]
    size: int = 0

    def text(self) -> str:
        """Return the content of a field, or raise BadBody."""
        if self.size > FORM_TEXT_BYTES:
            raise BadBody(f"must have at most {FORM_TEXT_BYTES} bytes in {self.name[:40]!r}")
        self.file.seek(0)
        try:
            return self.file.read().decode()
        except UnicodeDecodeError:
            raise BadBody(f"must have text in UTF-8 in {self.name[:40]!r}") from None


@asynccontextmanager
async def read_form(
    body: AsyncIterator[bytes], content_type: str
) -> AsyncIterator[dict[str, Part]]:
    """Read a body of multipart/form-data as it comes: its parts by their names, the first of each.

    The content of the parts is there until the end of the context. Raises BadBody.
    """
    reader = _FormReader(content_type)
    received = 0
    try:
        async for piece in body:
            received += len(piece)
            # By the size so far: a form that has become large is read in a thread.
            await off_loop(received, reader.feed, piece)
        yield reader.finished()
    finally:
        reader.close()


@dataclass
class _FormReader:
    """Makes parts of the pieces of a body; their names and texts are in UTF-8, whatever it says."""

    content_type: str
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind, options = parse_options_header(self.content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise BadBody("must be multipart/form-data, with a boundary")
        self._ended = False
        self._header_bytes = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[str, str] = {}
        callbacks: Any = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add_content,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, piece: bytes) -> None:
        if self._ended:
            # What follows the last boundary is no part.
            return
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise BadBody(f"must be multipart/form-data: {str(error)[:200]}") from None

    def finished(self) -> dict[str, Part]:
        if not self._ended:
            raise BadBody("must be multipart/form-data: it ends before its last boundary")
        for part in self.parts:
            part.file.seek(0)
        # Reversed, so that the first part of a name overwrites the later ones.
        return {part.name: part for part in reversed(self.parts)}

    def close(self) -> None:
        for part in self.parts:
            part.file.close()

    def _begin_part(self) -> None:
        if len(self.parts) == FORM_PARTS:
            raise BadBody(f"must have at most {FORM_PARTS} parts")
        self._header_bytes = 0
        self._headers = {}

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > FORM_HEADER_BYTES:
            raise BadBody(f"must have at most {FORM_HEADER_BYTES} bytes of headers in a part")

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name = self._header_name.decode("latin-1").lower()
        self._headers[name] = self._header_value.decode("latin-1")
        self._header_name.clear()
        self._header_value.clear()

    def _begin_content(self) -> None:
        """Begin a part, whose headers have all come."""
        _, options = parse_options_header(self._headers.get("content-disposition"))
        if b"name" not in options:
            raise BadBody("must have a name in the Content-Disposition of each part")
        filename = options.get(b"filename")
        kind, _ = parse_options_header(self._headers.get("content-type"))
        part = Part(
            name=options[b"name"].decode(errors="replace"),
            filename=None if filename is None else filename.decode(errors="replace"),
            content_type=kind.decode("latin-1"),
            file=tempfile.SpooledTemporaryFile(max_size=_SPOOLED_BYTES),  # noqa: SIM115
        )
        self.parts.append(part)

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.file.write(data[start:end])
        part.size += end - start

    def _end(self) -> None:
        self._ended = True
