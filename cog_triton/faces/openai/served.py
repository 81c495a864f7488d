"""The state of an application: names of models, the deployment behind them, running requests."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Depends
from fastapi import Request as HttpRequest

from cog_triton.adapters.directory import adapter_names
from cog_triton.errors import shown
from cog_triton.faces.openai.calls import current, observed
from cog_triton.faces.openai.errors import RETRY_SECONDS, ApiError
from cog_triton.generation import Chunk
from cog_triton.request.admission import Admission, Tenant
from cog_triton.request.limits import TextLimits
from cog_triton.request.request import Request
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer

LAST_SECONDS = 2.0
"""For requests that were ended by force to send their clients the error."""


class Backend(Protocol):
    """A ``Deployment``, or a Triton that somebody else runs."""

    settings: Settings
    limits: TextLimits
    tokenizer: Tokenizer
    context_length: int | None
    admission: Admission

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See ``cog_triton.generation.generate``."""

    def close(self) -> None:
        """End all requests with an error that asks to send them again; take no more."""

    async def healthy(self) -> bool:
        """Return whether a request would be answered now."""


@dataclass
class Served:
    """The state of one application.

    Attributes:
        models: names of the model in requests; the first is its own.
        created: seconds since 1970.
        draining: new requests are refused.
        running: number of requests that are being answered.
        busy: called with True when the first of them begins, with False when the last ends.
        processes: that answer; metrics_directory has the figures of several.
    """

    backend: Backend
    models: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    running: int = 0
    busy: Callable[[bool], object] = lambda _: None
    processes: int = 1
    metrics_directory: str | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def settings(self) -> Settings:
        return self.backend.settings

    def now(self) -> int:
        return int(time.time())

    def token_ids(self) -> dict[str, Any]:
        """Return the end and padding tokens of the settings, as arguments of a request."""
        return {"end_id": self.settings.end_id, "pad_id": self.settings.pad_id}

    def generate(
        self, requests: Sequence[Request], request_id: str
    ) -> list[AsyncGenerator[Chunk, None]]:
        """Start requests, under ids in Triton that begin with the client's, which may come again."""
        name, call = f"{request_id}-{secrets.token_hex(4)}", current()
        names = [f"{name}-{number}" if number else name for number in range(len(requests))]
        return [
            observed(self.backend.generate(request, name, call.tenant(request)), call)
            for name, request in zip(names, requests, strict=True)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, and of the LoRA adapters that are there now."""
        return (*self.models, *adapter_names(self.settings.lora_dir))

    def adapter(self, name: str) -> str:
        """Return the adapter of a model's name; empty for the model itself.

        Raises:
            ApiError: 404, nothing is served under that name.
        """
        if name in (names := self.names):
            current().model = name
            return "" if name in self.models else name
        text = f"The model `{shown(name)}` does not exist; there is {', '.join(names)}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def only_model(self) -> str:
        """Return the model's name, for a request that names none.

        Raises:
            ApiError: there are adapters, so that it has to name one.
        """
        if (names := self.names) == self.models:
            return self.models[0]
        text = f"you must provide model: one of {', '.join(names)}"
        raise ApiError(400, text, param="model", code="missing_required_parameter")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as running.

        Raises:
            ApiError: 503, the server is being stopped.
        """
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
                self._idle.set()
                self.busy(False)

    async def drain(self) -> None:
        """Let requests end for DRAIN_SECONDS; then end them with an error."""
        self.draining = True
        await self._idle_within(self.settings.drain_seconds)
        self.backend.close()
        await self._idle_within(LAST_SECONDS)

    async def _idle_within(self, seconds: float) -> None:
        self._idle.clear()
        if self.running:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)


async def _served(request: HttpRequest) -> Served:
    served: Served = request.app.state.served
    return served


async def _request_id(request: HttpRequest) -> str:
    return str(request.state.request_id)


FromApp = Annotated[Served, Depends(_served)]
RequestId = Annotated[str, Depends(_request_id)]
