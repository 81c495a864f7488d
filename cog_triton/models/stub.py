"""What the models of Triton's Python backend share: tensors of a request, tensors of a response."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy.typing as npt

from cog_triton.models.model_calls import Client, ModelError

Array = npt.NDArray[Any]


def end_with_server() -> None:
    """Ends this process when tritonserver ends, however it does: a stub notices nothing by itself."""
    server = os.pidfd_open(os.getppid())
    threading.Thread(target=_end_after, args=[server], name="end-with-server", daemon=True).start()


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """The string parameters of a parsed model configuration, those that are not empty."""
    return {
        name: value["string_value"]
        for name, value in (config.get("parameters") or {}).items()
        if value["string_value"] != ""
    }


def arrays(tensors: Any) -> dict[str, Array]:
    """The values of tensors of the Python backend, by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in tensors}


def response(pb_utils: Any, values: Mapping[str, Array], names: Collection[str]) -> Any:
    """A response with those of the values that the request named.

    No others: the stub of Triton 2.51 drops them when it no longer holds Python's lock, which kills it
    under Python 3.12 and later.

    Args:
        pb_utils: the stub's module.
        names: the request's requested outputs, which are all of the model's if it named none.
    """
    tensors = [pb_utils.Tensor(name, value) for name, value in values.items() if name in names]
    return pb_utils.InferenceResponse(tensors)


def error(pb_utils: Any, message: str) -> Any:
    """A response that says what went wrong here; HTTP clients get status 500."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


def refusal(pb_utils: Any, message: str) -> Any:
    """A response that says what is wrong with the request; HTTP clients get status 400."""
    code = pb_utils.TritonError.INVALID_ARG
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def answer_in_threads(
    pb_utils: Any, requests: Iterable[Any], answer: Callable[[Any, Client], None]
) -> None:
    """Answers each request in a thread of its own: calls of other models block, in a coroutine as well.

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
            client.send(response(pb_utils, tensors, names), last=last)
    if not client.closed:
        client.send(None, last=True)


def _end_after(process: int) -> None:
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(pb_utils: Any, request: Any, answer: Callable[[Any, Client], None]) -> None:
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    client = Client(request.get_response_sender(), final)
    try:
        answer(request, client)
    except Exception as cause:
        if not client.closed:
            client.send(error(pb_utils, str(cause)), last=True)


class StubModels:
    """The other models of this server; see ``model_calls.Models``."""

    def __init__(self, pb_utils: Any) -> None:
        """Calls nothing yet.

        Args:
            pb_utils: the stub's module.
        """
        self._pb_utils = pb_utils

    def call(self, model: str, request_id: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outcome = _outcome(self._request(model, request_id, inputs).exec())
        if isinstance(outcome, ModelError):
            raise outcome
        return outcome

    def stream(
        self, model: str, request_id: str, inputs: Mapping[str, Array]
    ) -> Iterator[dict[str, Array] | ModelError]:
        return map(_outcome, self._request(model, request_id, inputs).exec(decoupled=True))

    def _request(self, model: str, request_id: str, inputs: Mapping[str, Array]) -> Any:
        return self._pb_utils.InferenceRequest(
            model_name=model,
            request_id=request_id,
            inputs=[self._pb_utils.Tensor(*item) for item in inputs.items()],
            requested_output_names=[],  # all that there are
        )


def _outcome(response: Any) -> dict[str, Array] | ModelError:
    if response.has_error():
        return ModelError(response.error().message())
    return arrays(response.output_tensors())
