"""One stream interface to a running Triton, over ``grpc_transport`` or ``http_transport``."""

import asyncio
import contextlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cog_triton import errors
from cog_triton.client.connections import CLOSED as CLOSED
from cog_triton.protocol.frames import Frame
from cog_triton.protocol.log_probs import (
    TokenLogProb,
    unpacked_log_probs,
)
from cog_triton.protocol.names import (
    CONTINUED,
    ENGINE,
    IDS_ENSEMBLE,
    LOG_PROBS,
    NO_PARAMETERS,
    TOP_LOG_PROBS,
    Parameters,
)
from cog_triton.protocol.parameters import ids_text, stop_inputs

logger = logging.getLogger(__name__)

Inputs = Mapping[str, npt.NDArray[Any]]
Outputs = Mapping[str, list[Any]]  # each flat
T = TypeVar("T")

STOP_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds after a stop request; the last one repeats
STOP_SECONDS = 5.0  # for one stop request, and again for the end of a stream that it was to stop
NO_LOG_PROBS = "a response lacks the log probabilities of its ids"
CLOSE_SECONDS = 5.0  # for all stops that are still to be confirmed when the client is closed
# Errors of a stream that ended too early or lost something; its earlier responses are right.
BROKEN = (errors.TritonUnavailable, errors.TritonMalformedEvent, errors.TritonMalformedJSON)


@dataclass
class Response:
    """The tokens that have arrived since the last response was taken."""

    ids: list[int]  # may be empty
    input_tokens: int | None  # of the prompt, if the engine counts them
    final: bool
    # Whether an end token would be among the ids. TensorRT-LLM's C++ backend leaves it out.
    keeps_end_token: bool = field(default=True, compare=False)
    log_probs: list[TokenLogProb] = field(default_factory=list)  # one per id, if asked for
    # One per token of the prompt, if asked for: of a request's first response.
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)

    def extend(self, later: "Response") -> "Response":
        """Append the response that follows this one; return both."""
        self.ids += later.ids
        self.log_probs += later.log_probs
        self.input_tokens = later.input_tokens or self.input_tokens
        self.final = later.final
        return self


class Streams(Protocol):
    def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncGenerator[Response, None]:
        """Start a request and yield its responses; closing it early stops the request in the engine."""


@dataclass(frozen=True)
class TensorOutputs:
    """TensorRT-LLM's tensors of one response, each flat."""

    values: Outputs
    final: bool


def read_frame(frame: Frame, place: int, *, wants_log_probs: bool) -> Response:
    """Return the response of a frame; TritonMalformedEvent if one before it was lost.

    Args:
        place: the number of ids received before.
    """
    if frame.start != place:
        raise lost_after(place)
    if wants_log_probs and len(frame.log_probs) != len(frame.ids):
        raise errors.TritonMalformedEvent(NO_LOG_PROBS)
    return Response(
        frame.ids,
        frame.input_tokens,
        frame.final,
        log_probs=list(frame.log_probs),
        prompt_log_probs=list(frame.prompt_log_probs),
    )


def read_tensors(outputs: TensorOutputs, top: int | None) -> Response:
    """Return the response of TensorRT-LLM's tensors; TritonMalformedEvent if one is missing.

    Args:
        top: alternatives to each log probability; None without log probabilities.
    """
    values = outputs.values
    try:
        ids = values["output_ids"][: values["sequence_length"][0]]  # they may be padded
        input_tokens = values.get("num_input_tokens", [None])[0]
    except (KeyError, IndexError) as error:
        raise errors.TritonMalformedEvent(f"a response of the ensemble lacks {error}") from None
    response = Response(ids, input_tokens, outputs.final, keeps_end_token=False)
    if top is not None:
        log_probs = np.array(values.get(LOG_PROBS, ()), np.float32)
        try:
            response.log_probs = unpacked_log_probs(ids, log_probs, top)
        except ValueError:
            raise errors.TritonMalformedEvent(NO_LOG_PROBS) from None
    return response


def lost_after(place: int) -> errors.TritonMalformedEvent:
    return errors.TritonMalformedEvent(f"Triton's stream lost data after {place} tokens")


class Arrivals(Generic[T]):
    """The messages of an answer, for one consumer, which takes all that are there in one step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.started, self.last_arrival = self._loop.time(), 0.0  # 0 before the first
        self.complete = False  # whether the consumer has seen the last one
        self.close: Callable[[], object] = lambda: None  # drops the transport's stream
        self._messages: list[T] = []
        self._error: BaseException | None = None  # raised when all messages have been taken
        self._end = self._loop.create_future()
        self._waiter: asyncio.Future[None] | None = None

    def add(self, message: T) -> None:
        self.last_arrival = self._loop.time()
        self._messages.append(message)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise an error after the messages that have arrived; the stream may go on."""
        self._error = self._error or error
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, with an error or without one. Only the first call counts."""
        if not self._end.done():
            self._end.set_result(None)
            self._error = self._error or error
            self._wake()

    async def take(self) -> list[T]:
        """Wait for messages and return those that have arrived; at the end raise its error, or none."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._end.done():
                return []
            self._waiter = self._loop.create_future()
            await self._waiter
        messages, self._messages = self._messages, []
        return messages

    @property
    def ended(self) -> bool:
        return self._end.done()

    async def ends_within(self, seconds: float) -> bool:
        await asyncio.wait([self._end], timeout=seconds)
        return self._end.done()

    async def changes_within(self, seconds: float) -> None:
        """Wait for the end or the next message, in the place of a consumer that has left."""
        self._waiter = self._loop.create_future()
        either = asyncio.FIRST_COMPLETED
        await asyncio.wait([self._end, self._waiter], timeout=seconds, return_when=either)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TritonClient(ABC):
    """Runs requests on the ensemble. To be used from one event loop."""

    def __init__(self, response_timeout: float, stall_timeout: float = math.inf) -> None:
        """Connect to nothing yet.

        Args:
            response_timeout: the longest silence of a request, in seconds.
            stall_timeout: that after its first response, while other requests have some.
        """
        self._timeout, self._stall = response_timeout, min(stall_timeout, response_timeout)
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[Arrivals[Any]] = set()
        self._last_ended = 0.0  # the last response of a stream that has ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def stream(
        self,
        request_id: str,
        inputs: Inputs,
        continued: Sequence[int] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> AsyncGenerator[Response, None]:
        """Start a request and yield its responses, in order; those that arrived together are one.

        Closing it before the last response stops the request in the engine.

        Args:
            continued: ids of the output that an earlier attempt has delivered, to continue from.
            parameters: sent with the inputs, see ``cog_triton.protocol``.

        Raises:
            CogTritonError: from the iterator; TritonUnavailable also if the client has been closed.
        """
        if self._closed:
            raise errors.TritonUnavailable(CLOSED)
        if continued:
            parameters = {**parameters, CONTINUED: ids_text(continued)}
        top = int(parameters.get(TOP_LOG_PROBS, 0)) if "return_log_probs" in inputs else None
        arrivals = await self._send(IDS_ENSEMBLE, request_id, inputs, parameters)
        del inputs  # they may have the weights of an adapter, and the stream may be long
        place = 0
        with self.receiving(request_id, arrivals):
            while not arrivals.complete:
                response = None
                for message in await arrivals.take():
                    try:
                        parsed = self._parse(message)
                        if isinstance(parsed, Frame):
                            part = read_frame(parsed, place, wants_log_probs=top is not None)
                        else:
                            part = read_tensors(parsed, top)
                    except errors.CogTritonError:
                        if response is not None:
                            yield response
                        raise
                    place += len(part.ids)
                    response = response.extend(part) if response else part
                if response is None:
                    raise lost_after(place)
                arrivals.complete = response.final
                yield response

    @contextlib.contextmanager
    def receiving(self, request_id: str, arrivals: Arrivals[Any]) -> Iterator[None]:
        """Count a request as running; stop it in the engine if it is left before its last response."""
        self._running.add(arrivals)
        if self._timer is None:
            self._check_silence()
        try:
            yield
        except errors.CogTritonError as error:
            arrivals.complete = not isinstance(error, (*BROKEN, errors.TritonTimeout))
            raise
        finally:
            self._running.discard(arrivals)
            self._last_ended = max(self._last_ended, arrivals.last_arrival)
            if arrivals.complete or self._closed:
                arrivals.close()
            else:
                self._spawn(self._stop(request_id, arrivals))

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def silence(self) -> float:
        """Return the seconds since any response, or since the oldest request's start; 0 if none runs."""
        if not self._running:
            return 0.0
        since = max(self._last_response(), min(stream.started for stream in self._running))
        return asyncio.get_running_loop().time() - since

    def _last_response(self) -> float:
        return max([self._last_ended, *(stream.last_arrival for stream in self._running)])

    def _check_silence(self) -> None:
        # One timer for all requests. An engine that pauses is silent on all of them.
        loop, last = asyncio.get_running_loop(), self._last_response()
        for arrivals in self._running:
            since = arrivals.last_arrival or arrivals.started
            stalls = arrivals.last_arrival and last > since + self._stall / 2
            limit = self._stall if stalls else self._timeout
            if loop.time() - since >= limit:
                slow = limit == self._timeout
                kind = errors.TritonTimeout if slow else errors.TritonMalformedEvent
                arrivals.fail(kind(f"Triton sent nothing for {limit:g} s"))
        seconds = min(self._stall / 20, 1.0)
        self._timer = loop.call_later(seconds, self._check_silence) if self._running else None

    async def aclose(self) -> None:
        """End the running streams with TritonUnavailable, wait for the stops, and disconnect.

        A stop whose request stands in a queue of Triton's could take any time: it is given up.
        """
        self._closed = True
        for arrivals in self._running:
            arrivals.end(errors.blameless(errors.TritonUnavailable(CLOSED)))
        for arrivals in self._running:
            arrivals.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disconnect()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in a task that ``aclose`` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop(self, request_id: str, arrivals: Arrivals[Any]) -> None:
        """Stop a request in the engine, and read its stream to the end.

        Triton does not forward a cancellation from the ensemble, but it forwards the request's id, by
        which the engine can stop it. Dropping the stream instead leaves the request in the ensemble
        permanently: Triton 2.51 drops the next step of a cancelled request and then waits for it.

        The rules:

        - The engine ignores a stop of a request that it does not have. Only a response shows that it has
          it, so a stop that was sent before the first response is sent again: after a pause, and as soon as
          the first response comes.
        - Before the first response the request may stand in a queue, for as long as that takes. The stream
          is kept meanwhile. It costs a stop request every two seconds.
        - When a stop that was sent after the first response is confirmed, the stream should end at once.
          If it does not within ``STOP_SECONDS``, it is dropped.
        - When the stream has ended by itself, a single stop is sent: the engine may not know of the end.
        """
        pauses = itertools.chain(STOP_PAUSES, itertools.repeat(STOP_PAUSES[-1]))
        with contextlib.closing(arrivals):
            for pause in pauses:
                in_engine = bool(arrivals.last_arrival)
                problem = await self._stop_problem(request_id)
                if arrivals.ended:
                    return
                if in_engine and not problem:
                    if not await arrivals.ends_within(STOP_SECONDS):
                        logger.warning("request %s did not stop; dropping its stream", request_id)
                    return
                if in_engine:
                    await arrivals.ends_within(pause)
                else:
                    await arrivals.changes_within(pause)
                if arrivals.ended:
                    return

    async def _stop_problem(self, request_id: str) -> str:
        """Send a stop request; return why it failed, or an empty text."""
        try:
            await asyncio.wait_for(self._send_stop(request_id), STOP_SECONDS)
        except Exception as error:
            return repr(error)
        return ""

    async def _send_stop(self, request_id: str) -> None:
        sent = await self._send(ENGINE, request_id, stop_inputs())
        with contextlib.closing(sent):
            for message in await sent.take():
                self._parse(message)  # or raise its error
            await sent.ends_within(STOP_SECONDS)

    # Of the transports

    @abstractmethod
    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Arrivals[Any]: ...

    @abstractmethod
    def _parse(self, message: Any) -> Frame | TensorOutputs:
        """Return what a message has, or raise its error."""

    @abstractmethod
    async def _disconnect(self) -> None: ...
