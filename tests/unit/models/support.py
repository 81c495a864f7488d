"""Triton's Python stub as far as the models see it."""

import json
import queue
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cog_triton.models.stub import Array

CONTRACT: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "contracts" / "inflight_batcher_llm.json").read_text()
)["models"]
DTYPES: dict[str, Any] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}
FINAL, FAILED, REFUSED = 1, 2, 3


class Tensor:
    def __init__(self, name: str, value: Array) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._value


class Error:
    INVALID_ARG = REFUSED

    def __init__(self, message: str, code: int = FAILED) -> None:
        self.message, self.code = lambda: message, lambda: code


class Response:
    def __init__(self, tensors: Iterable[Tensor] = (), error: Any = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        self.output_tensors = lambda: tensors
        self.error, self.has_error = lambda: error, lambda: error is not None


class PbUtils:
    """The module ``triton_python_backend_utils``."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    TritonError, InferenceResponse, Tensor = Error, Response, Tensor


class Sender:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        self.cancelled = self.over = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.over = flags == FINAL
        self.sent.put((response, self.over))

    def is_cancelled(self) -> bool:
        assert not self.over  # Triton frees what it refers to
        return self.cancelled


def request(inputs: Any, names: Iterable[str], sender: Any, name: str = "7", **given: Any) -> Any:
    return SimpleNamespace(
        inputs=lambda: [Tensor(*item) for item in inputs.items()],
        requested_output_names=lambda: list(names),
        request_id=lambda: name,
        parameters=lambda: json.dumps(given) if given else "",
        get_response_sender=lambda: sender,
    )


# Lists as TensorRT-LLM takes them, and the words in them.
WORD_LISTS = [
    pytest.param([[5, 6, 7], [2, 3, -1]], [[5, 6], [7]], id="the contract's example"),
    pytest.param([[7, 5, 6, 8], [1, 4, -1, -1]], [[7], [5, 6, 8]], id="several words"),
    pytest.param([[], []], [], id="no words"),
]
