"""Triton over HTTP: generate_stream of the ensemble that returns token ids and no text."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property
from typing import Any

import aiohttp
import numpy.typing as npt

from cog_triton.client.arrivals import CLOSED
from cog_triton.client.server_sent_events import EventParser
from cog_triton.client.stream import (
    Inputs,
    Response,
    ResponseStream,
    TritonClient,
    check_total,
    checked_response,
    error_from_text,
    wanted_log_probs,
)
from cog_triton.errors import (
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnavailable,
)
from cog_triton.wire import (
    CHECKED_IDS,
    CONTINUED,
    ENGINE,
    IDS_ENSEMBLE,
    LOG_PROBS,
    OUTPUTS,
    Parameters,
    ids_text,
    stop_inputs,
)

CONNECT_SECONDS = 10.0
STALL_SECONDS = 20.0
"""Triton may lose the rest of a stream; see ``TritonClient``."""
END_SECONDS = 1.0
"""The wait for the end of a stream whose last event has come: Triton may lose that."""


class HttpClient(TritonClient):
    """See ``TritonClient``."""

    def __init__(
        self, address: str, *, response_timeout: float, stall_timeout: float = STALL_SECONDS
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: host:port of Triton's HTTP endpoint.
        """
        super().__init__(response_timeout=response_timeout, stall_timeout=stall_timeout)
        self._models = f"http://{address}/v2/models"
        self._readers: set[asyncio.Task[None]] = set()

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Belongs to the event loop that it is made in.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # ResponseStream limits silence.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    async def _begin(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> ResponseStream:
        top = wanted_log_probs(inputs, parameters)
        parameters = {**parameters, CHECKED_IDS: True}
        if continued:
            parameters = {**parameters, CONTINUED: ids_text(continued)}
        stream = ResponseStream(self._response_timeout)
        events = self.events(IDS_ENSEMBLE, request_id, inputs, parameters)
        # A task, because a consumer that is cancelled while it reads would break the connection.
        reader = asyncio.create_task(self._read(events, stream, top))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        stream.drop = reader.cancel
        return stream

    async def _read(
        self, events: AsyncGenerator[dict[str, Any], None], stream: ResponseStream, top: int | None
    ) -> None:
        place, response = 0, None
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    response = parse_event(event, place, top)
                    place += len(response.ids)
                    stream.add(response)
                    if response.final:
                        # Read on, because a connection serves the next request only after the end.
                        stream.drop = lambda: None
                        stream.end()
                        await asyncio.wait_for(anext(events, None), END_SECONDS)
                        return
            if response is None:
                raise TritonMalformedEvent("Triton ended the stream without a response")
            # An embedded engine marks its last response; TensorRT-LLM's backend does not. Measured with
            # Triton 2.51: it drops events when its HTTP threads get no processor.
            if response.keeps_end_token:
                check_total(place, None)
            stream.add(Response([], None, final=True))
            stream.end()
        except asyncio.CancelledError:
            stream.end(TritonUnavailable(CLOSED))
            raise
        except Exception as error:
            stream.end(error)

    async def _send_stop(self, request_id: str) -> None:
        async for _ in self.events(ENGINE, request_id, stop_inputs()):
            pass

    async def _disconnect(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._session.close()

    async def events(
        self,
        model: str,
        request_id: str,
        inputs: Inputs,
        parameters: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of any model's generate_stream.

        Raises:
            CogTritonError: Triton cannot be reached, or answered with an error.
        """
        # Keys that are not inputs of the model become parameters of the request.
        tensors = {name: json_value(value) for name, value in inputs.items()}
        body = {"id": request_id, **tensors, **(parameters or {})}
        try:
            url = f"{self._models}/{model}/generate_stream"
            async with self._session.post(url, json=body) as reply:
                async for event in _parse_reply(reply):
                    # The HTTP status is fixed on the first event, so errors come in any.
                    if "error" in event:
                        raise error_from_text(str(event["error"]))
                    yield event
        except (aiohttp.ClientError, OSError) as error:  # a time-out is either
            raise TritonUnavailable(
                f"Triton cannot be reached: {str(error) or repr(error)}"
            ) from None


async def _parse_reply(reply: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of a reply: its events, or a single plain object for an early error."""
    if reply.content_type != "text/event-stream":
        body = await reply.read()
        if body or not reply.ok:
            yield _object(body)
        return
    parser = EventParser()
    async for data in reply.content.iter_any():
        for _, event in parser.feed(data):
            yield _object(event)


def _object(data: bytes) -> dict[str, Any]:
    shown = repr(data[:200].decode(errors="replace"))
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TritonMalformedJSON(f"Triton sent {shown}: {error}") from None
    if not isinstance(value, dict):
        raise TritonMalformedEvent(f"Triton sent {shown}, which is not an object")
    return value


def parse_event(event: Mapping[str, Any], place: int = 0, top: int | None = None) -> Response:
    """Return the response in an event of generate_stream; it is final if the event has the total.

    Args:
        place: how many ids have come before it.
        top: see ``wanted_log_probs``.

    Raises:
        TritonMalformedEvent: an output is missing or of a wrong type, or the stream is not complete up to
            here.
    """
    outputs = {
        # Triton writes a tensor of a single element as a scalar.
        name: event[name] if isinstance(event[name], list) else [event[name]]
        for name in (*OUTPUTS, LOG_PROBS)
        if name in event
    }
    for name in OUTPUTS:
        for item in outputs.get(name, ()):
            if type(item) is not int or not -(2**31) <= item < 2**31:
                text = f"{name}, {str(event[name])[:100]}, is not of 32-bit integers"
                raise TritonMalformedEvent(f"a response of the ensemble is malformed: {text}")
    return checked_response(outputs, place, top)


def json_value(value: npt.NDArray[Any]) -> Any:
    """Return the element of a tensor, or the list of them, as Triton's generate endpoint takes it."""
    items = [item.decode() if isinstance(item, bytes) else item for item in value.ravel().tolist()]
    return items if len(items) > 1 else items[0]
