"""Triton's Python backend, for all models: what a request holds, and the responses to it."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.errors import (
    CogTritonError,
    EngineError,
    EngineUnavailable,
    InvalidParameter,
    ServerError,
    shortened,
)
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, without_torch

pb_utils: Any
try:
    import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,no-redef]
except ImportError:  # outside of Triton
    pb_utils = None

Array = npt.NDArray[Any]

logger = logging.getLogger(__name__)

INDICES = ("batch_index", "sequence_index")
LONGEST = 500  # characters of an error's text, which may have some of the request in it


class Client:
    """The client of one request, to which its responses are sent. Thread-safe.

    A sender must not be asked anything once it has sent the last response: Triton 2.51 frees what it
    refers to. So it is dropped then, under a lock.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        return self._sender is None

    def send(self, *response: Any, last: bool) -> None:
        """Send a response; without one, only the end of the responses."""
        with self._lock:
            self._sender.send(
                *response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
            )
            if last:
                self._sender = None

    def fail(self, model: str, cause: Exception) -> None:
        """Send an error as the last response, unless that has been sent."""
        if not self.closed:
            self.send(failure(model, cause), last=True)

    def gone(self) -> bool:
        """Ask Triton whether the client has disconnected, which is a round trip."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the string parameters of a parsed model configuration that are not empty."""
    values = {
        name: value["string_value"] for name, value in (config.get("parameters") or {}).items()
    }
    return {name: value for name, value in values.items() if value != ""}


def tokenizer(parameters: Mapping[str, str]) -> Tokenizer:
    """Load the tokenizer that a configuration names, without torch."""
    without_torch()
    trusted = parameters.get("trust_remote_code") == "true"
    return load_tokenizer(parameters["tokenizer_dir"], trust_remote_code=trusted)


def forget_requests() -> None:
    """Collect garbage, at the end of a model's ``finalize``, when nothing holds a request any more.

    Python collects what garbage still holds when it ends. By then the stub of Triton 2.51 has released
    its shared memory, and dies of a response sender that was asked whether its request is cancelled.
    """
    gc.collect()


def arrays(tensors: Any) -> dict[str, Array]:
    """Return the values of tensors of the Python backend, by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in tensors}


def received(request: Any) -> tuple[dict[str, Array], frozenset[str]]:
    """Return the inputs of a request, and the names of the outputs that it asks for."""
    return arrays(request.inputs()), frozenset(request.requested_output_names())


def flag(inputs: Mapping[str, Array], name: str) -> bool:
    """Return True if a tensor is there and true anywhere."""
    return name in inputs and bool(inputs[name].any())


def as_sent(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs as clients send them: a scalar, reshaped by a configuration to [batch], [batch, 1]."""
    return {name: v.reshape(-1, 1) if v.ndim == 1 else v for name, v in inputs.items()}


def sequence_of(tensors: Mapping[str, Array]) -> tuple[int, int]:
    """Return batch_index and sequence_index of a response; TensorRT-LLM omits them where both are 0."""
    batch, sequence = (tensors.get(name, np.zeros(1)) for name in INDICES)
    return int(batch.flat[0]), int(sequence.flat[0])


def indices(*place: int) -> dict[str, Array]:
    """Return the tensors of ``sequence_of``."""
    return {name: np.array([[i]], np.int32) for name, i in zip(INDICES, place, strict=True)}


def request_parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a request, which are not tensors."""
    return dict(json.loads(_text("the request's parameters", request.parameters) or "{}"))


def request_id(request: Any) -> str:
    """Return the id of a request, empty if it has none."""
    return _text("the request's id", request.request_id)


def _text(what: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError:  # half of a surrogate pair
        raise InvalidParameter(f"{what} must be valid Unicode") from None


def response(values: Mapping[str, Array], names: Collection[str]) -> Any:
    """Return a response with those of the values that the request named.

    Not more: the stub of Triton 2.51 drops others when it no longer holds Python's lock, which kills it
    under Python 3.12 and later.

    Args:
        names: the request's requested outputs, which are all of the model's if it named none.
    """
    tensors = [pb_utils.Tensor(name, value) for name, value in values.items() if name in names]
    return pb_utils.InferenceResponse(tensors)


def failure(model: str, cause: Exception, *refusals: type[Exception]) -> Any:
    """Return the error response for an exception; HTTP clients get status 400 for a refusal, else 500.

    What was not foreseen goes to the log with its trace. A model must not raise instead: Triton would
    send the trace, and fail the requests beside it.

    Args:
        refusals: more exceptions that are the request's fault, and have a text for the client.
    """
    text, code = cause.message if isinstance(cause, CogTritonError) else str(cause), []
    if not isinstance(cause, (CogTritonError, EngineError, *refusals)):
        logger.error("model %s failed", model, exc_info=cause)
        text = f"model '{model}' failed: {type(cause).__name__}; the server's log has more"
    elif not isinstance(cause, ServerError | EngineUnavailable):
        code = [pb_utils.TritonError.INVALID_ARG]
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(shortened(text, LONGEST), *code))
