"""The tensorrt_llm_context model, which stands between the ensemble and TensorRT-LLM's C++ backend.

The backend sends only new ids. Decoded alone, a response loses the space that begins it and breaks a
character that is split over two (tensorrtllm_backend issue 332). Postprocessing cannot remember the ids
before it: nothing that Triton 2.51 gives it tells one request's responses from another's, unless the
client gave its request an id. So this model asks the backend and adds to each response, as the embedded
engines do, the ids before it and whether it is the last.

It asks over gRPC, as any client would. Calls between models (BLS) would be shorter, but with 64 streams
that are not paced those of Triton 2.51 come to a standstill within 10,000 to 120,000 tokens.

Clients that read ids (the predictor does) go to the backend directly.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np

from cog_triton.client.grpc_transport import Channel, infer_request, stream_messages
from cog_triton.models import stub
from cog_triton.models.stub import Array, Client, flag
from cog_triton.processes import end_with_parent
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.wire import CONTEXT_MODEL, ENGINE, GRPC_ADDRESS

Tensors = dict[str, Array]


class Contexts:
    """The ids before each response of one request."""

    def __init__(self, *, streaming: bool) -> None:
        self._streaming = streaming
        self._sequences: dict[tuple[int, int], list[int]] = {}

    def add(self, tensors: Tensors, *, last: bool) -> list[Tensors]:
        """Return the responses to send for one of the backend's, which may have no tensors."""
        if not tensors:
            return self._ends() if last and self._streaming else []
        if not self._streaming or tensors["output_ids"].shape[1] > 1:
            # It holds a whole text. Streamed beams do: each response has all of their ids so far.
            return [{**tensors, **_context([], final=True)}]
        place = stub.sequence_of(tensors)
        before = self._sequences.pop(place, [])
        response = {**tensors, **_context(before, final=last)}
        if last:
            return [response, *(self._ends() if self._sequences else [])]
        ids = tensors["output_ids"][0, 0, : tensors["sequence_length"][0, 0]].tolist()
        self._sequences[place] = [*before, *ids][-CONTEXT_TOKENS:]
        return [response]

    def _ends(self) -> list[Tensors]:
        """Return a response without ids for each sequence: postprocessing sends what it held back."""
        return [
            {
                "output_ids": np.zeros((1, 1, 0), np.int32),
                "sequence_length": np.zeros((1, 1), np.int32),
                **stub.indices(*place),
                **_context(ids, final=True),
            }
            for place, ids in (self._sequences or {(0, 0): []}).items()
        ]


def _context(ids: list[int], *, final: bool) -> Tensors:
    return {
        "context_ids": np.array(ids, np.int32).reshape(1, -1),
        "is_final": np.array([[final]], np.bool_),
    }


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        self._channel = Channel(stub.parameters(json.loads(args["model_config"]))[GRPC_ADDRESS])
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="relay", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        stub.forget_requests()

    async def _serve(self, request: Any) -> None:
        client = Client(request)
        try:
            inputs, names = stub.received(request)
            contexts = Contexts(streaming=flag(inputs, "streaming"))
            message = infer_request(ENGINE, stub.request_id(request), stub.as_sent(inputs), ())
            # One by one, as they came: other clients count a response as a token.
            async for each in stream_messages(self._channel, message):
                responses = contexts.add(each.tensors, last=each.final)
                for count, tensors in enumerate(responses, 1):
                    last = each.final and count == len(responses)
                    client.send(stub.response(tensors, names), last=last)
                if each.final and not client.closed:
                    client.send(last=True)
        except Exception as error:  # unanswered, the request would wait permanently
            client.fail(CONTEXT_MODEL, error)
