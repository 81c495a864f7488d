"""The faces of a server, each a way to ask for a case: what users of Cog, of the package, of Triton do."""

from __future__ import annotations

import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from cog_triton.client.stream import Inputs, Response, Streams, TritonClient
from cog_triton.deployment import Deployment
from cog_triton.errors import CogTritonError
from cog_triton.generation import generate
from cog_triton.request.request import triton_inputs
from cog_triton.wire import NO_PARAMETERS, Parameters
from tools.server_sent_events import EventParser
from tools.soak.plan import Case

RETRYABLE = ("E2105", "E2106")
CUT = "cut off"
"""The code of an answer whose connection was lost before its end."""
CANCELED = "canceled"
_CODE = re.compile(r"\bE\d{4}\b")


class AskError(Exception):
    """A request that failed.

    Attributes:
        code: E and four digits, or what else to count it as.
        retryable: whether it may be sent again as it is.
    """

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable or code in RETRYABLE


@dataclass(frozen=True)
class Piece:
    """A piece of an answer that came at once.

    Attributes:
        tokens: how many came with it; 0 where only the whole answer says so.
        ids: token ids, on faces that have them.
    """

    text: str = ""
    tokens: int = 0
    ids: tuple[int, ...] = ()


class Face(ABC):
    """One way to ask.

    Attributes:
        name: in reports.
        has_text, has_ids: what its pieces have.
        breaks: codes of errors that end an answer with the server, or the part of it, that gave it.
    """

    name: str
    has_text = True
    has_ids = False
    breaks: frozenset[str] = frozenset()

    @abstractmethod
    def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:
        """The answer to a case; closing the generator is a client that is gone.

        Raises:
            AskError: from the generator.
        """

    async def cancel(self, request_id: str) -> bool:  # noqa: ARG002
        """Asks the server to end a request; returns False where users cannot."""
        return False


class Recording:
    """Streams whose ids are written down as they pass."""

    def __init__(self, streams: Streams, ids: list[int]) -> None:
        self._streams = streams
        self._ids = ids

    @asynccontextmanager
    async def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncIterator[AsyncIterator[Response]]:
        """See ``Streams``."""
        async with self._streams.stream(request_id, inputs, parameters=parameters) as responses:
            yield self._note(responses)

    async def _note(self, responses: AsyncIterator[Response]) -> AsyncIterator[Response]:
        async for response in responses:
            self._ids.extend(response.ids)
            yield response


class SoakedDeployment(Deployment):
    """A deployment whose token ids can be looked at, too."""

    async def pieces(self, case: Case) -> AsyncGenerator[Piece, None]:
        """The answer to a case, with its ids."""
        ids: list[int] = []
        streams = Recording(self.streams, ids)
        answer = generate(case.request, streams, self.tokenizer, context_length=self.context_length)
        async with aclosing(answer) as chunks:
            async for chunk in chunks:
                new = tuple(ids)
                ids.clear()
                yield Piece(chunk.text, len(new), new)


class Generate(Face):
    """``Deployment.generate`` in this process."""

    name = "generate()"
    has_ids = True

    def __init__(self, deployment: SoakedDeployment) -> None:
        self._deployment = deployment

    async def ask(
        self,
        case: Case,
        request_id: str,  # noqa: ARG002
    ) -> AsyncGenerator[Piece, None]:
        try:
            async with aclosing(self._deployment.pieces(case)) as pieces:
                async for piece in pieces:
                    yield piece
        except CogTritonError as error:
            raise failure(error) from error


class TritonIds(Face):
    """The ensemble on Triton's own port, whose clients lose their streams when it dies."""

    has_text = False
    has_ids = True
    breaks = frozenset(RETRYABLE)

    def __init__(self, client: TritonClient, transport: str) -> None:
        self.name = f"Triton {transport}"
        self._client = client

    async def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:
        try:
            async with self._client.stream(request_id, triton_inputs(case.request)) as responses:
                async for response in responses:
                    yield Piece("", len(response.ids), tuple(response.ids))
        except CogTritonError as error:
            raise failure(error) from error


class CogFace(Face):
    """Base of the faces of Cog's server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def cancel(self, request_id: str) -> bool:
        url = f"{self._url}/predictions/{request_id}/cancel"
        try:
            async with self._session.post(url) as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    def _put(self, case: Case, request_id: str, accept: str) -> Any:
        url = f"{self._url}/predictions/{request_id}"
        return self._session.put(url, json={"input": case.inputs}, headers={"Accept": accept})


class CogSse(CogFace):
    """PUT /predictions/ID, streamed."""

    name = "Cog SSE"

    async def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:
        parser = EventParser()
        try:
            async with self._put(case, request_id, "text/event-stream") as reply:
                await _check(reply)
                async for data in reply.content.iter_any():
                    for name, body in parser.feed(data):
                        if piece := sse_piece(name, json.loads(body)):
                            yield piece
                        if name == "completed":
                            return
        except (aiohttp.ClientError, OSError) as error:
            raise AskError(type(error).__name__, str(error)) from error
        raise AskError(CUT, "the stream ended without its last event")


class CogJson(CogFace):
    """PUT /predictions/ID, answered as a whole."""

    name = "Cog JSON"

    async def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:
        try:
            async with self._put(case, request_id, "application/json") as reply:
                await _check(reply)
                prediction = await reply.json()
        except (aiohttp.ClientError, OSError) as error:
            raise AskError(type(error).__name__, str(error)) from error
        check_status(prediction)
        tokens = int(prediction["metrics"].get("output_token_count", 0))
        yield Piece("".join(prediction["output"]), tokens)


def sse_piece(name: str, data: dict[str, Any]) -> Piece | None:
    """Return the piece that an event of Cog's adds to the answer, if any.

    Raises:
        AskError: it is the end of a prediction that failed.
    """
    if name == "output":
        return Piece(data["chunk"])
    if name == "metric" and data["name"] == "output_token_count":
        return Piece("", int(data["value"]))
    if name in ("completed", "error"):
        check_status(data)
    return None


def check_status(prediction: dict[str, Any]) -> None:
    """Raises AskError for a prediction that did not succeed."""
    status = prediction.get("status") or "failed"
    if status == "canceled":
        raise AskError(CANCELED, "the prediction was cancelled")
    if status != "succeeded":
        text = str(prediction.get("error") or prediction)
        raise AskError(code_of(text), text)


def code_of(text: str) -> str:
    """The code in an error's text."""
    match = _CODE.search(text)
    return match[0] if match else "no code"


def failure(error: CogTritonError) -> AskError:
    """An error of the package as that of a request."""
    return AskError(error.code, str(error), retryable=bool(getattr(error, "retryable", False)))


def new_id() -> str:
    """A request's id, which says what process it is of: Cog's server names directories with it."""
    return f"{id_prefix(os.getpid())}{secrets.token_hex(6)}"


def id_prefix(pid: int) -> str:
    """Return the beginning of the ids of a worker's requests."""
    return f"soak{pid}x"


async def _check(reply: aiohttp.ClientResponse) -> None:
    if reply.status != 200:
        text = await reply.text()
        code = code_of(text)
        raise AskError(f"HTTP {reply.status}" if code == "no code" else code, text[:300])
