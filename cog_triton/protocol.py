"""What the client, the filled repository and the models inside Triton agree on: names and a request."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ENGINE = "tensorrt_llm"
"""The model that generates."""

CONTEXT_MODEL = "tensorrt_llm_context"
"""What stands between the ensemble and TensorRT-LLM's C++ backend; see ``cog_triton.models.context``."""

ADDRESS_FILE = "grpc_address"
"""In that model's directory: host:port of the server's gRPC endpoint, written before the server starts."""

IDS_ENSEMBLE = "ensemble_ids"
"""The ensemble without its last step; see ``cog_triton.repository.derived``."""

DIMS = {
    "output_ids": [-1, -1],
    "sequence_length": [-1],
    "num_input_tokens": [1],
    "num_output_tokens": [1],
}
OUTPUTS = tuple(DIMS)
"""Outputs of tensorrt_llm, INT32, which that ensemble has under the same names."""

IDS_ONLY = "ids_only"
"""Parameter of a request (not a tensor) with which a client asks the embedded engines to answer with
token ids alone. The C++ backend takes no notice of it."""

CHECKED_IDS = "checked_ids"
"""The same, and each response's ids stand behind a checksum; see ``checksum``. So a client notices at once
if one was lost, came twice, or was damaged."""

CONTINUED = "continued_ids"
"""Parameter of a request: ids that an earlier attempt at it has delivered, see ``continued_text``.
Preprocessing puts them behind the prompt's, and the embedded engines take them for output."""


def checksum(ids: bytes | memoryview | array[int], place: int) -> int:
    """What stands before the ids of a response: a CRC-32 of them and of their place, as an int32.

    Args:
        ids: as int32, little-endian.
        place: how many ids were sent before these, in this attempt at the request.
    """
    # Spread, because a CRC takes its start for part of the first id.
    crc = zlib.crc32(ids, place * 2_654_435_761 & 0xFFFF_FFFF)
    return crc - (crc >> 31 << 32)


def continued_text(ids: Sequence[int]) -> str:
    """The value of ``CONTINUED``: the ids as int32, little-endian, in base64."""
    return base64.b64encode(np.array(ids, "<i4").tobytes()).decode()


def continued_ids(parameters: str) -> list[int]:
    """The ids that a request goes on from; empty for one that begins.

    Args:
        parameters: of the request, as the Python backend has them: a JSON object, or nothing.

    Raises:
        ValueError: there is something else under that name.
    """
    if CONTINUED not in parameters:  # nearly always, and without a parser
        return []
    try:
        text = json.loads(parameters).get(CONTINUED, "")
        ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (TypeError, ValueError):
        raise ValueError(f"{CONTINUED} must be 32-bit integers in base64") from None
    if (ids < 0).any():
        raise ValueError(f"{CONTINUED} must be token ids, which are at least 0")
    return ids.tolist()  # type: ignore[no-any-return]


def stop_inputs() -> dict[str, npt.NDArray[Any]]:
    """The engine's inputs for a stop request, shapes [batch = 1, 1].

    TensorRT-LLM reads only ``stop`` and the request's id. The others are there because Triton refuses
    a request without them.
    """
    return {
        "stop": np.array([[True]]),
        "input_ids": np.array([[0]], np.int32),
        "input_lengths": np.array([[1]], np.int32),
        "request_output_len": np.array([[1]], np.int32),
    }
