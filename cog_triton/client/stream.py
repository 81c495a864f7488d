"""One stream interface to a running Triton, over ``grpc_transport`` or ``http_transport``."""

import asyncio
import contextlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from cog_triton import errors
from cog_triton.client.arrivals import Arrivals
from cog_triton.client.connections import CLOSED
from cog_triton.client.responses import (
    Inputs,
    Response,
    TensorOutputs,
    lost_after,
    read_frame,
    read_tensors,
)
from cog_triton.client.silence import SilenceWatch
from cog_triton.protocol.frames import Frame
from cog_triton.protocol.names import (
    CONTINUED,
    ENGINE,
    IDS_ENSEMBLE,
    NO_PARAMETERS,
    TOP_LOG_PROBS,
    Parameters,
)
from cog_triton.protocol.parameters import ids_text, stop_inputs

logger = logging.getLogger(__name__)

# Seconds after a stop request; the last one repeats.
STOP_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# For one stop request, and again for the end of a stream that it was to stop.
STOP_SECONDS = 5.0
# For all stops that are still to be confirmed when the client is closed.
CLOSE_SECONDS = 5.0
# Errors of a stream that ended too early or lost something; its earlier responses are right.
BROKEN = (errors.TritonUnavailable, errors.TritonMalformedEvent, errors.TritonMalformedJSON)


class Streams(Protocol):
    def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncGenerator[Response, None]:
        """Start a request and yield its responses; closing it early stops the request in the engine."""


class TritonClient(ABC):
    """Runs requests on the ensemble. To be used from one event loop."""

    def __init__(self, response_timeout: float, stall_timeout: float = math.inf) -> None:
        """Connect to nothing yet; for the time-outs see ``SilenceWatch``."""
        self._silence = SilenceWatch(response_timeout, stall_timeout)
        # Called with the name of a model when an error says that Triton gave up its process.
        self.on_given_up: Callable[[str], object] = lambda _: None
        # Stops, and other work that ``aclose`` waits for.
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
        alternatives = None
        if "return_log_probs" in inputs:
            alternatives = int(parameters.get(TOP_LOG_PROBS, 0))
        arrivals = await self._send(IDS_ENSEMBLE, request_id, inputs, parameters)
        # They may have the weights of an adapter, and the stream may be long.
        del inputs
        place = 0
        with self.receiving(request_id, arrivals):
            while not arrivals.complete:
                response = None
                for message in await arrivals.take():
                    try:
                        part = self._response_of(message, place, alternatives)
                    except errors.CogTritonError:
                        # What came before the error comes before it here as well.
                        if response is not None:
                            yield response
                        raise
                    place += len(part.ids)
                    response = part if response is None else response.extend(part)
                if response is None:
                    raise lost_after(place)
                arrivals.complete = response.final
                yield response

    def _response_of(self, message: Any, place: int, alternatives: int | None) -> Response:
        """Return the response of a message, which follows so many ids, or raise its error."""
        parsed = self._parse(message)
        if isinstance(parsed, Frame):
            return read_frame(parsed, place, wants_log_probs=alternatives is not None)
        return read_tensors(parsed, alternatives)

    @contextlib.contextmanager
    def receiving(self, request_id: str, arrivals: Arrivals[Any]) -> Iterator[None]:
        """Count a request as running; stop it in the engine if it is left before its last response."""
        self._silence.add(arrivals)
        try:
            yield
        except errors.CogTritonError as error:
            self._note_given_up(error)
            # Any other error is Triton's last word on the request.
            may_run = isinstance(error, (*BROKEN, errors.TritonTimeout))
            arrivals.complete = not may_run
            raise
        finally:
            self._silence.remove(arrivals)
            if arrivals.complete or self._closed:
                arrivals.close()
            else:
                self._spawn(self._stop(request_id, arrivals))

    @property
    def busy(self) -> bool:
        return bool(self._silence.running)

    def silence(self) -> float:
        """Return the seconds since any response, or since the oldest request's start; 0 if none runs."""
        return self._silence.seconds()

    async def aclose(self) -> None:
        """End the running streams with TritonUnavailable, wait for the stops, and disconnect.

        A stop whose request stands in a queue of Triton's could take any time: it is given up.
        """
        self._closed = True
        for arrivals in self._silence.running:
            arrivals.end(errors.blameless(errors.TritonUnavailable(CLOSED)))
        for arrivals in self._silence.running:
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

    # Stops

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
                is_in_engine = arrivals.last_arrival > 0
                problem = await self._stop_problem(request_id)
                if arrivals.ended:
                    return
                if is_in_engine and not problem:
                    if not await arrivals.ends_within(STOP_SECONDS):
                        logger.warning("request %s did not stop; dropping its stream", request_id)
                    return
                if is_in_engine:
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
            self._note_given_up(error)
            return repr(error)
        return ""

    def _note_given_up(self, error: Exception) -> None:
        if isinstance(error, errors.TritonUnavailable) and error.given_up_model:
            self.on_given_up(error.given_up_model)

    async def _send_stop(self, request_id: str) -> None:
        """Send a stop request, and wait for its end, or raise its error."""
        arrivals = await self._send(ENGINE, request_id, stop_inputs())
        with contextlib.closing(arrivals):
            for message in await arrivals.take():
                self._parse(message)
            await arrivals.ends_within(STOP_SECONDS)

    # Of the transports

    @abstractmethod
    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Arrivals[Any]:
        """Send a request; return its messages, which begin to arrive. Raises TritonUnavailable."""

    @abstractmethod
    def _parse(self, message: Any) -> Frame | TensorOutputs:
        """Return what a message has, or raise its error."""

    @abstractmethod
    async def _disconnect(self) -> None: ...
