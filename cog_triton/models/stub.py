"""Tensors of requests and responses, for all models of Triton's Python backend."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy.typing as npt

from cog_triton.errors import shortened

Array = npt.NDArray[Any]

logger = logging.getLogger(__name__)

LONGEST = 500
"""Characters of the text that a client gets, which may have some of the request in it."""


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """The string parameters of a parsed model configuration, those that are not empty."""
    return {
        name: value["string_value"]
        for name, value in (config.get("parameters") or {}).items()
        if value["string_value"] != ""
    }


def forget_requests() -> None:
    """To be called last in a model's ``finalize``, when nothing of it holds a request any more.

    Python collects what garbage still holds when it ends. By then the stub of Triton 2.51 has let go of its
    shared memory, and dies of a response sender that was asked whether its request is cancelled.
    """
    gc.collect()


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


def parameters_text(request: Any) -> str:
    """The parameters of a request, which are no tensors: a JSON object, or nothing.

    Raises:
        ValueError: they have half of a surrogate pair, which Triton hands on as bytes that are no text.
    """
    return _text("the request's parameters", request.parameters)


def request_id(request: Any) -> str:
    """The id of a request; empty if it has none.

    Raises:
        ValueError: it is no valid Unicode.
    """
    return _text("the request's id", request.request_id)


def _text(what: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError:
        raise ValueError(f"{what} must be valid Unicode") from None


def error(pb_utils: Any, message: str) -> Any:
    """A response that says what went wrong here; HTTP clients get status 500."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(shortened(message, LONGEST)))


def failure(pb_utils: Any, model: str, cause: Exception) -> Any:
    """A response for what was not foreseen. Its trace goes to the log and not to the client.

    A model must not raise instead: Triton would send the trace, and fail the requests beside it.
    """
    logger.error("model %s failed", model, exc_info=cause)
    return error(
        pb_utils, f"model '{model}' failed: {type(cause).__name__}; the server's log has more"
    )


def refusal(pb_utils: Any, message: str) -> Any:
    """A response that says what is wrong with the request; HTTP clients get status 400."""
    code = pb_utils.TritonError.INVALID_ARG
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(shortened(message, LONGEST), code))
