"""A Triton that runs already, here or on another machine, reached by its gRPC port.

Its ensemble is ours, or NVIDIA's own of any age, which gives text and no ids. The latter decodes each
response alone, so spaces and characters of several tokens may be lost on its side, and how many tokens
there were is counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    DataType,
)

from cog_triton import wire
from cog_triton.adapters.tensors import TRITON_DTYPES, AdapterTensors
from cog_triton.client.grpc_transport import (
    Channel,
    GrpcClient,
    infer_request,
    message_arrivals,
)
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import Inputs, TritonClient
from cog_triton.deployment.deployment import tokenizer_of
from cog_triton.deployment.engine_choice import EngineName, check_supported, without_bos
from cog_triton.errors import (
    ConfigurationError,
    InvalidParameter,
    TritonMalformedEvent,
    TritonUnavailable,
)
from cog_triton.generation import Chunk, FinishReason, generate
from cog_triton.request.admission import STOPPING, Admission, Tenant
from cog_triton.request.request import Request, request_parameters, triton_inputs
from cog_triton.settings import Settings
from cog_triton.text.stop_sequences import StopSequences
from cog_triton.text.tokenizer import Tokenizer, text_limits

POLL_SECONDS = 0.1
ASK_SECONDS = 2.0
OLD_NAMES = {"seed": "random_seed", "min_tokens": "min_length"}
NOT_NEEDED = ("return_num_input_tokens",)
WORDS = ("bad_words", "stop_words")
"""Which old ensembles demand."""


async def attach(
    settings: Settings, address: str, model: str, context_length: int | None
) -> Attached:
    """Wait for a Triton that may still be starting, and look at what it has.

    Args:
        address: host:port of its gRPC endpoint.
        model: takes texts and returns them, where there is no ensemble of ours.
    """
    tokenizer = await asyncio.to_thread(tokenizer_of, settings)
    triton = RunningTriton(address)
    await triton.wait(settings.start_timeout)
    ensemble = None
    engine = await triton.config(wire.ENGINE)
    adapters = adapters_of(engine, settings.lora_dir)
    if await triton.config(wire.IDS_ENSEMBLE) is None:
        config = await triton.config(model)
        if config is None:
            text = f"the Triton at {address} has neither {wire.IDS_ENSEMBLE} nor {model}"
            raise ConfigurationError(text)
        known = {tensor.name: tensor.optional for tensor in config.input}
        ensemble = TextEnsemble(address, model, known, tokenizer, settings, adapters)
    return Attached(
        settings, tokenizer, triton, context_length, ensemble, engine_of(engine), adapters
    )


def engine_of(config: Any) -> EngineName | None:
    """Return TensorRT-LLM's C++ backend, if a model runs on it; engines in Python check requests."""
    return "tensorrtllm" if config is not None and config.backend == "tensorrtllm" else None


def adapters_of(config: Any, directory: Path | None) -> AdapterTensors | None:
    """Return a directory's adapters as TensorRT-LLM's C++ backend takes them."""
    if directory is None or engine_of(config) is None:
        return None
    kinds = {tensor.name: DataType.Name(tensor.data_type) for tensor in config.input}
    dtypes = {kind: dtype for dtype, kind in TRITON_DTYPES.items()}
    return AdapterTensors(directory, dtypes.get(kinds.get("lora_weights", ""), "float16"))


@dataclass
class Attached:
    """See ``served.Backend``. That Triton's owner starts and stops it."""

    settings: Settings
    tokenizer: Tokenizer
    triton: RunningTriton
    context_length: int | None
    ensemble: TextEnsemble | None  # None for ours
    engine: EngineName | None
    adapters: AdapterTensors | None  # of TensorRT-LLM's C++ backend

    def __post_init__(self) -> None:
        settings = self.settings
        self.limits = text_limits(self.tokenizer, self.context_length)
        self.admission = Admission(
            settings.max_running, settings.max_waiting, settings.queue_timeout
        )
        self._client: TritonClient = self._connected()
        self._reconnecting = asyncio.Lock()
        attempts, end_id = settings.resume_attempts, self.tokenizer.eos_token_id
        self._streams = ResumingClient(
            self, attempts=attempts, end_id=end_id, adapters=self.adapters
        )

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See ``Backend``; what would have no effect is refused at once."""
        check_supported(request, self.engine, own_preprocessing=True)
        if self.ensemble is not None:
            return self.ensemble.generate(request, self.admission, request_id, tenant)
        return generate(
            request,
            self._streams,
            self.tokenizer,
            admission=self.admission,
            context_length=self.context_length,
            request_id=request_id,
            tenant=tenant,
        )

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """See ``cog_triton.client.resume.Clients``."""
        async with self._reconnecting:
            if failed is not None and self._client is failed:
                try:
                    await self.triton.wait(self.settings.resume_timeout)
                except ConfigurationError as error:
                    raise TritonUnavailable(error.message) from None
                self._client = self._connected()
                await failed.aclose()  # its other requests continue on the new one as well
        return self._client

    def close(self) -> None:
        self.admission.close(STOPPING)

    async def healthy(self) -> bool:
        return not self.admission.closed and await self.triton.ready()

    async def stop(self) -> None:
        """Close the connections."""
        self.close()
        await self._client.aclose()
        if self.ensemble is not None:
            await self.ensemble.aclose()
        await self.triton.aclose()

    def _connected(self) -> GrpcClient:
        timeout = self.settings.response_timeout
        return GrpcClient(self.triton.address, response_timeout=timeout)


class RunningTriton:
    """Questions to a Triton, by its gRPC endpoint's host:port."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = Channel(address)

    async def ready(self) -> bool:
        """Return whether every model is ready."""
        request, kind = service_pb2.ServerReadyRequest(), service_pb2.ServerReadyResponse
        reply = await self._ask("ServerReady", request, kind)
        return reply is not None and bool(reply.ready)

    async def wait(self, seconds: float) -> None:
        """Wait until it is ready, or raise ConfigurationError after so many seconds."""
        deadline = time.monotonic() + seconds
        while not await self.ready():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"no Triton is ready at {self.address} (gRPC)")
            await asyncio.sleep(POLL_SECONDS)

    async def config(self, model: str) -> Any:
        """Return the configuration of a model; None if there is no such model."""
        request, kind = service_pb2.ModelConfigRequest(name=model), service_pb2.ModelConfigResponse
        reply = await self._ask("ModelConfig", request, kind)
        return None if reply is None else reply.config

    async def aclose(self) -> None:
        await self._channel.aclose()

    async def _ask(self, method: str, request: Any, kind: Any) -> Any:
        with contextlib.suppress(TritonUnavailable, asyncio.TimeoutError):
            return await asyncio.wait_for(self._channel.call(method, request, kind), ASK_SECONDS)
        return None


class TextEnsemble(GrpcClient):
    """Streams the texts of an ensemble without ids.

    Args:
        known: its inputs, and whether each may be left out.
    """

    def __init__(
        self,
        address: str,
        model: str,
        known: Mapping[str, bool],
        tokenizer: Tokenizer,
        settings: Settings,
        adapters: AdapterTensors | None,
    ) -> None:
        super().__init__(address, response_timeout=settings.response_timeout)
        self._model, self._known, self._tokenizer = model, known, tokenizer
        self._adapters = adapters

    async def generate(
        self,
        request: Request,
        admission: Admission,
        request_id: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """See ``cog_triton.generation.generate``; what the ensemble has no input for is refused."""
        tokenizer = self._tokenizer
        inputs = adapted(own_inputs(request, tokenizer), self._known)
        stops = StopSequences(request.stop_sequences)
        whole: list[str] = []
        delivered = ""
        input_tokens = len(tokenizer(inputs["text_input"].item().decode()).input_ids)
        texts = self._adapted_texts(request_id or secrets.token_hex(8), inputs)
        async with admission.acquire(tenant) as slot, contextlib.aclosing(texts):
            async for piece in texts:
                whole.append(piece)
                slot.used = input_tokens + len(whole)
                text = stops.feed(piece)
                delivered += text
                if stops.matched is not None:
                    break
                # An event has a token, mostly; the last chunk counts them.
                yield Chunk(text, len(whole), input_tokens)
                text = ""
        text = stops.flush() if stops.matched is None else text
        # Up to the stop: how much came after it is chance.
        counted = "".join(whole) if stops.matched is None else delivered + stops.matched
        tokens = len(tokenizer(counted, add_special_tokens=False).input_ids)
        if request.include_stop:
            text += stops.matched or ""
        ended = stops.matched is not None or tokens < request.max_tokens
        reason: FinishReason = "stop" if ended else "length"
        yield Chunk(text, tokens, input_tokens, reason, slot.waited, stop_sequence=stops.matched)

    def _adapted_texts(self, request_id: str, inputs: Inputs) -> AsyncGenerator[str, None]:
        """As with ``ResumingClient``, TensorRT-LLM is sent an adapter that it does not have."""
        if self._adapters is None:
            return self._texts(request_id, inputs)
        return self._adapters.stream(
            lambda *sent: contextlib.aclosing(self._texts(*sent)), request_id, inputs
        )

    async def _texts(self, request_id: str, inputs: Inputs) -> AsyncGenerator[str, None]:
        """Closing it early stops the request in the engine."""
        request = infer_request(self._model, request_id, inputs, ("text_output",))
        arrivals = await message_arrivals(self.channel, request, self.timeouts[0])
        try:
            while arrived := await arrivals.take():
                yield "".join(text_of(message.tensors) for message in arrived)
        finally:
            if arrivals.ended:
                arrivals.close()
            else:
                self.stop(request_id, arrivals)


def text_of(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the text of a response; the last one may have no tensors."""
    if tensors and "text_output" not in tensors:
        raise TritonMalformedEvent("a response of the ensemble has no text_output")
    values = tensors["text_output"].reshape(-1).tolist() if tensors else []
    return values[0].decode(errors="replace") if values else ""


def own_inputs(request: Request, tokenizer: Tokenizer) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a request, whose prompt lacks what the ensemble's preprocessing will add."""
    request = without_bos(request, tokenizer)
    gives = "the ensemble of this Triton gives text"
    if request.stop_token_ids:
        raise InvalidParameter(f"stop_token_ids must be empty: {gives}")
    if not request.skip_special_tokens:
        raise InvalidParameter(f"skip_special_tokens must be true: {gives} without them")
    for name in request_parameters(request):
        if name != wire.ADD_SPECIAL_TOKENS:  # which it does
            raise InvalidParameter(f"{name} is not known to the ensemble of this Triton")
    return triton_inputs(request)


def adapted(
    inputs: Mapping[str, npt.NDArray[Any]], known: Mapping[str, bool]
) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs under the ensemble's names for them, with the words that it demands."""
    result: dict[str, npt.NDArray[Any]] = {
        name: np.array([[b""]], np.object_)
        for name in WORDS
        if not known.get(name, True) and name not in inputs
    }
    for name, value in inputs.items():
        target = name if name in known else OLD_NAMES.get(name, name)
        if target in known:
            result[target] = value
        elif name not in NOT_NEEDED:
            raise InvalidParameter(f"{name} is no input of this Triton's ensemble")
    return result


def address_of(endpoint: str) -> str:
    """Return the host:port of a URL, or of itself."""
    parts = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    if not parts.hostname or not parts.port or parts.scheme not in ("http", "grpc"):
        raise ConfigurationError(
            f"--triton-endpoint {endpoint} must be a URL such as http://localhost:8001, with the port of "
            "Triton's gRPC endpoint"
        )
    return parts.netloc
