"""The codec between the client, the filled repository and the models inside Triton."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.errors import InvalidParameter
from cog_triton.web.bodies import BadBody, parse_json

Array = npt.NDArray[Any]

# Models

ENGINE = "tensorrt_llm"
CONTEXT_MODEL = "tensorrt_llm_context"  # see ``cog_triton.models.context``
IDS_ENSEMBLE = "ensemble_ids"  # without its last step; see ``cog_triton.repository.fill``
KV_BLOCK_TOKENS = 32  # in each block of its KV cache events; vLLM's for CPUs likes no fewer
GRPC_ADDRESS = "grpc_address"  # CONTEXT_MODEL's parameter: host:port of its own server

# Outputs of ENGINE and IDS_ENSEMBLE

DIMS = {
    "output_ids": [-1, -1],
    "sequence_length": [-1],
    "num_input_tokens": [1],
    "num_output_tokens": [1],
}
OUTPUTS = tuple(DIMS)  # INT32
LOG_PROBS = "output_log_probs"  # FP32, [beams, values]; see ``packed_log_probs``

# Parameters of a request, which are not tensors. The C++ backend takes no notice of them.

# Answer with one tensor (each costs tens of microseconds on its way): a response's ids behind the count of
# all so far, which the last response has inverted (~), and the number of the prompt's tokens.
COUNTED_IDS = "counted_ids"
# With COUNTED_IDS, of a stream without log probabilities: "reader/number". What a reader's sequences have
# at one time leaves in one response to one of its requests, in parts: a sequence's number, the count of
# values that follow, and those. A last part that left with another's comes again, without ids, to its own.
CHANNEL = "channel"
# ``ids_text`` of what an earlier attempt has delivered. Preprocessing puts them behind the prompt's, and
# the embedded engines take them for output.
CONTINUED = "continued_ids"
PROMPT_IDS = "prompt_ids"  # ``ids_text`` of the prompt, whose text is not read then
ADD_SPECIAL_TOKENS = "add_special_tokens"  # a boolean; a rendered chat has those that begin a text
LOGIT_BIAS = "logit_bias"  # a JSON object of ids and biases, which becomes an embedding_bias
MIN_P = "min_p"  # a number as text
TOP_LOG_PROBS = "top_logprobs"  # k: LOG_PROBS has the k likeliest tokens as well
# A boolean: with return_log_probs, the first response's LOG_PROBS begins with the prompt's tokens.
PROMPT_LOG_PROBS = "prompt_logprobs"
ALLOWED_IDS = "allowed_token_ids"  # ``ids_text`` of the only tokens that are generated
TRACEPARENT = "traceparent"  # the client's span, as the W3C writes it; a header as well, for Triton

Parameters = Mapping[str, str | int | bool]  # of the types that both of Triton's endpoints take
NO_PARAMETERS: Parameters = MappingProxyType({})


@dataclass(frozen=True)
class TokenLogProb:
    """Log probability of a token under the model's unchanged distribution."""

    id: int
    log_prob: float  # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens at its place, in that order


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


def packed_log_probs(
    tokens: Sequence[TokenLogProb], top: int, prompt: Sequence[TokenLogProb] = ()
) -> Array:
    """Make the value of ``LOG_PROBS``, without batch and beams: float32, [tokens * (1 + 2 * top)].

    Each token's log probability is followed by ``top`` ids, and by their log probabilities; -1 is unset.
    (A float32 holds ids up to 2**24 exactly.) With ``top`` 0 this is TensorRT-LLM's form. Before them stand
    those of the prompt's tokens, each the first of its own alternatives: [prompt * (3 + 2 * top)].
    """
    rows = np.zeros((len(tokens), 1 + 2 * top), np.float32)
    rows[:, 1 : 1 + top] = -1
    for row, token in zip(rows, tokens, strict=True):
        row[0] = token.log_prob
        for place, (token_id, log_prob) in enumerate(token.top[:top]):
            row[1 + place], row[1 + top + place] = token_id, log_prob
    if not prompt:
        return rows.ravel()
    named = [replace(token, top=((token.id, token.log_prob), *token.top)) for token in prompt]
    return np.append(packed_log_probs(named, 1 + top), rows)


def unpacked_log_probs(ids: Sequence[int], values: Array, top: int) -> list[TokenLogProb]:
    """Read the log probabilities of a response's ids, or raise ValueError if there are too few.

    ``values`` are of ``packed_log_probs``, of these ids behind any others: TensorRT-LLM sends all so far.
    """
    width = 1 + 2 * top
    rows = values[max(0, len(values) - len(ids) * width) :].reshape(len(ids), width).tolist()
    tokens = []
    for token, row in zip(ids, rows, strict=True):
        places = zip(map(int, row[1 : 1 + top]), row[1 + top :], strict=True)
        likely = tuple((other, log_prob) for other, log_prob in places if other >= 0)
        tokens.append(TokenLogProb(token, row[0], likely))
    return tokens


def unpacked_prompt_log_probs(values: Array, generated: int, top: int) -> list[TokenLogProb]:
    """Read the prompt's log probabilities, ahead of ``generated`` ids', or raise ValueError."""
    rows = values[: max(0, len(values) - generated * (1 + 2 * top))].reshape(-1, 3 + 2 * top)
    tokens = unpacked_log_probs(rows[:, 1].astype(np.int64).tolist(), rows.ravel(), 1 + top)
    return [replace(token, top=token.top[1:]) for token in tokens]


def adapter_task_id(name: str) -> int:
    """Return an adapter's lora_task_id, 31 bits above 0; a name that is such a number is its own."""
    if name.isascii() and name.isdigit() and name[0] != "0" and int(name[:11]) < 2**31:
        return int(name)
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


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


def reader_and_number(channel: Any) -> tuple[str, int]:
    """Read the value of ``CHANNEL``, or raise InvalidParameter."""
    found = re.fullmatch("([0-9a-f]{32})/([1-9][0-9]{0,9})", str(channel))
    if found is None or int(found[2]) >= 2**31:
        raise InvalidParameter(f"{CHANNEL} must be 32 hexadecimal digits, a slash and 31 bits")
    return found[1], int(found[2])


def stop_inputs() -> dict[str, Array]:
    """Make the inputs of a stop, shapes [1, 1]; Triton wants more than the engine's ``stop`` and id."""
    return {
        "stop": np.array([[True]]),
        "input_ids": np.array([[0]], np.int32),
        "input_lengths": np.array([[1]], np.int32),
        "request_output_len": np.array([[1]], np.int32),
    }
