"""A deployment as a worker of Dynamo's: ``LLMEngine`` of its backend interface (1.6, called beta)."""

import argparse
import asyncio
import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

import uvloop
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.common.backend.worker import Worker
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    lora_name_to_id,
    register_model,
)
from dynamo.llm.exceptions import DynamoException, InvalidArgument, StreamIncomplete, Unknown
from dynamo.runtime import Client, Context, DistributedRuntime, Endpoint

from cog_triton import errors
from cog_triton.adapters.directory import adapter_names
from cog_triton.api.dynamo.convert import Body, chunk_of, request_of, set_options, unknown_end_ids
from cog_triton.client.tracing import go_below
from cog_triton.deployment import Deployment
from cog_triton.deployment.attached import address_of, attach
from cog_triton.deployment.engine_choice import KV_EVENTS
from cog_triton.deployment.model_files import served_names
from cog_triton.deployment.template_variables import context_length
from cog_triton.processes import temporary_directory
from cog_triton.protocol.names import KV_BLOCK_TOKENS
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings
from cog_triton.text.end_tokens import EndTokens

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[dict[str, Any], None]
# Number of requests of all workers.
REMEMBERED = 65_536
# A worker that does not answer for so long is not waited for.
TELL_SECONDS = 1.0


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit status, or raise ConfigurationError."""
    settings = read_settings()
    log_to(settings.log_level)
    # Streams that run at SIGTERM have as long as those of every API.
    os.environ.setdefault("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", f"{settings.drain_seconds:g}")
    with temporary_directory("cog-triton-events.") as directory:
        engine = Engine(settings, options, directory)
        try:
            uvloop.run(Worker(engine, engine.config).run())
        finally:
            if engine.problem is not None:
                raise engine.problem
    return 0


class Engine(LLMEngine):
    """Requests of Dynamo's on a deployment of its own, or on a Triton that runs already."""

    deployment: Deployment | None = None
    # Why the start failed.
    problem: errors.CogTritonError | None = None

    def __init__(self, settings: Settings, options: argparse.Namespace, directory: str) -> None:
        """Start nothing yet; the directory is for this worker alone."""
        self._triton = options.triton
        self._events = settings.kv_events_endpoint
        if self._triton is None and self._events is None:
            self._events = f"ipc://{directory}/kv"
        # A worker whose Triton has been given up ends, so that its streams move to others.
        changed = {"kv_events_endpoint": self._events, "exit_on_failure": True}
        self.settings = settings.model_copy(update=changed)
        self._name = served_names(settings)[0]
        self._marks = Marks()
        self._running: dict[str, asyncio.Task[None]] = {}
        self.config = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            model_name=settings.tokenizer_dir,
            served_model_name=self._name,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
        """Raise: ``run`` has read the command line."""
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002
        try:
            if self._triton is None:
                self.deployment = await Deployment.start(self.settings)
            else:
                # The setting counts: the server may stretch the model's context.
                length = self.settings.max_sequence_length
                length = length or context_length({"model": self.settings.tokenizer_dir})
                address = address_of(self._triton)
                self.deployment = await attach(self.settings, address, "ensemble", length)
        except errors.CogTritonError as error:
            self.problem = error
            raise
        return EngineConfig(
            model=self.settings.tokenizer_dir,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=self.deployment.context_length,
                kv_cache_block_size=KV_BLOCK_TOKENS,
                max_num_seqs=self.settings.max_running,
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        assert self.deployment is not None
        publishes = self._triton is not None or self.deployment.engine in KV_EVENTS
        return [ZmqSource(self._events)] if self._events and publishes else []

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        """Register the adapters of LORA_DIR, and listen to the other workers beside Dynamo's endpoint."""
        parsers = ModelRuntimeConfig()
        parsers.tool_call_parser = self.config.tool_call_parser
        parsers.reasoning_parser = self.config.reasoning_parser
        for name in adapter_names(self.settings.lora_dir):
            await register_model(
                ModelInput.Tokens,
                ModelType.Chat | ModelType.Completions,
                endpoint,
                self.settings.tokenizer_dir,
                worker_type=WorkerType.Aggregated,
                kv_cache_block_size=KV_BLOCK_TOKENS,
                runtime_config=parsers,
                user_data={"lora_adapter": True, "lora_id": lora_name_to_id(name)},
                lora_name=name,
                base_model_path=self.settings.tokenizer_dir,
                needs=[],
            )
        config = self.config
        runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            config.discovery_backend,
            config.request_plane,
            event_plane=config.event_plane,
            response_plane=config.response_plane,
        )
        marks = f"{config.namespace}.{config.component}.marks"
        self._listening = asyncio.create_task(self._marks.serve(runtime, marks))
        self._listening.add_done_callback(_log_end)

    async def health_check_payload(self) -> dict[str, Any] | None:
        assert self.deployment is not None
        begin = getattr(self.deployment.tokenizer, "bos_token_id", None)
        return dict(build_health_check_payload(bos_token_id=begin or 1))

    async def generate(self, request: Body, context: Context) -> Chunks:
        """Stream a request's tokens, or raise an error of Dynamo's.

        The deployment's generator wants one task for its whole life; Dynamo asks for each chunk in its own.
        """
        chunks: asyncio.Queue[dict[str, Any] | DynamoException | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer(request, context, chunks))
        self._running[context.id()] = answering
        try:
            while True:
                chunk = await chunks.get()
                if chunk is None:
                    return
                if isinstance(chunk, DynamoException):
                    raise chunk
                yield chunk
        finally:
            self._running.pop(context.id(), None)
            answering.cancel()

    async def abort(self, context: Context) -> None:
        """Stop a request whose client has left."""
        answering = self._running.get(context.id())
        if answering is not None:
            answering.cancel()

    async def _answer(self, body: Body, context: Context, chunks: asyncio.Queue[Any]) -> None:
        end: Any = None
        go_below(context.trace_headers() or {})
        try:
            async with contextlib.aclosing(self._chunks(body, context.id())) as made:
                async for chunk in made:
                    chunks.put_nowait(chunk)
        except asyncio.CancelledError:
            end = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except errors.UserError as error:
            end = InvalidArgument(str(error))
        except (errors.TritonOverloaded, errors.TritonUnavailable) as error:
            # Another worker has room, or continues.
            end = StreamIncomplete(str(error))
        except errors.CogTritonError as error:
            end = Unknown(str(error))
        except Exception as error:
            logger.exception("request %s", context.id())
            end = Unknown(f"{type(error).__name__}: {error}")
        chunks.put_nowait(end)
        chunks.put_nowait(None)

    async def _chunks(self, body: Body, request_id: str) -> Chunks:
        if self.deployment is None:
            raise errors.TritonUnavailable("the worker has stopped")
        prompt = self._marks.length(request_id, len(body["token_ids"]))
        # Only the mark of the end was lost.
        if set_options(body, "stop_conditions").get("max_tokens") == 0:
            yield {"token_ids": [], "index": 0, "finish_reason": "length"}
            return
        # Of an adapter, as Dynamo has it or in place of the model's.
        name = set_options(body, "routing").get("lora_name") or body.get("model", self._name)
        end_tokens = self.deployment.end_tokens or EndTokens()
        request = request_of(
            body,
            request_id,
            prompt_tokens=prompt,
            end_tokens=end_tokens,
            context_length=self.deployment.context_length,
            adapter="" if name == self._name else name,
            seeded=self.deployment.draws_seeds,
            defaults=self.deployment.sampling_defaults,
        )
        if request.presence_penalty or request.frequency_penalty or request.prompt_log_probs:
            await self._marks.tell(request_id, prompt)
        unknown = unknown_end_ids(body, end_tokens)
        async with contextlib.aclosing(self.deployment.generate(request)) as answer:
            async for chunk in answer:
                yield chunk_of(chunk, unknown)

    async def cleanup(self) -> None:
        if self.deployment is None:
            return
        if self._running:
            # The frontends send no more; these would be moved to other workers.
            await asyncio.wait(self._running.values(), timeout=self.settings.drain_seconds)
        deployment = self.deployment
        self.deployment = None
        await deployment.stop()


def _log_end(listening: "asyncio.Task[None]") -> None:
    """Log why a worker does not hear from the others any more."""
    if not listening.cancelled() and listening.exception() is not None:
        logger.error(
            "this worker is not told about moved requests any more", exc_info=listening.exception()
        )


class Marks:
    """The lengths of prompts, by requests' ids: this worker's, and what the others told.

    Dynamo sends a request that has lost its worker to another one: the prompt and the output so far as
    one list of ids, under the same id. Penalties count the output only. So a worker tells the others of
    each request for which that matters, before its first token, by an endpoint of Dynamo's.
    """

    _client: Client

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, int] = OrderedDict()
        self._endpoint: Endpoint | None = None

    async def serve(self, runtime: DistributedRuntime, path: str) -> None:
        """Listen to the other workers at ``namespace.component.endpoint`` until cancelled."""
        self._endpoint = runtime.endpoint(path)
        self._client = await self._endpoint.client()
        await self._endpoint.serve_endpoint(self._receive)

    def length(self, request_id: str, count: int) -> int:
        """Return how many of a request's ids are its prompt: all, if nothing else is known."""
        return min(self._lengths.get(request_id, count), count)

    async def tell(self, request_id: str, length: int) -> None:
        """Tell the other workers; one that cannot be reached will not get the request either."""
        if self._endpoint is None or request_id in self._lengths:
            return
        self._remember(request_id, length)
        this_worker = self._endpoint.connection_id()
        mark = {"id": request_id, "length": length}
        others = [worker for worker in self._client.instance_ids() if worker != this_worker]
        telling = [asyncio.create_task(self._send(worker, mark)) for worker in others]
        if telling:
            await asyncio.wait(telling, timeout=TELL_SECONDS)

    async def _send(self, worker: int, mark: dict[str, Any]) -> None:
        try:
            async for _ in await self._client.direct(mark, worker):
                pass
        except Exception as error:
            # Dynamo's transport may raise anything.
            logger.debug("worker %d could not be told about a moved request: %s", worker, error)

    async def _receive(self, mark: dict[str, Any]) -> Chunks:
        self._remember(mark["id"], mark["length"])
        yield {}

    def _remember(self, request_id: str, length: int) -> None:
        self._lengths[request_id] = length
        if len(self._lengths) > REMEMBERED:
            self._lengths.popitem(last=False)
