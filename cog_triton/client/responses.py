"""Responses of Triton: new tokens of one request, from a frame or from TensorRT-LLM's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton import errors
from cog_triton.protocol.frames import Frame
from cog_triton.protocol.log_probs import TokenLogProb, unpacked_log_probs
from cog_triton.protocol.names import LOG_PROBS

Inputs = Mapping[str, npt.NDArray[Any]]
# Each flat.
Outputs = Mapping[str, list[Any]]

NO_LOG_PROBS = "a response lacks the log probabilities of its ids"


@dataclass
class Response:
    """The tokens that have arrived since the last response was taken.

    Attributes:
        ids: the new token ids, perhaps none.
        input_tokens: number of the prompt's tokens, if the engine counts them.
        final: whether this is the last response.
        keeps_end_token: whether an end token would be among the ids. TensorRT-LLM's C++ backend leaves it
            out.
        log_probs: one for each id, if they were asked for.
        prompt_log_probs: one for each token of the prompt, in a request's first response, if they were
            asked for.
    """

    ids: list[int]
    input_tokens: int | None
    final: bool
    keeps_end_token: bool = field(default=True, compare=False)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)

    def extend(self, later: "Response") -> "Response":
        """Append the response that follows this one; return both."""
        self.ids += later.ids
        self.log_probs += later.log_probs
        self.input_tokens = later.input_tokens or self.input_tokens
        self.final = later.final
        return self


@dataclass(frozen=True)
class TensorOutputs:
    """TensorRT-LLM's tensors of one response, each flat."""

    values: Outputs
    final: bool


def read_frame(frame: Frame, place: int, *, wants_log_probs: bool) -> Response:
    """Return the response of a frame; TritonMalformedEvent if one before it was lost.

    Args:
        place: the number of ids received before.
    """
    if frame.start != place:
        raise lost_after(place)
    if wants_log_probs and len(frame.log_probs) != len(frame.ids):
        raise errors.TritonMalformedEvent(NO_LOG_PROBS)
    return Response(
        frame.ids,
        frame.input_tokens,
        frame.final,
        log_probs=list(frame.log_probs),
        prompt_log_probs=list(frame.prompt_log_probs),
    )


def read_tensors(outputs: TensorOutputs, alternatives: int | None) -> Response:
    """Return the response of TensorRT-LLM's tensors; TritonMalformedEvent if one is missing.

    Args:
        alternatives: number of alternatives to each log probability; None without log probabilities.
    """
    values = outputs.values
    try:
        # The ids may be padded.
        ids = values["output_ids"][: values["sequence_length"][0]]
        input_tokens = values.get("num_input_tokens", [None])[0]
    except (KeyError, IndexError) as error:
        raise errors.TritonMalformedEvent(f"a response of the ensemble lacks {error}") from None
    response = Response(ids, input_tokens, outputs.final, keeps_end_token=False)
    if alternatives is not None:
        log_probs = np.array(values.get(LOG_PROBS, ()), np.float32)
        try:
            response.log_probs = unpacked_log_probs(ids, log_probs, alternatives)
        except ValueError:
            raise errors.TritonMalformedEvent(NO_LOG_PROBS) from None
    return response


def lost_after(place: int) -> errors.TritonMalformedEvent:
    return errors.TritonMalformedEvent(f"Triton's stream lost data after {place} tokens")
