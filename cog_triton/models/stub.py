"""What the models of Triton's Python backend share: tensors of a request, tensors of a response."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy.typing as npt

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
