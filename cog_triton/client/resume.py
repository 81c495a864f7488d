"""Requests that continue on the restarted server, after the tokens already streamed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

import numpy as np

from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.client.stream import BROKEN, Inputs, Response, TritonClient
from cog_triton.errors import PromptTooLong, TritonUnavailable, TritonUnknownError
from cog_triton.wire import NO_PARAMETERS, Parameters

logger = logging.getLogger(__name__)

TWO_ENDED = "two servers ended as they began this request, which is not tried again"
Opened = AbstractAsyncContextManager[AsyncIterator[Response]]


class Clients(Protocol):
    async def client(self, failed: TritonClient | None) -> TritonClient:
        """Return the present client, or the next after one that failed; or raise TritonUnavailable."""


class ResumingClient:
    """Retries a request on the restarted server, or on the same one after a response was lost.

    A sampled token depends on the seed, its place and the tokens before it, so on the embedded engines the
    output is that of an undisturbed request. TensorRT-LLM takes the delivered tokens for the prompt's and
    generates another end.

    Args:
        attempts: the most retries of one request.
        end_id: the token that ends an output, of requests that name none.
        adapters: of TensorRT-LLM's C++ backend, which is sent a request again with the adapter that it
            lacks; None for engines that read them themselves.

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
        self._clients, self._attempts, self._end_id = clients, attempts, end_id
        self._adapters, self._trials, self.retries = adapters, Trials(), 0

    def stream(
        self, request_id: str, inputs: Inputs, *, parameters: Parameters = NO_PARAMETERS
    ) -> Opened:
        """Start a request and yield its responses, see ``Streams``."""
        return contextlib.aclosing(self._responses(request_id, inputs, parameters))

    async def _responses(
        self, request_id: str, inputs: Inputs, parameters: Parameters
    ) -> AsyncGenerator[Response, None]:
        ids, prompt_tokens, keeps_end_token = array("i"), None, True
        end_id = int(inputs["end_id"].flat[0]) if "end_id" in inputs else self._end_id
        suspect = False
        for attempt in range(self._attempts + 1):
            name = f"{request_id}-{attempt}" if attempt else request_id
            continued, answered = len(ids), False
            async with self._trials.trial(alone=suspect) as end_trial:
                client = await self._clients.client(None)
                send = partial(client.stream, continued=ids, parameters=parameters)
                try:
                    async with self._opened(send, name, _rest(inputs, continued)) as responses:
                        async for response in responses:
                            if not answered:
                                answered = True
                                end_trial()
                            if continued and response.input_tokens is not None:
                                tokens = response.input_tokens - continued
                                if (
                                    tokens != prompt_tokens
                                ):  # its preprocessing is not this package's
                                    raise TritonUnknownError(
                                        "the server cannot continue an output that it has begun"
                                    )
                                response = dataclasses.replace(response, input_tokens=tokens)
                            prompt_tokens = response.input_tokens or prompt_tokens
                            keeps_end_token = keeps_end_token and response.keeps_end_token
                            ids.extend(response.ids)
                            yield response
                    return
                except PromptTooLong:
                    if not ids:
                        raise
                    break  # the context was full
                except BROKEN as error:
                    if len(ids) >= inputs["max_tokens"].flat[0] or (ids and ids[-1] == end_id):
                        break  # only the mark of the end is missing
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
                        "request %s is tried again after %d tokens: %s", request_id, len(ids), error
                    )
        yield Response([], None, final=True, keeps_end_token=keeps_end_token)

    def _opened(self, send: Callable[[str, Inputs], Opened], name: str, inputs: Inputs) -> Opened:
        if self._adapters is None:
            return send(name, inputs)
        return contextlib.aclosing(self._adapters.stream(send, name, inputs))


def _rest(inputs: Inputs, continued: int) -> Inputs:
    """Return the inputs with limits for the rest of the output."""
    counts = {n: inputs[n] - continued for n in ("max_tokens", "min_tokens") if n in inputs}
    return {**inputs, **{n: np.maximum(v, 0).astype(np.int32) for n, v in counts.items()}}


class Trials:
    """Requests from their start to their first response: many at once, or one that may end its server.

    A request without a response when its server ended may have ended it. It is tried once more, while no
    other request begins: if that server ends too, it is certain which request ended it.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Event] = set()
        self._suspects: set[asyncio.Event] = set()  # that wait or run

    @contextlib.asynccontextmanager
    async def trial(self, *, alone: bool) -> AsyncIterator[Callable[[], None]]:
        """Begin a trial once it may begin, and yield what ends it before the context does."""
        over = asyncio.Event()

        def end() -> None:
            over.set()
            self._running.discard(over)
            self._suspects.discard(over)

        try:
            if alone:
                self._suspects.add(over)
            while others := self._running if alone else self._suspects:
                await next(iter(others)).wait()
            self._running.add(over)
            yield end
        finally:
            end()
