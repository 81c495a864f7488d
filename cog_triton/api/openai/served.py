"""Served: the state of one application."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import anyio
from fastapi import Depends
from fastapi import Request as HttpRequest

from cog_triton.adapters.directory import adapter_names
from cog_triton.api.openai.background_tasks import BackgroundTasks
from cog_triton.api.openai.call import Chunks, current
from cog_triton.api.openai.errors import RETRY_SECONDS, SERVER_ERROR, ApiError
from cog_triton.api.openai.figures import Figures
from cog_triton.api.openai.keys import Key, configured_keys
from cog_triton.api.openai.pacing import Rounds
from cog_triton.api.openai.quotas import Quotas
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.client.tracing import tracer
from cog_triton.deployment.deployment import Deployment
from cog_triton.errors import shown
from cog_triton.request.request import Request

LAST_SECONDS = 2.0  # for requests that were ended by force to send their clients the error
POLL_SECONDS = 0.05


@dataclass
class Served:
    """The state of one application.

    Attributes:
        models: names of the model in requests; the first is the one that answers have.
        busy: called with True when the first request runs, and with False when none does any more.
        created: when the model was loaded, for the list of models.
        draining: new requests are refused, because the server stops.
        running: how many requests are being answered.
        storage: None with STORE=0.
        rounds: lets answers with log probabilities take turns.
        max_running: how many requests may run in all processes together.
    """

    backend: Deployment
    models: Sequence[str]
    busy: Callable[[bool], object] = lambda _: None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    running: int = 0
    storage: Storage | None = None
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self) -> None:
        self.settings = self.backend.settings
        processes = self.settings.openai_workers
        self.keys = configured_keys(self.settings)
        self.quotas = Quotas(processes)
        self.figures = Figures(self.models[0], self.backend.admission, processes)
        self.tracer = tracer(self.settings.otel_endpoint)
        self.max_running = self.backend.admission.max_running * processes

    def generate(self, requests: Sequence[Request]) -> list[Chunks]:
        """Start requests, under ids in Triton that begin with the client's, which may come again."""
        call = current()
        nonce = secrets.token_hex(4)
        answers: list[Chunks] = []
        for number, request in enumerate(requests):
            request_id = f"{call.id}-{nonce}-{number}"
            chunks = self.backend.generate(request, request_id, call.tenant(request))
            observed = call.observed(chunks)
            answers.append(observed if request.log_probs is None else self._by_turns(observed))
        return answers

    async def _by_turns(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of an answer with log probabilities, those of one answer in a round of the loop.

        Each token may have dozens of values, which take a hundred times as long as its text.
        """
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                await self.rounds.wait_for_turn()
                yield chunk

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, and of the LoRA adapters that are there now."""
        return (*self.models, *adapter_names(self.settings.lora_dir))

    def adapter(self, name: str) -> str:
        """Return the adapter of a model's name, empty for the model itself, or raise 404."""
        names = self.names
        if name not in names:
            text = f"The model `{shown(name)}` does not exist; available: {', '.join(names)}"
            raise ApiError(404, text, param="model", code="model_not_found")
        current().model = name
        return "" if name in self.models else name

    def only_model(self) -> str:
        """Return the model for a request that names none, or raise 400 if there are adapters."""
        names = self.names
        if names != tuple(self.models):
            text = f"you must provide model: one of {', '.join(names)}"
            raise ApiError(400, text, param="model", code="missing_required_parameter")
        return self.models[0]

    def problem(self) -> str | None:
        """Return why the server is not ready, other than its engine; None if it is."""
        if self.storage is not None:
            problem = self.storage.journal.problem()
            if problem is not None:
                return problem
        return self.tasks.problem()

    def key(self, name: str) -> Key | None:
        """Return the key of a name, if it is still there."""
        return Key(name, b"") if self.keys is None else self.keys.named(name)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as running, or raise 503 while the server stops."""
        if self.draining:
            text = "the server is stopping and takes no new requests"
            headers = {"Retry-After": str(RETRY_SECONDS)}
            raise ApiError(503, text, SERVER_ERROR, headers=headers)
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
        for seconds in (self.settings.drain_seconds, LAST_SECONDS):
            with anyio.move_on_after(seconds):
                while self.running:
                    await asyncio.sleep(POLL_SECONDS)
            self.backend.close()


async def _served(request: HttpRequest) -> Any:
    return request.app.state.served


FromApp = Annotated[Served, Depends(_served)]
