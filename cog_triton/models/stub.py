"""What the models of Triton's Python backend share: tensors of a request, tensors of a response."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy.typing as npt

from cog_triton.models.model_calls import ModelError

Array = npt.NDArray[Any]


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
