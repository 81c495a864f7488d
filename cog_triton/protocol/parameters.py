"""Values of a request's parameters, and the inputs of a stop."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.errors import InvalidParameter
from cog_triton.protocol.names import LOGIT_BIAS
from cog_triton.web.bodies import BadBody, parse_json


def ids_text(ids: Sequence[int]) -> str:
    """Write token ids as a parameter of a request: int32, little-endian, in base64."""
    return base64.b64encode(np.array(ids, "<i4").tobytes()).decode()


def ids_parameter(parameters: Mapping[str, Any], name: str) -> list[int]:
    """Read ``ids_text`` of a parameter, empty without it, or raise InvalidParameter."""
    if name not in parameters:
        return []
    try:
        ids = np.frombuffer(base64.b64decode(parameters[name], validate=True), "<i4")
    except (TypeError, ValueError):
        raise InvalidParameter(f"{name} must be 32-bit integers in base64") from None
    if (ids < 0).any():
        raise InvalidParameter(f"{name} must be token ids, which are at least 0")
    return ids.tolist()  # type: ignore[no-any-return]


def parse_logit_bias(text: Any) -> tuple[tuple[int, float], ...]:
    """Parse the value of ``LOGIT_BIAS``, which may be missing, or raise InvalidParameter."""
    try:
        biases = parse_json((text or "{}").encode())
        return tuple((int(token), float(bias)) for token, bias in biases.items())
    except BadBody as error:
        raise InvalidParameter(f"{LOGIT_BIAS} {error}") from None
    except (TypeError, ValueError, AttributeError):
        message = f"{LOGIT_BIAS} must be a JSON object of ids and numbers"
        raise InvalidParameter(message) from None


def adapter_task_id(name: str) -> int:
    """Return the lora_task_id of an adapter, which is above 0 and has 31 bits.

    A name that is such a number is its own id. Any other name is hashed.
    """
    is_number = name.isascii() and name.isdigit() and name[0] != "0"
    # 31 bits have at most 10 digits, and int() refuses thousands of them.
    if is_number and len(name) <= 10 and int(name) < 2**31:
        return int(name)
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=4).digest()
    hashed = int.from_bytes(digest, "little") >> 1
    return max(1, hashed)


def stop_inputs() -> dict[str, npt.NDArray[Any]]:
    """Make the inputs of a stop, shapes [1, 1].

    The engine reads only ``stop`` and the request's id. Triton demands the other inputs.
    """
    return {
        "stop": np.array([[True]]),
        "input_ids": np.array([[0]], np.int32),
        "input_lengths": np.array([[1]], np.int32),
        "request_output_len": np.array([[1]], np.int32),
    }
