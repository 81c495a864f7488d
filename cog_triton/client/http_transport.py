"""Triton over HTTP: generate_stream of the ensemble that returns token ids and no text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import aiohttp
import numpy.typing as npt

from cog_triton.client.server_sent_events import EventParser
from cog_triton.client.stream import Inputs, Response, TritonClient, error_from_text
from cog_triton.errors import TritonMalformedEvent, TritonMalformedJSON, TritonUnavailable
from cog_triton.protocol import (
    CONTINUED,
    ENGINE,
    IDS_ENSEMBLE,
    IDS_ONLY,
    continued_text,
    stop_inputs,
)

CONNECT_SECONDS = 10.0


class HttpClient(TritonClient):
    """See ``TritonClient``."""

    def __init__(self, address: str, *, response_timeout: float) -> None:
        """Connects to nothing yet.

        Args:
            address: host:port of Triton's HTTP endpoint.
        """
        super().__init__(response_timeout=response_timeout)
        self._models = f"http://{address}/v2/models"

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Belongs to the event loop that it is made in.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # Silence is bounded by ResponseStream.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    async def _responses(
        self, request_id: str, inputs: Inputs, continued: Sequence[int]
    ) -> AsyncGenerator[Response, None]:
        """The responses, and an empty last one: the endpoint does not say which is the last."""
        count, ids, announced, counts = 0, 0, None, False
        # What is no input of the model becomes a parameter of the request.
        parameters: dict[str, Any] = {IDS_ONLY: True}
        if continued:
            parameters[CONTINUED] = continued_text(continued)
        async for event in self.events(IDS_ENSEMBLE, request_id, inputs, parameters):
            response = parse_event(event)
            ids += len(response.ids)
            # An engine that knows ids_only ends with the count of all, and sends no length.
            announced = event.get("num_output_tokens", announced)
            counts = "sequence_length" not in event
            yield response
            count += 1
        if not count:
            raise TritonMalformedEvent("Triton ended the stream without a response")
        if counts and ids != announced:
            # Measured with Triton 2.51: it drops events when its HTTP threads get no processor.
            raise TritonMalformedEvent(f"Triton's stream has {ids} tokens of {announced}")
        yield Response([], None, final=True)

    async def _send_stop(self, request_id: str) -> None:
        async for _ in self.events(ENGINE, request_id, stop_inputs()):
            pass

    async def _disconnect(self) -> None:
        await self._session.close()

    async def events(
        self,
        model: str,
        request_id: str,
        inputs: Inputs,
        parameters: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of any model's generate_stream, as they come.

        Raises:
            CogTritonError: Triton cannot be reached, or answered with an error.
        """
        tensors = {name: json_value(value) for name, value in inputs.items()}
        body = {"id": request_id, **tensors, **(parameters or {})}
        url = f"{self._models}/{model}/generate_stream"
        with _mapped_errors():
            async with self._session.post(url, json=body) as reply:
                async for event in _parse_reply(reply):
                    # The HTTP status is fixed on the first event, so errors come in any.
                    if "error" in event:
                        raise error_from_text(str(event["error"]))
                    yield event


async def _parse_reply(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a reply: its events, or a single plain object for an early error."""
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
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TritonMalformedJSON(f"Triton sent {_shown(data)}: {error}") from None
    if not isinstance(value, dict):
        raise TritonMalformedEvent(f"Triton sent {_shown(data)}, which is no object")
    return value


def _shown(data: bytes) -> str:
    return repr(data[:200].decode(errors="replace"))


def parse_event(event: Mapping[str, Any]) -> Response:
    """The response in an event of generate_stream.

    Raises:
        TritonMalformedEvent: output_ids is missing, or it or sequence_length is of a wrong type.
    """
    try:
        ids = _flat(event["output_ids"])
        # TensorRT-LLM's may be padded; an engine that knows ids_only sends no length.
        length = _flat(event["sequence_length"])[0] if "sequence_length" in event else len(ids)
    except (KeyError, IndexError, TypeError) as error:
        raise TritonMalformedEvent(f"a response of the ensemble is malformed: {error!r}") from None
    return Response(
        ids[:length],
        event.get("num_input_tokens"),
        final=False,
        keeps_end_token="sequence_length" not in event,
    )


def _flat(value: Any) -> list[int]:
    """A tensor's integers; Triton writes one of a single element as a scalar."""
    values = value if isinstance(value, list) else [value]
    if not all(type(item) is int and abs(item) < 2**31 for item in values):
        raise TypeError(f"{str(value)[:100]} is not of 32-bit integers")
    return values


def json_value(value: npt.NDArray[Any]) -> Any:
    """The element of a tensor, or the list of them, as Triton's generate endpoint takes it."""
    items = [item.decode() if isinstance(item, bytes) else item for item in value.ravel().tolist()]
    return items if len(items) > 1 else items[0]


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:  # a time-out is either
        raise TritonUnavailable(f"Triton cannot be reached: {str(error) or repr(error)}") from None
