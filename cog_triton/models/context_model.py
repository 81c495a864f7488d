"""The tensorrt_llm_context model, as Triton's stub loads it: see ``context``."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from cog_triton.models import stub
from cog_triton.models.context import ContextRelay
from cog_triton.models.model_calls import Client, Llm, request_key


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:  # noqa: ARG002
        self._relay = ContextRelay(Llm(stub.StubModels(pb_utils), "tensorrt_llm"))

    def execute(self, requests: list[Any]) -> None:
        # Calls of other models block, in a coroutine as well. Hence the threads.
        for request in requests:
            threading.Thread(target=self._serve, args=(request,), daemon=True).start()

    def _serve(self, request: Any) -> None:
        client = Client(
            request.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )
        try:
            self._answer(request, client)
        except Exception as error:
            if not client.closed:
                client.send(stub.error(pb_utils, str(error)), last=True)

    def _answer(self, request: Any, client: Client) -> None:
        names = frozenset(request.requested_output_names())
        answer = self._relay.answer(
            request_key(request.request_id()), stub.arrays(request.inputs())
        )
        with closing(answer):
            for tensors, last in answer:
                client.send(stub.response(pb_utils, tensors, names), last=last)
        if not client.closed:
            client.send(None, last=True)
