"""A Triton that runs already, here or on another machine, reached by its gRPC port.

Its ensemble is ours, or NVIDIA's own of any age, which gives text and no ids. The latter decodes each
response by itself, so spaces and characters of several tokens may be lost on its side, and how many tokens
there were is counted here.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cog_triton import errors
from cog_triton.adapters.tensors import TRITON_DTYPES, AdapterTensors
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.messages import infer_request, tensors_of
from cog_triton.client.responses import Inputs
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import TritonClient
from cog_triton.deployment import announcement
from cog_triton.deployment.deployment import Deployment, check_supported, tokenizer_of, without_bos
from cog_triton.deployment.model_defaults import listed_ids
from cog_triton.errors import ConfigurationError, InvalidParameter, TritonUnavailable
from cog_triton.generation import Chunk, FinishReason
from cog_triton.protocol.names import ADD_SPECIAL_TOKENS, ENGINE, IDS_ENSEMBLE
from cog_triton.protocol.triton_messages import DataType, service_pb2
from cog_triton.redaction import shown_url
from cog_triton.request.admission import Admission, Tenant
from cog_triton.request.request import Request, request_parameters, triton_inputs
from cog_triton.settings import Settings, misspelt_variables
from cog_triton.text.end_tokens import EndTokens, end_ids
from cog_triton.text.stop_sequences import StopSequences
from cog_triton.text.tokenizer import Tokenizer

POLL_SECONDS = 0.1
ASK_SECONDS = 2.0
# Inputs that have another name in old ensembles, and inputs that these can do without.
OLD_NAMES = {"seed": "random_seed", "min_tokens": "min_length"}
NOT_NEEDED = ("return_num_input_tokens",)
# Inputs that old ensembles demand.
WORDS = ("bad_words", "stop_words")


@dataclass(frozen=True)
class _Engine:
    """The engine of an attached Triton.

    Attributes:
        name: None if the server does not say.
        adapters: the adapters that are sent with requests; None if the engine reads them itself.
    """

    name: str | None = None
    adapters: AdapterTensors | None = None


async def attach(
    settings: Settings,
    address: str,
    model: str,
    context: int | None,
    *,
    announce: bool = True,
    on_given_up: Callable[[str], object] | None = None,
) -> Deployment:
    """Wait for the Triton at ``address``, and run requests on its ensemble.

    Args:
        model: the ensemble to use if Triton does not have this project's.
        context: the context length in tokens, if it is known.
        announce: log what is served.
        on_given_up: called with the name of a model whose process Triton gave up, so that who started that
            Triton replaces it.

    Raises:
        ConfigurationError: no Triton is ready in time, or it has no ensemble.
    """
    if announce:
        for warning in misspelt_variables():
            announcement.logger.warning("%s", warning)
    tokenizer = await asyncio.to_thread(tokenizer_of, settings)
    triton = RunningTriton(settings, address, on_given_up)
    await triton.wait(settings.start_timeout)
    closing = contextlib.AsyncExitStack()
    closing.push_async_callback(lambda: triton.current.aclose())
    engine = _read_engine(settings, await triton.config(ENGINE))
    end_tokens = await _end_tokens(settings, triton, tokenizer)
    if announce:
        served = announcement.Served(
            f"model {model}",
            f"the Triton at {address}",
            context_length=context,
            end_tokens=announcement.texts_of(end_tokens, tokenizer),
            template=announcement.template_of(settings, tokenizer),
        )
        announcement.logger.info("%s", served.line())
    streams = ResumingClient(
        triton,
        attempts=settings.resume_attempts,
        end_tokens=end_tokens,
        adapters=engine.adapters,
    )
    supervisor: Any = triton
    shared: dict[str, Any] = {
        "settings": settings,
        "streams": streams,
        # A deployment asks its supervisor only for ``running``.
        "supervisor": supervisor,
        "admission": Admission(settings.max_running, settings.max_waiting, settings.queue_timeout),
        "tokenizer": tokenizer,
        "context_length": context,
        "end_tokens": end_tokens,
        "opened": closing,
    }
    if engine.name is not None:
        shared["engine"] = engine.name
    if await triton.config(IDS_ENSEMBLE) is not None:
        return Deployment(**shared)
    ensemble = await triton.config(model)
    if ensemble is None:
        raise ConfigurationError(f"the Triton at {address} has neither {IDS_ENSEMBLE} nor {model}")
    return TextDeployment(
        **shared,
        triton=triton,
        model=model,
        known={tensor.name: tensor.optional for tensor in ensemble.input},
        adapters=engine.adapters,
    )


def _read_engine(settings: Settings, config: Any | None) -> _Engine:
    """Return what a configuration of tensorrt_llm says of the engine."""
    if config is None:
        return _Engine()
    if config.backend != "tensorrtllm":
        name = None
        if "engine" in config.parameters:
            name = config.parameters["engine"].string_value
        return _Engine(name)
    if not settings.lora_dir:
        return _Engine("tensorrtllm")
    types = {tensor.name: DataType.Name(tensor.data_type) for tensor in config.input}
    dtypes = {triton_type: dtype for dtype, triton_type in TRITON_DTYPES.items()}
    dtype = dtypes.get(types.get("lora_weights", ""), "float16")
    return _Engine("tensorrtllm", AdapterTensors(settings.lora_dir, dtype))


async def _end_tokens(
    settings: Settings, triton: "RunningTriton", tokenizer: Tokenizer
) -> EndTokens:
    """Return the end tokens of END_ID, or else those that the server's preprocessing says it has."""
    preprocessing = await triton.config("preprocessing")
    servers: tuple[int, ...] = ()
    if preprocessing is not None and "end_ids" in preprocessing.parameters:
        servers = listed_ids(preprocessing.parameters["end_ids"].string_value)
    if settings.end_ids:
        return EndTokens(settings.end_ids, named_in_requests=settings.end_ids != servers)
    if servers:
        return EndTokens(servers)
    directories = [settings.tokenizer_dir]
    return EndTokens(end_ids((), directories, tokenizer.eos_token_id))


class RunningTriton:
    """A Triton that somebody else starts and stops, in the place of a ``Supervisor``."""

    def __init__(
        self,
        settings: Settings,
        address: str,
        on_given_up: Callable[[str], object] | None = None,
    ) -> None:
        """See ``attach`` for the arguments."""
        self._settings = settings
        self._address = address
        self._on_given_up = on_given_up
        # Whoever started this Triton has been asked to replace it.
        self._is_to_be_replaced = False
        self.current = self._connected()
        self.running = self
        self._reconnecting = asyncio.Lock()

    async def healthy(self) -> bool:
        try:
            reply = await self._ask("ServerReady")
        except (TritonUnavailable, asyncio.TimeoutError):
            return False
        return bool(reply.ready)

    async def wait(self, seconds: float) -> None:
        """Wait until it is ready, or raise ConfigurationError after so many seconds."""
        deadline = time.monotonic() + seconds
        while not await self.healthy():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"no Triton is ready at {self._address} (gRPC)")
            await asyncio.sleep(POLL_SECONDS)

    async def config(self, model: str) -> Any:
        """Return the configuration of a model; None if Triton has no model of this name.

        A busy server may take longer than the time-out, and a connection may be lost. Neither says that
        there is no such model, so Triton is asked again, for ``TRITON_START_TIMEOUT`` seconds at most.
        """
        seconds = self._settings.start_timeout
        deadline = time.monotonic() + seconds
        while True:
            try:
                reply = await self._ask("ModelConfig", name=model)
            except TritonUnavailable as error:
                if not error.blameless:
                    # The connection is fine, so this is Triton's answer.
                    return None
            except asyncio.TimeoutError:
                pass
            else:
                return reply.config
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"the Triton at {self._address} did not say within {seconds:g} s whether it has "
                    f"a model {model}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """See ``cog_triton.client.resume.Clients``."""
        async with self._reconnecting:
            if failed is not None and self.current is failed:
                try:
                    if self._is_to_be_replaced:
                        await self._wait_for_end(self._settings.resume_timeout)
                    await self.wait(self._settings.resume_timeout)
                except ConfigurationError as error:
                    raise TritonUnavailable(error.message) from None
                self.current = self._connected()
                # Its other requests continue on the new one as well.
                await failed.aclose()
        return self.current

    def _connected(self) -> GrpcClient:
        client = GrpcClient(self._address, response_timeout=self._settings.response_timeout)
        client.on_given_up = self._ask_for_another
        self._is_to_be_replaced = False
        return client

    def _ask_for_another(self, model: str) -> None:
        """Ask whoever started this Triton, if anybody, to replace it: it gave up the process of a model."""
        if self._on_given_up is not None:
            self._is_to_be_replaced = True
            self._on_given_up(model)

    async def _wait_for_end(self, seconds: float) -> None:
        """Wait until a Triton that is to be replaced has ended, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and await self.healthy():
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, method: str, **fields: str) -> Any:
        """Return the reply to a question, or raise TritonUnavailable or asyncio.TimeoutError."""
        request = getattr(service_pb2, f"{method}Request")(**fields)
        reply = getattr(service_pb2, f"{method}Response")
        return await asyncio.wait_for(self.current.call(method, request, reply), ASK_SECONDS)


@dataclass(eq=False, kw_only=True)
class TextDeployment(Deployment):
    """A deployment whose ensemble returns text and no ids.

    Attributes:
        model: the ensemble.
        known: the inputs of the ensemble, and whether each may be left out.
        adapters: the adapters that are sent with requests.
    """

    triton: RunningTriton
    model: str
    known: Mapping[str, bool]
    adapters: AdapterTensors | None

    async def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See ``Deployment``; what the ensemble has no input for is refused."""
        check_supported(request, self.engine, own_preprocessing=True)
        inputs = self._inputs(request)
        stops = StopSequences(request.stop_sequences)
        input_tokens = len(self.tokenizer(inputs["text_input"].item().decode()).input_ids)
        name = request_id or secrets.token_hex(8)
        texts = self._texts(name, inputs)
        if self.adapters is not None:
            # An adapter that the engine does not have is sent, as ``ResumingClient`` does.
            texts = self.adapters.stream(self._texts, name, inputs)
        pieces = 0
        delivered = ""
        async with self.admission.acquire(tenant) as slot, contextlib.aclosing(texts):
            async for piece in texts:
                pieces += 1
                slot.used = input_tokens + pieces
                text = stops.feed(piece)
                delivered += text
                if stops.matched is not None:
                    break
                # A piece is usually one token. The last chunk has their number.
                yield Chunk(text, pieces, input_tokens)
        if stops.matched is None:
            text = stops.flush()
            delivered += text
        # Up to the stop sequence: how much came after it is chance.
        counted = delivered + (stops.matched or "")
        tokens = len(self.tokenizer(counted, add_special_tokens=False).input_ids)
        if request.include_stop:
            text += stops.matched or ""
        ended = stops.matched is not None or tokens < request.max_tokens
        reason: FinishReason = "stop" if ended else "length"
        yield Chunk(text, tokens, input_tokens, reason, slot.waited, stop_sequence=stops.matched)

    async def _texts(self, name: str, inputs: Inputs) -> AsyncGenerator[str, None]:
        request = infer_request(self.model, name, inputs, ("text_output",))
        async with contextlib.aclosing(self.triton.current.responses(request)) as received:
            async for responses in received:
                yield "".join(text_of(tensors_of(response)) for response in responses)

    def _inputs(self, request: Request) -> Inputs:
        """Return a request's inputs, under the ensemble's names and with the words that it demands."""
        # The ensemble's preprocessing adds the token that begins a text.
        request = without_bos(request, self.tokenizer)
        if request.stop_token_ids:
            raise InvalidParameter(
                "stop_token_ids is not supported, because this Triton's ensemble returns only text"
            )
        if not request.skip_special_tokens:
            raise InvalidParameter(
                "skip_special_tokens must be true, because this Triton's ensemble removes special tokens"
            )
        for name in request_parameters(request):
            # It adds special tokens in any case.
            if name != ADD_SPECIAL_TOKENS:
                raise InvalidParameter(f"{name} is not supported by this Triton's ensemble")
        if request.log_probs is not None:
            raise InvalidParameter(
                "logprobs are not supported, because this Triton's ensemble returns only text"
            )
        no_words = np.array([[b""]], np.object_)
        inputs = {name: no_words for name in WORDS if not self.known.get(name, True)}
        wanted = triton_inputs(request)
        if "end_id" not in wanted and self.settings.end_ids:
            wanted["end_id"] = np.array([[self.settings.end_ids[0]]], np.int32)
        for name, value in wanted.items():
            target = name if name in self.known else OLD_NAMES.get(name, name)
            if target in self.known:
                inputs[target] = value
            elif name not in NOT_NEEDED:
                raise InvalidParameter(f"{name} is not an input of this Triton's ensemble")
        return inputs


def text_of(tensors: Inputs) -> str:
    """Return the text of a response; the last one may have no tensors."""
    if tensors and "text_output" not in tensors:
        raise errors.TritonMalformedEvent("a response of the ensemble has no text_output")
    values = tensors["text_output"].reshape(-1).tolist() if tensors else []
    return values[0].decode(errors="replace") if values else ""


def address_of(endpoint: str) -> str:
    """Return the host:port of a URL, or of itself."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
        is_valid = bool(parts.hostname and parts.port) and parts.scheme in ("http", "grpc")
    except ValueError:
        # The port is not a number up to 65535, or the host is not an address.
        is_valid = False
    if not is_valid:
        raise ConfigurationError(
            f"--triton-endpoint {shown_url(endpoint)} is not valid: it must be a URL with Triton's gRPC "
            "port, such as http://localhost:8001"
        )
    return parts.netloc.rpartition("@")[2]
