"""One interface to a running Triton, with two transports: ``grpc_transport`` and ``http_transport``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.client.arrivals import CLOSED, Arrivals
from cog_triton.errors import (
    NOT_CACHED,
    READ,
    CogTritonError,
    InvalidParameter,
    PromptRequired,
    PromptTooLong,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonOverloaded,
    TritonTokenizerError,
    TritonUnavailable,
    TritonUnknownError,
    cause,
)
from cog_triton.wire import (
    NO_PARAMETERS,
    TOP_LOG_PROBS,
    Parameters,
    TokenLogProb,
    unpacked_log_probs,
    unpacked_prompt_log_probs,
)

logger = logging.getLogger(__name__)

Inputs = Mapping[str, npt.NDArray[Any]]

# A stop may overtake its request, which is still queued or in preprocessing then: the engine does not
# know it and says nothing. So stops are sent until the stream has ended, so many seconds apart.
STOP_PERIODS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STOP_SECONDS = 5.0  # that one of them may take

BROKEN = (TritonUnavailable, TritonMalformedEvent, TritonMalformedJSON)
"""Of a stream that ended too early, or of which something was lost or damaged. What came before is right,
and the engine may go on."""


@dataclass(frozen=True)
class Response:
    """What has arrived for a request since the last response was taken.

    Attributes:
        ids: new token ids; may be empty.
        input_tokens: tokens of the prompt, if the engine says.
        final: whether this is the last one.
        keeps_end_token: whether an end token would be among the ids. The embedded engines leave it in,
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


def wanted_log_probs(inputs: Inputs, parameters: Parameters) -> int | None:
    """How many alternatives a request wants with its log probabilities; None if it wants none of all."""
    wanted = "return_log_probs" in inputs and bool(inputs["return_log_probs"].any())
    return int(parameters.get(TOP_LOG_PROBS, 0)) if wanted else None


def log_probs(
    ids: list[int], values: npt.NDArray[Any] | None, top: int | None
) -> list[TokenLogProb]:
    """The log probabilities of a response.

    Args:
        values: as they were sent.
        top: see ``wanted_log_probs``.

    Raises:
        TritonMalformedEvent: they are not those of the ids.
    """
    if top is None or not ids:
        return []
    try:
        return unpacked_log_probs(ids, np.zeros(0) if values is None else values, top)
    except ValueError:
        raise TritonMalformedEvent("a response lacks the log probabilities of its ids") from None


def prompt_log_probs(
    ids: list[int], values: npt.NDArray[Any] | None, top: int | None
) -> list[TokenLogProb]:
    """Those of the prompt's tokens, which stand before a first response's; see ``log_probs``."""
    if top is None or values is None:
        return []
    try:
        return unpacked_prompt_log_probs(values, len(ids), top)
    except ValueError:
        raise TritonMalformedEvent("a response has a part of log probabilities") from None


def checked_ids(sent: list[int], expected: int, place: int) -> list[int]:
    """The ids behind their checksum.

    Args:
        expected: the checksum of those ids at this place.

    Raises:
        TritonMalformedEvent: it is another: something before them was lost, or they were damaged.
    """
    if not sent or sent[0] != expected:
        raise TritonMalformedEvent(f"Triton's stream has a gap or an error after {place} tokens")
    return sent[1:]


def check_total(tokens: int, announced: int | None) -> None:
    """Compares a stream that has ended with the engine's count, None if none came.

    Raises:
        TritonMalformedEvent: the stream is not whole.
    """
    if tokens != announced:
        raise TritonMalformedEvent(
            f"Triton's stream has {tokens} tokens of {'?' if announced is None else announced}"
        )


class TritonClient(ABC):
    """Runs requests on the ensemble. To be used from one event loop."""

    def __init__(self, *, response_timeout: float, stall_timeout: float | None = None) -> None:
        """Connects to nothing yet.

        Args:
            response_timeout: seconds without a response after which a request fails.
            stall_timeout: the same for a stream that has begun, while others go on; None for never.
        """
        self._response_timeout = response_timeout
        self._stall_timeout = stall_timeout
        self._running: set[ResponseStream] = set()
        self._heard = 0.0  # when a stream that has ended last had a response
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def stream(
        self,
        request_id: str,
        inputs: Inputs,
        continued: Sequence[int] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> AsyncIterator[ResponseStream]:
        """Starts a request; its responses, in order.

        Leaving the context before the last response stops the request in the engine.

        Args:
            continued: ids of the output that an earlier attempt has delivered, to go on from.
            parameters: sent beside the inputs, see ``cog_triton.wire``.

        Raises:
            TritonUnavailable: the client has been closed, or there is no connection.
            CogTritonError: from the iterator.
        """
        if self._closed:
            raise TritonUnavailable(CLOSED)
        stream = await self._begin(request_id, inputs, continued, parameters)
        del inputs  # they may have the weights of an adapter, and the stream may be long
        if self._stall_timeout is not None:
            stream.watch(self._stall_timeout, self._last_heard)
        self._running.add(stream)
        try:
            yield stream
        finally:
            self._running.discard(stream)
            self._heard = max(self._heard, stream.heard)
            if self._closed or (stream.ended and not stream.broken):
                await stream.close()
            else:
                task = asyncio.create_task(self._stop(request_id, stream))
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)

    @property
    def busy(self) -> bool:
        """Whether requests run."""
        return bool(self._running)

    def silence(self) -> float:
        """Seconds since a response to any request, or since the oldest one that runs began.

        0 if none runs. Requests that have just begun do not count as something heard: who tries again
        and again on an engine that hangs would hide it.
        """
        if not self._running:
            return 0.0
        since = max(self._last_heard(), min(stream.started for stream in self._running))
        return asyncio.get_running_loop().time() - since

    def _last_heard(self) -> float:
        return max([self._heard, *(stream.heard for stream in self._running)])

    async def aclose(self) -> None:
        """Ends the streams that run, waits until what is being stopped has stopped, and closes all.

        Those that run get TritonUnavailable, and so do those that begin later. A transport that is closed
        does not tell them all: aiohttp leaves those that wait for data waiting.
        """
        self._closed = True
        for stream in list(self._running):
            stream.fail(TritonUnavailable(CLOSED))
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await self._disconnect()

    async def _stop(self, request_id: str, stream: ResponseStream) -> None:
        """Stops a request in the engine and reads its stream to the end.

        Triton hands no cancellation down from the ensemble, but it hands down the request's id, by
        which the engine can be told. Dropping the stream instead leaves the request in the ensemble
        for good (Triton 2.51 drops the next step of a cancelled request and waits for it for ever),
        so it is dropped only when nothing else has helped.

        A stream that broke has no end to wait for: its engine, which may go on, is told once.
        """
        problem = ""
        try:
            for seconds in STOP_PERIODS:
                problem = await self._stop_problem(request_id)
                if await stream.ends_within(seconds):
                    return
            logger.warning("request %s did not stop%s", request_id, problem)
        finally:
            await stream.close()

    async def _stop_problem(self, request_id: str) -> str:
        """Sends a stop; returns why that failed, if it did: there is nobody left to tell."""
        try:
            await asyncio.wait_for(self._send_stop(request_id), STOP_SECONDS)
        except Exception as error:
            return f": {error or repr(error)}"
        return ""

    @abstractmethod
    async def _begin(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> ResponseStream:
        """Sends a request; its responses, the last one final. CogTritonError may come of both."""

    @abstractmethod
    async def _send_stop(self, request_id: str) -> None:
        """Tells the engine to stop a request; an unknown one is no error."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Closes the connections."""


class ResponseStream(Arrivals[Response]):
    """A request's responses; those that arrived together are one."""

    _watch: asyncio.TimerHandle | None = None

    @property
    def broken(self) -> bool:
        """Whether it failed by an error of its way here, not of the engine."""
        return isinstance(self._error, BROKEN)

    def watch(self, timeout: float, others: Callable[[], float]) -> None:
        """Fails the stream when it stands still for so many seconds, while others go on.

        A stream that has had no response yet may wait in a queue, and is let be.

        Args:
            others: when any stream last had a response, on the loop's clock.
        """
        silence = self._loop.time() - self._last
        if self.heard and silence >= timeout and others() > self._last + timeout / 2:
            self._error = TritonMalformedEvent(
                f"Triton's stream stood still for {timeout:g} s while others went on"
            )
            self._wake()
        elif not self.ended:
            seconds = max(timeout - silence, timeout / 4)
            self._watch = self._loop.call_later(seconds, self.watch, timeout, others)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super().close()

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Response:
        arrived = await self.take()
        if not arrived:
            raise StopAsyncIteration
        return arrived[0] if len(arrived) == 1 else _joined(arrived)


def _joined(responses: list[Response]) -> Response:
    ids = [token for response in responses for token in response.ids]
    counts = [r.input_tokens for r in responses if r.input_tokens is not None]
    keeps_end_token = all(response.keeps_end_token for response in responses)
    return Response(
        ids,
        counts[-1] if counts else None,
        responses[-1].final,
        keeps_end_token,
        [log_prob for response in responses for log_prob in response.log_probs],
        [log_prob for response in responses for log_prob in response.prompt_log_probs],
    )


# First match wins. The texts are those of TensorRT-LLM, vLLM, Triton 2.51 and this package's engines.
_ERRORS: tuple[tuple[str, type[CogTritonError]], ...] = (
    (r"exceeds maximum input length|sequence length is potentially greater", PromptTooLong),
    (r"prompt has no tokens", PromptRequired),
    (r"[Mm]aximum queue size|(PEFT C|LoRA c)ache is full", TritonOverloaded),
    (r"is not within acceptable range", InvalidParameter),
    (
        r"must be (at least|at most|greater|between|as many|the same|among|in [\[(])|does not support"
        r"|needs decoupled_mode|lora_task_id|guided_decoding_guide"
        rf"|{NOT_CACHED}|lora module \S+ not enabled|low_rank must be|Expected layerId|few values for",
        InvalidParameter,
    ),
    (
        r"the engine has stopped|not ready|has no available versions|Stub process .* is not healthy",
        TritonUnavailable,
    ),
    (r"model (instance )?'(pre|post)processing", TritonTokenizerError),
)


def error_from_text(text: str) -> CogTritonError:
    """The error that a text from Triton stands for; its message is what the text gives as the cause."""
    text = text[:READ]
    for pattern, error in _ERRORS:
        if re.search(pattern, text):
            return error(cause(text))
    return TritonUnknownError(cause(text) or "Triton gave no reason")
