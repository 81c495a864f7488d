"""Text to text by calls to the other models; see cog_triton/models/bls.py."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.models import stub
from cog_triton.models.bls import Bls, Watch, check_parameters
from cog_triton.models.bls_stub import StubModels, answer_in_threads, send_all
from cog_triton.models.model_calls import Client, ModelError, request_key
from cog_triton.processes import end_with_parent

CANCELLATION_CHECK_SECONDS = 1.0  # asking Triton is a round trip


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        config = json.loads(args["model_config"])
        parameters = stub.parameters(config)
        check_parameters(parameters)
        self._bls = Bls(
            StubModels(pb_utils),
            llm=parameters.get("tensorrt_llm_model_name", "tensorrt_llm"),
            accumulate=parameters.get("accumulate_tokens") == "true",
            decoupled=config["model_transaction_policy"]["decoupled"],
        )
        self._watch = Watch(CANCELLATION_CHECK_SECONDS)

    def execute(self, requests: list[Any]) -> None:
        answer_in_threads(pb_utils, requests, self._answer)

    def finalize(self) -> None:
        self._watch.close()
        stub.forget_requests()

    def _answer(self, request: Any, client: Client) -> None:
        inputs = stub.arrays(request.inputs())
        names = frozenset(request.requested_output_names())
        request_id = request_key(bls_id(request))
        with self._watch.over(client, partial(self._bls.stop, request_id)):
            answer = self._bls.answer(request_id, inputs, bls_parameters(request))
            send_all(pb_utils, client, answer, names)


def bls_id(request: Any) -> str:
    try:
        return stub.request_id(request)
    except ValueError as error:
        raise ModelError(str(error)) from None


def bls_parameters(request: Any) -> dict[str, Any]:
    try:
        return dict(json.loads(stub.parameters_text(request) or "{}"))
    except ValueError as error:
        raise ModelError(str(error)) from None
