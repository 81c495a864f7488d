"""Triton's Python backend, for all models: what a request holds, and the responses to it."""

import contextlib
import gc
import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton import errors
from cog_triton.errors import CogTritonError, InvalidParameter, shortened
from cog_triton.processes import end_with_parent
from cog_triton.request.limits import WORDS, WORDS_BYTES
from cog_triton.text.detokenizer import CONTEXT_TOKENS
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, without_torch

pb_utils: Any
try:
    import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,no-redef]
except ImportError:
    # Outside of Triton.
    pb_utils = None

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Inputs = Mapping[str, Array]

logger = logging.getLogger(__name__)

# Triton 2.51 gives up a process that has shown no sign of life for a second; one is due every 0.3 seconds.
STANDSTILL_SECONDS = 0.8
# EX_TEMPFAIL of sysexits.h.
STANDSTILL_STATUS = 75

# Fills output_ids to the same length, as TensorRT-LLM's does.
PADDING = -1
INDICES = ("batch_index", "sequence_index")


class Client:
    """The client of one request, to which its responses are sent. Thread-safe."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        # Whether the last response has been sent.
        self.closed = False

    def send(self, *response: Any, last: bool) -> None:
        """Send a response; without one, only the end of the responses."""
        with self._lock:
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
            self._sender.send(*response, flags=flags)
            if last:
                # Triton 2.51 frees what the sender refers to.
                self._sender = None
                self.closed = True

    def fail(self, model: str, cause: Exception) -> None:
        """Send an error as the last response, unless that has been sent. Never raises.

        It is called where an exception would end a thread, or the requests of the same batch.
        """
        if self.closed:
            return
        try:
            self.send(failure(model, cause), last=True)
        except Exception:
            logger.exception("model %s: an error could not be sent: %s", model, cause)

    def gone(self) -> bool:
        """Ask Triton whether the client has disconnected, which is a round trip."""
        with self._lock:
            return not self.closed and bool(self._sender.is_cancelled())


def begin(args: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a model's configuration, and its parameters that are not empty.

    From then on the stub ends with tritonserver, and can print any text.
    """
    end_with_parent()
    print_any_text()
    config = json.loads(args["model_config"])
    texts = {
        name: value["string_value"] for name, value in (config.get("parameters") or {}).items()
    }
    return config, {name: text for name, text in texts.items() if text}


def print_any_text() -> None:
    """Let standard output and error take any text, as UTF-8.

    Triton's stub runs an isolated Python, which takes no notice of PYTHONIOENCODING and takes the locale C
    for ASCII: an error with an accent in it would be hidden by a UnicodeEncodeError.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(encoding="utf-8", errors="backslashreplace")


def tokenizer(parameters: Mapping[str, str]) -> Tokenizer:
    """Load the tokenizer that a configuration names, without torch."""
    without_torch()
    trusted = parameters.get("trust_remote_code") == "true"
    return load_tokenizer(parameters["tokenizer_dir"], trust_remote_code=trusted)


def end_ids(parameters: Mapping[str, str]) -> tuple[int, ...]:
    """Return the end tokens in a configuration's ``end_ids``; none where it is unset."""
    return tuple(int(number) for number in parameters.get("end_ids", "").split(",") if number)


@contextlib.contextmanager
def ends_after_standstill() -> Iterator[None]:
    """End this process if it got no CPU time for most of a second while it made a response.

    The machine may have been paused, or overloaded. Triton 2.51 has given the process up then, and would
    take its responses for those to the next requests, of other clients.

    The block must wait for nothing but the processor; a block that imports, which may wait for a disk, is
    let off. Use it for one request at a time: on a busy machine, the short waits of a whole batch add up to
    a second, and Triton minds none of them.
    """
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    used = time.process_time()
    modules = len(sys.modules)
    yield
    elapsed = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    idle = elapsed - (time.process_time() - used)
    if idle > STANDSTILL_SECONDS and len(sys.modules) == modules:
        logger.error(
            "no CPU time for %.1f s: ending, because Triton may take responses for those to other requests",
            idle,
        )
        os._exit(STANDSTILL_STATUS)


def forget_requests() -> None:
    """Collect garbage, at the end of a model's ``finalize``, when nothing holds a request any more.

    Python collects what garbage still holds when it ends. By then the stub of Triton 2.51 has released
    its shared memory, and dies of a response sender that was asked whether its request is cancelled.
    """
    gc.collect()


def arrays(tensors: Any) -> dict[str, Array]:
    return {tensor.name(): tensor.as_numpy() for tensor in tensors}


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as Triton passes it to a model.

    Attributes:
        inputs: the batch is the first dimension.
        names: the outputs that the request asks for.
        parameters: the request's parameters, which are not tensors.
    """

    inputs: dict[str, Array]
    names: frozenset[str]
    request_id: str
    parameters: dict[str, Any]


def received(request: Any) -> ReceivedRequest:
    """Return Triton's request, or raise InvalidParameter if its texts are not Unicode."""
    return ReceivedRequest(
        inputs=arrays(request.inputs()),
        names=frozenset(request.requested_output_names()),
        request_id=request_id(request),
        parameters=request_parameters(request),
    )


def request_id(request: Any) -> str:
    return _text("the request's id", request.request_id)


def words(array: Array) -> list[list[str]]:
    """Return the words of each sequence of a batch, or raise InvalidParameter for too many.

    Lists that would take long to tokenize are refused before any word is decoded.
    """
    array = array.reshape(len(array), -1)
    if array.shape[1] > WORDS:
        raise InvalidParameter(f"the words of a list must be at most {WORDS}, not {array.shape[1]}")
    size = sum(map(len, array.flat))
    if size > WORDS_BYTES:
        raise InvalidParameter(
            f"the words of a list must be at most {WORDS_BYTES} bytes, not {size}"
        )
    return [[text(word) for word in row] for row in array]


def text(value: Any) -> str:
    """Return the text of one element of an input, or raise InvalidParameter."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidParameter("a text input is not valid UTF-8") from None


def flag(inputs: Mapping[str, Array], name: str) -> bool:
    return name in inputs and bool(inputs[name].any())


def as_sent(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs as clients send them: a scalar, reshaped by a configuration to [batch], [batch, 1]."""
    return {
        name: array.reshape(-1, 1) if array.ndim == 1 else array for name, array in inputs.items()
    }


def sequence_of(tensors: Mapping[str, Array]) -> tuple[int, int]:
    """Return batch_index and sequence_index of a response; TensorRT-LLM omits them where both are 0."""
    indices_found = [int(tensors[name].flat[0]) if name in tensors else 0 for name in INDICES]
    batch, sequence = indices_found
    return batch, sequence


def indices(batch: int, sequence: int) -> Tensors:
    """Return batch_index and sequence_index as tensors."""
    return {
        name: np.array([[index]], np.int32)
        for name, index in zip(INDICES, (batch, sequence), strict=True)
    }


def end_stop_words(inputs: Inputs, end_ids: Collection[int]) -> frozenset[int]:
    """Return the model's end tokens that a request of tensorrt_llm has as stop words of one token.

    They are there because TensorRT-LLM's C++ backend has room for one end_id. It leaves that one out of the
    output, and keeps stop words.
    """
    words = inputs.get("stop_words_list")
    if words is None or not words.size or not end_ids:
        return frozenset()
    ids, ends = words.reshape(-1, 2, words.shape[-1])[0].tolist()
    begins = [0, *ends[:-1]]
    single = {
        ids[begin]
        for begin, end in zip(begins, ends, strict=True)
        if begin >= 0 and end == begin + 1
    }
    return frozenset(single & set(end_ids))


def without_end_token(tensors: Tensors, end_ids: Collection[int]) -> Tensors:
    """Return a response of the C++ backend without the end token that it ends with, if it does."""
    if not end_ids or "output_ids" not in tensors:
        return tensors
    ids = tensors["output_ids"].copy()
    lengths = tensors["sequence_length"].copy()
    for place in np.ndindex(lengths.shape):
        length = lengths[place]
        if length and ids[place][length - 1] in end_ids:
            ids[place][length - 1] = PADDING
            lengths[place] = length - 1
    longest = int(lengths.max(initial=0))
    return {**tensors, "output_ids": ids[..., :longest], "sequence_length": lengths}


class Contexts:
    """The ids before each response of one request, which postprocessing needs to decode it."""

    def __init__(self, *, streaming: bool) -> None:
        self._streaming = streaming
        self._sequences: dict[tuple[int, int], list[int]] = {}

    def add(self, tensors: Mapping[str, Array], *, last: bool) -> list[Tensors]:
        """Return the responses to decode for one of the backend's, which may have no tensors."""
        if not tensors:
            return self._ends() if last and self._streaming else []
        if not self._streaming or tensors["output_ids"].shape[1] > 1:
            # It holds a whole text. So do streamed beams: each response has all of their ids so far.
            return [{**tensors, **_context([], final=True)}]
        place = sequence_of(tensors)
        final = last or flag(tensors, "is_final")
        before = self._sequences.pop(place, [])
        if not final:
            ids = tensors["output_ids"][0, 0, : tensors["sequence_length"][0, 0]].tolist()
            self._sequences[place] = [*before, *ids][-CONTEXT_TOKENS:]
        responses = [{**tensors, **_context(before, final=final)}]
        if last and self._sequences:
            responses += self._ends()
        return responses

    def _ends(self) -> list[Tensors]:
        """Return a response without ids for each sequence: postprocessing sends what it held back."""
        return [
            {
                "output_ids": np.zeros((1, 1, 0), np.int32),
                "sequence_length": np.zeros((1, 1), np.int32),
                **indices(*place),
                **_context(ids, final=True),
            }
            for place, ids in (self._sequences or {(0, 0): []}).items()
        ]


def _context(ids: list[int], *, final: bool) -> Tensors:
    context_ids = np.array(ids, np.int32).reshape(1, -1)
    return {"context_ids": context_ids, "is_final": np.array([[final]], np.bool_)}


def request_parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a request, which are not tensors."""
    return dict(json.loads(_text("the request's parameters", request.parameters) or "{}"))


def _text(what: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError:
        # There is half of a surrogate pair.
        raise InvalidParameter(f"{what} must be valid Unicode") from None


def response(values: Mapping[str, Array], names: Collection[str]) -> Any:
    """Return a response with the values that the request named; Triton 2.51's stub dies of any others."""
    tensors = [pb_utils.Tensor(name, value) for name, value in values.items() if name in names]
    return pb_utils.InferenceResponse(tensors)


def failure(model: str, cause: Exception) -> Any:
    """Return the error response for an exception.

    HTTP's status is 400 for a refused request, and 500 for anything else. The trace of an exception that
    nobody expected is logged.
    """
    if not isinstance(cause, CogTritonError | errors.EngineError):
        logger.error("model %s failed", model, exc_info=cause)
        message = f"model '{model}' failed: {type(cause).__name__}; see the server's log"
        return _error_response(message)
    message = cause.message if isinstance(cause, CogTritonError) else str(cause)
    if isinstance(cause, errors.ServerError | errors.EngineFailure | errors.EngineUnavailable):
        return _error_response(message)
    return _error_response(message, pb_utils.TritonError.INVALID_ARG)


def _error_response(message: str, *code: Any) -> Any:
    """Return a response with an error; without a code, Triton's is that of an internal error."""
    error = pb_utils.TritonError(shortened(message, errors.LONGEST), *code)
    return pb_utils.InferenceResponse(error=error)
