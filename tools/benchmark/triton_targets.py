"""Targets on a tritonserver or without one: Triton's models over gRPC, ``generate()``, and engines."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tools.benchmark.load import Load, Planned
from tools.benchmark.targets import (
    Answer,
    CogJson,
    CogSse,
    Endpoints,
    Failed,
    OpenAiSse,
    OpenAiText,
    Pieces,
    Target,
    TritonHttp,
    VllmServe,
)

RESPONSE_TIMEOUT = 300.0  # seconds


def engine_inputs(target: Target, request: Planned) -> dict[str, Any]:
    """Return the tensorrt_llm model's inputs, as the ensemble would make them; batch of one."""
    import numpy as np

    ids = target.tokenizer.encode(request.prompt).ids
    ensemble = target.inputs(request)
    renamed = {
        "max_tokens": "request_output_len",
        "stream": "streaming",
        "top_k": "runtime_top_k",
        "top_p": "runtime_top_p",
    }
    same = ("temperature", "seed", "min_tokens", "return_num_input_tokens", "end_id")
    names = {**renamed, **{name: name for name in same}}
    if (end_id := end_id_of(target.endpoints.tokenizer, target.tokenizer)) is not None:
        ensemble = {"end_id": np.array([[end_id]], np.int32), **ensemble}
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        **{names[name]: value for name, value in ensemble.items() if name in names},
    }


class TritonGrpc(Target):
    """ModelStreamInfer on the ensemble without postprocessing."""

    server = "triton"
    model = "ensemble_ids"
    outputs: tuple[str, ...] = ("output_ids", "sequence_length", "num_input_tokens")

    def __init__(self, endpoints: Endpoints, tokenizer: Any, load: Load) -> None:
        super().__init__(endpoints, tokenizer, load)
        import grpc

        self._end = grpc.aio.EOF
        options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(endpoints.grpc, options=options)
        # Bytes in, bytes out: nothing is parsed during the load.
        self._call: Any = self._channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer"
        )

    def prepare(self, request: Planned) -> bytes:
        from cog_triton.client.grpc_transport import infer_request

        inputs = self._inputs(request)
        message = infer_request(self.model, secrets.token_hex(8), inputs, self.outputs)
        return bytes(message.SerializeToString())

    async def send(self, prepared: bytes) -> Pieces:
        pieces: Pieces = []
        call = self._call()
        try:
            await call.write(prepared)
            await call.done_writing()  # Triton then ends the stream after the last response
            while (message := await call.read()) is not self._end:
                pieces.append((time.perf_counter(), message))
        finally:
            call.cancel()
        return pieces

    def parse(self, pieces: Pieces) -> Answer:
        from tritonclient.grpc import service_pb2

        from cog_triton.client.grpc_transport import flat_outputs, is_final
        from cog_triton.client.stream import decode_response

        answer, final = Answer(), False
        for at, data in pieces:
            message = service_pb2.ModelStreamInferResponse.FromString(data)
            if message.error_message:
                raise Failed(message.error_message)
            outputs, final = flat_outputs(message.infer_response), is_final(message.infer_response)
            if ids := decode_response(outputs, 0, None, final=final).ids:
                answer.add(at, len(ids))
        if not final:
            raise Failed("the stream ended without a final response")
        answer.total = sum(answer.tokens)
        return answer

    async def close(self) -> None:
        await self._channel.close()

    def _inputs(self, request: Planned) -> Mapping[str, Any]:
        return self.inputs(request)


class TritonEngine(TritonGrpc):
    """ModelStreamInfer on the tensorrt_llm model alone."""

    model = "tensorrt_llm"
    outputs = ("output_ids", "sequence_length")

    def _inputs(self, request: Planned) -> Mapping[str, Any]:
        return engine_inputs(self, request)


class Generate(Target):
    """The package's ``generate()`` over gRPC, which is what the predictor runs."""

    server = "triton"

    def __init__(self, endpoints: Endpoints, tokenizer: Any, load: Load) -> None:
        super().__init__(endpoints, tokenizer, load)
        from cog_triton.text.tokenizer import load_tokenizer, without_torch

        self._client = self._connect(endpoints)
        without_torch()
        self._loaded = load_tokenizer(endpoints.tokenizer)

    def _connect(self, endpoints: Endpoints) -> Any:
        from cog_triton.client.grpc_transport import GrpcClient

        return GrpcClient(endpoints.grpc, response_timeout=RESPONSE_TIMEOUT)

    def prepare(self, request: Planned) -> Any:
        return self.request(request)

    async def send(self, prepared: Any) -> Pieces:
        from cog_triton.generation import generate

        chunks = generate(prepared, self._client, self._loaded)
        return [(time.perf_counter(), chunk) async for chunk in chunks]

    def parse(self, pieces: Pieces) -> Answer:
        answer, counted = Answer(total=pieces[-1][1].output_tokens), 0
        for at, chunk in pieces:
            if chunk.text:  # a chunk without text shows nothing; its tokens are the next one's
                answer.add(at, chunk.output_tokens - counted)
                counted = chunk.output_tokens
        return answer

    async def close(self) -> None:
        await self._client.aclose()


class GenerateHttp(Generate):
    """``generate()`` over HTTP."""

    def _connect(self, endpoints: Endpoints) -> Any:
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(endpoints.http, response_timeout=RESPONSE_TIMEOUT)


class RawEngine(Target):
    """The engine in the load generator's process: no Triton, no network."""

    def __init__(self, endpoints: Endpoints, tokenizer: Any, load: Load) -> None:
        super().__init__(endpoints, tokenizer, load)
        from cog_triton.engines.base import create_engine
        from cog_triton.engines.serving import Serving

        most = int(endpoints.engine.get("max_tokens_per_response", 0))
        self._serving = Serving(create_engine(endpoints.engine), most)

    def prepare(self, request: Planned) -> Any:
        from cog_triton.models.tensors import generation_requests

        return generation_requests(engine_inputs(self, request))[0]

    async def send(self, prepared: Any) -> Pieces:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        outputs: Pieces = []

        def take(output: Any) -> None:  # on the delivery thread
            outputs.append((time.perf_counter(), output))
            if output.final:
                loop.call_soon_threadsafe(done.set)

        stop = self._serving.start(secrets.token_hex(8), prepared, take, streaming=True)
        try:
            await done.wait()
        except asyncio.CancelledError:
            stop()
            raise
        return outputs

    def parse(self, pieces: Pieces) -> Answer:
        answer = Answer()
        for at, output in pieces:
            if output.error is not None:
                raise Failed(output.error)
            if output.ids:
                answer.add(at, len(output.ids))
        answer.total = sum(answer.tokens)
        return answer

    async def close(self) -> None:
        await asyncio.to_thread(self._serving.close)


class Vllm(Target):
    """vLLM's AsyncLLM with the engine's arguments, in the load generator's process."""

    def __init__(self, endpoints: Endpoints, tokenizer: Any, load: Load) -> None:
        super().__init__(endpoints, tokenizer, load)
        from cog_triton.engines.vllm import loading_arguments

        arguments = loading_arguments(endpoints.engine)
        from vllm import (  # type: ignore[import-not-found, unused-ignore]
            AsyncEngineArgs,
            SamplingParams,
        )
        from vllm.sampling_params import (  # type: ignore[import-not-found, unused-ignore]
            RequestOutputKind,
        )
        from vllm.v1.engine.async_llm import (  # type: ignore[import-not-found, unused-ignore]
            AsyncLLM,
        )

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._sampling = partial(
            SamplingParams,
            temperature=load.temperature,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def prepare(self, request: Planned) -> Any:
        ids = self.tokenizer.encode(request.prompt).ids
        return {"prompt_token_ids": ids}, self._sampling(max_tokens=request.output_tokens)

    async def send(self, prepared: Any) -> Pieces:
        outputs = self._llm.generate(*prepared, request_id=secrets.token_hex(8))
        return [(time.perf_counter(), len(output.outputs[0].token_ids)) async for output in outputs]

    def parse(self, pieces: Pieces) -> Answer:
        answer = Answer()
        for at, tokens in pieces:
            if tokens:
                answer.add(at, tokens)
        answer.total = sum(answer.tokens)
        return answer

    async def close(self) -> None:
        self._llm.shutdown()  # not in a thread: its task on this loop would see the engine end
        del self._llm  # else it is shut down once more, when the interpreter is half gone


TARGETS: dict[str, type[Target]] = {
    "cog-sse": CogSse,
    "cog-json": CogJson,
    "openai-sse": OpenAiSse,
    "openai-text": OpenAiText,
    "generate": Generate,
    "generate-http": GenerateHttp,
    "triton-grpc": TritonGrpc,
    "triton-http": TritonHttp,
    "triton-engine": TritonEngine,
    "engine": RawEngine,
    "vllm": Vllm,
    "vllm-serve": VllmServe,
}


def load_tokenizer(name: str) -> Any:
    """Load the ``tokenizers.Tokenizer`` of a directory or a Hugging Face id.

    A directory's tokenizer.json is read by itself: transformers takes seconds to import.

    Raises:
        ConfigurationError: it has none.
    """
    file = Path(name) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    from cog_triton.errors import ConfigurationError
    from cog_triton.text import tokenizer

    tokenizer.without_torch()
    backend = getattr(tokenizer.load_tokenizer(name), "backend_tokenizer", None)
    if backend is None:
        raise ConfigurationError(f"{name} has no fast tokenizer, which the benchmark needs")
    return backend


def end_id_of(name: str, tokenizer: Any) -> int | None:
    """Return the id of the token that ends an output; None if a directory does not name it."""
    file = Path(name) / "tokenizer_config.json"
    token = json.loads(file.read_text()).get("eos_token") if file.is_file() else None
    text = token["content"] if isinstance(token, dict) else token  # a dict as transformers 4 wrote
    end_id: int | None = tokenizer.token_to_id(text) if text else None
    return end_id
