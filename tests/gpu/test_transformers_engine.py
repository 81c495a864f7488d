"""The transformers engine on a GPU: it gives the tokens that it gives on a CPU.

python -m pytest tests/gpu
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from cog_triton.engines.base import SamplingParams
from cog_triton.text.tokenizer import load_tokenizer
from tests.engines import running
from tools.demo_model.corpus import PAIRS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def answers(model: Path, sampling: SamplingParams, **parameters: str) -> list[list[int]]:
    """The ids of the answers to all of the demo model's questions, asked at once."""
    tokenizer = load_tokenizer(str(model))
    engine = {"engine": "transformers", "model": str(model), "tokenizer_dir": str(model)}
    values: Any = {"max_tokens": 120, "end_id": tokenizer.eos_token_id, "sampling": sampling}
    with running(engine, **parameters) as requests:
        prompts = [tokenizer(pair.question).input_ids for pair in PAIRS]
        streams = [requests.start(prompt, **values) for prompt in prompts]
        return [stream.wait().ids for stream in streams]


SAMPLING = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, seed=7, repetition_penalty=1.1, min_tokens=5
)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SAMPLING])
def test_answers_are_those_of_a_cpu(demo_model: Path, sampling: SamplingParams) -> None:
    expected = answers(demo_model, sampling, device="cpu", dtype="float32")
    assert answers(demo_model, sampling, device="cuda", dtype="float32") == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_greedy_answers_in_half_precision_are_those_learned(demo_model: Path, dtype: str) -> None:
    greedy = SamplingParams(temperature=0)
    expected = answers(demo_model, greedy, device="cpu", dtype="float32")
    assert answers(demo_model, greedy, device="cuda", dtype=dtype) == expected
