"""One small class per protocol: how a request is sent, and what its answer means.

``prepare`` runs before the load, ``send`` during it, ``parse`` after it. ``send`` does no more than the
protocol needs and notes when each piece came.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from tools.benchmark.http import Piece, Pool, events, parse_reply
from tools.benchmark.load import Planned
from tools.benchmark.vocabulary import Vocabulary

RESPONSE_TIMEOUT = 300.0  # seconds

# Cog 0.23 refuses a request now and then although most of its slots are free, the more often the more
# arrive together (measured: a fifth of 256, with 600 slots). As its clients have to, one tries again.
REFUSED = b"HTTP/1.1 409"
REFUSED_SECONDS = 0.005
REFUSED_TRIES = 40


class Failed(Exception):
    """The server answered with an error; the text is its own."""


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        times: when each chunk with content came, seconds of ``time.perf_counter``.
        tokens: of each of these chunks.
        total: output tokens of the request.
        counted: whether the server counted them. The tokens of a text are not those it was made of.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    total: int = 0
    counted: bool = True

    def add(self, at: float, tokens: int) -> None:
        self.times.append(at)
        self.tokens.append(tokens)
        self.total += tokens


@dataclass(frozen=True)
class Context:
    """What a driver needs to know.

    Attributes:
        tokenizer: directory or Hugging Face id that the vocabulary is of.
        url: of the Cog server.
        grpc, http: host:port of Triton's endpoints.
        engine: parameters of the tensorrt_llm model, for an engine without a server.
    """

    vocabulary: Vocabulary
    tokenizer: str
    temperature: float
    url: str = ""
    grpc: str = ""
    http: str = ""
    engine: Mapping[str, str] = field(default_factory=dict)


class Driver(ABC):
    """Sends requests to one target. Made and used on one event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.refused = 0  # attempts that the server turned away and that were made again

    @abstractmethod
    def prepare(self, request: Planned) -> Any:
        """What ``send`` needs of a request, as far as it can be made before."""

    @abstractmethod
    async def send(self, prepared: Any) -> list[Any]:
        """Sends it and returns the pieces of the answer, as ``parse`` wants them."""

    @abstractmethod
    def parse(self, pieces: list[Any]) -> Answer:
        """The answer.

        Raises:
            Failed: it is an error.
        """

    async def close(self) -> None:
        """Ends what was opened."""
        return

    @property
    def own_cpu_s(self) -> float:
        """CPU seconds that this process has spent on generating load."""
        return time.process_time()


class CogJson(Driver):
    """POST /predictions, answered as a whole."""

    _HEADERS: ClassVar[dict[str, str]] = {}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pool = Pool(context.url)

    def prepare(self, request: Planned) -> bytes:
        inputs = {
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "temperature": self._context.temperature,
            "seed": 0,
        }
        body = json.dumps({"input": inputs}).encode()
        return self._pool.message("/predictions", self._HEADERS, body)

    async def send(self, prepared: bytes) -> list[Piece]:
        for _ in range(REFUSED_TRIES):
            pieces = await self._pool.send(prepared)
            if not pieces[0][1].startswith(REFUSED):
                break
            self.refused += 1
            await asyncio.sleep(REFUSED_SECONDS)
        return pieces

    def parse(self, pieces: list[Piece]) -> Answer:
        reply = parse_reply(pieces)
        prediction = _object(reply.text)
        if reply.status != 200 or prediction.get("status") != "succeeded":
            raise Failed(_error_of(prediction, reply.status))
        text = "".join(prediction["output"])
        return self._counted([(pieces[-1][0], text)], prediction["metrics"])

    async def close(self) -> None:
        self._pool.close()

    def _counted(self, texts: list[tuple[float, str]], metrics: Mapping[str, Any]) -> Answer:
        # A server that gives no metrics is measured by its text.
        answer = Answer(counted="output_token_count" in metrics)
        counts = self._context.vocabulary.count([text for _, text in texts])
        for (at, _), tokens in zip(texts, counts, strict=True):
            answer.add(at, tokens)
        answer.total = int(metrics.get("output_token_count", answer.total))
        if len(texts) == 1 and answer.counted:
            answer.tokens = [answer.total]
        return answer


class CogSse(CogJson):
    """POST /predictions, streamed as server-sent events."""

    _HEADERS: ClassVar[dict[str, str]] = {"Accept": "text/event-stream"}

    def parse(self, pieces: list[Piece]) -> Answer:
        reply = parse_reply(pieces)
        if reply.status != 200:
            raise Failed(_error_of(_object(reply.text), reply.status))
        texts: list[tuple[float, str]] = []
        metrics: dict[str, Any] = {}
        status = "no event completed"
        for event in events(reply.body):
            data = json.loads(event.data)
            if event.name == "output" and data["chunk"]:
                texts.append((event.at, data["chunk"]))
            elif event.name == "metric":
                metrics[data["name"]] = data["value"]
            elif event.name in ("completed", "error"):
                status = data.get("status") or "failed"
                if status != "succeeded":
                    raise Failed(_error_of(data, reply.status))
        if status != "succeeded":
            raise Failed(status)
        return self._counted(texts, metrics)


class TritonHttp(Driver):
    """generate_stream on the ensemble, which always runs all of it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pool = Pool(f"http://{context.http}")

    def prepare(self, request: Planned) -> bytes:
        values = {name: _plain(value) for name, value in self._inputs(request).items()}
        body = json.dumps({"id": secrets.token_hex(8), **values}).encode()
        return self._pool.message("/v2/models/ensemble/generate_stream", {}, body)

    def _inputs(self, request: Planned) -> Mapping[str, Any]:
        return ensemble_inputs(request, self._context.temperature)

    async def send(self, prepared: bytes) -> list[Piece]:
        return await self._pool.send(prepared)

    def parse(self, pieces: list[Piece]) -> Answer:
        reply = parse_reply(pieces)
        if reply.status != 200:
            raise Failed(_error_of(_object(reply.text), reply.status))
        answer = Answer()
        for event in events(reply.body):
            data = _object(event.data)
            if "error" in data:
                raise Failed(str(data["error"]))
            if tokens := int(data["sequence_length"]):
                answer.add(event.at, tokens)
        return answer

    async def close(self) -> None:
        self._pool.close()


# cum_log_probs keeps Triton from skipping tensorrt_llm along with postprocessing: outputs that the
# skipped step would read count as unused even when they are asked for.
IDS_OUTPUTS = ("output_ids", "sequence_length", "num_input_tokens")


class TritonGrpc(Driver):
    """ModelStreamInfer on the ensemble without postprocessing: raw ids alone."""

    _MODEL = "ensemble_ids"
    _METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        import grpc

        from cog_triton.client.grpc_transport import CHANNEL_OPTIONS

        self._end = grpc.aio.EOF
        self._channel = grpc.aio.insecure_channel(context.grpc, options=CHANNEL_OPTIONS)
        # No serializers: bytes in, bytes out.
        self._call: Any = self._channel.stream_stream(self._METHOD)

    def prepare(self, request: Planned) -> bytes:
        from cog_triton.client.grpc_transport import infer_request

        inputs = self._inputs(request)
        message = infer_request(self._MODEL, secrets.token_hex(8), inputs, self._outputs)
        return bytes(message.SerializeToString())

    @property
    def _outputs(self) -> tuple[str, ...]:
        return IDS_OUTPUTS

    def _inputs(self, request: Planned) -> Mapping[str, Any]:
        return ensemble_inputs(request, self._context.temperature)

    async def send(self, prepared: bytes) -> list[Piece]:
        pieces: list[Piece] = []
        call = self._call()
        try:
            await call.write(prepared)
            # Triton ends a stream that is done writing when the last response is out, so that nothing
            # has to be parsed to know the end.
            await call.done_writing()
            while (message := await call.read()) is not self._end:
                pieces.append((time.perf_counter(), message))
        finally:
            call.cancel()
        return pieces

    def parse(self, pieces: list[Piece]) -> Answer:
        from tritonclient.grpc import service_pb2

        from cog_triton.client.grpc_transport import parse_response

        answer, final = Answer(), False
        for at, data in pieces:
            message = service_pb2.ModelStreamInferResponse.FromString(data)
            if message.error_message:
                raise Failed(message.error_message)
            response = parse_response(message.infer_response)
            final = response.final
            if response.ids:
                answer.add(at, len(response.ids))
        if not final:
            raise Failed("the stream ended without a final response")
        return answer

    async def close(self) -> None:
        await self._channel.close()


class TritonGrpcClassic(TritonGrpc):
    """ModelStreamInfer on the ensemble with all outputs: postprocessing makes text of the ids."""

    _MODEL = "ensemble"

    @property
    def _outputs(self) -> tuple[str, ...]:
        return ()


class TritonEngine(TritonGrpc):
    """ModelStreamInfer on the tensorrt_llm model alone, with token ids."""

    _MODEL = "tensorrt_llm"

    @property
    def _outputs(self) -> tuple[str, ...]:
        return ("output_ids", "sequence_length")

    def _inputs(self, request: Planned) -> Mapping[str, Any]:
        return engine_inputs(request, self._context.vocabulary, self._context.temperature)


class Generate(Driver):
    """The package's ``generate()`` over gRPC, which is what the predictor runs."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from cog_triton.text.tokenizer import load_tokenizer, without_torch

        self._client = self._connect(context)
        without_torch()
        self._tokenizer = load_tokenizer(context.tokenizer)

    def _connect(self, context: Context) -> Any:
        from cog_triton.client.grpc_transport import GrpcClient

        return GrpcClient(context.grpc, response_timeout=RESPONSE_TIMEOUT)

    def prepare(self, request: Planned) -> Any:
        return sampling_request(request, self._context.temperature)

    async def send(self, prepared: Any) -> list[tuple[float, Any]]:
        from cog_triton.generation import generate

        chunks = []
        async for chunk in generate(prepared, self._client, self._tokenizer):
            chunks.append((time.perf_counter(), chunk))
        return chunks

    def parse(self, pieces: list[tuple[float, Any]]) -> Answer:
        answer = Answer()
        for at, chunk in pieces:
            # A chunk without text is nothing that a user sees; its tokens are the next one's.
            if chunk.text:
                answer.add(at, chunk.output_tokens - answer.total)
        answer.total = pieces[-1][1].output_tokens
        return answer

    async def close(self) -> None:
        await self._client.aclose()


class GenerateHttp(Generate):
    """``generate()`` over HTTP."""

    def _connect(self, context: Context) -> Any:
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(context.http, response_timeout=RESPONSE_TIMEOUT)


class RawEngine(Driver):
    """The engine in this very process: no Triton, no network."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from cog_triton.engines.create import create_engine
        from cog_triton.engines.serving import DeliveryLimits, Serving

        self._serving = Serving(
            create_engine(context.engine), DeliveryLimits.from_parameters(context.engine)
        )
        self._loop = asyncio.get_running_loop()

    def prepare(self, request: Planned) -> Any:
        from cog_triton.models.tensors import generation_requests

        inputs = engine_inputs(request, self._context.vocabulary, self._context.temperature)
        return generation_requests(inputs)[0]

    async def send(self, prepared: Any) -> list[tuple[float, Any]]:
        done = self._loop.create_future()
        outputs: list[tuple[float, Any]] = []

        def take(output: Any) -> None:  # on the delivery thread
            outputs.append((time.perf_counter(), output))
            if output.final:
                self._loop.call_soon_threadsafe(partial(_set, done))

        stop = self._serving.start(secrets.token_hex(8), prepared, take, streaming=True)
        try:
            await done
        except asyncio.CancelledError:
            stop()
            raise
        return outputs

    def parse(self, pieces: list[tuple[float, Any]]) -> Answer:
        answer = Answer()
        for at, output in pieces:
            if output.error is not None:
                raise Failed(output.error)
            if output.ids:
                answer.add(at, len(output.ids))
        return answer

    async def close(self) -> None:
        await asyncio.to_thread(self._serving.close)

    @property
    def own_cpu_s(self) -> float:
        return time.thread_time()  # the engine's threads are what is measured


DRIVERS: dict[str, type[Driver]] = {
    "cog-sse": CogSse,
    "cog-json": CogJson,
    "generate": Generate,
    "generate-http": GenerateHttp,
    "triton-grpc": TritonGrpc,
    "triton-grpc-classic": TritonGrpcClassic,
    "triton-http": TritonHttp,
    "triton-engine": TritonEngine,
    "engine": RawEngine,
}


def sampling_request(request: Planned, temperature: float) -> Any:
    """The request as the predictor would make it."""
    from cog_triton.request import Request

    return Request(
        prompt=request.prompt,
        seed=0,
        max_tokens=request.output_tokens,
        min_tokens=request.output_tokens,
        temperature=temperature,
    )


def ensemble_inputs(request: Planned, temperature: float) -> dict[str, Any]:
    """The ensemble's inputs, the same as the predictor sends."""
    from cog_triton.request import triton_inputs

    return triton_inputs(sampling_request(request, temperature))


def engine_inputs(request: Planned, vocabulary: Vocabulary, temperature: float) -> dict[str, Any]:
    """The tensorrt_llm model's inputs, as the ensemble would make them; batch of one."""
    import numpy as np

    ids = vocabulary.encode(request.prompt)
    ensemble = ensemble_inputs(request, temperature)
    renamed = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"}
    same = ("temperature", "seed", "min_tokens", "return_num_input_tokens")
    end_id = vocabulary.end_id
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": ensemble["max_tokens"],
        "streaming": ensemble["stream"],
        **{
            renamed.get(name, name): ensemble[name]
            for name in (*same, *renamed)
            if name in ensemble
        },
        **({} if end_id is None else {"end_id": np.array([[end_id]], np.int32)}),
    }


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise Failed(f"no JSON: {text[:100]!r}") from None
    if not isinstance(value, dict):
        raise Failed(f"no JSON object: {text[:100]!r}")
    return value


def _error_of(answer: Mapping[str, Any], status: int) -> str:
    text = answer.get("error") or answer.get("detail") or "no reason given"
    return str(text) if status == 200 else f"HTTP {status}: {text}"


def _plain(value: Any) -> Any:
    item = value.reshape(-1)[0]
    item = item.item() if hasattr(item, "item") else item
    return item.decode() if isinstance(item, bytes) else item
