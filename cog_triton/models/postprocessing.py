"""The postprocessing model's work: token ids in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.text.detokenizer import decode_delta
from cog_triton.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]


class Postprocessor:
    """Decodes responses. It keeps nothing between them: what it needs of earlier ones comes along.

    A response that comes with no context is decoded alone, which is exact if it holds a whole text, and may
    lose a space or split a character if it is streamed.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __call__(self, inputs: Mapping[str, Array]) -> Array:
        """The texts, UTF-8, shape [batch * beams], as NVIDIA's postprocessing returns them.

        Args:
            inputs: TOKENS_BATCH [batch, beams, n], SEQUENCE_LENGTH [batch, beams], and optionally
                CONTEXT_IDS [batch, n] and IS_FINAL [batch, 1].

        Raises:
            ValueError: an input is not valid; the text is for the client.
        """
        ids, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
        if lengths.shape != ids.shape[:2]:
            raise ValueError(
                f"SEQUENCE_LENGTH must be of shape {list(ids.shape[:2])}, not {list(lengths.shape)}"
            )
        texts = [
            self._decode(inputs, i, beam)
            for i, row in enumerate(ids)
            for beam in range(row.shape[0])
        ]
        return np.array(texts, np.object_)

    def _decode(self, inputs: Mapping[str, Array], i: int, beam: int) -> bytes:
        length = inputs["SEQUENCE_LENGTH"][i, beam]
        if length < 0:
            raise ValueError(f"SEQUENCE_LENGTH must be at least 0, not {length}")
        context = inputs.get("CONTEXT_IDS")
        final = inputs.get("IS_FINAL")
        try:
            text = decode_delta(
                self._tokenizer,
                [] if context is None else context[i].tolist(),
                inputs["TOKENS_BATCH"][i, beam, :length].tolist(),
                final=True if final is None else bool(final[i].any()),
                skip_special_tokens=self._skip_special_tokens,
            )
        except OverflowError:  # found by the tokenizer: looking at each would cost time
            raise ValueError("token ids must be at least 0") from None
        return text.encode()
