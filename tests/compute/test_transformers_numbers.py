"""A model that computes no finite numbers for some sequences, and finite ones for others beside them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cog_triton.engines.base import SamplingParams
from cog_triton.errors import EngineFailure, LogitsNotFinite, error_from_text
from tests.engines import Requests, running
from tests.late import safetensors_torch, torch, transformers_numbers
from tests.tiny_models import save_tiny_model

DAMAGED = 250  # the token whose embedding is not finite
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["nan", "inf"])
def damaged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Requests]:
    model: Path = save_tiny_model("llama", tmp_path_factory.mktemp("damaged"))
    weights = safetensors_torch.load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][DAMAGED] = float(request.param)
    safetensors_torch.save_file(weights, model / "model.safetensors", {"format": "pt"})
    with running({"engine": "transformers", "model": str(model), "device": "cpu"}) as requests:
        yield requests


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([5, DAMAGED], id="last"),
        pytest.param([DAMAGED, *range(5, 200)], id="first of several blocks"),
        pytest.param(
            [*range(5, 200), DAMAGED, *range(5, 200)], id="in the middle of several steps"
        ),
    ],
)
def test_only_the_sequence_that_has_them_fails(damaged: Requests, prompt: list[int]) -> None:
    beside = [[*range(5, 45)], [*range(5, 205)], [7]]
    alone = [damaged.ids(one, sampling=GREEDY) for one in beside]
    for _ in range(2):  # the second time, blocks of the cache could be shared
        failing = damaged.start(prompt, sampling=GREEDY, return_log_probs=True)
        streams = [damaged.start(one, sampling=GREEDY) for one in beside]
        error = failing.last().error
        assert isinstance(error, EngineFailure)
        assert isinstance(error_from_text(f"EngineFailure: {error}"), LogitsNotFinite)
        assert failing.ids == []
        assert [stream.wait().ids for stream in streams] == alone


def test_minus_infinity_is_a_token_that_the_model_excludes() -> None:

    class Cache:
        use_prefix_sharing = True
        update = None

    finite = transformers_numbers.FiniteCache(Cache())
    assert finite.failed(torch.tensor([[0.0, -torch.inf], [1.0, 2.0]])) is None
    assert finite.failed(torch.tensor([[0.0, torch.nan], [1.0, 2.0]])) == ([], [True, False])
    assert finite.failed(torch.tensor([[-torch.inf, -torch.inf]])) == ([], [True])
