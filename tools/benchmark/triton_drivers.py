"""Targets on a tritonserver: its models over gRPC, and the package's ``generate()``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from tools.benchmark.driver import (
    Answer,
    Context,
    Driver,
    Failed,
    engine_inputs,
    ensemble_inputs,
    sampling_request,
)
from tools.benchmark.http import Piece
from tools.benchmark.load import Planned

RESPONSE_TIMEOUT = 300.0  # seconds

# cum_log_probs keeps Triton from skipping tensorrt_llm along with postprocessing: outputs that the
# skipped step would read count as unused even when they are asked for.
IDS_OUTPUTS = ("output_ids", "sequence_length", "num_input_tokens")


class TritonGrpc(Driver):
    """ModelStreamInfer on the ensemble without postprocessing: raw ids alone."""

    server = "triton"
    _MODEL = "ensemble_ids"
    _METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        import grpc

        self._end = grpc.aio.EOF
        options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(context.grpc, options=options)
        self._call: Any = self._channel.stream_stream(self._METHOD)  # bytes in, bytes out

    def prepare(self, request: Planned) -> bytes:
        from cog_triton.client.grpc_transport import infer_request

        inputs = self._inputs(request)
        message = infer_request(self._MODEL, secrets.token_hex(8), inputs, self._outputs)
        return bytes(message.SerializeToString())

    @property
    def _outputs(self) -> tuple[str, ...]:
        return IDS_OUTPUTS

    def _inputs(self, request: Planned) -> Mapping[str, Any]:
        return ensemble_inputs(request, self._context)

    async def send(self, prepared: bytes) -> list[Piece]:
        pieces: list[Piece] = []
        call = self._call()
        try:
            await call.write(prepared)
            # Triton ends a stream that is done writing when the last response is out: nothing is parsed.
            await call.done_writing()
            while (message := await call.read()) is not self._end:
                pieces.append((time.perf_counter(), message))
        finally:
            call.cancel()
        return pieces

    def parse(self, pieces: list[Piece]) -> Answer:
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
        return engine_inputs(request, self._context)


class Generate(Driver):
    """The package's ``generate()`` over gRPC, which is what the predictor runs."""

    server = "triton"

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
        return sampling_request(request, self._context)

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
