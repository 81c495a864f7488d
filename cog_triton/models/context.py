"""What stands between the ensemble and TensorRT-LLM's C++ backend, so that streamed text comes out right.

The backend sends new ids and nothing else. Decoded alone, a response loses the space that begins it and
breaks a character that is split over two (tensorrtllm_backend issue 332). Postprocessing cannot remember
the ids before it: nothing that Triton 2.51 hands it tells one request's responses from another's, unless
the client gave its request an id. So ``fill_repository`` puts a model before the backend that calls it and
adds to each response what the embedded engines add themselves: the ids before it, and whether it is the
last.

Clients that read ids (the predictor does) go to the backend directly.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing

import numpy as np

from cog_triton.models.model_calls import Array, Llm, flag, index, renamed
from cog_triton.text.detokenizer import CONTEXT_TOKENS


class ContextRelay:
    """Passes requests on and their responses back. Methods may be called from any thread."""

    def __init__(self, llm: Llm) -> None:
        """Calls nothing yet."""
        self._llm = llm

    def answer(
        self, request_id: str, inputs: Mapping[str, Array]
    ) -> Generator[tuple[dict[str, Array], bool], None, None]:
        """The tensors of each response, with what went before it, and whether it is the request's last.

        The last has tensors, since an ensemble's stream that ends without any stays open at the client
        (Triton 2.51). The backend does not say of a streamed response that it is the last. So a stream ends
        with one of no ids, for which postprocessing hands out what it held back.

        Raises:
            ModelError: the backend failed, or refused the request.
        """
        sequences: dict[tuple[int, int], list[int]] = {}
        beams: dict[str, Array] | None = None
        given = renamed(inputs, {name: name for name in inputs})
        with closing(self._llm.responses(request_id, given)) as responses:
            for tensors, final, last in responses:
                if final:
                    yield {**tensors, **_context([], final=True)}, last
                elif tensors["output_ids"].shape[1] > 1:
                    # It holds all ids so far: the last one may wait for the end of the stream.
                    if beams is not None:
                        yield beams, False
                    beams = {**tensors, **_context([], final=True)}
                else:
                    key = index(tensors, "batch_index"), index(tensors, "sequence_index")
                    before = sequences.get(key, [])
                    ids = tensors["output_ids"][0, 0, : tensors["sequence_length"][0, 0]].tolist()
                    sequences[key] = [*before, *ids][-CONTEXT_TOKENS:]
                    yield {**tensors, **_context(before, final=False)}, False
        if beams is not None:
            yield beams, True
        elif flag(inputs, "streaming"):
            yield from _ends(sequences or {(0, 0): []})


def _ends(
    sequences: Mapping[tuple[int, int], list[int]],
) -> Generator[tuple[dict[str, Array], bool], None, None]:
    for left, ((batch_index, sequence_index), ids) in zip(
        reversed(range(len(sequences))), sequences.items(), strict=True
    ):
        yield (
            {
                "output_ids": np.zeros((1, 1, 0), np.int32),
                "sequence_length": np.zeros((1, 1), np.int32),
                "batch_index": np.array([[batch_index]], np.int32),
                "sequence_index": np.array([[sequence_index]], np.int32),
                **_context(ids, final=True),
            },
            left == 0,
        )


def _context(ids: list[int], *, final: bool) -> dict[str, Array]:
    return {
        "context_ids": np.array(ids, np.int32).reshape(1, -1),
        "is_final": np.array([[final]], np.bool_),
    }
