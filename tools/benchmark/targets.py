"""The ways to ask: Cog's API, OpenAI's, ``generate()``, Triton's models, and the engine by itself.

The benchmark puts a load on them, and the soak compares what they answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from cog_triton.client import messages
from cog_triton.client.grpc_transport import INFER, GrpcClient
from cog_triton.client.http_transport import HttpClient
from cog_triton.client.responses import TensorOutputs, read_tensors
from cog_triton.engines.base import create_engine
from cog_triton.engines.serving import Serving
from cog_triton.errors import ConfigurationError
from cog_triton.generation import generate
from cog_triton.models.tensors import generation_requests
from cog_triton.request.guide import choose_guide
from cog_triton.request.request import Request, triton_inputs
from cog_triton.text.tokenizer import load_tokenizer, without_torch
from tools import server_sent_events as sse
from tools.server_sent_events import CUT, AnswerError, Part

MODEL = "model"  # the name under which a server with OpenAI's API serves
RESPONSE_TIMEOUT = 300.0  # seconds

Inputs = Mapping[str, Any]  # those of Cog's API
Parts = AsyncGenerator[Part, None]


@dataclass(frozen=True)
class Endpoints:
    """The addresses of the servers that are asked."""

    tokenizer: str  # directory of the model's
    url: str = ""  # of a server over HTTP
    model: str = MODEL  # its name in OpenAI's API
    grpc: str = ""  # host:port of Triton's, and so are the next two
    http: str = ""
    metrics: str = ""
    engine: Mapping[str, str] = field(default_factory=dict)  # parameters of the tensorrt_llm model
    pids: tuple[int, ...] = ()  # of the servers; their descendants are watched with them


@cache
def fast_tokenizer(directory: str) -> Any:
    """Load the ``tokenizers.Tokenizer``, by itself: transformers takes seconds to import."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"{directory} has no tokenizer.json, which the benchmark needs")
    return Tokenizer.from_file(str(file))


class Target(ABC):
    """One way to ask, on one event loop."""

    name: ClassVar[str]
    server: ClassVar[str] = ""  # what has to run; nothing for an engine in this process

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.client = self.connect()

    @abstractmethod
    def connect(self) -> Any:
        """Return the client that all requests share."""

    @abstractmethod
    def ask(self, inputs: Inputs, request_id: str) -> Parts:
        """Yield the parts of an answer, or raise AnswerError or CogTritonError; closing it leaves."""

    def forced(self, tokens: int) -> Inputs:
        """Return the inputs with which an answer has so many tokens."""
        return {"max_tokens": tokens, "ignore_eos": True}

    async def cancel(self, request_id: str) -> bool:  # noqa: ARG002
        """Ask the server to end a request; return False where users cannot."""
        return False

    async def close(self) -> None:
        await self.client.aclose()


class HttpTarget(Target):
    """An API of JSON, streamed as server-sent events or whole."""

    method: ClassVar[str] = "POST"
    streamed: ClassVar[bool] = True
    read: ClassVar[staticmethod[[str, bytes], Part]]  # of an event

    def connect(self) -> aiohttp.ClientSession:
        unlimited, forever = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
        return aiohttp.ClientSession(connector=unlimited, timeout=forever)

    @abstractmethod
    def request(self, inputs: Inputs, request_id: str) -> tuple[str, dict[str, Any]]:
        """Return the path and the body."""

    @abstractmethod
    def whole(self, reply: dict[str, Any]) -> Part:
        """Read an answer that is not streamed."""

    async def ask(self, inputs: Inputs, request_id: str) -> Parts:
        kind = "text/event-stream" if self.streamed else "application/json"
        headers = {"Accept": kind, "X-Request-Id": request_id}
        path, body = self.request(inputs, request_id)
        url = self.endpoints.url + path
        sent = self.client.request(self.method, url, json=body, headers=headers)
        parser = sse.EventParser()
        ended = False
        try:
            async with sent as reply:
                if reply.status != 200:
                    raise sse.http_error(await reply.read(), reply.status)
                if not self.streamed:
                    yield self.whole(await reply.json())
                    return
                # To its end, because only then the connection serves the next request.
                async for data in reply.content.iter_any():
                    for event in parser.feed(data):
                        part = self.read(*event)
                        yield part
                        ended = part.last
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"{type(error).__name__}: {error}", CUT) from error
        if not ended:
            raise AnswerError("the stream ended without its last event", CUT)

    async def close(self) -> None:
        await self.client.close()


class CogSse(HttpTarget):
    """PUT /predictions/ID."""

    name, server, method = "cog-sse", "cog", "PUT"
    read = staticmethod(sse.cog_part)

    def request(self, inputs: Inputs, request_id: str) -> tuple[str, dict[str, Any]]:
        return f"/predictions/{request_id}", {"input": inputs}

    def forced(self, tokens: int) -> Inputs:
        return {"max_tokens": tokens, "min_tokens": tokens}

    def whole(self, reply: dict[str, Any]) -> Part:
        sse.check_prediction(reply)
        return Part("".join(reply["output"]), int(reply["metrics"].get("output_token_count", 0)))

    async def cancel(self, request_id: str) -> bool:
        url = f"{self.endpoints.url}/predictions/{request_id}/cancel"
        with contextlib.suppress(aiohttp.ClientError):
            async with self.client.post(url) as reply:
                return bool(reply.status == 200)
        return False


class CogJson(CogSse):
    name, streamed = "cog-json", False


class OpenAiSse(HttpTarget):
    """POST /v1/chat/completions."""

    name, server = "openai-sse", "openai"
    path = "/v1/chat/completions"
    read = staticmethod(sse.openai_part)

    def request(self, inputs: Inputs, request_id: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        names = {"regex": "guided_regex"}
        body = {names.get(name, name): own for name, own in inputs.items() if name != "prompt"}
        body |= {"model": self.endpoints.model, **self.prompt(inputs["prompt"])}
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return self.path, body

    def prompt(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}

    def whole(self, reply: dict[str, Any]) -> Part:
        tokens = int(reply["usage"]["completion_tokens"])
        return Part(reply["choices"][0]["message"]["content"], tokens)


class OpenAiJson(OpenAiSse):
    name, streamed = "openai-json", False


class Generate(Target):
    """The package's ``generate()`` over gRPC, which is what the predictor runs."""

    name, server = "generate", "triton"

    def connect(self) -> GrpcClient:
        without_torch()
        self._tokenizer = load_tokenizer(self.endpoints.tokenizer)
        return GrpcClient(self.endpoints.grpc, response_timeout=RESPONSE_TIMEOUT)

    async def ask(self, inputs: Inputs, request_id: str) -> Parts:  # noqa: ARG002
        async for chunk in generate(Request(**inputs), self.client, self._tokenizer):
            yield Part(chunk.text, chunk.output_tokens)


class TritonGrpc(Target):
    """ModelStreamInfer on the ensemble without postprocessing."""

    name, server = "triton-grpc", "triton"
    model = "ensemble_ids"

    def connect(self) -> GrpcClient:
        return GrpcClient(self.endpoints.grpc)

    def inputs(self, inputs: Inputs) -> Inputs:
        plain = {name: value for name, value in inputs.items() if name != "regex"}
        guide = choose_guide(regex=inputs.get("regex"))
        return triton_inputs(Request(**plain, guide=guide))

    async def ask(self, inputs: Inputs, request_id: str) -> Parts:
        names = ("output_ids", "sequence_length")
        request = messages.infer_request(self.model, request_id, self.inputs(inputs), names)
        count, final = 0, False
        with contextlib.closing(await self.client.send(INFER, request)) as stream:
            while not final:
                for message in map(messages.parse, await stream.take()):
                    final = messages.is_final(message)
                    outputs = messages.flat_outputs(message)  # none in a response that only ends
                    ids = (
                        read_tensors(TensorOutputs(outputs, final=False), None).ids
                        if outputs
                        else []
                    )
                    count += len(ids)
                    yield Part(tokens=count, ids=ids)


class TritonEngine(TritonGrpc):
    """ModelStreamInfer on the tensorrt_llm model alone."""

    name, model = "triton-engine", "tensorrt_llm"

    def inputs(self, inputs: Inputs) -> Inputs:
        return engine_inputs(self.endpoints, inputs)


def engine_inputs(endpoints: Endpoints, inputs: Inputs) -> Inputs:
    """Return the tensorrt_llm model's inputs for greedy tokens, none of which ends the output."""
    ids = fast_tokenizer(endpoints.tokenizer).encode(inputs["prompt"]).ids
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[inputs["max_tokens"]]], np.int32),
        "streaming": np.array([[True]]),
    }


class TritonHttp(Target):
    """generate_stream on the whole ensemble."""

    name, server = "triton-http", "triton"

    def connect(self) -> HttpClient:
        return HttpClient(self.endpoints.http, response_timeout=RESPONSE_TIMEOUT)

    async def ask(self, inputs: Inputs, request_id: str) -> Parts:
        tensors, count = triton_inputs(Request(**inputs)), 0
        async for event in self.client.events("ensemble", request_id, tensors):
            count += int(event["sequence_length"])
            yield Part(event["text_output"], count)


class RawEngine(Target):
    """The engine in this process: no Triton, no network."""

    name = "engine"

    def connect(self) -> Serving:
        parameters = self.endpoints.engine
        most = int(parameters.get("max_tokens_per_response", 0))
        return Serving(create_engine(parameters), most)

    async def ask(self, inputs: Inputs, request_id: str) -> Parts:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        request = generation_requests(engine_inputs(self.endpoints, inputs))[0]

        def take(output: Any) -> None:  # on the delivery thread
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        stop = self.client.start(request_id, request, take, streaming=True)
        count = 0
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                finished = output.finished
                count += len(output.ids)
                if output.error is not None:
                    raise AnswerError(str(output.error))
                yield Part(tokens=count, ids=output.ids)
        finally:
            if not finished:
                stop()

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


_TARGETS = (CogSse, CogJson, OpenAiSse, Generate, TritonGrpc, TritonHttp, TritonEngine, RawEngine)
TARGETS: dict[str, type[Target]] = {target.name: target for target in _TARGETS}
