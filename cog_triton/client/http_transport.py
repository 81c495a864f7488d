"""Triton over HTTP: generate_stream of the ensemble that returns token ids and no text."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from functools import cached_property
from typing import Any

import aiohttp
import numpy.typing as npt

from cog_triton import wire
from cog_triton.client.stream import (
    CLOSED,
    Inputs,
    Response,
    ResponseStream,
    TritonClient,
    lost_after,
)
from cog_triton.errors import (
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnavailable,
    error_from_text,
)
from cog_triton.wire import LOG_PROBS, NO_PARAMETERS, OUTPUTS, Parameters

CONNECT_SECONDS = 10.0
STALL_SECONDS = 20.0
"""The longest silence after a first event. Measured with Triton 2.51: it drops events, and may drop the
rest of a stream, when its HTTP threads get no processor."""
END_SECONDS = 1.0
"""The wait for the end of a stream whose last event has come, which Triton may drop as well."""
LINE_BYTES = 2**26  # of an event, at most: a long prompt's log probabilities have tens of megabytes


class HttpClient(TritonClient):
    """See ``TritonClient``."""

    def __init__(
        self, address: str, *, response_timeout: float, stall_timeout: float = STALL_SECONDS
    ) -> None:
        """Connect to nothing yet; the address is host:port of Triton's HTTP endpoint."""
        super().__init__(response_timeout=response_timeout, stall_timeout=stall_timeout)
        self._models = f"http://{address}/v2/models"

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Belongs to the event loop that it is made in. ResponseStream limits silence.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES)

    async def _begin(
        self, stream: ResponseStream, request_id: str, inputs: Inputs, parameters: Parameters
    ) -> None:
        events = self.events(wire.IDS_ENSEMBLE, request_id, inputs, parameters)
        # A task, because a consumer that is cancelled while it reads would break the connection.
        stream.drop = self._spawn(self._read(events, stream)).cancel

    async def _read(
        self, events: AsyncGenerator[dict[str, Any], None], stream: ResponseStream
    ) -> None:
        response = None
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    response = stream.decode(flat_outputs(event))
                    stream.add(response)
                    if response.final:
                        # Read on, because a connection serves the next request only after the end.
                        stream.drop = lambda: None
                        stream.end()
                        await asyncio.wait_for(anext(events, None), END_SECONDS)
                        return
            # An embedded engine marks its last response; TensorRT-LLM's backend does not.
            if response is None or response.keeps_end_token:
                raise lost_after(stream.place)
            stream.add(Response([], None, final=True))
            stream.end()
        except asyncio.CancelledError:
            stream.end(TritonUnavailable(CLOSED))
            raise
        except Exception as error:
            stream.end(error)

    async def _send_stop(self, request_id: str) -> None:
        async for _ in self.events(wire.ENGINE, request_id, wire.stop_inputs()):
            pass

    async def _disconnect(self) -> None:
        await self._session.close()

    async def events(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of any model's generate_stream.

        Raises:
            CogTritonError: Triton cannot be reached, or answered with an error.
        """
        # Keys that are not inputs of the model become parameters of the request.
        tensors = {name: json_value(value) for name, value in inputs.items()}
        url, body = f"{self._models}/{model}/generate_stream", {"id": request_id, **tensors}
        try:
            async with self._session.post(url, json={**body, **parameters}) as reply:
                if reply.content_type != "text/event-stream":  # an early error is a plain object
                    plain = await reply.read()
                    if plain or not reply.ok:
                        yield _object(plain)
                    return
                async for line in reply.content:
                    if line.startswith(b"data:"):
                        yield _object(line[5:])
        except (aiohttp.ClientError, OSError) as error:  # a time-out is either
            problem = str(error) or repr(error)
            raise TritonUnavailable(f"Triton cannot be reached: {problem}") from None


def _object(data: bytes) -> dict[str, Any]:
    shown = repr(data[:200].decode(errors="replace"))
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TritonMalformedJSON(f"Triton sent {shown}: {error}") from None
    if not isinstance(value, dict):
        raise TritonMalformedEvent(f"Triton sent {shown}, which is not an object")
    if "error" in value:  # in any event, because the HTTP status is fixed on the first
        raise error_from_text(str(value["error"]))
    return value


def flat_outputs(event: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the outputs for ``decode_response``."""
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
    return outputs


def json_value(value: npt.NDArray[Any]) -> Any:
    """Return the element of a tensor, or the list of them, as Triton's generate endpoint takes it."""
    items = [item.decode() if isinstance(item, bytes) else item for item in value.ravel().tolist()]
    return items if len(items) > 1 else items[0]
