"""The postprocessing model: token ids to text, one response at a time."""

from typing import Any

import numpy as np

from cog_triton.errors import InvalidParameter
from cog_triton.models import stub
from cog_triton.models.stub import Array, Inputs
from cog_triton.text.detokenizer import decode_delta
from cog_triton.text.tokenizer import Tokenizer


def decoded(tokenizer: Tokenizer, inputs: Inputs, *, skip_special_tokens: bool = True) -> Array:
    """Return the texts, UTF-8, shape [batch * beams], as NVIDIA's postprocessing does.

    Nothing is kept between responses. One that comes without the ids before it is decoded alone, which is
    exact if it holds a whole text, and may lose a space or split a character if it is streamed.

    Args:
        inputs: TOKENS_BATCH [batch, beams, n], SEQUENCE_LENGTH [batch, beams], and optionally
            CONTEXT_IDS [batch, n], IS_FINAL [batch, 1] and CUT_CHARACTERS [batch, 1].
    """
    ids, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
    if lengths.shape != ids.shape[:2]:
        shapes = f"{list(ids.shape[:2])}, not {list(lengths.shape)}"
        raise InvalidParameter(f"SEQUENCE_LENGTH must be of shape {shapes}")
    if (lengths < 0).any():
        raise InvalidParameter(f"SEQUENCE_LENGTH must be at least 0, not {lengths.min()}")
    context = inputs.get("CONTEXT_IDS")
    final = inputs.get("IS_FINAL")
    cut = inputs.get("CUT_CHARACTERS")
    texts: list[bytes] = []
    try:
        for i, beams in enumerate(ids):
            for beam, length in zip(beams, lengths[i], strict=True):
                text = decode_delta(
                    tokenizer,
                    [] if context is None else context[i].tolist(),
                    beam[:length].tolist(),
                    final=True if final is None else bool(final[i].any()),
                    skip_special_tokens=skip_special_tokens,
                )
                if cut is not None:
                    text = text[: max(0, len(text) - max(0, int(cut[i].max())))]
                texts.append(text.encode())
    except OverflowError:  # found by the tokenizer: looking at each would cost time
        raise InvalidParameter("token ids must be at least 0") from None
    return np.array(texts, np.object_)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        _, parameters = stub.begin(args)
        self._tokenizer = stub.tokenizer(parameters)
        self._skip = parameters.get("skip_special_tokens", "true") == "true"

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        inputs = stub.arrays(request.inputs())
        try:
            text = decoded(self._tokenizer, inputs, skip_special_tokens=self._skip)
        except Exception as error:
            return stub.failure("postprocessing", error)
        unchanged = {f"OUT_{name}": value for name, value in inputs.items()}
        return stub.response({"OUTPUT": text, **unchanged}, request.requested_output_names())
