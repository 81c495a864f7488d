"""Triton over HTTP: generate_stream of the ensemble that returns token ids and no text."""

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any
from uuid import uuid4

import aiohttp
import numpy.typing as npt
from aiohttp.http_exceptions import LineTooLong

from cog_triton import errors
from cog_triton.client.arrivals import Arrivals
from cog_triton.client.connections import CLOSED
from cog_triton.client.responses import Inputs, Outputs, TensorOutputs
from cog_triton.client.stream import TritonClient
from cog_triton.protocol.frames import Frame, FrameAddress, decode_frames
from cog_triton.protocol.names import (
    DIMS,
    FRAMES,
    FRAMES_FOR,
    IDS_ENSEMBLE,
    LOG_PROBS,
    NO_PARAMETERS,
    TRACEPARENT,
    Parameters,
)

CONNECT_SECONDS = 10.0
# Of silence after a first event: Triton 2.51 may drop the rest of a stream.
STALL_SECONDS = 20.0
# To wait for a stream's end after its last event: Triton may drop it as well.
END_SECONDS = 1.0
# Of an event, at most: a long prompt's log probabilities have tens of megabytes.
LINE_BYTES = 2**26

Event = dict[str, Any]
# TensorRT-LLM marks no last event.
UNMARKED_END = TensorOutputs({"output_ids": [], "sequence_length": [0]}, final=True)


class HttpClient(TritonClient):
    """See ``TritonClient``."""

    def __init__(
        self, address: str, *, response_timeout: float, stall_timeout: float = STALL_SECONDS
    ) -> None:
        """Connect to nothing yet; the address is host:port of Triton's HTTP endpoint."""
        super().__init__(response_timeout, stall_timeout)
        self._models = f"http://{address}/v2/models"

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Belongs to the event loop that it is made in. The base class limits silence.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES)

    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Arrivals[Frame | TensorOutputs]:
        arrivals: Arrivals[Frame | TensorOutputs] = Arrivals()
        if model == IDS_ENSEMBLE:
            # Each request has a reader, since each has its stream.
            address = FrameAddress(reader=uuid4().hex, sequence=1)
            parameters = {**parameters, FRAMES_FOR: address.parameter()}
        events = self.events(model, request_id, inputs, parameters)
        # A task, because a consumer that is cancelled while it reads would break the connection.
        arrivals.close = self._spawn(_read(events, arrivals)).cancel
        return arrivals

    def _parse(self, message: Any) -> Frame | TensorOutputs:
        parsed: Frame | TensorOutputs = message
        return parsed

    async def _disconnect(self) -> None:
        await self._session.close()

    async def events(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of any model's generate_stream, or raise CogTritonError."""
        # Keys that are not inputs of the model become parameters of the request.
        tensors = {name: json_value(value) for name, value in inputs.items()}
        body = {"id": request_id, **tensors, **parameters}
        url = f"{self._models}/{model}/generate_stream"
        headers = {}
        if TRACEPARENT in parameters:
            headers[TRACEPARENT] = str(parameters[TRACEPARENT])
        try:
            async with self._session.post(url, json=body, headers=headers) as reply:
                if reply.content_type != "text/event-stream":
                    # An early error is a plain object.
                    plain = await reply.read()
                    if plain or not reply.ok:
                        yield _object(plain)
                    return
                async for line in _lines(reply.content):
                    if line.startswith(b"data:"):
                        yield _object(line[5:])
        except (aiohttp.ClientError, OSError) as error:
            # A time-out is either of them, and may have no text.
            problem = str(error) or repr(error)
            raise errors.TritonUnavailable(f"Triton cannot be reached: {problem}") from None


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a reply, or raise TritonMalformedEvent for one that is too long."""
    while True:
        try:
            line = await content.readline()
        except (LineTooLong, ValueError):  # the latter of older releases
            raise errors.TritonMalformedEvent(
                f"Triton sent an event of more than {LINE_BYTES} bytes"
            ) from None
        if not line:
            return
        yield line


async def _read(
    events: AsyncGenerator[Event, None], arrivals: Arrivals[Frame | TensorOutputs]
) -> None:
    """Add the events to the arrivals, and end those, however the events end."""
    last: Frame | TensorOutputs | None = None
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                last = parse_event(event)
                arrivals.add(last)
                if isinstance(last, Frame) and last.final:
                    # Read on, because a connection serves the next request only after the end.
                    arrivals.close = lambda: None
                    arrivals.end()
                    await asyncio.wait_for(anext(events, None), END_SECONDS)
                    return
        if isinstance(last, TensorOutputs) and "sequence_length" in last.values:
            arrivals.add(UNMARKED_END)
        arrivals.end()
    except asyncio.CancelledError:
        arrivals.end(errors.TritonUnavailable(CLOSED))
        raise
    except Exception as error:
        arrivals.end(error)


def parse_event(event: Event) -> Frame | TensorOutputs:
    """Return the frame or the tensors of an event, or raise TritonMalformedEvent."""
    outputs = flat_outputs(event)
    if FRAMES not in outputs:
        return TensorOutputs(outputs, final=False)
    frames = decode_frames(outputs[FRAMES])
    if len(frames) != 1:
        raise errors.TritonMalformedEvent(f"a response has {len(frames)} frames instead of one")
    return frames[0]


def _object(data: bytes) -> Event:
    shown = repr(data[:200].decode(errors="replace"))
    try:
        value = json.loads(data)
    except ValueError as error:
        raise errors.TritonMalformedJSON(f"Triton sent {shown}: {error}") from None
    if not isinstance(value, dict):
        raise errors.TritonMalformedEvent(f"Triton sent {shown}, which is not an object")
    if "error" in value:
        # Any event may be an error: the HTTP status was sent with the first one.
        raise errors.error_from_text(str(value["error"]))
    return value


def flat_outputs(event: Event) -> Outputs:
    """Return an event's outputs, each flat, or raise TritonMalformedEvent."""
    outputs = {}
    for name in event.keys() & DIMS.keys():
        value = event[name]
        # Triton writes a tensor of a single element as a scalar.
        outputs[name] = value if isinstance(value, list) else [value]
        try:
            # Raises where an element is not a 32-bit number.
            array("f" if name == LOG_PROBS else "i", outputs[name])
        except (TypeError, OverflowError):
            text = f"a response of the ensemble is malformed: {name}, {str(value)[:100]}"
            raise errors.TritonMalformedEvent(text) from None
    return outputs


def json_value(value: npt.NDArray[Any]) -> Any:
    """Return the element of a tensor, or the list of them, as Triton's generate endpoint takes it."""
    items = [item.decode() if isinstance(item, bytes) else item for item in value.ravel().tolist()]
    return items if len(items) > 1 else items[0]
