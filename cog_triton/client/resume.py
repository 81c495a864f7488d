"""Streams that continue on the restarted server, after the tokens already delivered."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np

from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.client.stream import BROKEN, Inputs, Response, TritonClient
from cog_triton.errors import PromptTooLong, TritonUnavailable, TritonUnknownError
from cog_triton.wire import NO_PARAMETERS, Parameters

logger = logging.getLogger(__name__)

TWO_ENDED = "two servers ended as they began this request, which is not tried again"


class Streams(Protocol):
    """Runs requests."""

    def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AbstractAsyncContextManager[AsyncIterator[Response]]:
        """Yield the responses to a request, in order; leaving the context stops it in the engine.

        Args:
            parameters: sent with the inputs, see ``cog_triton.wire``.
        """


class Clients(Protocol):
    """The clients of the running server and of those after it."""

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """Return the present one, or the next after one that failed.

        Raises:
            TritonUnavailable: there is none any more, or none in time.
        """


class ResumingClient:
    """Retries a request on the restarted server, after the tokens already streamed.

    It does so on the same server where a connection broke or a stream is not complete. TensorRT-LLM is
    first sent the number of an adapter, and the request again with the adapter if it lacks that.

    A sampled token depends on the seed, its place and the tokens before it, so on the embedded engines the
    output is that of an undisturbed request. TensorRT-LLM takes the delivered tokens for the prompt's and
    generates another end.

    A request without a response when its server ended may have ended it. It is tried once more, while no
    other request begins; see ``Trials``.

    Attributes:
        retries: how often a request was tried again.
    """

    def __init__(
        self,
        clients: Clients,
        *,
        attempts: int,
        end_id: int | None,
        adapters: AdapterTensors | None = None,
    ) -> None:
        """Connect to nothing.

        Args:
            attempts: the most retries of one request.
            end_id: the token that ends an output, of requests that name none.
            adapters: of TensorRT-LLM's C++ backend; None for engines that read them themselves.
        """
        self._adapters = adapters
        self._clients = clients
        self._attempts = attempts
        self._end_id = end_id
        self._trials = Trials()
        self.retries = 0

    @contextlib.asynccontextmanager
    async def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> AsyncIterator[AsyncIterator[Response]]:
        """See ``Streams``."""
        progress = Progress(inputs, self._end_id)
        responses = self._responses(request_id, progress, parameters)
        async with contextlib.aclosing(responses):
            yield responses

    async def _responses(
        self, request_id: str, progress: Progress, parameters: Parameters
    ) -> AsyncGenerator[Response, None]:
        suspect = False
        for attempt in range(self._attempts + 1):
            name = f"{request_id}-{attempt}" if attempt else request_id
            answered = False
            async with self._trials.trial(alone=suspect) as trial:
                client = await self._clients.client(None)
                try:
                    async with self._stream(client, name, progress, parameters) as responses:
                        async for response in responses:
                            if not answered:
                                answered = True
                                trial.close()
                            yield progress.add(response)
                    return
                except PromptTooLong:
                    if not progress.ids:
                        raise
                    break  # the context was full
                except BROKEN as error:
                    if progress.complete:
                        break  # no server is needed for the end
                    if attempt == self._attempts:
                        raise
                    # In the trial: no other begins on a server whose end is not noticed yet.
                    gone = isinstance(error, TritonUnavailable)
                    ended = gone and await self._clients.client(client) is not client
                    if ended and suspect and not answered:
                        raise TritonUnavailable(TWO_ENDED) from error
                    suspect = not answered and (ended or suspect)
                    self.retries += 1
                    logger.warning(
                        "request %s is tried again after %d tokens: %s",
                        request_id,
                        len(progress.ids),
                        error,
                    )
        yield Response([], None, final=True, keeps_end_token=progress.keeps_end_token)

    def _stream(
        self, client: TritonClient, name: str, progress: Progress, parameters: Parameters
    ) -> AbstractAsyncContextManager[AsyncIterator[Response]]:
        inputs = progress.inputs()
        if self._adapters is None:  # each generator between costs time with each token
            return client.stream(name, inputs, progress.ids, parameters)

        def send(name: str, inputs: Inputs) -> AbstractAsyncContextManager[AsyncIterator[Response]]:
            return client.stream(name, inputs, progress.ids, parameters)

        return contextlib.aclosing(self._adapters.stream(send, name, inputs))


class Trials:
    """Requests from their start to their first response: many at once, or one that may end its server.

    If the server ends in the trial of that one, it is certain which request ended it.
    """

    def __init__(self) -> None:
        self._running = 0
        self._suspects = 0  # that wait or run
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def trial(self, *, alone: bool) -> AsyncIterator[contextlib.ExitStack]:
        """Begin a trial once it may begin.

        It ends with the context, or when what this yields is closed.
        """
        with contextlib.ExitStack() as ends:
            if alone:
                self._count(suspects=1)
                ends.callback(self._count, suspects=-1)
            while self._running if alone else self._suspects:
                await self._changed.wait()
            self._count(running=1)
            ends.callback(self._count, running=-1)
            yield ends

    def _count(self, *, running: int = 0, suspects: int = 0) -> None:
        self._running += running
        self._suspects += suspects
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Progress:
    """The progress of one request.

    Attributes:
        ids: the delivered part of its output.
        keeps_end_token: as its responses have it.
    """

    def __init__(self, inputs: Inputs, end_id: int | None) -> None:
        self._inputs = inputs
        self._end_id = int(inputs["end_id"].flat[0]) if "end_id" in inputs else end_id
        self._continued = 0
        self._prompt_tokens: int | None = None
        self.ids = array("i")
        self.keeps_end_token = True

    @property
    def complete(self) -> bool:
        """No token is missing, although no response was marked as the last."""
        limit = int(self._inputs["max_tokens"].flat[0])
        return len(self.ids) >= limit or (bool(self.ids) and self.ids[-1] == self._end_id)

    def inputs(self) -> Inputs:
        """Return the inputs of the next attempt, with limits for the rest of the output."""
        self._continued = len(self.ids)
        if not self._continued:
            return self._inputs
        counts = {
            name: np.maximum(self._inputs[name] - self._continued, 0)
            for name in ("max_tokens", "min_tokens")
            if name in self._inputs
        }
        return {**self._inputs, **{name: n.astype(np.int32) for name, n in counts.items()}}

    def add(self, response: Response) -> Response:
        """Add a response, and return it as that of an undisturbed request.

        Raises:
            TritonUnknownError: the server began a new output: its preprocessing is not this package's.
        """
        tokens = response.input_tokens
        if tokens is not None and self._continued:
            tokens -= self._continued
            if tokens != self._prompt_tokens:
                raise TritonUnknownError("the server cannot continue an output that it has begun")
            response = dataclasses.replace(response, input_tokens=tokens)
        self._prompt_tokens = tokens or self._prompt_tokens
        self.ids.extend(response.ids)
        self.keeps_end_token = self.keeps_end_token and response.keeps_end_token
        return response
