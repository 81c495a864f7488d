"""Triton over HTTP: generate_stream of the ensemble that returns token ids and no text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from cog_triton.client.server_sent_events import EventParser
from cog_triton.client.stream import (
    Inputs,
    Response,
    ResponseStream,
    TritonClient,
    check_total,
    checked_ids,
    error_from_text,
    log_probs,
    prompt_log_probs,
    wanted_log_probs,
)
from cog_triton.errors import (
    CogTritonError,
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
    Parameters,
    checksum,
    ids_text,
    stop_inputs,
)

CONNECT_SECONDS = 10.0
STALL_SECONDS = 20.0
"""Triton may also forget a stream in the middle; see ``TritonClient``."""
END_SECONDS = 1.0
"""For which the end of a stream is awaited whose last event has come: Triton may forget it."""


class HttpClient(TritonClient):
    """See ``TritonClient``."""

    def __init__(
        self, address: str, *, response_timeout: float, stall_timeout: float = STALL_SECONDS
    ) -> None:
        """Connects to nothing yet.

        Args:
            address: host:port of Triton's HTTP endpoint.
        """
        super().__init__(response_timeout=response_timeout, stall_timeout=stall_timeout)
        self._models = f"http://{address}/v2/models"

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Belongs to the event loop that it is made in.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # Silence is bounded by ResponseStream.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    async def _begin(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> ResponseStream:
        responses = self._responses(request_id, inputs, continued, parameters)
        return ResponseStream(responses, self._response_timeout)

    async def _responses(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> AsyncGenerator[Response, None]:
        """The responses, and an empty last one: the endpoint does not say which is the last."""
        # What is no input of the model becomes a parameter of the request.
        top = wanted_log_probs(inputs, parameters)
        parameters = {**parameters, CHECKED_IDS: True}
        if continued:
            parameters = {**parameters, CONTINUED: ids_text(continued)}
        place, response = 0, None
        events = self.events(IDS_ENSEMBLE, request_id, inputs, parameters)
        async with contextlib.aclosing(events):
            async for event in events:
                response = parse_event(event, place, top)
                place += len(response.ids)
                yield dataclasses.replace(response, final=False) if response.final else response
                if response.final:
                    await _end(events)
                    break
        if response is None:
            raise TritonMalformedEvent("Triton ended the stream without a response")
        # An engine that checks its ids says which response is the last; TensorRT-LLM's backend does not.
        # Measured with Triton 2.51: it drops events when its HTTP threads get no processor.
        if response.keeps_end_token and not response.final:
            check_total(place, None)
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
    ) -> AsyncGenerator[dict[str, Any], None]:
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


async def _end(events: AsyncGenerator[dict[str, Any], None]) -> None:
    """Waits for the end of a reply, so that its connection can serve the next request."""
    with contextlib.suppress(asyncio.TimeoutError, CogTritonError, StopAsyncIteration):
        await asyncio.wait_for(anext(events), END_SECONDS)


async def _parse_reply(reply: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
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


def parse_event(event: Mapping[str, Any], place: int = 0, top: int | None = None) -> Response:
    """The response in an event of generate_stream; it is final if the event says so.

    Args:
        place: how many ids have come before it.
        top: see ``wanted_log_probs``.

    Raises:
        TritonMalformedEvent: output_ids is missing, or it or sequence_length is of a wrong type, or the
            stream is not whole up to here.
    """
    prompt, total = event.get("num_input_tokens"), event.get("num_output_tokens")
    try:
        ids = _flat(event["output_ids"])
        if "sequence_length" in event:  # TensorRT-LLM's, which may be padded
            new = ids[: _flat(event["sequence_length"])[0]]
            likely = log_probs(new, _floats(event.get(LOG_PROBS)), top)
            return Response(new, prompt, final=False, keeps_end_token=False, log_probs=likely)
    except (KeyError, IndexError, TypeError) as error:
        raise TritonMalformedEvent(f"a response of the ensemble is malformed: {error!r}") from None
    new = checked_ids(ids, checksum(array("i", ids[1:]), place), place)
    if total is not None:
        check_total(place + len(new), total)
    values = _floats(event.get(LOG_PROBS))
    likely, before = log_probs(new, values, top), prompt_log_probs(new, values, top)
    return Response(new, prompt, final=total is not None, log_probs=likely, prompt_log_probs=before)


def _floats(value: Any) -> npt.NDArray[Any] | None:
    return None if value is None else np.array(value, np.float32).ravel()


def _flat(value: Any) -> list[int]:
    """A tensor's integers; Triton writes one of a single element as a scalar."""
    values = value if isinstance(value, list) else [value]
    if not all(type(item) is int and -(2**31) <= item < 2**31 for item in values):
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
