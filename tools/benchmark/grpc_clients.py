"""Compare this package's gRPC client with grpc.aio, each with all requests on one long stream.

    python -m tools.benchmark.grpc_clients --engine stand-in --streams 64 256 --rounds 5

The clients take turns on one tritonserver, and stop where the ids of an answer are known. The figures are
processor time, of the whole stack and of the client, so that they say something on a shared machine too.
"""

import argparse
import asyncio
import contextlib
import math
import os
import tempfile
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
from tritonclient.grpc import service_pb2

from cog_triton.client.arrivals import Arrivals
from cog_triton.client.demultiplexer import Demultiplexer
from cog_triton.client.grpc_transport import INFER, GrpcClient
from cog_triton.client.messages import flat_outputs, infer_request, is_final, parse
from cog_triton.client.responses import Inputs, TensorOutputs
from cog_triton.client.stream import TritonClient
from cog_triton.protocol.frames import Frame, FrameAddress
from cog_triton.protocol.names import FRAMES_FOR, IDS_ENSEMBLE, NO_PARAMETERS, Parameters
from cog_triton.request.request import Request, triton_inputs
from tools.benchmark import servers
from tools.benchmark.load import Load
from tools.benchmark.measuring import Result, run_loads
from tools.benchmark.processes import LOAD_GENERATOR
from tools.benchmark.targets import RESPONSE_TIMEOUT, Parts, Target
from tools.command_line import begin
from tools.demo_model import DIRECTORY
from tools.server_sent_events import Part


class GrpcAioClient(TritonClient):
    """A client on grpc.aio, as short as it can be: it measures, and recovers from nothing."""

    def __init__(self, address: str, *, response_timeout: float = math.inf) -> None:
        super().__init__(response_timeout)
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(address, options=unlimited)
        self._call: Any = self._channel.stream_stream(f"/inference.GRPCInferenceService/{INFER}")()
        self._reader = uuid4().hex
        self._demultiplexer = Demultiplexer()
        self._arrivals: dict[int, Arrivals[Any]] = {}
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._loops = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._unsent.get())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while (message := await self._call.read()) is not grpc.aio.EOF:
            for delivery in self._demultiplexer.receive(message, loop.time()):
                arrivals = self._arrivals[delivery.sequence]
                arrivals.add(delivery.item)
                if delivery.last:
                    arrivals.end()

    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Arrivals[Any]:
        sequence = self._demultiplexer.new_sequence()
        self._demultiplexer.expect(sequence, model, request_id)
        if model == IDS_ENSEMBLE:
            address = FrameAddress(self._reader, sequence)
            parameters = {**parameters, FRAMES_FOR: address.parameter()}
        arrivals: Arrivals[Any] = Arrivals()
        arrivals.close = partial(self._close, sequence)
        self._arrivals[sequence] = arrivals
        request = infer_request(model, request_id, inputs, (), parameters)
        self._unsent.put_nowait(request.SerializeToString())
        return arrivals

    def _close(self, sequence: int) -> None:
        self._demultiplexer.forget(sequence)
        self._arrivals.pop(sequence, None)

    def _parse(self, message: Frame | service_pb2.ModelStreamInferResponse) -> Any:
        if isinstance(message, Frame):
            return message
        response = parse(message)
        return TensorOutputs(flat_outputs(response), is_final(response))

    async def _disconnect(self) -> None:
        for loop in self._loops:
            loop.cancel()
        self._call.cancel()
        await self._channel.close()


class Ids(Target):
    """The ids of a client's answers."""

    server = "triton"

    @abstractmethod
    def connect(self) -> TritonClient: ...

    async def ask(self, inputs: Any, request_id: str) -> Parts:
        count = 0
        answer = self.client.stream(request_id, triton_inputs(Request(**inputs)))
        async with contextlib.aclosing(answer) as responses:
            async for response in responses:
                count += len(response.ids)
                yield Part(tokens=count, ids=response.ids)


class Ours(Ids):
    name = "ours"

    def connect(self) -> GrpcClient:
        return GrpcClient(self.endpoints.grpc, response_timeout=RESPONSE_TIMEOUT)


class GrpcAio(Ids):
    name = "grpc.aio"

    def connect(self) -> GrpcAioClient:
        return GrpcAioClient(self.endpoints.grpc, response_timeout=RESPONSE_TIMEOUT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare this package's gRPC client with grpc.aio."
    )
    parser.add_argument("--engine", choices=["simulated", "stand-in"], default="stand-in")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pace-ms", type=float, default=0.0, help="between two tokens")
    options = parser.parse_args()
    begin()
    with tempfile.TemporaryDirectory(prefix="cog-triton-clients-") as name:
        directory = Path(name)
        if options.engine == "stand-in":
            engine = servers.one_token_engine({}, directory, options.pace_ms)
        else:
            engine = servers.simulated(directory, options.pace_ms, each_token=True)
        environment = {**os.environ, "MODEL": str(DIRECTORY), **engine}
        loads = [
            Load(streams, requests=4 * streams, warmup=streams, rounds=options.rounds)
            for streams in options.streams
        ]
        results = run_loads(
            [Ours, GrpcAio],
            [Ours],
            loads,
            lambda kind: servers.started(kind, environment, directory),
        )
    for result in results:
        print(line(options.engine, result))


def line(engine: str, result: Result) -> str:
    tokens = result.figures["output_tokens"]
    stack = tokens / result.figures["cpu_s"]
    client = 1e6 * result.cpu_s[LOAD_GENERATOR] / tokens
    compared = "".join(
        f", {1 / ratios['cpu_s']:.2f} of {other}" for other, ratios in result.ratios.items()
    )
    return (
        f"{engine}, {result.concurrency} streams, {result.target}: {stack:,.0f} tokens per "
        f"core-second{compared}; client {client:.1f} µs a token; TTFT p50 {result.ttft:.0f} ms; "
        f"errors: {result.errors or 'none'}"
    )


if __name__ == "__main__":
    main()
