"""What an application serves: names of models, the deployment behind them, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
"""For those that were ended by force to tell their clients so."""
OWNER = "cog-triton"


class Backend(Protocol):
    """What answers: a ``Deployment``, or a Triton that somebody else runs."""

    settings: Settings
    limits: TextLimits
    tokenizer: Tokenizer
    context_length: int | None
    admission: Admission

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Streams the answer to a request; see ``cog_triton.generation.generate``."""

    def close(self) -> None:
        """Ends all requests with an error that asks to send them again, and takes no more."""

    async def healthy(self) -> bool:
        """Whether a request that comes now would be answered."""

    async def stop(self) -> None:
        """Stops what was started."""


@dataclass
class Served:
    """The state of one application.

    Attributes:
        models: the names under which the model is asked for; the first is its own.
        created: seconds since 1970.
        draining: whether it takes no new requests.
        running: requests that are being answered.
        busy: called with True when there are some, and with False when there are none any more.
        processes: that answer.
        metrics_directory: in which they have their figures; None for a single one.
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
        """Seconds since 1970."""
        return int(time.time())

    def token_ids(self) -> dict[str, Any]:
        """The end and padding tokens that the settings name, as arguments of a request."""
        return {"end_id": self.settings.end_id, "pad_id": self.settings.pad_id}

    def generate(
        self, requests: Sequence[Request], request_id: str
    ) -> list[AsyncGenerator[Chunk, None]]:
        """The answers to requests, under names in Triton that tell whose they are.

        Args:
            request_id: the client's, which may come again: so more is put behind it.
        """
        name, call = f"{request_id}-{secrets.token_hex(4)}", current()
        names = [f"{name}-{number}" if number else name for number in range(len(requests))]
        return [
            observed(self.backend.generate(request, name, call.tenant(request)), call)
            for name, request in zip(names, requests, strict=True)
        ]

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters that are there now, each a model by its own name."""
        return adapter_names(self.settings.lora_dir)

    def adapter(self, name: str) -> str:
        """The adapter that a model's name asks for; empty for the model itself.

        Raises:
            ApiError: 404, nothing is served under that name.
        """
        adapters = self.adapters
        if name in self.models or name in adapters:
            current().model = name
            return "" if name in self.models else name
        raise ApiError(
            404,
            f"The model `{shown(name)}` does not exist; there is "
            f"{', '.join([*self.models, *adapters])}",
            param="model",
            code="model_not_found",
        )

    def only_model(self) -> str:
        """The model's name, for a request that names none.

        Raises:
            ApiError: there are adapters, so that it has to name one.
        """
        if self.adapters:
            names = ", ".join([*self.models, *self.adapters])
            text = f"you must provide model: one of {names}"
            raise ApiError(400, text, param="model", code="missing_required_parameter")
        return self.models[0]

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Counts a request meanwhile.

        Raises:
            ApiError: 503, the server is being stopped.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is stopping and takes no new requests",
                "server_error",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
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
        """Lets requests that run end, for DRAIN_SECONDS, and then ends them with an error."""
        self.draining = True
        await self._idle_within(self.settings.drain_seconds)
        self.backend.close()
        await self._idle_within(LAST_SECONDS)

    async def _idle_within(self, seconds: float) -> None:
        self._idle.clear()
        if self.running:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
