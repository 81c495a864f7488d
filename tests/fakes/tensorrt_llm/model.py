"""A made-up language model: every next token is a function of the seed and all tokens before.

For a model directory with a tokenizer, the tokens that follow a question of the demo model's are
those of its answer; anything else is noise.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .sampling_params import SamplingParams


class Model:
    def __init__(self, name: str | Path) -> None:
        self.vocabulary = 1000
        self._answers: dict[tuple[int, ...], list[int]] = {}
        config, tokenizer = Path(name, "config.json"), Path(name, "tokenizer.json")
        if config.is_file():
            values = json.loads(config.read_text())
            self.vocabulary = values["vocab_size"]
            if tokenizer.is_file():
                self._answers = _answers(tokenizer, values["eos_token_id"])

    def next_token(self, prompt: list[int], output: list[int], sampling: SamplingParams) -> int:
        seed = 0 if sampling.top_k == 1 else sampling.seed or 0
        before = np.array(prompt + output, np.int32).tobytes() + seed.to_bytes(8, "little")
        random = np.random.default_rng(zlib.crc32(before))
        noise: list[int] = random.permutation(self.vocabulary).tolist()
        answer, count = self._answers.get(tuple(prompt), []), len(output)
        known = answer[count : count + 1] if output == answer[:count] else []
        excluded = {*(sampling.bad_token_ids or [])}
        if count < (sampling.min_tokens or 0):
            excluded.update([sampling.end_id or 0, *(sampling.stop_token_ids or [])])
        return next(token for token in known + noise if token not in excluded)


def _answers(file: Path, end_id: int) -> dict[tuple[int, ...], list[int]]:
    from tokenizers import Tokenizer

    from tools.demo_model.corpus import PAIRS

    encode: Any = Tokenizer.from_file(str(file)).encode
    answers = [encode(pair.answer, add_special_tokens=False).ids for pair in PAIRS]
    questions = [tuple(encode(pair.question).ids) for pair in PAIRS]
    return {q: [*answer, end_id] for q, answer in zip(questions, answers, strict=True)}
