"""The tensorrt_llm_context model, as Triton's stub loads it: see ``context``."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from cog_triton.client.grpc_transport import Channel, infer_request, message_arrivals
from cog_triton.errors import CogTritonError, InvalidParameter, UserError
from cog_triton.models import stub
from cog_triton.models.context import Contexts, Tensors, joined
from cog_triton.models.model_calls import Client, flag, renamed
from cog_triton.processes import end_with_parent
from cog_triton.wire import ADDRESS_FILE, CONTEXT_MODEL, ENGINE


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        # The server's own, which it wrote down before it started.
        self._channel = Channel(Path(args["model_repository"], ADDRESS_FILE).read_text())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="relay", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        stub.forget_requests()

    async def _serve(self, request: Any) -> None:
        client = Client(
            request.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )
        try:
            await self._answer(request, client)
        except Exception as error:  # unanswered, the request would wait for good
            if not client.closed:
                client.send(failure(error), last=True)

    async def _answer(self, request: Any, client: Client) -> None:
        inputs = stub.arrays(request.inputs())
        names = frozenset(request.requested_output_names())
        given = renamed(inputs, {name: name for name in inputs})
        message = infer_request(ENGINE, _id(request), given, ())
        contexts = Contexts(streaming=flag(inputs, "streaming"))
        arrivals = await message_arrivals(self._channel, message)
        try:
            while not client.closed:
                # One by one, as they came: other clients count a response as a token.
                for each in await arrivals.take():
                    if not each.tensors and not each.final:
                        continue
                    responses = answers(contexts, [each.tensors], last=each.final)
                    for i, tensors in enumerate(responses):
                        is_last = each.final and i == len(responses) - 1
                        client.send(stub.response(pb_utils, tensors, names), last=is_last)
                    if each.final and not client.closed:
                        client.send(None, last=True)
        finally:
            arrivals.close()


def _id(request: Any) -> str:
    try:
        return stub.request_id(request)
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def answers(contexts: Contexts, arrived: list[Tensors], *, last: bool) -> list[Tensors]:
    """The responses to send for what has arrived together."""
    parts = joined([tensors for tensors in arrived if tensors] or [{}])
    return [
        response
        for i, tensors in enumerate(parts)
        for response in contexts.add(tensors, last=last and i == len(parts) - 1)
    ]


def failure(error: Exception) -> Any:
    """The response that says what went wrong, and whose fault it is."""
    if isinstance(error, UserError):
        return stub.refusal(pb_utils, error.message)
    if isinstance(error, CogTritonError):
        return stub.error(pb_utils, error.message)
    return stub.failure(pb_utils, CONTEXT_MODEL, error)
