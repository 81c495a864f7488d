"""A made-up language model: the logits of every next token are a function of all tokens before.

For a model directory with a tokenizer, the tokens that follow a question of the demo model's are
those of its answer, as surely as the trained model's; anything else is noise.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams

VOCABULARY = 1000  # of a model that is no directory
CERTAINTY = 14.0

Logits = npt.NDArray[np.float64]  # shape [vocabulary]


class Model:
    def __init__(self, name: str | Path) -> None:
        self.vocabulary = VOCABULARY
        self.context_length: int | None = None
        self._answers: dict[tuple[int, ...], list[int]] = {}
        directory = Path(name)
        if (directory / "config.json").is_file():
            config = json.loads((directory / "config.json").read_text())
            self.vocabulary = config["vocab_size"]
            self.context_length = config["max_position_embeddings"]
            self._answers = _answers(directory, config["eos_token_id"])

    def next_token(
        self, prompt: list[int], output: list[int], sampling: SamplingParams
    ) -> tuple[int, float]:
        """The next token, and its log probability under the distribution as it was before sampling."""
        logits = self._logits(prompt, output)
        token = _choose(_penalized(logits, prompt, output, sampling), len(output), sampling)
        return token, float(logits[token] - np.log(np.exp(logits).sum()))

    def _logits(self, prompt: list[int], output: list[int]) -> Logits:
        text = np.array(prompt + output, np.int32).tobytes()
        logits = np.random.default_rng(zlib.crc32(text)).normal(size=self.vocabulary)
        answer = self._answers.get(tuple(prompt), [])
        if output == answer[: len(output)] and len(output) < len(answer):
            logits[answer[len(output)]] += CERTAINTY
        return logits


def _answers(directory: Path, end_id: int) -> dict[tuple[int, ...], list[int]]:
    if not (directory / "tokenizer.json").is_file():
        return {}
    from tokenizers import Tokenizer

    from tools.demo_model.corpus import PAIRS

    tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(text: str, *, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    return {
        tuple(ids(pair.question, special=True)): [*ids(pair.answer, special=False), end_id]
        for pair in PAIRS
    }


def _penalized(
    logits: Logits, prompt: list[int], output: list[int], sampling: SamplingParams
) -> Logits:
    logits = logits.copy()
    seen = np.unique(np.array(prompt + output))
    factor = sampling.repetition_penalty or 1.0
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    counts = np.bincount(np.array(output, np.int64), minlength=len(logits))
    logits -= (counts > 0) * (sampling.presence_penalty or 0.0)
    logits -= counts * (sampling.frequency_penalty or 0.0)
    logits[sampling.bad_token_ids or []] = -np.inf
    if len(output) < (sampling.min_tokens or 0) and sampling.end_id is not None:
        logits[sampling.end_id] = -np.inf
    return logits


def _choose(logits: Logits, position: int, sampling: SamplingParams) -> int:
    if sampling._greedy:
        return int(logits.argmax())
    logits = logits / (sampling.temperature or 1.0)
    order = logits.argsort()[::-1][: sampling.top_k or None]
    likelihood = np.exp(logits[order] - logits[order[0]])
    before = (likelihood.cumsum() - likelihood) / likelihood.sum()
    kept = order[before < (1.0 if sampling.top_p is None else sampling.top_p)]
    noise = np.random.default_rng([sampling.seed or 0, position]).gumbel(size=len(logits))
    return int(kept[(logits[kept] + noise[kept]).argmax()])
