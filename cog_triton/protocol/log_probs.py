"""Log probabilities as values of the tensor ``LOG_PROBS``: float32, without batch and beams.

TensorRT-LLM sends one value for each token. The embedded engines add the likeliest tokens at its place:

    | log probability | id … id | log probability … | next token …
                        k of them  of these k
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenLogProb:
    """Log probability of a token under the model's unchanged distribution."""

    id: int
    # Natural logarithm.
    log_prob: float
    # The likeliest tokens at its place, the likeliest first.
    top: tuple[tuple[int, float], ...] = ()


def packed_log_probs(
    tokens: Sequence[TokenLogProb], top: int, prompt: Sequence[TokenLogProb] = ()
) -> Array:
    """Make the value of ``LOG_PROBS``: [tokens * (1 + 2 * top)], -1 for an id that there is not.

    A float32 holds ids up to 2**24 exactly. With ``top`` 0 this is TensorRT-LLM's form. The prompt's tokens
    come first, each as the first of its own alternatives: [prompt * (3 + 2 * top)].
    """
    rows = np.zeros((len(tokens), 1 + 2 * top), np.float32)
    rows[:, 1 : 1 + top] = -1
    for row, token in zip(rows, tokens, strict=True):
        row[0] = token.log_prob
        for place, (token_id, log_prob) in enumerate(token.top[:top]):
            row[1 + place] = token_id
            row[1 + top + place] = log_prob
    if not prompt:
        return rows.ravel()
    # A reader has the output's ids, and not the prompt's. So each of these names itself.
    named_prompt = [
        replace(token, top=((token.id, token.log_prob), *token.top)) for token in prompt
    ]
    return np.append(packed_log_probs(named_prompt, 1 + top), rows)


def unpacked_log_probs(ids: Sequence[int], values: Array, top: int) -> list[TokenLogProb]:
    """Read the log probabilities of a response's ids, or raise ValueError if there are too few.

    Args:
        values: from ``packed_log_probs``. Those of these ids are the last: TensorRT-LLM sends all so far.
        top: number of alternatives at each place.
    """
    width = 1 + 2 * top
    first = max(0, len(values) - len(ids) * width)
    rows = values[first:].reshape(len(ids), width).tolist()
    tokens = []
    for token, row in zip(ids, rows, strict=True):
        places = zip(map(int, row[1 : 1 + top]), row[1 + top :], strict=True)
        likely = tuple((other, log_prob) for other, log_prob in places if other >= 0)
        tokens.append(TokenLogProb(token, row[0], likely))
    return tokens
