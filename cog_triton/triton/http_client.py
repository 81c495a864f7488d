"""Triton over HTTP: the generate_stream endpoint, which always runs the whole ensemble."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from cog_triton.errors import TritonMalformedEvent, TritonMalformedJSON, TritonUnavailable
from cog_triton.triton.client import (
    ENGINE,
    ENSEMBLE,
    Inputs,
    Response,
    TritonClient,
    error_from_text,
    stop_inputs,
)


class HttpClient(TritonClient):
    """See ``TritonClient``."""

    def __init__(self, address: str, *, response_timeout: float) -> None:
        """Connects to nothing yet.

        Args:
            address: host:port of Triton's HTTP endpoint.
        """
        super().__init__(response_timeout=response_timeout)
        self._client = httpx.AsyncClient(
            base_url=f"http://{address}/v2/models/",
            timeout=httpx.Timeout(None, connect=10),  # silence is bounded by ResponseStream
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # Triton is on this machine: no proxy is in between
        )

    async def _responses(self, request_id: str, inputs: Inputs) -> AsyncGenerator[Response, None]:
        """The responses, and an empty last one: the endpoint does not say which is the last."""
        count = 0
        async for event in self._events(ENSEMBLE, request_id, inputs):
            yield parse_event(event)
            count += 1
        if not count:
            raise TritonMalformedEvent("Triton ended the stream without a response")
        yield Response([], None, final=True)

    async def _send_stop(self, request_id: str) -> None:
        async for _ in self._events(ENGINE, request_id, stop_inputs()):
            pass

    async def _disconnect(self) -> None:
        await self._client.aclose()

    async def _events(
        self, model: str, request_id: str, inputs: Inputs
    ) -> AsyncIterator[dict[str, Any]]:
        body = {"id": request_id, **{name: _plain(value) for name, value in inputs.items()}}
        with _mapped_errors():
            async with self._client.stream("POST", f"{model}/generate_stream", json=body) as reply:
                async for event in _parse_reply(reply):
                    # The HTTP status is fixed on the first event, so errors come in any.
                    if "error" in event:
                        raise error_from_text(str(event["error"]))
                    yield event


async def _parse_reply(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a reply: its events, or its one plain object for an early error."""
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        body = await reply.aread()
        if body or reply.is_error:
            yield _object(body.decode(errors="replace"))
        return
    async for line in reply.aiter_lines():
        if line.startswith("data:"):
            yield _object(line[len("data:") :])


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TritonMalformedJSON(f"Triton sent {text[:200]!r}: {error}") from None
    if not isinstance(value, dict):
        raise TritonMalformedEvent(f"Triton sent {text[:200]!r}, which is no object")
    return value


def parse_event(event: Mapping[str, Any]) -> Response:
    """The response in an event of generate_stream.

    Raises:
        TritonMalformedEvent: output_ids or sequence_length is missing or of a wrong type.
    """
    try:
        ids, length = _flat(event["output_ids"]), _flat(event["sequence_length"])[0]
    except (KeyError, IndexError, TypeError) as error:
        raise TritonMalformedEvent(f"a response of the ensemble is malformed: {error!r}") from None
    return Response(ids[:length], event.get("num_input_tokens"), final=False)


def _flat(value: Any) -> list[int]:
    """A tensor's integers; Triton writes one of a single element as a scalar."""
    values = value if isinstance(value, list) else [value]
    if not all(type(item) is int and abs(item) < 2**31 for item in values):
        raise TypeError(f"{str(value)[:100]} is not of 32-bit integers")
    return values


def _plain(value: npt.NDArray[Any]) -> Any:
    item = value.reshape(-1)[0].item() if value.dtype != np.object_ else value.flat[0]
    return item.decode() if isinstance(item, bytes) else item


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise TritonUnavailable(f"Triton cannot be reached: {error!r}") from None
