"""The codec between the client, the filled repository and the models inside Triton."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

# Models

ENGINE = "tensorrt_llm"
CONTEXT_MODEL = "tensorrt_llm_context"  # see ``cog_triton.models.context``
IDS_ENSEMBLE = "ensemble_ids"  # without its last step; see ``cog_triton.repository.derived``
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

# Parameters of a request, which are no tensors. The C++ backend takes no notice of them.

IDS_ONLY = "ids_only"  # answer with token ids only
COUNTED_IDS = "counted_ids"  # the same, each response's ids behind the count of all ids so far
CONTINUED = "continued_ids"
"""``ids_text`` of what an earlier attempt has delivered. Preprocessing puts them behind the prompt's, and
the embedded engines take them for output."""
PROMPT_IDS = "prompt_ids"  # ``ids_text`` of the prompt, whose text is not read then
ADD_SPECIAL_TOKENS = "add_special_tokens"  # a boolean; a rendered chat has those that begin a text
LOGIT_BIAS = "logit_bias"  # a JSON object of ids and biases, which becomes an embedding_bias
MIN_P = "min_p"  # a number as text
TOP_LOG_PROBS = "top_logprobs"  # k: LOG_PROBS has the k likeliest tokens as well
PROMPT_LOG_PROBS = "prompt_logprobs"
"""A boolean: with return_log_probs, the first response's LOG_PROBS begins with the prompt's tokens; see
``packed_prompt_log_probs``."""
ALLOWED_IDS = "allowed_token_ids"  # ``ids_text`` of the only tokens that are generated

Parameters = Mapping[str, str | int | bool]
"""Parameters of a request, of the types that both of Triton's endpoints take."""

NO_PARAMETERS: Parameters = MappingProxyType({})


@dataclass(frozen=True)
class TokenLogProb:
    """Log probability of a token under the model's unchanged distribution.

    Attributes:
        log_prob: natural logarithm of its probability.
        top: the most likely tokens at its place with theirs, the most likely first.
    """

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


def parse_biases(text: Any) -> dict[int, float]:
    """Parse the value of ``LOGIT_BIAS``; a ValueError says that it is something else."""
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{LOGIT_BIAS} must be as a JSON object of ids and numbers") from None


def packed_log_probs(tokens: Sequence[TokenLogProb], top: int) -> npt.NDArray[Any]:
    """Make the value of ``LOG_PROBS``, without batch and beams: float32, [tokens * (1 + 2 * top)].

    Each token's log probability is followed by ``top`` ids, and by their log probabilities; -1 is no id.
    (A float32 holds ids up to 2**24 exactly.) With ``top`` 0 this is TensorRT-LLM's form.
    """
    rows = np.zeros((len(tokens), 1 + 2 * top), np.float32)
    rows[:, 1 : 1 + top] = -1
    for row, token in zip(rows, tokens, strict=True):
        row[0] = token.log_prob
        for place, (token_id, log_prob) in enumerate(token.top[:top]):
            row[1 + place], row[1 + top + place] = token_id, log_prob
    return rows.ravel()


def unpacked_log_probs(
    ids: Sequence[int], values: npt.NDArray[Any], top: int
) -> list[TokenLogProb]:
    """Read the log probabilities of a response's ids.

    Args:
        values: of ``packed_log_probs``, of these ids and any before them. TensorRT-LLM sends those of all
            tokens so far each time.

    Raises:
        ValueError: there are too few.
    """
    width = 1 + 2 * top
    rows = values[max(0, len(values) - len(ids) * width) :].reshape(len(ids), width).tolist()
    tokens = []
    for token, row in zip(ids, rows, strict=True):
        places = zip(map(int, row[1 : 1 + top]), row[1 + top :], strict=True)
        likely = tuple((other, log_prob) for other, log_prob in places if other >= 0)
        tokens.append(TokenLogProb(token, row[0], likely))
    return tokens


def packed_prompt_log_probs(
    places: Sequence[Sequence[tuple[int, float]]], top: int
) -> npt.NDArray[Any]:
    """Make what precedes ``packed_log_probs`` in the first response, [prompt * (3 + 2 * top)].

    Args:
        places: at each of the prompt's, its token with its log probability, and the ``top`` most likely
            ones with theirs. The first token's is 0: there is nothing that it could follow.
    """
    tokens = [TokenLogProb(*place[0], tuple(place)) for place in places]
    return packed_log_probs(tokens, 1 + top)


def unpacked_prompt_log_probs(
    values: npt.NDArray[Any], generated: int, top: int
) -> list[TokenLogProb]:
    """Read the prompt's tokens and their log probabilities; none if they were not asked for.

    Args:
        values: of the response, with those of its ``generated`` ids.

    Raises:
        ValueError: they do not come out even.
    """
    width = 1 + 2 * (1 + top)
    rows = values[: max(0, len(values) - generated * (1 + 2 * top))].reshape(-1, width)
    tokens = unpacked_log_probs(rows[:, 1].astype(np.int64).tolist(), rows.ravel(), 1 + top)
    return [TokenLogProb(token.id, token.log_prob, token.top[1:]) for token in tokens]


def adapter_task_id(name: str) -> int:
    """Return the lora_task_id of a LoRA adapter: of 31 bits, above 0, the same in every process.

    A name that is such a number stands for itself: TensorRT-LLM's adapters are named so.
    """
    if name.isascii() and name.isdigit() and name[0] != "0" and int(name[:11]) < 2**31:
        return int(name)
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


def ids_text(ids: Sequence[int]) -> str:
    """Write token ids as a parameter of a request: int32, little-endian, in base64."""
    return base64.b64encode(np.array(ids, "<i4").tobytes()).decode()


def ids_parameter(parameters: Mapping[str, Any], name: str) -> list[int]:
    """Read ``ids_text`` of a parameter; empty without it. A ValueError says that it is something else."""
    try:
        ids = np.frombuffer(base64.b64decode(parameters.get(name, ""), validate=True), "<i4")
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be 32-bit integers in base64") from None
    if (ids < 0).any():
        raise ValueError(f"{name} must be token ids, which are at least 0")
    return ids.tolist()  # type: ignore[no-any-return]


def stop_inputs() -> dict[str, npt.NDArray[Any]]:
    """Make the engine's inputs for a stop request, shapes [batch = 1, 1].

    TensorRT-LLM reads only ``stop`` and the request's id. The others are there because Triton refuses
    a request without them.
    """
    return {
        "stop": np.array([[True]]),
        "input_ids": np.array([[0]], np.int32),
        "input_lengths": np.array([[1]], np.int32),
        "request_output_len": np.array([[1]], np.int32),
    }
