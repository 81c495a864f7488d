"""Requests that continue on the restarted server, after the tokens already streamed."""

import asyncio
import contextlib
import itertools
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from cog_triton import errors
from cog_triton.adapters.tensors import AdapterTensors, Send
from cog_triton.client.responses import Inputs, Response
from cog_triton.client.stream import BROKEN, TritonClient
from cog_triton.protocol.names import CONTINUED, NO_PARAMETERS, Parameters
from cog_triton.protocol.parameters import ids_parameter
from cog_triton.text.end_tokens import EndTokens

logger = logging.getLogger(__name__)

GUIDED = "TensorRT-LLM cannot resume structured output after its server has crashed"
_GUIDE = "guided_decoding_guide_type"
# Retries in a row, which take about 45 s.
MOST_BLAMELESS = 50
# Seconds before a retry.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
# Said where the preprocessing is not this package's.
CANNOT = "the server cannot resume an output that has started"
TWO_ENDED = "two servers crashed as they started this request, so it is not retried"


class Clients(Protocol):
    async def client(self, failed: TritonClient | None) -> TritonClient:
        """Return the present client, or the next after one that failed; or raise TritonUnavailable."""


class Trials:
    """Requests from their start to their first response: many at once, or one that may end its server.

    A request without a response when its server ended may have ended it. It is tried once more, while no
    other request begins: if that server ends too, it is certain which request ended it.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Event] = set()
        # Trials that are to run alone; they wait or run.
        self._suspects: set[asyncio.Event] = set()

    @contextlib.asynccontextmanager
    async def trial(self, *, alone: bool) -> AsyncIterator[asyncio.Event]:
        """Begin a trial once it may begin; it ends with the context, or when the event is set."""
        end = asyncio.Event()
        others = self._running if alone else self._suspects
        try:
            if alone:
                self._suspects.add(end)
            while True:
                going_on = [other for other in others if not other.is_set()]
                if not going_on:
                    break
                await going_on[0].wait()
            self._running.add(end)
            yield end
        finally:
            end.set()
            self._running.discard(end)
            self._suspects.discard(end)


class Patience:
    """Decides whether a request that broke is tried again.

    - Retries for a fault of the request or of its answer are counted: no more than ``attempts``.
    - Retries for what another request or the connection caused are not: after a blameless error, or when
      the server became unavailable after it had sent new tokens. Each has a pause before it that grows, and
      ``MOST_BLAMELESS`` in a row without a new token are the limit.
    - With ``attempts`` 0 nothing is tried again.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._counted = 0
        # Since the last token.
        self._blameless = 0

    def progressed(self) -> None:
        self._blameless = 0

    def allows(self, error: errors.CogTritonError, *, had_tokens: bool) -> bool:
        """Return whether to try again after an error, and count that."""
        unavailable = isinstance(error, errors.TritonUnavailable)
        if error.blameless or (unavailable and had_tokens):
            self._blameless += 1
            return self._attempts > 0 and self._blameless <= MOST_BLAMELESS
        self._counted += 1
        return self._counted <= self._attempts

    async def pause(self) -> None:
        """Wait before a retry, unless it is the first since the last token."""
        if self._blameless > 1:
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** (self._blameless - 2), LONGEST_PAUSE))


@dataclass
class _Output:
    """What has been delivered of one request's output.

    Attributes:
        ids: all token ids.
        begun: number of those that another deployment or start delivered; the limits are for the rest.
        max_tokens: the limit.
        end_ids: token ids that end the output.
    """

    ids: "array[int]"
    begun: int
    max_tokens: int
    end_ids: Collection[int]
    prompt_tokens: int | None = None
    keeps_end_token: bool = True

    @classmethod
    def begin(cls, inputs: Inputs, parameters: Parameters, end_tokens: EndTokens) -> "_Output":
        """Return the output of a request before its first attempt."""
        ids = array("i", ids_parameter(parameters, CONTINUED))
        end_id = int(inputs["end_id"].flat[0]) if "end_id" in inputs else None
        return cls(
            ids,
            begun=len(ids),
            max_tokens=int(inputs["max_tokens"].flat[0]),
            end_ids=end_tokens.for_request(end_id),
        )

    @property
    def was_complete(self) -> bool:
        """Whether nothing was left to generate at the beginning."""
        if not self.begun:
            return False
        return self.max_tokens == 0 or self.ids[self.begun - 1] in self.end_ids

    @property
    def has_new_ids(self) -> bool:
        return len(self.ids) > self.begun

    @property
    def is_complete(self) -> bool:
        ended = self.has_new_ids and self.ids[-1] in self.end_ids
        return ended or len(self.ids) - self.begun >= self.max_tokens

    def add(self, response: Response, continued: int) -> None:
        """Add a response of an attempt that continued after so many ids."""
        if response.input_tokens is not None:
            response.input_tokens -= continued
            if self.prompt_tokens not in (None, response.input_tokens):
                raise errors.TritonUnknownError(CANNOT)
            self.prompt_tokens = response.input_tokens
        self.keeps_end_token = self.keeps_end_token and response.keeps_end_token
        self.ids.extend(response.ids)


@dataclass
class ResumingClient:
    """Retries a request on the restarted server, or on the same one after a response was lost.

    A sampled token depends on the seed, its place and the tokens before it, so on the embedded engines the
    output is that of an uninterrupted request. TensorRT-LLM takes the delivered tokens for the prompt's and
    generates another end; a guide would begin anew, so that request fails.

    Attributes:
        clients: has the client of the server that runs.
        attempts: maximum number of retries of one request for its faults; see ``Patience``.
        end_tokens: those of the model.
        adapters: sent to TensorRT-LLM's C++ backend where it lacks them.
        retries: number of retries of all requests.
    """

    clients: Clients
    attempts: int
    end_tokens: EndTokens
    adapters: AdapterTensors | None = None
    retries: int = field(default=0, init=False)
    trials: Trials = field(default_factory=Trials, init=False)

    async def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncGenerator[Response, None]:
        """Start a request and yield its responses, see ``Streams``."""
        output = _Output.begin(inputs, parameters, self.end_tokens)
        patience = Patience(self.attempts)
        suspect = False
        for attempt in itertools.count():
            if attempt == 0 and output.was_complete:
                break
            name = f"{request_id}-{attempt}" if attempt else request_id
            continued = len(output.ids)
            await patience.pause()
            async with self.trials.trial(alone=suspect) as answered:
                client = await self.clients.client(None)
                sent = self._send(client, name, inputs, output, parameters)
                try:
                    async with contextlib.aclosing(sent) as responses:
                        async for response in responses:
                            answered.set()
                            output.add(response, continued)
                            if response.ids:
                                patience.progressed()
                            yield response
                    return
                except errors.PromptTooLong:
                    if not output.ids:
                        raise
                    # The context was full.
                    break
                except BROKEN as error:
                    if output.is_complete:
                        # Only the mark of the end is missing.
                        break
                    if not patience.allows(error, had_tokens=len(output.ids) > continued):
                        raise
                    if output.has_new_ids and not output.keeps_end_token and _GUIDE in inputs:
                        raise errors.TritonUnavailable(GUIDED) from error
                    # In the trial: no other begins on a server whose end is not noticed yet.
                    died = await self._has_died(client, error)
                    if died and suspect and not answered.is_set():
                        raise errors.TritonUnavailable(TWO_ENDED) from error
                    suspect = not answered.is_set() and (died or suspect)
                    self.retries += 1
                    logger.warning(
                        "resuming request %s after %d tokens: %s",
                        request_id,
                        len(output.ids),
                        error,
                    )
        # Left by a break: nothing more is to be generated, and the end has not been yielded.
        yield Response([], None, final=True, keeps_end_token=output.keeps_end_token)

    def _send(
        self,
        client: TritonClient,
        name: str,
        inputs: Inputs,
        output: _Output,
        parameters: Parameters,
    ) -> AsyncGenerator[Response, None]:
        """Send the rest of a request to a server."""
        send: Send[Response] = partial(client.stream, continued=output.ids, parameters=parameters)
        if self.adapters is not None:
            send = partial(self.adapters.stream, send)
        return send(name, _rest(inputs, len(output.ids) - output.begun))

    async def _has_died(self, client: TritonClient, error: errors.CogTritonError) -> bool:
        """Whether the server of a client has ended, and not just this request of it."""
        if not isinstance(error, errors.TritonUnavailable):
            return False
        return await self.clients.client(client) is not client


def _rest(inputs: Inputs, continued: int) -> Inputs:
    """Return the inputs with limits for the rest of the output."""
    rest = dict(inputs)
    for name in ("max_tokens", "min_tokens"):
        if name in inputs:
            rest[name] = np.maximum(inputs[name] - continued, 0).astype(np.int32)
    return rest
