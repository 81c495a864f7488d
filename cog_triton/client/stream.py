"""One interface to a running Triton, with two transports: ``grpc_transport`` and ``http_transport``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cog_triton import wire
from cog_triton.errors import (
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
)
from cog_triton.wire import NO_PARAMETERS, Parameters, TokenLogProb

logger = logging.getLogger(__name__)

Inputs = Mapping[str, npt.NDArray[Any]]
T = TypeVar("T")

CLOSED = "the connection was closed before the last response"
STOP_PERIODS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STOP_SECONDS = 5.0  # for one stop request, and again for the end of its stream
BROKEN = (TritonUnavailable, TritonMalformedEvent, TritonMalformedJSON)
"""Errors of a stream that ended too early or lost something. Its earlier responses are right, and the
engine may still be running."""


@dataclass(frozen=True)
class Response:
    """The tokens that have arrived since the last response was taken.

    Attributes:
        ids: new token ids; may be empty.
        input_tokens: tokens of the prompt, if the engine counts them.
        final: true of the last one.
        keeps_end_token: true where an end token would be among the ids. The embedded engines leave it in,
            TensorRT-LLM's C++ backend leaves it out.
        log_probs: one per id if they were asked for, else empty.
        prompt_log_probs: of the first response, one per token of the prompt if they were asked for.
    """

    ids: list[int]
    input_tokens: int | None
    final: bool
    keeps_end_token: bool = field(default=True, compare=False)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


class Streams(Protocol):
    def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AbstractAsyncContextManager[AsyncIterator[Response]]:
        """Start a request and yield its responses; leaving the context stops it in the engine."""


def lost_after(place: int) -> TritonMalformedEvent:
    return TritonMalformedEvent(f"Triton's stream lost something after {place} tokens")


def decode_response(
    outputs: Mapping[str, list[Any]], place: int, top: int | None, *, final: bool | None = None
) -> Response:
    """Return the response of one set of outputs, each as a flat list.

    Args:
        outputs: output_ids of the embedded engines begin with the running count of ids. TensorRT-LLM's
            C++ backend sends sequence_length, because its ids may be padded.
        place: the number of ids received before.
        top: alternatives to each log probability; None without log probabilities.
        final: None where only num_output_tokens marks the last response.

    Raises:
        TritonMalformedEvent: an output is missing, or the stream is not complete up to here.
    """
    embedded = "sequence_length" not in outputs
    total = outputs.get("num_output_tokens", [None])[0]
    if final is None:
        final = embedded and total is not None
    try:
        ids = outputs["output_ids"]
        if embedded:
            count, ids = ids[:1], ids[1:]
            if count != [place + len(ids)] or (final and count != [total]):
                raise lost_after(place)
        else:
            ids = ids[: outputs["sequence_length"][0]]
    except (KeyError, IndexError) as error:
        raise TritonMalformedEvent(f"a response of the ensemble lacks {error}") from None
    response = Response(ids, outputs.get("num_input_tokens", [None])[0], final, embedded)
    if top is not None:
        values = np.array(outputs.get(wire.LOG_PROBS, ()), np.float32)
        try:
            response.log_probs.extend(wire.unpacked_log_probs(ids, values, top))
            if embedded:
                response.prompt_log_probs.extend(
                    wire.unpacked_prompt_log_probs(values, len(ids), top)
                )
        except ValueError:
            text = "a response lacks the log probabilities of its ids"
            raise TritonMalformedEvent(text) from None
    return response


class Arrivals(Generic[T]):
    """The items of a stream, for one consumer, which takes all that are there in one step.

    Attributes:
        drop: closes the transport's stream; set by the transport.
        others: returns the time of the last item of any stream.
        error: the stream's, raised once all items before it have been taken.
        started: the time on the loop's clock.
        last_arrival: the same of the last item; 0 before the first.
    """

    def __init__(self, timeout: float | None = None, stall_timeout: float | None = None) -> None:
        """Start to wait for items.

        Args:
            timeout: seconds of silence after which the stream fails; None waits permanently.
            stall_timeout: the same after the first item, while others have some.
        """
        self.drop: Callable[[], object] = lambda: None
        self.others: Callable[[], float] = lambda: 0.0
        self.error: BaseException | None = None
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self.started, self.last_arrival = self._loop.time(), 0.0
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._check_silence(timeout, min(stall_timeout or timeout, timeout))

    @property
    def ended(self) -> bool:
        return self._end.done()

    def add(self, item: T) -> None:
        self.last_arrival = self._loop.time()
        self._items.append(item)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, with an error or without one. Only the first call counts."""
        if not self.ended:
            self.error = self.error or error
            self._end.set_result(None)
            self._wake()

    async def take(self) -> list[T]:
        """Wait for items and return those that have arrived; empty at the end, or its error is raised."""
        while not self._items:
            if self.error is not None:
                raise self.error
            if self.ended:
                return []
            self._waiter = self._loop.create_future()
            await self._waiter
        items, self._items = self._items, []
        return items

    async def ends_within(self, seconds: float) -> bool:
        await asyncio.wait([self._end], timeout=seconds)
        return self.ended

    def close(self) -> None:
        """Drop the stream if it has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        self.drop()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self, timeout: float, stall: float) -> None:
        # One timer a request, not one a response. An engine that pauses is silent on all streams.
        silence = self._loop.time() - (self.last_arrival or self.started)
        stalls = self.last_arrival and self.others() > self.last_arrival + stall / 2
        limit = stall if stalls else timeout
        if silence < limit:
            seconds = max(stall - silence, min(limit - silence, stall / 4))
            self._timer = self._loop.call_later(seconds, self._check_silence, timeout, stall)
        elif not self.ended:
            kind = TritonTimeout if limit == timeout else TritonMalformedEvent
            self.error = kind(f"Triton sent nothing for {limit:g} s")
            self._wake()


class ResponseStream(Arrivals[Response]):
    """A request's responses; those that arrived together are one.

    Attributes:
        place: the number of ids that have arrived.
        top: see ``decode_response``.
    """

    place = 0
    top: int | None = None

    def decode(self, outputs: Mapping[str, list[Any]], *, final: bool | None = None) -> Response:
        """Return the next response; see ``decode_response``."""
        response = decode_response(outputs, self.place, self.top, final=final)
        self.place += len(response.ids)
        return response

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Response:
        if not (arrived := await self.take()):
            raise StopAsyncIteration
        if len(arrived) == 1:
            return arrived[0]
        counts = [r.input_tokens for r in arrived if r.input_tokens is not None]
        return Response(
            [token for response in arrived for token in response.ids],
            counts[-1] if counts else None,
            arrived[-1].final,
            all(response.keeps_end_token for response in arrived),
            [log_prob for response in arrived for log_prob in response.log_probs],
            [log_prob for response in arrived for log_prob in response.prompt_log_probs],
        )


class TritonClient(ABC):
    """Runs requests on the ensemble. To be used from one event loop."""

    def __init__(self, *, response_timeout: float, stall_timeout: float | None = None) -> None:
        """Connect to nothing yet; for the limits of silence, in seconds, see ``Arrivals``."""
        self.timeouts = response_timeout, stall_timeout
        self._running: set[ResponseStream] = set()
        self._last_ended = 0.0  # the last response of a stream that has ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def stream(
        self,
        request_id: str,
        inputs: Inputs,
        continued: Sequence[int] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> AsyncIterator[ResponseStream]:
        """Start a request and yield its responses, in order.

        Leaving the context before the last response stops the request in the engine.

        Args:
            continued: ids of the output that an earlier attempt has delivered, to continue from.
            parameters: sent with the inputs, see ``cog_triton.wire``.

        Raises:
            TritonUnavailable: the client has been closed, or there is no connection.
            CogTritonError: from the iterator.
        """
        if self._closed:
            raise TritonUnavailable(CLOSED)
        parameters = {**parameters, wire.COUNTED_IDS: True}
        if continued:
            parameters[wire.CONTINUED] = wire.ids_text(continued)
        stream = ResponseStream(*self.timeouts)
        stream.others = self._last_response
        if "return_log_probs" in inputs and inputs["return_log_probs"].any():
            stream.top = int(parameters.get(wire.TOP_LOG_PROBS, 0))
        await self._begin(stream, request_id, inputs, parameters)
        del inputs  # they may have the weights of an adapter, and the stream may be long
        self._running.add(stream)
        try:
            yield stream
        finally:
            self._running.discard(stream)
            self._last_ended = max(self._last_ended, stream.last_arrival)
            if self._closed or (stream.ended and not isinstance(stream.error, BROKEN)):
                stream.close()
            else:
                self.stop(request_id, stream)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def silence(self) -> float:
        """Return the seconds since a response to any request, or since the start of the oldest one.

        0 if none runs. The start of a request does not count as a response: a request that is tried again
        and again on an engine that hangs would hide it.
        """
        if not self._running:
            return 0.0
        since = max(self._last_response(), min(stream.started for stream in self._running))
        return asyncio.get_running_loop().time() - since

    def _last_response(self) -> float:
        return max([self._last_ended, *(stream.last_arrival for stream in self._running)])

    async def aclose(self) -> None:
        """End the running streams with TritonUnavailable, wait until stops are done, and disconnect."""
        self._closed = True
        for stream in list(self._running):
            if not stream.ended:
                stream.end(TritonUnavailable(CLOSED))
                stream.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disconnect()

    def stop(self, request_id: str, stream: Arrivals[Any]) -> None:
        """Stop a request in the engine, in a task, and read its stream to the end.

        Triton does not forward a cancellation from the ensemble, but it forwards the request's id, by
        which the engine can stop it. Dropping the stream instead leaves the request in the ensemble
        permanently (Triton 2.51 drops the next step of a cancelled request and then waits for it), so it
        is dropped only when nothing else has helped. A stream that broke has ended: one stop is sent.
        """
        self._spawn(self._stop(request_id, stream))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop(self, request_id: str, stream: Arrivals[Any]) -> None:
        problem: object = ""
        try:
            for seconds in STOP_PERIODS:
                # A response confirms that the engine knows the request. A stop that overtakes its request
                # is ignored, so before the first response it is sent again.
                confirmed = bool(stream.last_arrival)
                try:
                    await asyncio.wait_for(self._send_stop(request_id), STOP_SECONDS)
                except Exception as error:
                    problem, confirmed = repr(error), False
                if await stream.ends_within(STOP_SECONDS if confirmed else seconds):
                    return
                if confirmed:
                    break
            logger.warning("request %s did not stop %s", request_id, problem)
        finally:
            stream.close()

    @abstractmethod
    async def _begin(
        self, stream: ResponseStream, request_id: str, inputs: Inputs, parameters: Parameters
    ) -> None:
        """Send a request, whose responses arrive in the stream; the last one is final."""

    @abstractmethod
    async def _send_stop(self, request_id: str) -> None:
        """Have the engine stop a request; an unknown one is not an error."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the connections."""
