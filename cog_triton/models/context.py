"""The tensorrt_llm_context model, which stands between the ensemble and TensorRT-LLM's C++ backend.

The backend sends only new ids. Decoded alone, a response loses the space that begins it and breaks a
character that is split over two (tensorrtllm_backend issue 332). Postprocessing cannot remember the ids
before it: nothing that Triton 2.51 gives it tells one request's responses from another's, unless the
client gave its request an id. So this model asks the backend and adds to each response, as the embedded
engines do, the ids before it and whether it is the last. It asks over gRPC, as any client would. Calls
between models (BLS) would be shorter, but with 64 streams that are not paced those of Triton 2.51 come to a
standstill within 10,000 to 120,000 tokens.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.client.messages import infer_request, is_final, tensors_of
from cog_triton.models import stub
from cog_triton.models.stub import Client, Contexts, flag
from cog_triton.protocol.names import CONTEXT_MODEL, ENGINE, GRPC_ADDRESS
from cog_triton.text.end_tokens import declared_end_ids


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        _, parameters = stub.begin(args)
        self._client = GrpcClient(parameters[GRPC_ADDRESS])
        self._end_ids = stub.end_ids(parameters) or declared_end_ids(
            Path(parameters.get("tokenizer_dir", ""))
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="relay", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        stub.forget_requests()

    async def _serve(self, request: Any) -> None:
        """Pass a request on to the engine, and its responses back with their contexts."""
        client = Client(request)
        try:
            received = stub.received(request)
            contexts = Contexts(streaming=flag(received.inputs, "streaming"))
            end_ids = stub.end_stop_words(received.inputs, self._end_ids)
            message = infer_request(ENGINE, received.request_id, stub.as_sent(received.inputs), ())
            async for arrived in self._client.responses(message):
                # One by one, as they came: other clients count a response as a token.
                for response in arrived:
                    final = is_final(response)
                    tensors = stub.without_end_token(tensors_of(response), end_ids)
                    parts = contexts.add(tensors, last=final)
                    for number, part in enumerate(parts, 1):
                        last = final and number == len(parts)
                        client.send(stub.response(part, received.names), last=last)
                    if final and not client.closed:
                        client.send(last=True)
        except Exception as error:
            # Unanswered, the request would wait permanently.
            client.fail(CONTEXT_MODEL, error)
