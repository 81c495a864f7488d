"""The model between the ensemble and TensorRT-LLM's C++ backend, which makes streamed text come out right.

The backend sends new ids and nothing else. Decoded alone, a response loses the space that begins it and
breaks a character that is split over two (tensorrtllm_backend issue 332). Postprocessing cannot remember
the ids before it: nothing that Triton 2.51 hands it tells one request's responses from another's, unless
the client gave its request an id. So ``fill_repository`` puts a model before the backend that asks it and
adds to each response what the embedded engines add themselves: the ids before it, and whether it is the
last.

It asks over gRPC, as any client would. Calls between models (BLS) would be shorter, but with 64 streams at
no pace those of Triton 2.51 come to a standstill within 10,000 to 120,000 tokens.

Clients that read ids (the predictor does) go to the backend directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cog_triton.models.model_calls import Array, index
from cog_triton.text.detokenizer import CONTEXT_TOKENS

Tensors = dict[str, Array]

# How the tensors of responses that are ready together become one; of others the last one stands.
_JOINED = {"output_ids": 2, "output_log_probs": 2}
_ADDED = ("sequence_length", "num_output_tokens")


class Contexts:
    """The ids before each response of one request."""

    def __init__(self, *, streaming: bool) -> None:
        """Start with none."""
        self._streaming = streaming
        self._sequences: dict[tuple[int, int], list[int]] = {}

    def add(self, tensors: Tensors, *, last: bool) -> list[Tensors]:
        """The responses to send for one of the backend's, with the ids before each.

        Args:
            tensors: empty if the backend has nothing to say but that the request has ended.
            last: whether it is the request's last.
        """
        if not tensors:
            return self._ends() if last and self._streaming else []
        if not self._streaming or tensors["output_ids"].shape[1] > 1:
            # It holds a whole text. Streamed beams do: each response has all of their ids so far.
            return [{**tensors, **_context([], final=True)}]
        # The backend sends them only where there is more than one.
        key = index(tensors, "batch_index"), index(tensors, "sequence_index")
        before = self._sequences.pop(key, [])
        ids = tensors["output_ids"][0, 0, : tensors["sequence_length"][0, 0]].tolist()
        response = {**tensors, **_context(before, final=last)}
        if last:
            return [response, *(self._ends() if self._sequences else [])]
        self._sequences[key] = [*before, *ids][-CONTEXT_TOKENS:]
        return [response]

    def _ends(self) -> list[Tensors]:
        """A response of no ids for each sequence: postprocessing hands out what it held back."""
        return [
            {
                "output_ids": np.zeros((1, 1, 0), np.int32),
                "sequence_length": np.zeros((1, 1), np.int32),
                "batch_index": np.array([[batch_index]], np.int32),
                "sequence_index": np.array([[sequence_index]], np.int32),
                **_context(ids, final=True),
            }
            for (batch_index, sequence_index), ids in (self._sequences or {(0, 0): []}).items()
        ]


def joined(responses: Sequence[Tensors]) -> list[Tensors]:
    """Responses that are ready together as one, if they are of one sequence and one beam."""
    if len(responses) == 1 or not all(_is_joinable(tensors) for tensors in responses):
        return list(responses)
    whole: Tensors = {}
    for name in dict.fromkeys(name for tensors in responses for name in tensors):
        values = [tensors[name] for tensors in responses if name in tensors]
        if name in _JOINED:
            whole[name] = np.concatenate(values, axis=_JOINED[name])
        elif name in _ADDED:
            whole[name] = np.sum(values, axis=0, dtype=np.int32)
        else:
            whole[name] = values[-1]
    return [whole]


def _is_joinable(tensors: Mapping[str, Array]) -> bool:
    return (
        "output_ids" in tensors
        and tensors["output_ids"].shape[:2] == (1, 1)
        and tensors["output_ids"].shape[2] == tensors["sequence_length"][0, 0]
        and not {"batch_index", "sequence_index"} & tensors.keys()
    )


def _context(ids: list[int], *, final: bool) -> Tensors:
    return {
        "context_ids": np.array(ids, np.int32).reshape(1, -1),
        "is_final": np.array([[final]], np.bool_),
    }
