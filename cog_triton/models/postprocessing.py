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
        """
        texts = [
            self._decode(inputs, i, beam)
            for i, row in enumerate(inputs["TOKENS_BATCH"])
            for beam in range(row.shape[0])
        ]
        return np.array(texts, np.object_)

    def _decode(self, inputs: Mapping[str, Array], i: int, beam: int) -> bytes:
        length = inputs["SEQUENCE_LENGTH"][i, beam]
        context = inputs.get("CONTEXT_IDS")
        final = inputs.get("IS_FINAL")
        text = decode_delta(
            self._tokenizer,
            [] if context is None else context[i].tolist(),
            inputs["TOKENS_BATCH"][i, beam, :length].tolist(),
            final=True if final is None else bool(final[i].any()),
            skip_special_tokens=self._skip_special_tokens,
        )
        return text.encode()
