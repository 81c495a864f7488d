"""The tensorrt_llm_context model, as Triton's stub loads it: see ``context``."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from cog_triton.client.grpc_transport import (
    CHANNEL_OPTIONS,
    Message,
    infer_request,
    stream_messages,
)
from cog_triton.errors import CogTritonError, UserError
from cog_triton.models import stub
from cog_triton.models.context import Contexts, Tensors, joined
from cog_triton.models.model_calls import flag, renamed
from cog_triton.protocol import ADDRESS_FILE, ENGINE


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # The server's own, which it wrote down before it started.
        self._address = Path(args["model_repository"], ADDRESS_FILE).read_text()
        self._loop = asyncio.new_event_loop()
        self._channel: Any = None
        threading.Thread(target=self._loop.run_forever, name="relay", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self, request: Any) -> None:
        answer = Answer(request)
        try:
            if self._channel is None:
                self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
            await self._answer(request, answer)
        except UserError as error:
            answer.end(stub.refusal(pb_utils, error.message))
        except CogTritonError as error:
            answer.end(stub.error(pb_utils, error.message))
        except Exception as error:  # unanswered, the request would wait for good
            answer.end(stub.error(pb_utils, f"{type(error).__name__}: {error}"))

    async def _answer(self, request: Any, answer: Answer) -> None:
        inputs = stub.arrays(request.inputs())
        given = renamed(inputs, {name: name for name in inputs})
        message = infer_request(ENGINE, request.request_id(), given, ())
        arrived: deque[Message] = deque()
        wake = asyncio.Event()

        async def read() -> None:
            try:
                async with aclosing(stream_messages(self._channel, message)) as messages:
                    async for each in messages:
                        arrived.append(each)
                        wake.set()
            finally:
                wake.set()

        contexts = Contexts(streaming=flag(inputs, "streaming"))
        reader = asyncio.create_task(read())
        try:
            while not answer.ended:
                await wake.wait()
                wake.clear()
                ready = list(arrived)
                arrived.clear()
                if ready:
                    self._pass_on(contexts, ready, answer)
                elif reader.done():
                    await reader  # raises what went wrong
        finally:
            reader.cancel()

    def _pass_on(self, contexts: Contexts, ready: list[Message], answer: Answer) -> None:
        last = ready[-1].final
        said = [each.tensors for each in ready if each.tensors]
        parts = joined(said) if said else [{}]
        responses = [
            response
            for i, tensors in enumerate(parts)
            for response in contexts.add(tensors, last=last and i == len(parts) - 1)
        ]
        for i, response in enumerate(responses):
            answer.send(response, last=last and i == len(responses) - 1)
        if last:
            answer.end(None)


class Answer:
    """The responses to one request."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._names = frozenset(request.requested_output_names())
        self.ended = False

    def send(self, tensors: Tensors, *, last: bool) -> None:
        response = stub.response(pb_utils, tensors, self._names)
        if last:
            self.end(response)
        else:
            self._sender.send(response)

    def end(self, response: Any | None) -> None:
        if not self.ended:
            self.ended = True
            given = [] if response is None else [response]
            self._sender.send(*given, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
