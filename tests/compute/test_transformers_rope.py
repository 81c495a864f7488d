"""Frequencies of RoPE that depend on a sequence's length: generate()'s ids, alone and beside others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import SamplingParams
from tests.engines import Requests, ids_of_generate, running
from tests.late import torch, transformers
from tests.tiny_models import save_tiny_model

TRAINED = 64
TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["phi3:longrope", "llama:dynamic"])
def engine_and_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Requests, Any]]:
    model: Path = save_tiny_model(request.param, tmp_path_factory.mktemp("rope"))
    parameters = {"engine": "transformers", "model": str(model), "device": "cpu"}
    with running(parameters) as requests:
        yield requests, transformers.AutoModelForCausalLM.from_pretrained(model)


def generated(model: Any, prompt: list[int]) -> list[int]:
    model(torch.tensor([[3]]))  # else frequencies of the text before stay
    return ids_of_generate(model, prompt, TOKENS)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([10], id="short"),
        pytest.param([200], id="long"),
        pytest.param([TRAINED - 6], id="grows beyond"),
        pytest.param([TRAINED - 1, TRAINED, TRAINED + 1], id="around the length of training"),
        pytest.param([10, 200, TRAINED - 6, 30, 90], id="all together"),
    ],
)
def test_a_sequence_is_the_same_alone_and_beside_others(
    engine_and_reference: tuple[Requests, Any], lengths: list[int]
) -> None:
    engine, model = engine_and_reference
    prompts = [[*range(3, 3 + length)] for length in lengths]
    expected = [generated(model, prompt) for prompt in prompts]
    for _ in range(2):  # the second time with blocks of the cache that the first left
        streams = [
            engine.start(prompt, max_tokens=TOKENS, sampling=GREEDY, return_log_probs=True)
            for prompt in prompts
        ]
        assert [stream.wait().ids for stream in streams] == expected
        assert {len(stream.log_probs) for stream in streams} == {TOKENS}
