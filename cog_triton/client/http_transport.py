"""Triton over HTTP: generate_stream of the ensemble that returns token ids and no text."""

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any

import aiohttp
import numpy.typing as npt

from cog_triton import errors
from cog_triton.client.stream import CLOSED, Arrivals, Inputs, Outputs, TritonClient
from cog_triton.protocol.names import LOG_PROBS, NO_PARAMETERS, OUTPUTS, TRACEPARENT, Parameters

CONNECT_SECONDS = 10.0
STALL_SECONDS = 20.0  # of silence after a first event: Triton 2.51 may drop the rest of a stream
END_SECONDS = 1.0  # to wait for a stream's end after its last event: Triton may drop it as well
LINE_BYTES = 2**26  # of an event, at most: a long prompt's log probabilities have tens of megabytes

Event = dict[str, Any]
UNMARKED_END: Event = {"output_ids": [], "sequence_length": 0}  # TensorRT-LLM marks no last event


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
    ) -> Arrivals[Event]:
        arrivals: Arrivals[Event] = Arrivals()
        events = self.events(model, request_id, inputs, parameters)
        # A task, because a consumer that is cancelled while it reads would break the connection.
        arrivals.close = self._spawn(_read(events, arrivals)).cancel
        return arrivals

    def _parse(self, message: Event) -> tuple[Outputs, bool]:
        return flat_outputs(message), _is_final(message)

    async def _disconnect(self) -> None:
        await self._session.close()

    async def events(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of any model's generate_stream, or raise CogTritonError."""
        # Keys that are not inputs of the model become parameters of the request.
        tensors = {name: json_value(value) for name, value in inputs.items()}
        url, body = f"{self._models}/{model}/generate_stream", {"id": request_id, **tensors}
        try:
            headers = {name: str(parameters[name]) for name in parameters.keys() & {TRACEPARENT}}
            body |= parameters
            async with self._session.post(url, json=body, headers=headers) as reply:
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
            raise errors.TritonUnavailable(f"Triton cannot be reached: {problem}") from None


async def _read(events: AsyncGenerator[Event, None], arrivals: Arrivals[Event]) -> None:
    event: Event = {}
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                arrivals.add(event)
                if _is_final(event):
                    # Read on, because a connection serves the next request only after the end.
                    arrivals.close = lambda: None
                    arrivals.end()
                    await asyncio.wait_for(anext(events, None), END_SECONDS)
                    return
        if "sequence_length" in event:
            arrivals.add(UNMARKED_END)
        arrivals.end()
    except asyncio.CancelledError:
        arrivals.end(errors.TritonUnavailable(CLOSED))
        raise
    except Exception as error:
        arrivals.end(error)


def _is_final(event: Event) -> bool:
    ids = event.get("output_ids")
    first = ids[0] if isinstance(ids, list) and ids and "sequence_length" not in event else 0
    return event is UNMARKED_END or (isinstance(first, int) and first < 0)


def _object(data: bytes) -> Event:
    shown = repr(data[:200].decode(errors="replace"))
    try:
        value = json.loads(data)
    except ValueError as error:
        raise errors.TritonMalformedJSON(f"Triton sent {shown}: {error}") from None
    if not isinstance(value, dict):
        raise errors.TritonMalformedEvent(f"Triton sent {shown}, which is not an object")
    if "error" in value:  # in any event, because the HTTP status is fixed on the first
        raise errors.error_from_text(str(value["error"]))
    return value


def flat_outputs(event: Event) -> Outputs:
    """Return the outputs for ``decode_response``."""
    outputs = {}
    for name in event.keys() & {*OUTPUTS, LOG_PROBS}:
        value = event[name]
        # Triton writes a tensor of a single element as a scalar.
        outputs[name] = value if isinstance(value, list) else [value]
        try:
            array("f" if name == LOG_PROBS else "i", outputs[name])
        except (TypeError, OverflowError):
            text = f"a response of the ensemble is malformed: {name}, {str(value)[:100]}"
            raise errors.TritonMalformedEvent(text) from None
    return outputs


def json_value(value: npt.NDArray[Any]) -> Any:
    """Return the element of a tensor, or the list of them, as Triton's generate endpoint takes it."""
    items = [item.decode() if isinstance(item, bytes) else item for item in value.ravel().tolist()]
    return items if len(items) > 1 else items[0]
