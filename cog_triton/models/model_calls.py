"""Shared by the models that call other models of the server to answer.

A call and its responses are plain values here; ``bls_stub.StubModels`` makes real ones.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from cog_triton.wire import stop_inputs

Array = npt.NDArray[Any]
Parameters = Mapping[str, str | int | bool]
"""Of a request, which are no tensors."""
NO_PARAMETERS: Parameters = {}

logger = logging.getLogger(__name__)

# A call occupies one of the 32 threads that Triton has for an instance until its first response is
# there. With none left, the responses of the other requests would have to wait for that as well.
STARTING_AT_ONCE = 24


class ModelError(Exception):
    """An error of a model, or the refusal of a request; for the client.

    Attributes:
        refused: whether the request is at fault.
    """

    def __init__(self, message: str, *, refused: bool = True) -> None:
        super().__init__(message)
        self.refused = refused


class Models(Protocol):
    """The other models of the server. Methods may be called from any thread."""

    def call(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> dict[str, Array]:
        """The one response of a model that is not decoupled.

        Raises:
            ModelError: with the model's message.
        """

    def stream(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> Iterator[dict[str, Array] | ModelError]:
        """All responses of a model, decoupled or not, as they come. It waits for the first one.

        An error is yielded, not raised, because responses of other sequences may follow it.
        """


class Llm:
    """The tensorrt_llm model, called for token ids. Methods may be called from any thread."""

    def __init__(self, models: Models, name: str) -> None:
        """Calls nothing yet."""
        self._models = models
        self._name = name
        self._starting = threading.BoundedSemaphore(STARTING_AT_ONCE)

    def responses(
        self,
        request_id: str,
        inputs: Mapping[str, Array],
        parameters: Parameters = NO_PARAMETERS,
    ) -> Generator[tuple[dict[str, Array], bool, bool], None, None]:
        """Each response with ids, whether it is known to be its sequence's last, and the request's.

        Not every backend tells the last response of a stream; otherwise the end of the iteration does. What
        is left to generate is stopped when the iteration fails or is closed.

        Raises:
            ModelError: the model failed, or refused the request.
        """
        whole = not flag(inputs, "streaming")
        unfinished = batch_size(inputs) * largest(inputs, "num_return_sequences")
        try:
            with self._starting:
                replies = self._models.stream(self._name, request_id, inputs, parameters)
            for reply in replies:
                final = isinstance(reply, ModelError) or whole or flag(reply, "is_final")
                unfinished -= final
                if isinstance(reply, ModelError):
                    raise reply
                if "output_ids" in reply:
                    yield reply, final, unfinished == 0
        except BaseException:
            if unfinished > 0:
                self.stop(request_id)
            raise

    def stop(self, request_id: str) -> None:
        """End the sequences of a request, if there are any."""
        for reply in self._models.stream(self._name, request_id, stop_inputs()):
            if isinstance(reply, ModelError):
                logger.warning("%s, told to stop %s: %s", self._name, request_id, reply)


def request_key(request_id: str) -> str:
    """The id under which a request is known to the other models: its own, else a new one."""
    return request_id or f"bls-{uuid.uuid4()}"


def batch_size(inputs: Mapping[str, Array]) -> int:
    """Return the number of prompts of a request: the first dimension of any of its inputs."""
    return int(next(iter(inputs.values())).shape[0])


def renamed(arrays: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
    """The arrays that ``names`` lists, under the names that it gives them, each of shape [batch, …].

    A scalar that the sender's configuration reshapes to nothing has shape [batch]; its receiver
    wants what clients send, [batch, 1].
    """
    return {
        new: array.reshape(-1, 1) if array.ndim == 1 else array
        for old, new in names.items()
        if (array := arrays.get(old)) is not None
    }


class Client:
    """The client of one request. Thread-safe.

    A sender must not be asked anything once it has sent the last response: Triton 2.51 frees what it
    refers to. Hence the lock.
    """

    def __init__(self, sender: Any, final_flag: int) -> None:
        self._sender = sender
        self._final_flag = final_flag
        self._lock = threading.Lock()
        self.closed = False

    def send(self, response: Any | None, *, last: bool) -> None:
        """Sends a response, or nothing but the end of the responses."""
        flags = self._final_flag if last else 0
        with self._lock:
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)
            self.closed = last

    def gone(self) -> bool:
        """Return True if the client has gone away before the last response. It takes a round trip."""
        with self._lock:
            return not self.closed and bool(self._sender.is_cancelled())


def flag(arrays: Mapping[str, Array], name: str) -> bool:
    """Return True if a tensor is there and true anywhere."""
    return name in arrays and bool(arrays[name].any())


def largest(arrays: Mapping[str, Array], name: str, default: int = 1) -> int:
    """The largest element of a tensor, or the default where it is not there."""
    return int(arrays[name].max()) if name in arrays else default


def index(arrays: Mapping[str, Array], name: str) -> int:
    """The first element of a tensor, 0 where it is not there."""
    return int(arrays[name].flat[0]) if name in arrays else 0
