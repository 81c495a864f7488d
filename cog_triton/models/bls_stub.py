"""The BLS model in Triton's stub: a thread for each request, and calls of the other models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from cog_triton.models import stub
from cog_triton.models.model_calls import NO_PARAMETERS, Client, ModelError, Parameters
from cog_triton.models.stub import Array


def answer_in_threads(
    pb_utils: Any, requests: Iterable[Any], answer: Callable[[Any, Client], None]
) -> None:
    """Answer each request in its own thread, since calls of other models block even in a coroutine.

    Args:
        pb_utils: the stub's module.
        answer: sends a request's responses to its client. What it raises ends them, as an error.
    """
    for request in requests:
        threading.Thread(target=_answer, args=(pb_utils, request, answer), daemon=True).start()


def send_all(
    pb_utils: Any,
    client: Client,
    answer: Generator[tuple[dict[str, Array], bool], None, None],
    names: Collection[str],
) -> None:
    """Sends responses as they come, and their end if none of them was known to be the last.

    Args:
        pb_utils: the stub's module.
        answer: the tensors of each response, and whether it is the last; it is closed in any case.
        names: the request's requested outputs.
    """
    with closing(answer):
        for tensors, last in answer:
            client.send(stub.response(pb_utils, tensors, names), last=last)
    if not client.closed:
        client.send(None, last=True)


def _answer(pb_utils: Any, request: Any, answer: Callable[[Any, Client], None]) -> None:
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    client = Client(request.get_response_sender(), final)
    try:
        answer(request, client)
    except Exception as cause:
        if not client.closed:
            client.send(_failure(pb_utils, cause), last=True)


def _failure(pb_utils: Any, cause: Exception) -> Any:
    if not isinstance(cause, ModelError):
        return stub.failure(pb_utils, "tensorrt_llm_bls", cause)
    response = stub.refusal if cause.refused else stub.error
    return response(pb_utils, str(cause))


class StubModels:
    """The other models of this server; see ``model_calls.Models``."""

    def __init__(self, pb_utils: Any) -> None:
        """Calls nothing yet.

        Args:
            pb_utils: the stub's module.
        """
        self._pb_utils = pb_utils

    def call(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> dict[str, Array]:
        request = self._request(model, request_id, inputs, parameters)
        outcome = self._outcome(request.exec())
        if isinstance(outcome, ModelError):
            raise outcome
        return outcome

    def stream(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> Iterator[dict[str, Array] | ModelError]:
        request = self._request(model, request_id, inputs, parameters)
        return map(self._outcome, request.exec(decoupled=True))

    def _request(
        self, model: str, request_id: str, inputs: Mapping[str, Array], parameters: Parameters
    ) -> Any:
        return self._pb_utils.InferenceRequest(
            model_name=model,
            request_id=request_id,
            inputs=[self._pb_utils.Tensor(*item) for item in inputs.items()],
            requested_output_names=[],  # all that there are
            parameters=dict(parameters),
        )

    def _outcome(self, response: Any) -> dict[str, Array] | ModelError:
        if response.has_error():
            error = response.error()
            refused = error.code() == self._pb_utils.TritonError.INVALID_ARG
            return ModelError(error.message(), refused=refused)
        return stub.arrays(response.output_tensors())
