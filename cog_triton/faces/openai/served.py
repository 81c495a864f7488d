"""The state of an application, and the record of each request."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Depends
from fastapi import Request as HttpRequest

from cog_triton.adapters.directory import adapter_names
from cog_triton.errors import CogTritonError, shown
from cog_triton.faces.openai.errors import RETRY_SECONDS, ApiError
from cog_triton.faces.openai.keys import ANYBODY, Key
from cog_triton.generation import Chunk
from cog_triton.request.admission import Admission, Tenant
from cog_triton.request.limits import TextLimits
from cog_triton.request.request import Request
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer

Chunks = AsyncGenerator[Chunk, None]
LAST_SECONDS = 2.0
"""For requests that were ended by force to send their clients the error."""
POLL_SECONDS = 0.05
EXPECTED_TOKENS = 256
"""Of an answer that may be longer, before its length is known."""
CHARACTERS_PER_TOKEN = 4


class Backend(Protocol):
    """A ``Deployment``, or a Triton that somebody else runs."""

    settings: Settings
    limits: TextLimits
    tokenizer: Tokenizer
    context_length: int | None
    admission: Admission

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> Chunks:
        """See ``cog_triton.generation.generate``."""

    def close(self) -> None:
        """End all requests with an error that asks to send them again; take no more."""

    async def healthy(self) -> bool:
        """Return whether a request would be answered now."""


@dataclass
class Call:
    """A request as its metrics, log line and trace have it."""

    id: str
    path: str
    key: Key = ANYBODY
    began: float = field(default_factory=time.monotonic)
    model: str = ""  # as the client names it, once it has named one that is served
    input_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None  # seconds from the beginning
    queued: float = 0.0  # seconds that the longest of its answers waited in the queue
    finish_reasons: list[str] = field(default_factory=list)  # of its answers
    error: str = ""  # code of the error that ended it
    status: int = 0
    gap: Callable[[float], object] = lambda _: None  # gets the seconds between two chunks
    large: bool = False  # its body is prepared in a thread
    names: Mapping[str, str] = field(default_factory=dict)  # see ``Body.names``

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tenant(self, request: Request) -> Tenant:
        """Return the tenant of a request to the engine, with the tokens that it may take."""
        prompt = len(request.prompt_ids) or len(request.prompt) // CHARACTERS_PER_TOKEN
        expected = prompt + min(request.max_tokens, EXPECTED_TOKENS)
        return Tenant(self.key.name, self.key.weight, float(expected), request.priority)

    async def observed(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of one answer, and note them."""
        last, chunk, reason = 0.0, None, "abort"
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if chunk.ids or chunk.text:
                        now = time.monotonic()
                        if last:
                            self.gap(now - last)
                        elif self.first_token is None:
                            self.first_token = now - self.began
                        last = now
                    reason = chunk.finish_reason or reason
                    yield chunk
        except Exception as error:
            reason = "error"
            self.error = error.code if isinstance(error, CogTritonError) else "internal"
            raise
        finally:
            self.finish_reasons.append(reason)
            if chunk is not None:
                self.output_tokens += chunk.output_tokens
                self.input_tokens += chunk.input_tokens or 0
                self.queued = max(self.queued, chunk.queued)


CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)


def current() -> Call:
    """Return the request that is being answered."""
    return CURRENT.get() or Call("", "")


@dataclass
class Served:
    """The state of one application.

    Attributes:
        models: names of the model in requests; the first is its own.
        busy: gets True when requests run, then False.
        processes: that answer; the metrics directory has the figures of several.
        draining: new requests are refused.
    """

    backend: Backend
    models: tuple[str, ...]
    busy: Callable[[bool], object] = lambda _: None
    processes: int = 1
    metrics_directory: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    running: int = 0

    @property
    def settings(self) -> Settings:
        return self.backend.settings

    def now(self) -> int:
        return int(time.time())

    def token_ids(self) -> dict[str, Any]:
        """Return the end and padding tokens of the settings, as arguments of a request."""
        return {"end_id": self.settings.end_id, "pad_id": self.settings.pad_id}

    def generate(self, requests: Sequence[Request], request_id: str) -> list[Chunks]:
        """Start requests, under ids in Triton that begin with the client's, which may come again."""
        name, call, sources = f"{request_id}-{secrets.token_hex(4)}", current(), []
        for number, request in enumerate(requests):
            own = f"{name}-{number}" if number else name
            chunks = self.backend.generate(request, own, call.tenant(request))
            sources.append(call.observed(chunks))
        return sources

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, and of the LoRA adapters that are there now."""
        return (*self.models, *adapter_names(self.settings.lora_dir))

    def adapter(self, name: str) -> str:
        """Return the adapter of a model's name, empty for the model itself, or raise 404."""
        if name in (names := self.names):
            current().model = name
            return "" if name in self.models else name
        text = f"The model `{shown(name)}` does not exist; there is {', '.join(names)}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def only_model(self) -> str:
        """Return the model for a request that names none; where there are adapters, it has to."""
        if (names := self.names) == self.models:
            return self.models[0]
        text = f"you must provide model: one of {', '.join(names)}"
        raise ApiError(400, text, param="model", code="missing_required_parameter")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as running, or raise 503 while the server stops."""
        if self.draining:
            text, retry = "the server is stopping and takes no new requests", str(RETRY_SECONDS)
            raise ApiError(503, text, "server_error", headers={"Retry-After": retry})
        self.running += 1
        if self.running == 1:
            self.busy(True)
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.busy(False)

    async def drain(self) -> None:
        """Let requests end for DRAIN_SECONDS; then end them with an error."""
        self.draining = True
        await self._idle_within(self.settings.drain_seconds)
        self.backend.close()
        await self._idle_within(LAST_SECONDS)

    async def _idle_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)


async def _served(request: HttpRequest) -> Served:
    served: Served = request.app.state.served
    return served


async def _request_id(request: HttpRequest) -> str:
    return str(request.state.request_id)


FromApp = Annotated[Served, Depends(_served)]
RequestId = Annotated[str, Depends(_request_id)]
