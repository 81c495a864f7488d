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
    LOG_PROBS,
    NO_PARAMETERS,
    TOP_LOG_PROBS,
    Parameters,
    TokenLogProb,
    checksum,
    unpacked_log_probs,
    unpacked_prompt_log_probs,
)

logger = logging.getLogger(__name__)

Inputs = Mapping[str, npt.NDArray[Any]]

# A stop may overtake its request, which is still queued or in preprocessing then: the engine does not
# know it and ignores the stop. So stops are sent until the stream has ended, so many seconds apart.
STOP_PERIODS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STOP_SECONDS = 5.0  # the limit of one of them

BROKEN = (TritonUnavailable, TritonMalformedEvent, TritonMalformedJSON)
"""Errors of a stream that ended too early or lost something. Its earlier responses are right, and the
engine may still be running."""


@dataclass(frozen=True)
class Response:
    """The tokens that have arrived for a request since the last response was taken.

    Attributes:
        ids: new token ids; may be empty.
        input_tokens: tokens of the prompt, if the engine counts them.
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
    """Return how many alternatives a request wants with its log probabilities; None if it wants none."""
    wanted = "return_log_probs" in inputs and bool(inputs["return_log_probs"].any())
    return int(parameters.get(TOP_LOG_PROBS, 0)) if wanted else None


def checked_response(
    outputs: Mapping[str, list[Any]], place: int, top: int | None, *, final: bool | None = None
) -> Response:
    """Return the response of one set of outputs, each as a flat list.

    Args:
        outputs: output_ids of the embedded engines stand behind their checksum. TensorRT-LLM's C++
            backend sends sequence_length, because its ids may be padded.
        place: the number of ids received before.
        top: see ``wanted_log_probs``.
        final: None where only num_output_tokens marks the last response.

    Raises:
        TritonMalformedEvent: an output is missing, or the stream is not complete up to here.
    """
    total = outputs.get("num_output_tokens", [None])[0]
    embedded = "sequence_length" not in outputs
    if final is None:
        final = embedded and total is not None
    try:
        ids = outputs["output_ids"]
        if embedded:
            check, ids = ids[:1], ids[1:]
            if check != [checksum(ids, place)]:
                raise TritonMalformedEvent(
                    f"Triton's stream has a gap or an error after {place} tokens"
                )
            if final:
                check_total(place + len(ids), total)
        else:
            ids = ids[: outputs["sequence_length"][0]]
    except (KeyError, IndexError) as error:
        raise TritonMalformedEvent(f"a response of the ensemble lacks {error}") from None
    input_tokens = outputs.get("num_input_tokens", [None])[0]
    if top is None:
        return Response(ids, input_tokens, final, embedded)
    values = np.array(outputs.get(LOG_PROBS, ()), np.float32)
    try:
        own = unpacked_log_probs(ids, values, top) if ids else []
        prompts = unpacked_prompt_log_probs(values, len(ids), top) if embedded else []
    except ValueError:
        raise TritonMalformedEvent("a response lacks the log probabilities of its ids") from None
    return Response(ids, input_tokens, final, embedded, own, prompts)


def check_total(tokens: int, announced: int | None) -> None:
    """Compare a stream that has ended with the engine's count, None if none came.

    Raises:
        TritonMalformedEvent: the stream is not complete.
    """
    if tokens != announced:
        raise TritonMalformedEvent(
            f"Triton's stream has {tokens} tokens of {'?' if announced is None else announced}"
        )


class ResponseStream(Arrivals[Response]):
    """A request's responses; those that arrived together are one."""

    @property
    def broken(self) -> bool:
        """The stream failed by an error of the transport, not of the engine."""
        return isinstance(self._error, BROKEN)

    def watch(self, timeout: float, others: Callable[[], float]) -> None:
        """Fail the stream when it is silent for so many seconds, while others have responses.

        A stream that has had no response yet may wait in a queue, and is not failed.

        Args:
            others: the time of the last response of any stream, on the loop's clock.
        """
        silence = self._loop.time() - self._last
        if self.last_arrival and silence >= timeout and others() > self._last + timeout / 2:
            self._fail(
                TritonMalformedEvent(
                    f"Triton's stream stood still for {timeout:g} s while others went on"
                )
            )
        elif not self.ended:
            seconds = max(timeout - silence, timeout / 4)
            self._call_later(seconds, self.watch, timeout, others)

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Response:
        arrived = await self.take()
        if not arrived:
            raise StopAsyncIteration
        return arrived[0] if len(arrived) == 1 else _joined(arrived)


def _joined(responses: list[Response]) -> Response:
    counts = [r.input_tokens for r in responses if r.input_tokens is not None]
    return Response(
        [token for response in responses for token in response.ids],
        counts[-1] if counts else None,
        responses[-1].final,
        all(response.keeps_end_token for response in responses),
        [log_prob for response in responses for log_prob in response.log_probs],
        [log_prob for response in responses for log_prob in response.prompt_log_probs],
    )


class TritonClient(ABC):
    """Runs requests on the ensemble. To be used from one event loop."""

    def __init__(self, *, response_timeout: float, stall_timeout: float | None = None) -> None:
        """Connect to nothing yet.

        Args:
            response_timeout: seconds without a response after which a request fails.
            stall_timeout: the same for a stream that has begun, while others have responses; None for
                never.
        """
        self._response_timeout = response_timeout
        self._stall_timeout = stall_timeout
        self._running: set[ResponseStream] = set()
        self._last_ended = 0.0  # the last response of a stream that has ended
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
        stream = await self._begin(request_id, inputs, continued, parameters)
        del inputs  # they may have the weights of an adapter, and the stream may be long
        if self._stall_timeout is not None:
            stream.watch(self._stall_timeout, self._last_response)
        self._running.add(stream)
        try:
            yield stream
        finally:
            self._running.discard(stream)
            self._last_ended = max(self._last_ended, stream.last_arrival)
            if self._closed or (stream.ended and not stream.broken):
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
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await self._disconnect()

    def stop(self, request_id: str, stream: Arrivals[Any]) -> None:
        """Stop a request in the engine, in a task, and read its stream to the end.

        Triton does not forward a cancellation from the ensemble, but it forwards the request's id, by
        which the engine can be told. Dropping the stream instead leaves the request in the ensemble
        permanently (Triton 2.51 drops the next step of a cancelled request and then waits for it), so it
        is dropped only when nothing else has helped. A stream that broke has ended: one stop is sent.
        """
        task = asyncio.create_task(self._stop(request_id, stream))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _stop(self, request_id: str, stream: Arrivals[Any]) -> None:
        try:
            for seconds in STOP_PERIODS:
                problem = ""
                try:
                    await asyncio.wait_for(self._send_stop(request_id), STOP_SECONDS)
                except Exception as error:
                    problem = f": {error or repr(error)}"
                if await stream.ends_within(seconds):
                    return
            logger.warning("request %s did not stop%s", request_id, problem)
        finally:
            stream.close()

    @abstractmethod
    async def _begin(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> ResponseStream:
        """Send a request; its responses, the last one final. CogTritonError may come of both."""

    @abstractmethod
    async def _send_stop(self, request_id: str) -> None:
        """Have the engine stop a request; an unknown one is not an error."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the connections."""


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
    """Return the error that a text from Triton stands for, with the cause that the text gives."""
    text = text[:READ]
    for pattern, error in _ERRORS:
        if re.search(pattern, text):
            return error(cause(text))
    return TritonUnknownError(cause(text) or "Triton gave no reason")
